"""Producer lanes of the decode linear on sm_90: bulk copies of an item's k tiles into a ring.

Legend: items and cut are those of `decode_runs`; who multiplies takes every step-th of them, and
has a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import (
    bulk_copy_to_shared,
    bulk_stream_to_shared,
    mbarrier_expect_bytes,
    mbarrier_wait,
    wait_for_previous_kernel,
)
from ginfer.cuda.linear.decode_ring import advance_stage
from ginfer.cuda.linear.decode_runs import end_of_items, following, place

if TYPE_CHECKING:
    from ginfer.cuda.linear.decode_ring import Ring


def stream(form: Ring, tiles_of: Any, *, tokens: bool) -> Any:
    """Device function of one lane: weights, or the tokens behind them, of its items into the ring.
    After `ahead` stages it waits for the kernel before this one. Weights are the first to leave L2,
    for nothing reads them again in this forward; what is read soon has the room."""
    stage_bytes, empty, advance = form.stage_bytes, 8 * form.stages, advance_stage(form.stages)
    tile_bytes, skip = (form.x_bytes, form.weight_bytes) if tokens else (form.tile_bytes, 0)
    bring = bulk_copy_to_shared if tokens else bulk_stream_to_shared

    @cuda.jit(device=True, inline="always")
    def copy(everything, ring, barrier, item, cut, ahead):
        s, phase, begun = uint32(0), uint32(1), uint32(0)
        _, items = end_of_items(cut)
        while item < items:
            block, first, left, before, after, _ = place(item, cut)
            tile = int64(first)
            if not tokens:
                tile += int64(block) * int64(cut[0])
            source = everything + tile * tile_bytes
            while left > uint32(0):
                count = tiles_of(left, before, after)
                num_bytes = uint32(count * uint32(tile_bytes))
                full = uint32(barrier + s * uint32(8))
                at = uint32(ring + s * uint32(stage_bytes) + uint32(skip))
                if begun == ahead:
                    wait_for_previous_kernel()
                begun = uint32(begun + uint32(1))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, num_bytes)
                bring(at, source, num_bytes, full)
                source += int64(num_bytes)
                left, before = uint32(left - count), uint32(before + count)
                s, phase = advance(s, phase)
            item = following(item, cut[4])

    return copy
