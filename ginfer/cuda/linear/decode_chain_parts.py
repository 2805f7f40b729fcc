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
    bits_from_f32,
    bulk_copy_to_shared,
    bulk_prefetch,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    f32_from_bits,
    first_lane_u32,
    fma_f32,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32x4,
    ldmatrix_x4,
    mbarrier_arrive_if,
    mbarrier_expect_bytes,
    mbarrier_wait,
    mma_m16n8k16_bf16,
    named_barrier,
    st_global_u16,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x4,
    st_tagged_f32x2,
    wait_for_other_half,
    wait_for_tagged_f32x8,
)
from ginfer.cuda.linear.decode_results import item_locator
from ginfer.cuda.linear.decode_tokens import MOST_COLUMNS
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.norm import HELD, add_squares, inverse_rms, normed_pair

GATE_UP, INNER, PHASES = 1, 3, 4  # phases that norm are odd
SETS, WARPS = 2, 8  # of consumers; in a set, 16 rows each
SET = 32 * WARPS
CONSUMERS, MEET = SETS * SET, 1  # and the named barrier where they all meet
HELD_WORDS = 4 * HELD
FACTORS_NBYTES = 4 * MOST_COLUMNS
SLICE_NBYTES = 32 * SET  # sums of a set with their tags
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


def _products(fmt: str, span: int) -> Any:
    """Device function: d = the chains of mma of a 16-row tile of `span` k tiles, one chain each."""
    f = UNPACK[fmt]
    load, codes, words, tile_bytes = f.load, f.codes, f.words, f.tile_nbytes
    num_words, num_d = span * words, span * 4

    @cuda.jit(device=True, inline="always")
    def products(d, weights, tokens, row_tile, lane):
        v, b = cuda.local.array(num_words, uint32), cuda.local.array(num_d, uint32)
        for k in range(span):
            load(v, k * words, uint32(weights + uint32(k * tile_bytes)), row_tile, lane)
        for i in range(num_d):
            d[i] = float32(0.0)
        for half in range(2):
            for k in range(span):
                q = ldmatrix_x4(uint32(tokens + uint32(k * 128 + half * 64)))
                for i in range(4):
                    b[4 * k + i] = q[i]
            for j in range(2):
                for k in range(span):
                    a, p, q = codes(v, k * words, half * 2 + j), 4 * k, 4 * k + 2 * j
                    r = mma_m16n8k16_bf16(
                        *(a[0], a[1], a[2], a[3], b[q], b[q + 1]),
                        *(d[p], d[p + 1], d[p + 2], d[p + 3]),
                    )
                    for i in range(4):
                        d[p + i] = r[i]

    return products


def chain_products(fmt: str, span: int, stages: int) -> Any:
    """Device function: c = the sums of an item, the next `left` k tiles of the ring, whose tokens
    are resident. Two warps share a row tile and take the stages in turns: each computes the chains
    of its stages while the other is at its own, and adds them when it is its turn. Returns where
    the ring and the turns are, and whether this warp has the sums."""
    tile_bytes, empty, factor = UNPACK[fmt].tile_nbytes, 8 * stages, UNPACK[fmt].divisor
    slab, num_d, many, scales = (
        span * tile_bytes,
        span * 4,
        _products(fmt, span),
        UNPACK[fmt].scales,
    )

    @cuda.jit(device=True, inline="always")
    def consume(c, places, at, left, depth, me, tokens):
        ring, barrier, mine_at, other_at, slot = places
        s, phase, mine, turn = at
        row_tile, lane = me
        d = cuda.local.array(num_d, float32)
        low, high = cuda.local.array(span, float32), cuda.local.array(span, float32)
        chosen, first, kept = uint32(1) if lane == 0 else uint32(0), uint32(1), uint32(0)
        while left > uint32(0):
            count = min(left, uint32(span))
            if mine != uint32(0):
                full = uint32(barrier + s * uint32(8))
                weights = uint32(ring + s * uint32(slab))
                mbarrier_wait(full, phase)
                many(
                    d, weights, tokens, row_tile, lane
                )  # of a short stage what lies behind it, too
                for k in range(span):
                    tile = uint32(weights + uint32(k * tile_bytes))
                    low[k], high[k] = scales(tile, row_tile, lane, uint32(0))
                mbarrier_wait(mine_at, turn)
                for i in range(4):
                    c[i] = float32(0.0)
                if first == uint32(0):
                    q = ld_shared_u32x4(slot)
                    for i in range(4):
                        c[i] = f32_from_bits(q[i])
                for k in range(span):
                    if uint32(k) < count:
                        for i in range(2):
                            c[i] = fma_f32(d[4 * k + i], low[k], c[i])
                            c[2 + i] = fma_f32(d[4 * k + 2 + i], high[k], c[2 + i])
                kept = uint32(1) if left == count else uint32(0)
                if kept == uint32(0):
                    st_shared_u32x4(
                        slot,
                        bits_from_f32(c[0]),
                        bits_from_f32(c[1]),
                        bits_from_f32(c[2]),
                        bits_from_f32(c[3]),
                    )
                cuda.syncwarp()
                mbarrier_arrive_if(other_at, chosen)
                mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
                turn ^= uint32(1)
            mine ^= uint32(1)
            first = uint32(0)
            left = uint32(left - count)
            tokens = uint32(tokens + uint32(128) * count)
            s = uint32(s + uint32(1))
            if s == depth:
                s, phase = uint32(0), uint32(phase ^ uint32(1))
        for i in range(4):
            c[i] = c[i] * float32(factor)
        return s, phase, mine, turn, kept

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
def copy_factors(at, factors, C, thread):
    """The factors [C] FP32 of a norm to shared memory, by one set; `copy_tokens` waits for them."""
    for i in range(HELD):
        c = uint32((thread + uint32(i * SET)) * uint32(8))
        if c < C and thread < uint32(SET):
            for h in range(2):
                to = uint32(at + c * uint32(4) + uint32(16 * h))
                cp_async_16(to, factors + int64(c) * 4 + 16 * h)


