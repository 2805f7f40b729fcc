"""Plans of the linear family, and which of its kernels an image holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ginfer.cuda.linear.decode import NEVER, linear_decode_kernel
from ginfer.cuda.linear.decode_mma import DecodeMmaPlan, linear_decode_mma_kernel
from ginfer.cuda.linear.epilogue import EPILOGUES
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.plan import LaunchPlan, PlanTable, Shape
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

COLUMN_TILES = (1, 2, 4, 8)  # tiles of 8 columns that a decode launch may have
# Of the ring. Where two blocks fit on a multiprocessor, those of the next kernel double up on
# whichever ends first, which costs more than their early start wins.
SHARED_NBYTES = 212 << 10
MMA_TILES = 2  # column tiles up to which mma beats wgmma
W8_NBYTES = UNPACK["W8G32_F16S"].tile_nbytes
Q4_NBYTES = UNPACK["Q4G64_F16S"].tile_nbytes
LONGEST_SPAN = {1: 8, 2: 4, 4: 2, 8: 4}  # k tiles between two barriers, by column tiles
# Span and stages of 4-bit weights, by column tiles and up to so many tiles of a matrix. Tokens
# queue behind the weights that are under way when the kernel before ends: work on a small matrix
# begins up to a microsecond earlier where those are few.
Q4_RINGS = {
    1: {8_000: (4, 4), 16_000: (8, 5), inf: (4, 4)},
    2: {inf: (4, 5)},
    4: {inf: (4, 4)},
    8: {inf: (4, 3)},
}
SIZES = (8_000, 16_000, 1 << 20)  # tiles of a small, a middling and a large matrix


@dataclass(frozen=True)
class LinearDecodePlan(LaunchPlan):
    """span: k tiles in a stage of the ring; wgmma: its products, else mma; ahead: stages that are
    asked for before the previous kernel ends. Shapes are (N, K, column tiles, bytes of a weight
    tile)."""

    span: int
    stages: int
    wgmma: bool = False
    ahead: int = NEVER

    def supports(self, capability: str, shape: Shape) -> bool:
        """Bulk copies of sm_90a; a ring that fits."""
        _, _, column_tiles, tile_nbytes = shape
        stage = self.span * (tile_nbytes + column_tiles * 1024)
        return (
            capability == "90a"
            and self.stages >= 2
            and stage * self.stages <= SHARED_NBYTES
            and column_tiles <= max(COLUMN_TILES)
            and (self.wgmma or column_tiles <= MMA_TILES)
        )

    @classmethod
    def default(cls, capability: str, shape: Shape) -> LinearDecodePlan:
        """Of 4-bit weights what was measured, else the longest stages of which four fit, as many
        of them as fit."""
        N, K, column_tiles, tile_nbytes = shape
        wgmma = column_tiles > MMA_TILES
        if tile_nbytes == Q4_NBYTES:
            rings, tiles = Q4_RINGS[column_tiles], div_ceil(N, 128) * div_ceil(K, 64)
            ahead = (1 if tiles <= 16_000 else 4) if column_tiles == 1 and N > K else NEVER
            return cls(*rings[min(most for most in rings if tiles <= most)], wgmma, ahead)
        tile = tile_nbytes + column_tiles * 1024
        longest = LONGEST_SPAN[column_tiles]
        if tile_nbytes == W8_NBYTES and column_tiles <= MMA_TILES:
            longest //= 2  # two scale groups to a k tile: registers
        spans = (longest >> i for i in range(4))
        span = next(s for s in spans if 4 * s * tile <= SHARED_NBYTES)
        return cls(span, SHARED_NBYTES // (span * tile), wgmma=wgmma)

    @classmethod
    def candidates(cls, capability: str, shape: Shape) -> tuple[LinearDecodePlan, ...]:
        """The rings of all sizes of a matrix, and stages of another length, as many as fit."""
        _, _, column_tiles, tile_nbytes = shape
        wide, x_nbytes = column_tiles > MMA_TILES, column_tiles * 1024
        found = [cls.default(capability, (128, 64 * tiles, *shape[2:])) for tiles in SIZES]
        span = 2 if wide else 8
        stages = SHARED_NBYTES // (span * (tile_nbytes + x_nbytes))
        found = list(dict.fromkeys((*found, cls(span, stages, wgmma=wide))))
        return tuple(p for p in found if capability == "90a" and p.supports(capability, shape))


OPS: dict[str, type[LinearDecodePlan] | type[DecodeMmaPlan]] = {
    "linear_decode": LinearDecodePlan,
    "linear_decode_mma": DecodeMmaPlan,
}


def decode_op(capability: str) -> str:
    """What runs the decode linear."""
    return "linear_decode" if capability == "90a" else "linear_decode_mma"


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Decode kernels of each format and width, of the defaults and of measured plans."""
    op = decode_op(capability)
    measured = [(b, p) for (name, b), p in PlanTable.load(capability).plans.items() if name == op]
    for fmt in EPILOGUES:
        for NT in COLUMN_TILES:
            shape = (128, 64, NT, UNPACK[fmt].tile_nbytes)
            sizes = ((128, 64 * tiles, *shape[2:]) for tiles in SIZES)
            plans: list[LaunchPlan] = [OPS[op].default(capability, size) for size in sizes]
            plans += [plan for bucket, plan in measured if bucket[2:] == shape[2:]]
            if every and fmt == "Q4G64_F16S":
                plans += OPS[op].candidates(capability, shape)
            yield from (plan_kernel(plan, fmt, NT) for plan in plans)


def plan_kernel(plan: LaunchPlan, fmt: str, NT: int) -> Kernel:
    """The kernel of a plan for NT column tiles."""
    if isinstance(plan, DecodeMmaPlan):
        return linear_decode_mma_kernel(fmt, NT, plan.span)
    assert isinstance(plan, LinearDecodePlan)
    return linear_decode_kernel(fmt, NT, plan.span, plan.stages, plan.wgmma)


def decode_kernel(plans: PlanTable, fmt: str, shape: Shape) -> tuple[Kernel, int]:
    """The kernel of a launch of a plan's shape, and what it is to ask for ahead, where it can."""
    op = decode_op(plans.capability)
    plan = plans.find(op, OPS[op], shape)
    ahead = plan.ahead if isinstance(plan, LinearDecodePlan) else 0
    return plan_kernel(plan, fmt, shape[2]), ahead
