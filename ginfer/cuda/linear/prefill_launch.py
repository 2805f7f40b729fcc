"""Prefill linear: plans, which kernels an image holds, tensor maps of the tokens, the launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ginfer.cuda.lib.wgmma import WIDTHS
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.prefill import linear_prefill_kernel, shared_nbytes
from ginfer.cuda.linear.prefill_mma import linear_prefill_mma_kernel
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.plan import LaunchPlan, Shape
from ginfer.cuda.runtime.tensor_map import TensorMap
from ginfer.sizes import align_up, div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ginfer.cuda.runtime.image import Image
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.stream import Stream

NUM_SMS = 132  # of the devices that costs were measured on
SM_SHARED_NBYTES = 228 << 10
BLOCK_SHARED_NBYTES = 1280  # of each block: the driver's part and the barriers
REGISTERS = 65_536


@dataclass(frozen=True)
class LinearPrefillPlan(LaunchPlan):
    """Tiles of groups * 64 rows by tile_n tokens; resident: blocks that a multiprocessor must hold.

    Shapes are (N, K, T, bytes of a weight tile).
    """

    tile_n: int
    groups: int
    resident: int = 1

    def supports(self, capability: str, shape: Shape) -> bool:
        """wgmma of sm_90a: sums and operands in registers (else products are serialised), a ring of
        at least three stages. The tile of mma.sync elsewhere."""
        if capability != "90a":
            return self == MMA
        tile_nbytes = shape[3]
        threads = align_up(self.groups * 128 + 32, 128)
        others = (40 if self.tile_n > 192 else 44) + (8 if tile_nbytes > 8704 else 0)
        return (
            self.tile_n in WIDTHS
            and 1 <= self.groups <= 3
            and self.tile_n // 2 + others <= REGISTERS // (threads * self.resident)
            and self.stages(tile_nbytes) >= 3
        )

    @classmethod
    def default(cls, capability: str, shape: Shape) -> LinearPrefillPlan:
        """The cheapest of the measured plans by whole waves of tiles."""
        if capability != "90a":
            return MMA
        N, _, T, tile_nbytes = shape
        legal = [p for p in plans_of(tile_nbytes) if p.supports(capability, shape)]
        return min(legal, key=lambda p: p.cost(N, T))

    @classmethod
    def candidates(cls, capability: str, shape: Shape) -> tuple[LinearPrefillPlan, ...]:
        """The plans in use, and others for Q4."""
        if capability != "90a":
            return (MMA,)
        used = plans_of(shape[3])
        others = OTHERS if len(used) == len(COSTS) else ()
        return tuple(p for p in (*used, *others) if p.supports(capability, shape))

    def stages(self, tile_nbytes: int) -> int:
        """Stages of the ring: as many as fit, at most 8."""
        room = SM_SHARED_NBYTES // self.resident - BLOCK_SHARED_NBYTES
        one = shared_nbytes(tile_nbytes, self.tile_n, self.groups, 1, Epilogue.STORE_BF16)
        stage = one - shared_nbytes(tile_nbytes, self.tile_n, self.groups, 0, Epilogue.STORE_BF16)
        return min(8, (room - one) // stage + 1)

    def cost(self, N: int, T: int) -> int:
        """Nanoseconds per k tile as measured, for the waves of a launch."""
        wave, single = COSTS[self]
        tiles = div_ceil(N, 64 * self.groups) * div_ceil(T, self.tile_n)
        waves, rest = divmod(tiles, NUM_SMS * self.resident)
        return waves * wave + (0 if rest == 0 else single if rest <= NUM_SMS else wave)


MMA = LinearPrefillPlan(128, 2)
# H200, Q4: (a full wave, a wave of at most one block per multiprocessor) in ns per k tile of 64.
COSTS = {
    LinearPrefillPlan(256, 2): (778, 778),
    LinearPrefillPlan(160, 2): (500, 500),
    LinearPrefillPlan(128, 3): (590, 590),
    LinearPrefillPlan(128, 1): (250, 250),
    LinearPrefillPlan(64, 1, 2): (300, 255),
    LinearPrefillPlan(32, 1, 3): (390, 220),
    # for chunks of 192 and 256 columns beside decode, of which the others leave half a wave empty
    LinearPrefillPlan(192, 2): (589, 589),
    LinearPrefillPlan(96, 2): (390, 390),
    LinearPrefillPlan(192, 1): (370, 295),
}
OTHERS = (  # tried by the tuner only
    LinearPrefillPlan(224, 2),
    LinearPrefillPlan(160, 3),
    LinearPrefillPlan(112, 2),
    LinearPrefillPlan(96, 3),
    LinearPrefillPlan(96, 1, 2),
    LinearPrefillPlan(64, 2, 2),
    LinearPrefillPlan(48, 1, 3),
    LinearPrefillPlan(32, 1, 4),
)
FEW = (LinearPrefillPlan(160, 2), LinearPrefillPlan(128, 1), LinearPrefillPlan(32, 1, 3))


def plans_of(tile_nbytes: int) -> tuple[LinearPrefillPlan, ...]:
    """The plans in use for a weight tile: all for Q4, of which the large matrices are."""
    return tuple(COSTS) if tile_nbytes == UNPACK["Q4G64_F16S"].tile_nbytes else FEW


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Prefill kernels of each format, plan and epilogue."""
    for fmt, epilogues in EPILOGUES.items():
        tile_nbytes = UNPACK[fmt].tile_nbytes
        wgmma_plans = tuple(COSTS) if every else plans_of(tile_nbytes)
        for plan in wgmma_plans if capability == "90a" else (MMA,):
            if plan.supports(capability, (128, 64, 1, tile_nbytes)):
                for epilogue in epilogues:
                    yield prefill_kernel(fmt, plan, epilogue, capability)
    if every:
        fmt = "Q4G64_F16S"
        for plan in LinearPrefillPlan.candidates(capability, (128, 64, 1, UNPACK[fmt].tile_nbytes)):
            yield prefill_kernel(fmt, plan, Epilogue.STORE_BF16, capability)


