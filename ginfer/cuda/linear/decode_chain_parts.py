"""Parts of the decode linears in one kernel: phases, streams of weights and products, meetings.

Legend: a phase is a linear with its items (`item_locator`), which thread blocks take in turns; one
ring of `depth` stages, `span` k tiles each, serves all phases.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    bulk_copy_to_shared,
    bulk_prefetch,
    first_lane_u32,
    ld_global_u32x4,
    mbarrier_arrive_if,
    mbarrier_expect_bytes,
    mbarrier_wait,
    named_barrier,
    st_shared_u32x4,
    wait_for_other_half,
)
from ginfer.cuda.linear.decode_multiply import by_mma
from ginfer.cuda.linear.decode_results import X_TILE, item_locator
from ginfer.cuda.linear.decode_tokens import row_factors
from ginfer.cuda.linear.unpack import UNPACK

GATE_UP, INNER, PHASES = 1, 3, 4  # phases that norm are odd
WARPS, MEET = 8, 1  # consumers, 16 rows each, and the named barrier where they meet
CONSUMERS = 32 * WARPS
COPIED = 3  # groups of eight columns of a thread
MOST_TILES = COPIED * CONSUMERS // 8  # k tiles of an item whose tokens are copied
PREFETCH_NBYTES = 8192


@cuda.jit(device=True, inline="always")
def of_phase(p, four):
    """four[p]."""
    found = four[0]
    if p == uint32(1):
        found = four[1]
    if p == uint32(2):
        found = four[2]
    if p == uint32(3):
        found = four[3]
    return found


@cuda.jit(device=True, inline="always")
def phase_items(p, sizes):
    """(k tiles, rows, row blocks, whole ones, slices, items that are slices, items, the first item
    of this thread block, step) of phase p. sizes: k tiles, rows and splits of all phases, blocks
    that take no items of the last."""
    tiles, rows, splits, others = sizes
    k_tiles, N, split = of_phase(p, tiles), of_phase(p, rows), of_phase(p, splits)
    blocks = uint32((N + uint32(127)) >> uint32(7))
    whole, slices = uint32(split & uint32(0xFFFF)), uint32(split >> uint32(16))
    sliced = uint32((blocks - whole) * slices)
    items, item, step = (
        uint32(sliced + whole),
        uint32(cuda.blockIdx.x),
        uint32(cuda.gridDim.x),
    )
    if p == uint32(INNER):
        step = uint32(step - others)
        if item >= step:
            item = items
    return k_tiles, N, blocks, whole, slices, sliced, items, item, step


def chain_stream(fmt: str, span: int, stages: int) -> Any:
    """Device function of one lane: the weights of this block's items of phases p to last - 1."""
    tile_bytes, empty = UNPACK[fmt].tile_nbytes, 8 * stages
    slab, locate = span * tile_bytes, item_locator(1)

    @cuda.jit(device=True, inline="always")
    def stream(p, last, matrices, sizes, ring, barrier, depth):
        s, phase = uint32(0), uint32(1)
        while p < last:
            k_tiles, _, blocks, whole, slices, sliced, items, item, step = phase_items(p, sizes)
            w = of_phase(p, matrices)
            while item < items:
                block, _, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
                source = w + (int64(block) * int64(k_tiles) + int64(first)) * tile_bytes
                while left > uint32(0):
                    count = min(left, uint32(span))
                    num_bytes = uint32(count * uint32(tile_bytes))
                    full = uint32(barrier + s * uint32(8))
                    mbarrier_wait(uint32(full + uint32(empty)), phase)
                    mbarrier_expect_bytes(full, num_bytes)
                    bulk_copy_to_shared(uint32(ring + s * uint32(slab)), source, num_bytes, full)
                    source += int64(num_bytes)
                    left = uint32(left - count)
                    s = uint32(s + uint32(1))
                    if s == depth:
                        s, phase = uint32(0), uint32(phase ^ uint32(1))
                item = uint32(item + step)
            p = uint32(p + uint32(1))

    return stream


