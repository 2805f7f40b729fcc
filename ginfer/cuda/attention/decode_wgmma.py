"""Decode attention on wgmma (sm_90a): units of up to 64 rows as in `attention.decode`.

Two warpgroups share a block of keys: each has the scores of every other tile, in registers; they
exchange maxima and sums of the rows and leave the weights in shared memory, where both find them
for their half of the dims. A warp keeps the ring of planes full, as in `attention.decode_bulk`.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.decode_bulk import follower, last_token, producer, unit_at
from ginfer.cuda.attention.decode_parts import (
    BLOCK_KEYS,
    BLOCK_TILES,
    LOWEST,
    PLANE_NBYTES,
    THREADS,
    WARPS,
    fetch_queries,
    fold,
    fold_factors,
)
from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE
from ginfer.cuda.lib.numeric import LOG2E, row_of_32
from ginfer.cuda.lib.ptx import (
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    fence_async_proxy,
    first_lane_u32,
    ld_global_u32,
    ld_shared_f32,
    let_next_kernel_start,
    mbarrier_arrive_if,
    mbarrier_init,
    mbarrier_wait,
    mul_rn_f32,
    named_barrier,
    shared_address,
    shfl_xor_f32,
    st_global_f32,
    st_shared_f32,
    st_shared_u32x4,
)
from ginfer.cuda.lib.wgmma import tile_descriptor, wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_attention import max_f32, value_descriptor
from ginfer.cuda.lib.wgmma_decode import DIMS, ROWS, decode_tile
from ginfer.cuda.runtime.jit import Build, kernel

FLOOR = -1.0e25  # far above a masked score, so that masked keys weigh 0 where a row sees none
STAGES = BLOCK_TILES  # two planes of a block's keys must not share a place
QUERY_NBYTES = ROWS * HEAD_DIM * 2
WEIGHT_NBYTES = ROWS * BLOCK_KEYS * 2
RING_AT = QUERY_NBYTES + WEIGHT_NBYTES
WORDS_AT = RING_AT + STAGES * PLANE_NBYTES
SHARED_NBYTES = WORDS_AT + 4 * ROWS * 4 + 1024


@cuda.jit(device=True, inline="always")
def _quad_max(x):
    x = max_f32(x, shfl_xor_f32(x, uint32(1)))
    return max_f32(x, shfl_xor_f32(x, uint32(2)))


@cuda.jit(device=True, inline="always")
def _quad_sum(x):
    x = x + shfl_xor_f32(x, uint32(1))
    return x + shfl_xor_f32(x, uint32(2))


@cuda.jit(device=True, inline="always")
def _ahead(s, phase, n):
    """The place in the ring n <= STAGES planes further."""
    s = uint32(s + n)
    if s >= uint32(STAGES):
        return uint32(s - uint32(STAGES)), uint32(phase ^ uint32(1))
    return s, phase


@cuda.jit(device=True, inline="always")
def _meet():
    named_barrier(uint32(1), uint32(THREADS))


@cuda.jit(device=True, inline="always")
def _row_facts(r, members, count, first, token, slot, g, H, M):
    """Tokens that row r sees, 0 if there is no such row, and the place of its partial."""
    j = div_u32(r, M)
    seen, place = uint32(0), uint32(0)
    if j < count:
        t = ld_global_u32(row_of_32(members, j))
        seen = uint32(ld_global_u32(row_of_32(token, t)) + uint32(1))
        place = uint32(ld_global_u32(row_of_32(first, t)) + slot)
        place = uint32(place * H + g * M + r - j * M)
    return seen, place


@cuda.jit(device=True, inline="always")
def _exchange(words, row, t, group, value):
    """Leave a row's value of this warpgroup where both find it."""
    if t == uint32(0):
        st_shared_f32(uint32(words + (group * uint32(ROWS) + row) * uint32(4)), value)


@cuda.jit(device=True, inline="always")
def _both(words, row):
    at = uint32(words + row * uint32(4))
    return ld_shared_f32(at), ld_shared_f32(uint32(at + uint32(ROWS * 4)))


