"""Parts of the decode linears in one kernel: phases, streams of weights and products, meetings.

Legend: a phase is a linear with its items (`item_locator`), which thread blocks take in turns; one
ring of `depth` stages, `span` k tiles each, serves all phases.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import high_f32, low_f32, warp_sum
from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    bf16_from_f32,
    bulk_copy_to_shared,
    bulk_prefetch,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    f32_from_bits,
    first_lane_u32,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32x4,
    mbarrier_arrive_if,
    mbarrier_expect_bytes,
    mbarrier_wait,
    named_barrier,
    st_global_u16,
    st_shared_f32,
    st_shared_u32x4,
    wait_for_other_half,
)
from ginfer.cuda.linear.decode_multiply import by_mma
from ginfer.cuda.linear.decode_results import item_locator
from ginfer.cuda.linear.decode_tokens import row_factors
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.norm import HELD, add_squares, inverse_rms, normed_pair

GATE_UP, INNER, PHASES = 1, 3, 4  # phases that norm are odd
WARPS, MEET = 8, 1  # consumers, 16 rows each, and the named barrier where they meet
CONSUMERS = 32 * WARPS
NUM_SUMS = WARPS * WARPS + WARPS  # of up to eight rows, and what follows from them
MOST_TILES = 96  # k tiles of an item whose tokens are copied: half of the memory of a ring is left
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
def fetch_share(at, num_bytes):
    """This thread block's share of num_bytes, into L2; one lane."""
    done = uint32(cuda.blockIdx.x * uint32(PREFETCH_NBYTES))
    while done < num_bytes:
        bulk_prefetch(at + int64(done), min(uint32(PREFETCH_NBYTES), uint32(num_bytes - done)))
        done = uint32(done + uint32(cuda.gridDim.x * uint32(PREFETCH_NBYTES)))


def chain_ahead(fmt: str) -> Any:
    """Device function of one lane: what this block's stream of phases 0 and 1 of another chain of
    the same sizes begins with, num_bytes of it, into L2."""
    tile_bytes, locate = UNPACK[fmt].tile_nbytes, item_locator(1)

    @cuda.jit(device=True, inline="always")
    def fetch(w0, w1, num_bytes, sizes):
        p, w = uint32(0), w0
        while p < uint32(2):
            k_tiles, _, blocks, whole, slices, sliced, items, item, step = phase_items(p, sizes)
            while item < items and num_bytes > uint32(0):
                block, _, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
                source = w + (int64(block) * int64(k_tiles) + int64(first)) * tile_bytes
                count = min(uint32(left * uint32(tile_bytes)), num_bytes)
                bulk_prefetch(source, count)
                num_bytes, item = uint32(num_bytes - count), uint32(item + step)
            p, w = uint32(p + uint32(1)), w1

    return fetch


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


@cuda.jit(device=True, inline="always")
def copy_tokens(tokens, x, places, first, count, T, thread):
    """k tiles first .. first + count - 1 of T tokens x, to rows at `tokens`, all of them under way
    together; waits for those of this thread. places: bytes between tokens of x, and between groups
    of eight columns; the power of two of tokens that neighbouring threads take."""
    between_tokens, between_groups, shift = places
    groups, width = uint32(count * uint32(8)), uint32(uint32(1) << shift)
    stride = uint32((groups + uint32(1)) << uint32(4))
    source, t = x + int64(first) * 8 * between_groups, uint32(thread & uint32(width - uint32(1)))
    while t < T:
        g = uint32(thread >> shift)
        while g < groups:
            at = source + int64(t) * between_tokens + int64(g) * between_groups
            cp_async_16(uint32(tokens + t * stride + g * uint32(16)), at)
            g = uint32(g + (uint32(CONSUMERS) >> shift))
        t = uint32(t + width)
    cp_async_commit()
    cp_async_wait_0()


@cuda.jit(device=True, inline="always")
def _load_row(held, b, row, C, thread):
    """This thread's columns of row b of several that lie in shared memory."""
    for i in range(HELD):
        c = uint32((thread + uint32(i * CONSUMERS)) * uint32(8))
        if c < C:
            q = ld_shared_u32x4(uint32(row + c * uint32(2)))
            for j in range(4):
                held[(b * HELD + i) * 4 + j] = q[j]


def _square_rows(rows: int) -> Any:
    """Device function: the warp's sums of squares of rows t, t + 1, ... at `row`, to shared
    memory."""
    num_held = rows * HELD * 4

    @cuda.jit(device=True, inline="always")
    def square(sums, row, t, C, thread):
        held, totals = cuda.local.array(num_held, uint32), cuda.local.array(rows, float32)
        stride = uint32(C * uint32(2) + uint32(16))
        for b in range(rows):
            _load_row(held, b, uint32(row + uint32(b) * stride), C, thread)
        for b in range(rows):
            totals[b] = float32(0.0)
            for i in range(HELD):
                if uint32((thread + uint32(i * CONSUMERS)) * uint32(8)) < C:
                    totals[b] = add_squares(totals[b], held, (b * HELD + i) * 4)
        for b in range(rows):
            totals[b] = warp_sum(totals[b])
        if thread & uint32(31) == 0:
            for b in range(rows):
                at = uint32((t + uint32(b)) * uint32(WARPS) + (thread >> uint32(5)))
                st_shared_f32(uint32(sums + at * uint32(4)), totals[b])

    return square