@cache
def prefill_kernel(
    fmt: str, plan: LinearPrefillPlan, epilogue: Epilogue, capability: str
) -> Kernel:
    """The kernel of a plan: storing and adding are one."""
    form = Epilogue.STORE_BF16 if epilogue == Epilogue.ADD_BF16 else epilogue
    if capability != "90a":
        return linear_prefill_mma_kernel(fmt, form)
    stages = plan.stages(UNPACK[fmt].tile_nbytes)
    return linear_prefill_kernel(fmt, plan.tile_n, plan.groups, stages, plan.resident, form)


def token_maps(x: int, *, rows: int, K: int) -> dict[int, TensorMap]:
    """Views of activations [rows, K] BF16 at address x, one per tile_n of the plans; K a multiple
    of 8. Rows beyond a launch's T may hold anything."""
    widths = sorted({plan.tile_n for plan in COSTS})
    return {n: TensorMap(address=x, shape=(rows, K), box=(n, 64)) for n in widths}


@dataclass(frozen=True, kw_only=True)
class PrefillLinear:
    """A matrix [N, K] in `tile128x64-v1` at address w, what happens to its sums, and the number of
    multiprocessors of its device."""

    w: int
    fmt: str
    N: int
    K: int
    epilogue: Epilogue = Epilogue.STORE_BF16
    num_sms: int = NUM_SMS

    def shape(self, T: int) -> Shape:
        """The shape of a launch, for plans."""
        return (self.N, self.K, T, UNPACK[self.fmt].tile_nbytes)


@dataclass(frozen=True, kw_only=True)
class PrefillTokens:
    """T tokens: address of x [T, K] BF16, a multiple of 16, and on sm_90a device addresses of its
    tensor maps by tile_n, see `token_maps`."""

    x: int
    T: int
    maps: Mapping[int, int] = field(default_factory=dict)


def linear_prefill(
    image: Image,
    stream: Stream,
    y: int,
    *,
    tokens: PrefillTokens,
    linear: PrefillLinear,
    plan: LinearPrefillPlan,
) -> None:
    """y = x W^T with the epilogue of `linear`, at any T >= 1. y: address of [T, N] BF16 or FP32, or
    [T, N / 2] BF16; 16-byte stores where N is a multiple of 8. May overlap the kernel before."""
    item = prefill_kernel(linear.fmt, plan, linear.epilogue, image.capability)
    blocks, k_tiles = div_ceil(linear.N, 128), div_ceil(linear.K, 64)
    tiles = div_ceil(blocks * 2, plan.groups) * div_ceil(tokens.T, plan.tile_n)
    scalars = (k_tiles, blocks, tokens.T, linear.N, int(linear.epilogue == Epilogue.ADD_BF16))
    if image.capability == "90a":
        grid = (min(tiles, linear.num_sms * plan.resident),)
        addresses = (linear.w, tokens.maps[plan.tile_n], y)
        image.launch(item, grid, stream, *addresses, *scalars, dependent=True)
    else:
        image.launch(item, (tiles,), stream, linear.w, tokens.x, y, *scalars, linear.K)