@cuda.jit(device=True, inline="always")
def _zero_tail(plane, valid, group, thread):
    """Zero what a page holds beyond its last token in the panels of a warpgroup."""
    i = uint32(thread & uint32(127))
    half = uint32(plane + group * uint32(PLANE_NBYTES // 2))
    while i < uint32(PLANE_NBYTES // 32):
        if uint32((i >> uint32(3)) & uint32(TILE - 1)) >= valid:
            at = uint32(half + i * uint32(16))
            st_shared_u32x4(at, uint32(0), uint32(0), uint32(0), uint32(0))
        i = uint32(i + uint32(128))
    fence_async_proxy()
    named_barrier(uint32(group + uint32(2)), uint32(128))


@kernel(*(int64,) * 11, *(uint32,) * 6, float32)
def attention_decode_wgmma_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments as those of `attention_decode_kernel`."""
    produce, follow, tile = producer(STAGES, 0, early), follower(early), decode_tile(HEAD_DIM)
    even, odd, clear, add = tile.even, tile.odd, tile.clear, tile.add
    clear_scores, clear_values = tile.clear_scores, tile.clear_values
    score_even, mask_even, highest_even = even.multiply, even.mask, even.highest
    score_odd, mask_odd, highest_odd = odd.multiply, odd.mask, odd.highest
    weigh_even, weigh_odd, store_even, store_odd = even.weigh, odd.weigh, even.store, odd.store
    declare, fold_values, write_values = tile.declare, tile.fold, tile.write
    wait_all, wait_older = wgmma_wait(0), wgmma_wait(1)
    fetch, empty, D = fetch_queries(ROWS), STAGES * 8, HEAD_DIM
    barriers, threads = 2 * STAGES, THREADS + 32

    @cuda.jit(device=True, inline="always")
    def wait_for(place, barrier, ring):
        """A plane that has arrived."""
        mbarrier_wait(uint32(barrier + place[0] * uint32(8)), place[1])
        return uint32(ring + place[0] * uint32(PLANE_NBYTES))

    @cuda.jit(device=True, inline="always")
    def release(place, barrier, chosen):
        mbarrier_arrive_if(uint32(barrier + uint32(empty) + place[0] * uint32(8)), chosen)

    @cuda.jit(device=True, inline="always")
    def limits(rows, key):
        """For masks: the last key of a tile that this thread's two rows see, less its first."""
        seen0, seen1, t = rows
        before = uint32(key + t * uint32(2) + uint32(1))
        return uint32(seen0 - before), uint32(seen1 - before)

    @cuda.jit(device=True, inline="always")
    def score_block(np, start, shared, rows, key, fewest, group, scale, chosen):
        """Scores of this warpgroup's tiles; scaled maxima of two rows."""
        base, barrier, ring = shared
        m0, m1 = float32(FLOOR), float32(FLOOR)
        queries = tile_descriptor(base)
        clear_scores()
        if group < np:
            plane = wait_for(_ahead(start[0], start[1], group), barrier, ring)
            wgmma_fence()
            score_even(queries, tile_descriptor(plane))
            wgmma_commit()
            wait_all()
            first = uint32(key + group * uint32(TILE))
            if uint32(first + uint32(TILE)) > fewest:
                low, high = limits(rows, first)
                mask_even(low, high)
            high0, high1 = highest_even()
            m0 = max_f32(m0, mul_rn_f32(_quad_max(high0), scale))
            m1 = max_f32(m1, mul_rn_f32(_quad_max(high1), scale))
        if uint32(group + uint32(2)) < np:
            place = _ahead(start[0], start[1], uint32(group + uint32(2)))
            plane = wait_for(place, barrier, ring)
            wgmma_fence()
            score_odd(queries, tile_descriptor(plane))
            wgmma_commit()
            wait_all()
            first = uint32(key + (group + uint32(2)) * uint32(TILE))
            if uint32(first + uint32(TILE)) > fewest:
                low, high = limits(rows, first)
                mask_odd(low, high)
            high0, high1 = highest_odd()
            m0 = max_f32(m0, mul_rn_f32(_quad_max(high0), scale))
            m1 = max_f32(m1, mul_rn_f32(_quad_max(high1), scale))
        for i in range(BLOCK_TILES):
            if uint32(i) < np:
                release(_ahead(start[0], start[1], uint32(i)), barrier, chosen)
        return m0, m1

    @cuda.jit(device=True, inline="always")
    def weigh_block(np, weights, row, g, t, group, scale, m0, m1):
        """Weights of this warpgroup's tiles to shared memory; their sums in two rows."""
        at = uint32(weights + group * uint32(PANEL_NBYTES) + row * uint32(128) + t * uint32(4))
        swizzle, l0, l1 = uint32(g * uint32(16)), float32(0.0), float32(0.0)
        if group < np:
            l0, l1 = weigh_even(scale, -m0, -m1)
            store_even(at, swizzle)
        if uint32(group + uint32(2)) < np:
            more0, more1 = weigh_odd(scale, -m0, -m1)
            l0, l1 = l0 + more0, l1 + more1
            store_odd(uint32(at + uint32(2 * PANEL_NBYTES)), swizzle)
        return _quad_sum(l0), _quad_sum(l1)

    @cuda.jit(device=True, inline="always")
    def value_block(np, start, shared, weights, left, group, thread, chosen):
        """value = weights V of a block, a plane behind the other."""
        _, barrier, ring = shared
        before, j = start, uint32(0)
        clear_values()
        while j < np:
            place = _ahead(start[0], start[1], j)
            plane = wait_for(place, barrier, ring)
            valid = uint32(left - j * uint32(TILE))
            if valid < uint32(TILE):
                _zero_tail(plane, valid, group, thread)
            panel = tile_descriptor(uint32(weights + j * uint32(PANEL_NBYTES)))
            half = uint32(plane + group * uint32(PLANE_NBYTES // 2))
            wgmma_fence()
            add(panel, value_descriptor(half))
            wgmma_commit()
            if j > uint32(0):
                wait_older()
                release(before, barrier, chosen)
            before = place
            j = uint32(j + uint32(1))
        wait_all()
        release(before, barrier, chosen)

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def attention_decode_wgmma(
        partials,
        stats,
        qkgv,
        kv,
        scales,
        units,
        members,
        first,
        row,
        token,
        pages,
        H,
        G,
        M,
        P,
        page_nbytes,
        layer,
        scale,
    ):
        barrier = shared_address(cuda.shared.array(barriers, int64))
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 1023) & uint32(0xFFFFFC00))
        ring, thread = uint32(base + uint32(RING_AT)), uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(STAGES):
                mbarrier_init(uint32(barrier + uint32(s * 8)), uint32(1))
                mbarrier_init(uint32(barrier + uint32(empty + s * 8)), uint32(WARPS))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        if warp == uint32(WARPS):
            if lane == 0:
                tables, columns = (units, members), (row, token, pages)
                produce(kv, scales, tables, columns, ring, barrier, G, P, page_nbytes, layer)
        else:
            declare()
            follow()
            work, grain = uint32(ld_global_u32(units) * G), ld_global_u32(units + 4)
            group, g, t = uint32(warp >> uint32(2)), uint32(lane >> uint32(2)), uint32(lane & 3)
            row0 = uint32((warp & uint32(3)) * uint32(16) + g)
            row1 = uint32(row0 + uint32(8))
            shared, factor = (base, barrier, ring), scale * float32(LOG2E)
            weights, words = uint32(base + uint32(QUERY_NBYTES)), uint32(base + uint32(WORDS_AT))
            sums = uint32(words + uint32(2 * ROWS * 4))
            chosen = uint32(1) if lane == 0 else uint32(0)
            start, unit = (uint32(0), uint32(0)), uint32(cuda.blockIdx.x)
            while unit < work:
                item = div_u32(unit, G)
                head = uint32(unit - item * G)
                group_at, count, block = unit_at(units, members, item)
                fetch(base, qkgv, group_at, count, head, H, G, M, thread)
                cp_async_commit()
                slot = div_u32(block, grain)
                seen0, place0 = _row_facts(row0, group_at, count, first, token, slot, head, H, M)
                seen1, place1 = _row_facts(row1, group_at, count, first, token, slot, head, H, M)
                fewest = uint32(last_token(token, group_at, uint32(1)) + uint32(1))
                seen = uint32(last_token(token, group_at, count) + uint32(1))
                stop = uint32((seen + uint32(BLOCK_KEYS - 1)) >> uint32(8))
                stop = min(uint32(block + grain), stop)
                top0, top1 = float32(LOWEST), float32(LOWEST)
                total0, total1 = float32(0.0), float32(0.0)
                clear()
                cp_async_wait_0()
                fence_async_proxy()
                _meet()
                while block < stop:
                    key = uint32(block * uint32(BLOCK_KEYS))
                    left = uint32(seen - key)
                    np = min(uint32(BLOCK_TILES), uint32((left + uint32(TILE - 1)) >> uint32(6)))
                    m0, m1 = score_block(
                        np, start, shared, (seen0, seen1, t), key, fewest, group, factor, chosen
                    )
                    _exchange(words, row0, t, group, m0)
                    _exchange(words, row1, t, group, m1)
                    _meet()
                    a, b = _both(words, row0)
                    m0 = max_f32(a, b)
                    a, b = _both(words, row1)
                    m1 = max_f32(a, b)
                    l0, l1 = weigh_block(np, weights, row0, g, t, group, factor, m0, m1)
                    _exchange(sums, row0, t, group, l0)
                    _exchange(sums, row1, t, group, l1)
                    fence_async_proxy()
                    _meet()
                    start = _ahead(start[0], start[1], np)
                    value_block(np, start, shared, weights, left, group, thread, chosen)
                    start = _ahead(start[0], start[1], np)
                    a, b = _both(sums, row0)
                    top0, keep0, take0 = fold_factors(top0, m0)
                    total0 = fold(total0, keep0, a + b, take0)
                    a, b = _both(sums, row1)
                    top1, keep1, take1 = fold_factors(top1, m1)
                    total1 = fold(total1, keep1, a + b, take1)
                    fold_values(keep0, take0, keep1, take1)
                    block = uint32(block + uint32(1))
                dim = int64(group * uint32(DIMS) + t * uint32(2)) * 4
                at0 = partials + int64(place0) * (4 * D) + dim
                at1 = partials + int64(place1) * (4 * D) + dim
                write_values(at0, at1, seen0, seen1)
                if group == uint32(0) and t == uint32(0):
                    if seen0 > uint32(0):
                        st_global_f32(stats + int64(place0) * 8, top0)
                        st_global_f32(stats + int64(place0) * 8 + 4, total0)
                    if seen1 > uint32(0):
                        st_global_f32(stats + int64(place1) * 8, top1)
                        st_global_f32(stats + int64(place1) * 8 + 4, total1)
                unit = uint32(unit + uint32(cuda.gridDim.x))

    return Build(attention_decode_wgmma, threads, SHARED_NBYTES, since_sm_90=True)
