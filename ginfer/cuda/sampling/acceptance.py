"""Acceptance of verified columns: their tokens by selection, then how far each row goes.

Every column chooses as if all drafts before it held: penalties count them, and a row ends at the
first column whose token is not the next draft. So columns need not wait for each other; a warp per
row then finds the first that ends it, counts the tokens up to there, and keeps the last one as what
the lane drew last.

Legend: B rows, R columns of all rows, V legal ids. Oracle: tests.oracles.acceptance; the same
choices as `ginfer.cpu.acceptance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda, int64, uint32

from ginfer.batch import Purpose
from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import (
    ld_global_u32,
    red_global_add_u32,
    shfl_xor_u32,
    st_global_u32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.cuda.sampling.choose import ACCEPTED, ID, RESULT_NBYTES, SOUND
from ginfer.cuda.sampling.keys import (
    DRAFTED,
    DRAW_NBYTES,
    HOW,
    MOST_PATH,
    REJECTS,
    ROW,
    VERIFIED,
    token_of,
)
from ginfer.cuda.sampling.launch import (
    SelectionScratch,
    SelectionShape,
    SelectionTables,
    blocks_of_row,
    select,
)
from ginfer.cuda.sampling.rejection import rejection_choose_kernel, rejection_sift_kernel
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ginfer.batch import SelectionBatch
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

LANES = 32


@kernel(*(int64,) * 7, uint32)
def acceptance_settle_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments results, columns, tokens, counts, draws, ids, indptr, V. A block of one warp takes
    a row of at most 16 columns, a lane each.

    The result of a row's first column gets its accepted drafts; columns: [B] u32, one more.
    """
    start = follow(early)

    @cuda.jit(launch_bounds=LANES)
    def acceptance_settle(results, columns, tokens, counts, draws, ids, indptr, V):
        start()
        row, lane = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        first = ld_global_u32(row_of_32(indptr, row))
        n = uint32(ld_global_u32(row_of_32(indptr, uint32(row + uint32(1)))) - first)
        token, sound, last = uint32(0), uint32(0), uint32(LANES)
        draw = draws + int64(first + min(lane, uint32(n - uint32(1)))) * DRAW_NBYTES
        if lane < n:
            column = uint32(first + lane)
            result = results + int64(column) * RESULT_NBYTES
            token, sound = ld_global_u32(result + ID), ld_global_u32(result + SOUND)
            goes_on = sound != uint32(0) and ld_global_u32(draw + HOW) & uint32(DRAFTED)
            if goes_on:
                goes_on = token == token_of(ids, tokens, uint32(column + uint32(1)))
            if not goes_on:
                last = lane
        last = min(last, shfl_xor_u32(last, uint32(16)))
        last = min(last, shfl_xor_u32(last, uint32(8)))
        last = min(last, shfl_xor_u32(last, uint32(4)))
        last = min(last, shfl_xor_u32(last, uint32(2)))
        last = min(last, shfl_xor_u32(last, uint32(1)))
        if lane <= last and sound != uint32(0):
            owner = ld_global_u32(draw + ROW)
            red_global_add_u32(counts + (int64(owner) * int64(V) + int64(token)) * 4, uint32(1))
            if lane == last:
                st_global_u32(row_of_32(tokens, owner), token)
        if lane == uint32(0):
            st_global_u32(results + int64(first) * RESULT_NBYTES + ACCEPTED, last)
            st_global_u32(row_of_32(columns, row), uint32(last + uint32(1)))

    return Build(acceptance_settle, LANES)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """What acceptance has beside selection."""
    early = starts_early(capability)
    yield rejection_sift_kernel(early)
    yield rejection_choose_kernel(early)
    yield acceptance_settle_kernel(early)


@dataclass(frozen=True)
class Drafts:
    """Device addresses: ids [R] of the columns, ~n for word n of tokens [1 + all drafts][lanes];
    names and units [lanes][all drafts][16] of what the drafter drew from; indptr [B + 1]; columns
    [B], which gets those that rows used. lanes, most: all lanes, all drafts of one."""

    ids: int
    names: int
    units: int
    indptr: int
    columns: int
    lanes: int
    most: int
    B: int


def verified_records(
    records: NDArray[Any], s: SelectionBatch, indptr: NDArray[np.int32], limits: NDArray[np.int32]
) -> NDArray[Any]:
    """Records of draws of columns, completed for their verification; row b ends at column
    limits[b] - 1."""
    lengths = np.diff(indptr)
    assert lengths.max(initial=0) <= MOST_PATH
    assert (limits >= 1).all()
    assert (limits <= lengths).all()
    place = np.arange(len(records)) - np.repeat(indptr[:-1], lengths)
    records["path"] = place
    records["how"] = VERIFIED | DRAFTED * (place + 1 < np.repeat(limits, lengths))
    rejects = (s.purposes == Purpose.ACCEPT) & (s.temperature != 0) & (s.forced < 0)
    records["how"] |= (REJECTS * rejects).astype(np.uint32)
    return records


def accept(
    queue: Queue,
    logits: int,
    drafts: Drafts,
    *,
    tables: SelectionTables,
    scratch: SelectionScratch,
    shape: SelectionShape,
) -> None:
    """Choose one id for each of R columns of logits [R] FP32, and settle the rows they are of.
    shape.rejects: some column follows the rejection rule."""
    t, s, d, early = tables, scratch, drafts, queue.early
    V, S, R = shape.V, align_up(shape.V, 4), shape.R
    select(queue, logits, tables=t, scratch=s, shape=shape)
    if shape.rejects:
        known = (d.ids, t.tokens, d.names, d.units, V, S, d.lanes, d.most)
        keys, few, blocks = s.adjusted.address, s.few.address, blocks_of_row(R)
        sift = (s.states.address, few, keys, t.draws, *known, blocks)
        queue.launch(rejection_sift_kernel(early), (R * blocks,), *sift)
        results = (t.results, s.states.address, keys, few, logits, t.draws)
        choose = rejection_choose_kernel(early)
        queue.launch(choose, (R,), *results, *known, shape.logits_nbytes)
    settled = (t.results, d.columns, t.tokens, t.counts, t.draws, d.ids, d.indptr, V)
    queue.launch(acceptance_settle_kernel(early), (d.B,), *settled)
