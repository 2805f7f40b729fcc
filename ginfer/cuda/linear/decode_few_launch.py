"""Decode linear of up to 8 rows of the residual stream, norm included: plans and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.linear.decode import NEVER
from ginfer.cuda.linear.decode_few import linear_decode_few_kernel
from ginfer.cuda.linear.decode_launch import k_runs
from ginfer.cuda.linear.decode_tokens import MOST_COLUMNS, NBYTES
from ginfer.cuda.linear.epilogue import EPILOGUES
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.plan import LaunchPlan, PlanTable, Shape
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.linear.decode_launch import DecodeLinear, DecodeScratch
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

SHARED_NBYTES = 220 << 10  # of tokens and rings
BESIDE = 3  # thread blocks of a small matrix
MOST_ROWS = 8  # those of `decode_tokens`


@dataclass(frozen=True)
class FewPlan(LaunchPlan):
    """groups of consumer warps; span: k tiles in a stage of a group's ring; ahead: stages that are
    asked for before the previous kernel ends. Shapes are (N, K, bytes of a weight tile)."""

    groups: int
    span: int
    stages: int
    ahead: int = NEVER

    def supports(self, capability: str, shape: Shape) -> bool:
        """Bulk copies of sm_90a; the norm's 256 threads, once or twice; rings that fit."""
        _, K, tile_nbytes = shape
        ring = self.stages * self.span * tile_nbytes
        return (
            capability == "90a"
            and K <= MOST_COLUMNS
            and self.groups in (1, 2)
            and self.stages >= 2
            and NBYTES + self.groups * ring <= SHARED_NBYTES
        )

    @classmethod
    def default(cls, capability: str, shape: Shape) -> FewPlan:
        """Two groups with short stages for 4-bit weights, which hold some back of a large matrix
        until its rows have been asked for; else one group with the longest stages of which four
        fit."""
        room = (SHARED_NBYTES - NBYTES) // shape[2]
        if room >= 32:
            tiles = div_ceil(shape[0], 128) * div_ceil(shape[1], 64)
            return cls(2, 2, 6, ahead=2 if tiles > 16_000 else NEVER)
        span = next(s for s in (8, 4, 2) if 4 * s <= room)
        return cls(1, span, room // span)


def few_kernel(plans: PlanTable, fmt: str, shape: Shape) -> tuple[Kernel, int]:
    """The kernel of a plan's shape, and what it is to ask for ahead."""
    p = plans.find("linear_decode_few", FewPlan, shape)
    return linear_decode_few_kernel(fmt, p.groups, p.span, p.stages, 1), p.ahead


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel of each format, where there is a variant."""
    if starts_early(capability):
        plans = PlanTable(capability)
        for fmt in EPILOGUES:
            yield few_kernel(plans, fmt, (128, 64, UNPACK[fmt].tile_nbytes))[0]


@dataclass(frozen=True, kw_only=True)
class NormedRows:
    """T rows of x [.., K] BF16, `columns` of them (address of [T] u32; 0: the first), and their
    norm: address of its factors [K] FP32, eps."""

    x: int
    factors: int
    eps: float
    T: int
    columns: int = 0


def takes_rows(queue: Queue, T: int, K: int) -> bool:
    """Whether `linear_decode_rows` has a variant for T rows of K columns here."""
    return queue.early and T <= MOST_ROWS and K <= MOST_COLUMNS and K % 64 == 0


def linear_decode_rows(
    queue: Queue,
    y: int,
    rows: NormedRows,
    *,
    linear: tuple[DecodeLinear, DecodeScratch],
    beside: tuple[DecodeLinear, int] | None = None,
) -> None:
    """y = norm(rows) W^T with the bits of `rms_norm` and `linear_decode`. beside: a small BF16
    matrix and the address of its results, FP32, from the same rows."""
    assert beside is None or beside[0].fmt == "BF16", "a small matrix is BF16"
    matrix, scratch = linear
    blocks, k_tiles = div_ceil(matrix.N, 128), div_ceil(matrix.K, 64)
    whole, runs = k_runs(matrix.N, matrix.K)
    shape = (matrix.N, matrix.K, UNPACK[matrix.fmt].tile_nbytes)
    item, ahead = few_kernel(queue.image.plans, matrix.fmt, shape)
    others = min(BESIDE, div_ceil(beside[0].N, 16)) if beside else 0
    takers = min(max(runs + whole, blocks), matrix.num_sms - others)
    other = (beside[0].w, beside[1]) if beside else (0, 0)
    other_size = (beside[0].N, max(k_runs(beside[0].N, matrix.K)[1], 1)) if beside else (0, 0)
    queue.launch(
        item,
        (takers + others,),
        *(matrix.w, rows.x, y, scratch.workspace),
        *(rows.factors, rows.columns, *other),
        *(k_tiles, blocks, whole, runs, rows.T, matrix.N, int(matrix.epilogue), ahead),
        *(takers, *other_size, rows.eps),
    )
