"""Producer lanes of the decode linear on sm_90: bulk copies of an item's k tiles into a ring.

Legend: items and their k tiles are those of `item_locator`; a group of consumers has a ring and
takes the items first, first + step, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import bulk_copy_to_shared, mbarrier_expect_bytes, mbarrier_wait

if TYPE_CHECKING:
    from ginfer.cuda.linear.decode_ring import Ring


def weight_stream(form: Ring, locate: Any, tiles_of: Any) -> Any:
    """Device function of one lane: the weights w of its items into the ring."""
    slab, stages, stage_bytes = form.slab, form.stages, form.stage_bytes
    tile_bytes, RB, empty = form.tile_bytes, form.row_blocks, 8 * form.stages

    @cuda.jit(device=True, inline="always")
    def stream(w, ring, barrier, item, step, items, sliced, k_tiles, blocks, whole, slices):
        s, phase = uint32(0), uint32(1)
        while item < items:
            block, end, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            done = uint32(0)
            source = w + (int64(block) * int64(k_tiles) + int64(first)) * tile_bytes
            last = min(uint32(block + uint32(1)), uint32(end - uint32(1)))
            second = w + (int64(last) * int64(k_tiles) + int64(first)) * tile_bytes
            while left > uint32(0):
                count = tiles_of(left, done)
                num_bytes = uint32(count * uint32(tile_bytes))
                full = uint32(barrier + s * uint32(8))
                at = uint32(ring + s * uint32(stage_bytes))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, uint32(num_bytes * uint32(RB)))
                bulk_copy_to_shared(at, source, num_bytes, full)
                if RB == 2:
                    bulk_copy_to_shared(uint32(at + uint32(slab)), second, num_bytes, full)
                source += int64(num_bytes)
                second += int64(num_bytes)
                left, done = uint32(left - count), uint32(done + count)
                s = uint32(s + uint32(1))
                if s == uint32(stages):
                    s = uint32(0)
                    phase ^= uint32(1)
            item = uint32(item + step)

    return stream


def token_stream(form: Ring, locate: Any, tiles_of: Any) -> Any:
    """Device function of one lane: the tokens x of its items into the ring, behind the weights."""
    stages, stage_bytes, weight_bytes = form.stages, form.stage_bytes, form.weight_bytes
    x_bytes, empty = form.x_bytes, 8 * form.stages

    @cuda.jit(device=True, inline="always")
    def stream(x, ring, barrier, item, step, items, sliced, k_tiles, blocks, whole, slices):
        s, phase = uint32(0), uint32(1)
        while item < items:
            _, _, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            done = uint32(0)
            source = x + int64(first) * x_bytes
            while left > uint32(0):
                count = tiles_of(left, done)
                num_bytes = uint32(count * uint32(x_bytes))
                full = uint32(barrier + s * uint32(8))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, num_bytes)
                at = uint32(ring + s * uint32(stage_bytes) + uint32(weight_bytes))
                bulk_copy_to_shared(at, source, num_bytes, full)
                source += int64(num_bytes)
                left, done = uint32(left - count), uint32(done + count)
                s = uint32(s + uint32(1))
                if s == uint32(stages):
                    s = uint32(0)
                    phase ^= uint32(1)
            item = uint32(item + step)

    return stream