@cuda.jit(device=True, inline="always")
def _load_row(held, row, C, thread):
    """This thread's columns of a row in shared memory."""
    for i in range(HELD):
        c = uint32((thread + uint32(i * SET)) * uint32(8))
        if c < C:
            q = ld_shared_u32x4(uint32(row + c * uint32(2)))
            for j in range(4):
                held[i * 4 + j] = q[j]


@cuda.jit(device=True, inline="always")
def _square_row(sums, row, t, C, thread):
    """The warp's sum of squares of a row, to shared memory."""
    held, total = cuda.local.array(HELD_WORDS, uint32), float32(0.0)
    _load_row(held, row, C, thread)
    for i in range(HELD):
        if uint32((thread + uint32(i * SET)) * uint32(8)) < C:
            total = add_squares(total, held, i * 4)
    total = warp_sum(total)
    if thread & uint32(31) == 0:
        at = uint32(t * uint32(WARPS) + (thread >> uint32(5)))
        st_shared_f32(uint32(sums + at * uint32(4)), total)


@cuda.jit(device=True, inline="always")
def _scale_row(row, inv, factors, C, thread):
    """A row becomes its norm."""
    held, pairs = cuda.local.array(HELD_WORDS, uint32), cuda.local.array(4, uint32)
    f = cuda.local.array(8, float32)
    _load_row(held, row, C, thread)
    for i in range(HELD):
        c = uint32((thread + uint32(i * SET)) * uint32(8))
        if c < C:
            for h in range(2):
                q = ld_shared_u32x4(uint32(factors + c * uint32(4) + uint32(16 * h)))
                for j in range(4):
                    f[4 * h + j] = f32_from_bits(q[j])
            for j in range(4):
                word, k = held[i * 4 + j], 2 * j
                pairs[j] = normed_pair(low_f32(word), high_f32(word), inv, f[k], f[k + 1])
            st_shared_u32x4(uint32(row + c * uint32(2)), pairs[0], pairs[1], pairs[2], pairs[3])


@cuda.jit(device=True, inline="always")
def resident_norm(tokens, sums, factors, T, C, eps, thread):
    """Norms of T rows that `copy_tokens` has brought to `tokens`, and `copy_factors` their factors,
    in place, by all consumers: the sets take rows in turns. The numbers are those of
    `ginfer.cuda.norm`."""
    stride, scales = uint32(C * uint32(2) + uint32(16)), uint32(sums + uint32(4 * WARPS * WARPS))
    mine, warp, t = uint32(thread & uint32(SET - 1)), thread >> uint32(5), thread >> uint32(8)
    named_barrier(uint32(MEET), uint32(CONSUMERS))
    while t < T:
        _square_row(sums, uint32(tokens + t * stride), t, C, mine)
        t = uint32(t + uint32(SETS))
    named_barrier(uint32(MEET), uint32(CONSUMERS))
    if warp < T:
        total = float32(0.0)
        for i in range(WARPS):
            at = uint32(warp * uint32(WARPS) + uint32(i))
            total = total + ld_shared_f32(uint32(sums + at * uint32(4)))
        inv = inverse_rms(total, C, eps)
        if thread & uint32(31) == 0:
            st_shared_f32(uint32(scales + warp * uint32(4)), inv)
    named_barrier(uint32(MEET), uint32(CONSUMERS))
    t = uint32(thread >> uint32(8))
    while t < T:
        inv = ld_shared_f32(uint32(scales + uint32(4) * t))
        _scale_row(uint32(tokens + t * stride), inv, factors, C, mine)
        t = uint32(t + uint32(SETS))


