"""Plans of the linear family, and which of its kernels an image holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.linear.decode import linear_decode_kernel
from ginfer.cuda.linear.decode_mma import DecodeMmaPlan, linear_decode_mma_kernel
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.plan import LaunchPlan, PlanTable, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

COLUMN_TILES = (1, 2, 4, 8)  # tiles of 8 columns that a decode launch may have
MATRIX = (Epilogue.STORE_BF16, Epilogue.ADD_BF16, Epilogue.SILU_UP)
EPILOGUES = {  # what a model does with the sums of a format's matrices
    "Q4G64_F16S": MATRIX,
    "Q4G64_BF16S": MATRIX,
    "W8G32_F16S": (Epilogue.STORE_F32,),
    "BF16": (*MATRIX, Epilogue.STORE_F32),
}
# Of the ring. More than half of a multiprocessor: where two blocks fit, those of the next kernel
# double up on whichever ends first, which costs more than their early start wins.
SHARED_NBYTES = 212 << 10
MMA_TILES = 2  # column tiles up to which mma beats wgmma
W8_NBYTES = UNPACK["W8G32_F16S"].tile_nbytes
LONGEST_SPAN = {1: 8, 2: 4, 4: 2, 8: 4}  # k tiles between two barriers, by column tiles


@dataclass(frozen=True)
class LinearDecodePlan(LaunchPlan):
    """warps of M 16-row tiles each; span: k tiles in a stage of the ring; resident: blocks that
    share a multiprocessor; wgmma: its products, else mma. Shapes are (N, K, column tiles, bytes of
    a weight tile)."""

    warps: int
    M: int
    span: int
    stages: int
    resident: int = 1
    wgmma: bool = False

    def supports(self, capability: str, shape: Shape) -> bool:
        """Bulk copies of sm_90a; whole row blocks; a ring that fits; sums that registers hold."""
        _, _, column_tiles, tile_nbytes = shape
        row_blocks = self.warps * self.M // 8
        stage = self.span * (row_blocks * tile_nbytes + column_tiles * 1024)
        return (
            capability == "90a"
            and self.warps * self.M % 8 == 0
            and row_blocks in (1, 2)
            and self.stages >= 2
            and stage * self.stages <= SHARED_NBYTES // self.resident
            and row_blocks * column_tiles <= max(COLUMN_TILES)
            and (self.wgmma or column_tiles <= MMA_TILES)
        )

    @classmethod
    def default(cls, capability: str, shape: Shape) -> LinearDecodePlan:
        """One row block; the longest stages of which four fit, as many of them as fit."""
        _, _, column_tiles, tile_nbytes = shape
        tile = tile_nbytes + column_tiles * 1024
        longest = LONGEST_SPAN[column_tiles]
        if tile_nbytes == W8_NBYTES and column_tiles <= MMA_TILES:
            longest //= 2  # two scale groups to a k tile: registers
        spans = (longest >> i for i in range(4))
        span = next(s for s in spans if 4 * s * tile <= SHARED_NBYTES)
        wgmma = column_tiles > MMA_TILES
        return cls(8, 1, span, SHARED_NBYTES // (span * tile), wgmma=wgmma)

    @classmethod
    def candidates(cls, capability: str, shape: Shape) -> tuple[LinearDecodePlan, ...]:
        """Shorter and longer stages; of wide launches two row blocks at once, too."""
        _, _, column_tiles, tile_nbytes = shape
        wide, x_nbytes = column_tiles > MMA_TILES, column_tiles * 1024
        found = []
        for warps, span in ((8, 2), (8, 4), (16, 4)) if wide else ((8, 4), (8, 8)):
            stages = SHARED_NBYTES // (span * (warps // 8 * tile_nbytes + x_nbytes))
            found.append(cls(warps, 1, span, stages, wgmma=wide))
        return tuple(p for p in found if capability == "90a" and p.supports(capability, shape))


OPS: dict[str, type[LinearDecodePlan] | type[DecodeMmaPlan]] = {
    "linear_decode": LinearDecodePlan,
    "linear_decode_mma": DecodeMmaPlan,
}


def decode_op(capability: str) -> str:
    """What runs the decode linear."""
    return "linear_decode" if capability == "90a" else "linear_decode_mma"


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Decode kernels of each format and width, of the default and of measured plans."""
    op = decode_op(capability)
    measured = [(b, p) for (name, b), p in PlanTable.load(capability).plans.items() if name == op]
    for fmt in EPILOGUES:
        for NT in COLUMN_TILES:
            shape = (128, 64, NT, UNPACK[fmt].tile_nbytes)
            plans: list[LaunchPlan] = [OPS[op].default(capability, shape)]
            plans += [plan for bucket, plan in measured if bucket[2:] == shape[2:]]
            if every and fmt == "Q4G64_F16S":
                plans += OPS[op].candidates(capability, shape)
            yield from (plan_kernel(plan, fmt, NT) for plan in plans)


def plan_kernel(plan: LaunchPlan, fmt: str, NT: int) -> Kernel:
    """The kernel of a plan for NT column tiles."""
    if isinstance(plan, DecodeMmaPlan):
        return linear_decode_mma_kernel(fmt, NT, plan.span)
    assert isinstance(plan, LinearDecodePlan)
    p = plan
    return linear_decode_kernel(fmt, p.warps, p.M, NT, p.span, p.stages, p.resident, p.wgmma)


def decode_kernel(plans: PlanTable, fmt: str, shape: Shape) -> tuple[Kernel, int]:
    """The kernel of a launch of a plan's shape, and the row blocks of 128 in one of its items."""
    op = decode_op(plans.capability)
    plan = plans.find(op, OPS[op], shape)
    row_blocks = plan.warps * plan.M // 8 if isinstance(plan, LinearDecodePlan) else 1
    return plan_kernel(plan, fmt, shape[2]), row_blocks