@cuda.jit(device=True, inline="always")
def fetch_ahead(at, num_bytes):
    """This thread block's share of what the next kernels read, into L2; one lane."""
    done = uint32(cuda.blockIdx.x * uint32(PREFETCH_NBYTES))
    while done < num_bytes:
        bulk_prefetch(at + int64(done), min(uint32(PREFETCH_NBYTES), uint32(num_bytes - done)))
        done = uint32(done + uint32(cuda.gridDim.x * uint32(PREFETCH_NBYTES)))


def chain_products(fmt: str, span: int, stages: int) -> Any:
    """Device function: c = the next `left` k tiles of the ring from stage s on, whose tokens are
    resident; returns the stage after them and its phase."""
    tile_bytes, empty, factor = UNPACK[fmt].tile_nbytes, 8 * stages, UNPACK[fmt].divisor
    slab = span * tile_bytes
    most, one = (by_mma(fmt, 1, 1, n, slab, resident=True) for n in (span, 1))

    @cuda.jit(device=True, inline="always")
    def consume(c, ring, barrier, s, phase, left, depth, warp, lane, tokens):
        chosen = uint32(1) if lane == 0 else uint32(0)
        for i in range(4):
            c[i] = float32(0.0)
        while left > uint32(0):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(ring + s * uint32(slab))
            count = min(left, uint32(span))
            mbarrier_wait(full, phase)
            if count == uint32(span):
                most(c, weights, tokens, warp, lane)
                tokens = uint32(tokens + uint32(128 * span))
            else:
                for _ in range(count):
                    one(c, weights, tokens, warp, lane)
                    weights = uint32(weights + uint32(tile_bytes))
                    tokens = uint32(tokens + uint32(128))
            cuda.syncwarp()
            mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
            left = uint32(left - count)
            s = uint32(s + uint32(1))
            if s == depth:
                s, phase = uint32(0), uint32(phase ^ uint32(1))
        for i in range(4):
            c[i] = c[i] * float32(factor)
        return s, phase

    return consume


def row_copy(at_once: int) -> Any:
    """Device function of all consumers: k tiles first .. first + count - 1 of T tokens x in
    fragment order to rows at `tokens`, at_once of them under way together."""
    num_held = at_once * COPIED * 4

    @cuda.jit(device=True, inline="always")
    def copy(tokens, x, first, count, T, thread):
        held, done = cuda.local.array(num_held, uint32), uint32(0)
        columns = uint32(count * uint32(8))
        while done < T:
            for b in range(at_once):
                t = uint32(done + uint32(b))
                for i in range(COPIED):
                    c = uint32(thread + uint32(i * CONSUMERS))
                    if t < T and c < columns:
                        q = ld_global_u32x4(
                            x + int64(first) * X_TILE + int64(c) * 128 + int64(t) * 16
                        )
                        for j in range(4):
                            held[(b * COPIED + i) * 4 + j] = q[j]
            for b in range(at_once):
                t = uint32(done + uint32(b))
                for i in range(COPIED):
                    c = uint32(thread + uint32(i * CONSUMERS))
                    if t < T and c < columns:
                        to = uint32(tokens + t * (columns * uint32(16) + uint32(16)))
                        to, p = uint32(to + c * uint32(16)), (b * COPIED + i) * 4
                        st_shared_u32x4(to, held[p], held[p + 1], held[p + 2], held[p + 3])
            done = uint32(done + uint32(at_once))

    return copy


@cuda.jit(device=True, inline="always")
def meet_blocks(arrivals, f, factors, C, thread):
    """Consumers of all thread blocks have written their results; meanwhile f = the factors of a
    norm of C columns, if any."""
    named_barrier(uint32(MEET), uint32(CONSUMERS))
    grid, old = uint32(cuda.gridDim.x), uint32(0)
    if thread == 0:  # its release covers what the barrier has ordered before it
        old = atomic_inc_u32(arrivals, uint32(grid + grid - uint32(1)))
    if factors != 0:
        row_factors(f, factors, C, thread)
    if thread < uint32(32):
        old = first_lane_u32(old)
        wait_for_other_half(arrivals, grid, uint32(1) if old >= grid else uint32(0))
    named_barrier(uint32(MEET), uint32(CONSUMERS))