def _scale_rows(rows: int) -> Any:
    """Device function: rows at `row` become their norms, whose factors of rows lie at `scales`."""
    num_held = rows * HELD * 4

    @cuda.jit(device=True, inline="always")
    def scale(scales, row, f, C, thread):
        held, pairs = cuda.local.array(num_held, uint32), cuda.local.array(4, uint32)
        stride = uint32(C * uint32(2) + uint32(16))
        for b in range(rows):
            _load_row(held, b, uint32(row + uint32(b) * stride), C, thread)
        for b in range(rows):
            inv = ld_shared_f32(uint32(scales + uint32(4 * b)))
            for i in range(HELD):
                c = uint32((thread + uint32(i * CONSUMERS)) * uint32(8))
                if c < C:
                    for j in range(4):
                        word, k = held[(b * HELD + i) * 4 + j], 8 * i + 2 * j
                        pairs[j] = normed_pair(low_f32(word), high_f32(word), inv, f[k], f[k + 1])
                    to = uint32(row + uint32(b) * stride + c * uint32(2))
                    st_shared_u32x4(to, pairs[0], pairs[1], pairs[2], pairs[3])

    return scale


def resident_norm(at_once: int) -> Any:
    """Device function norm(tokens, sums, f, T, C, eps, thread) of all consumers: T rows that
    `copy_tokens` has brought to `tokens`, in place, at_once side by side while there are as many.
    f: `row_factors`. The numbers are those of `ginfer.cuda.norm`."""
    square, square_more = _square_rows(1), _square_rows(at_once)
    scale, scale_more = _scale_rows(1), _scale_rows(at_once)

    @cuda.jit(device=True, inline="always")
    def norm(tokens, sums, f, T, C, eps, thread):
        stride, t = uint32(C * uint32(2) + uint32(16)), uint32(0)
        scales = uint32(sums + uint32(4 * WARPS * WARPS))
        while uint32(t + uint32(at_once)) <= T:
            square_more(sums, uint32(tokens + t * stride), t, C, thread)
            t = uint32(t + uint32(at_once))
        while t < T:
            square(sums, uint32(tokens + t * stride), t, C, thread)
            t = uint32(t + uint32(1))
        named_barrier(uint32(MEET), uint32(CONSUMERS))
        warp = uint32(thread >> uint32(5))
        if warp < T:
            total = float32(0.0)
            for i in range(WARPS):
                at = uint32(warp * uint32(WARPS) + uint32(i))
                total = total + ld_shared_f32(uint32(sums + at * uint32(4)))
            inv = inverse_rms(total, C, eps)
            if thread & uint32(31) == 0:
                st_shared_f32(uint32(scales + warp * uint32(4)), inv)
        named_barrier(uint32(MEET), uint32(CONSUMERS))
        t = uint32(0)
        while uint32(t + uint32(at_once)) <= T:
            scale_more(uint32(scales + uint32(4) * t), uint32(tokens + t * stride), f, C, thread)
            t = uint32(t + uint32(at_once))
        while t < T:
            scale(uint32(scales + uint32(4) * t), uint32(tokens + t * stride), f, C, thread)
            t = uint32(t + uint32(1))

    return norm


@cuda.jit(device=True, inline="always")
def _result(first_row, lane, i):
    """Row and token of a lane's sum i of a 16-row tile."""
    row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1) * 8))
    return row, uint32((lane & uint32(3)) * uint32(2) + uint32(i & 1))


@cuda.jit(device=True, inline="always")
def load_rows(old, y, first_row, lane, T, N):
    """What y [T, N] BF16 holds where this lane's sums go."""
    for i in range(4):
        row, t = _result(first_row, lane, i)
        old[i] = float32(0.0)
        if t < T and row < N:
            bits = uint32(ld_global_u16(y + (int64(t) * int64(N) + int64(row)) * 2))
            old[i] = f32_from_bits(bits << uint32(16))


@cuda.jit(device=True, inline="always")
def add_rows(old, c, y, first_row, lane, T, N):
    """y = old + c, for what `load_rows` has loaded."""
    for i in range(4):
        row, t = _result(first_row, lane, i)
        if t < T and row < N:
            at = y + (int64(t) * int64(N) + int64(row)) * 2
            st_global_u16(at, bf16_from_f32(old[i] + c[i]))


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