@cuda.jit(device=True, inline="always")
def _result(first_row, lane, i):
    """Row and token of a lane's sum i of a 16-row tile."""
    row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1) * 8))
    return row, uint32((lane & uint32(3)) * uint32(2) + uint32(i & 1))


@cuda.jit(device=True, inline="always")
def load_rows(old, y, first_row, lane, T, N):
    """What y [T, N] BF16 holds where this lane's sums go, in pairs."""
    for i in range(4):
        row, t = _result(first_row, lane, i)
        bits = uint32(0)
        if t < T and row < N:
            bits = uint32(ld_global_u16(y + (int64(t) * int64(N) + int64(row)) * 2))
        old[i >> 1] = uint32(bits << uint32(16)) | old[i >> 1] if i & 1 else bits


@cuda.jit(device=True, inline="always")
def add_rows(old, c, y, first_row, lane, T, N):
    """y = old + c, for what `load_rows` has loaded."""
    for i in range(4):
        row, t = _result(first_row, lane, i)
        if t < T and row < N:
            at = y + (int64(t) * int64(N) + int64(row)) * 2
            pair = old[i >> 1]
            bits = uint32(pair & uint32(0xFFFF0000)) if i & 1 else uint32(pair << uint32(16))
            st_global_u16(at, bf16_from_f32(f32_from_bits(bits) + c[i]))


@cuda.jit(device=True, inline="always")
def count_launch(to, counter):
    """A number of this launch, 1 to 65536, the same for all blocks and another than the last, to
    shared memory; one thread, when the kernel before has ended."""
    grid = uint32(cuda.gridDim.x)
    old = atomic_inc_u32(counter, uint32(grid * uint32(65536) - uint32(1)))
    st_shared_u32(to, uint32(div_u32(old, grid) + uint32(1)))


@cuda.jit(device=True, inline="always")
def publish_slice(c, at, tag):
    """Leave a thread's sums of a slice at `at`, with a tag that no launch before had."""
    st_tagged_f32x2(at, c[0], c[1], tag)
    st_tagged_f32x2(at + 16, c[2], c[3], tag)


@cuda.jit(device=True, inline="always")
def add_slices(c, at, count, tag):
    """c = the `count` slices in front of the one whose place is `at`, ascending, and then c."""
    c0, c1, c2, c3 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    while count > uint32(0):
        more = count > uint32(1)
        a = at - int64(count) * SLICE_NBYTES
        v = wait_for_tagged_f32x8(a, a + (SLICE_NBYTES if more else 0), tag)
        c0, c1, c2, c3 = c0 + v[0], c1 + v[1], c2 + v[2], c3 + v[3]
        if more:
            c0, c1, c2, c3 = c0 + v[4], c1 + v[5], c2 + v[6], c3 + v[7]
            count = uint32(count - uint32(1))
        count = uint32(count - uint32(1))
    c[0], c[1], c[2], c[3] = c0 + c[0], c1 + c[1], c2 + c[2], c3 + c[3]


@cuda.jit(device=True, inline="always")
def meet_blocks(arrivals, at, factors, C, thread):
    """Consumers of all thread blocks have written their results; meanwhile the factors of a norm of
    C columns are copied, if there is one."""
    named_barrier(uint32(MEET), uint32(CONSUMERS))
    grid, old = uint32(cuda.gridDim.x), uint32(0)
    if thread == 0:  # its release covers what the barrier has ordered before it
        old = atomic_inc_u32(arrivals, uint32(grid + grid - uint32(1)))
    if factors != 0:
        copy_factors(at, factors, C, thread)
    if thread < uint32(32):
        old = first_lane_u32(old)
        if uint32(old + uint32(1)) != grid and uint32(old + uint32(1)) != uint32(grid + grid):
            wait_for_other_half(arrivals, grid, uint32(1) if old >= grid else uint32(0))
    named_barrier(uint32(MEET), uint32(CONSUMERS))
