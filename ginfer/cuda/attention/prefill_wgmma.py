"""Attention of the prefill family on sm_90a: wgmma, two warpgroups that take turns.

A block works on one K/V head at a time for up to 128 rows, tokens times the query heads that share
it; a token may begin in one tile of rows and end in the next. It walks the history in tiles of 64
keys. Keys and values lie in pages as wgmma reads them and come by bulk copies; the warp that is
last to be done with a tile asks for the next one in its place. While a warpgroup weighs its scores,
the products of the other run, and its own of the tile before.

Numbers: within an absolute block of 2,048 keys the softmax is online, tile after tile from the
left, and the blocks are merged left to right. The merged blocks of a tile of rows lie in `totals`:
its blocks may be the work of several thread blocks in turns, which merge in order. So a column's
value depends on its position and history alone, however prompts are cut, packed or spread.

Legend: H query heads, G K/V heads, M = H / G, D dims, 128 or 256. Oracle: tests.oracles.attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.pages import TILE, chunk_at
from ginfer.cuda.lib.numeric import LOG2E, follow, row_of_32
from ginfer.cuda.lib.ptx import (
    bulk_copy_to_shared,
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    exp2_approx,
    fence_async_proxy,
    first_lane_u32,
    fma_f32,
    ld_acquire_u32,
    ld_global_f32x4,
    ld_global_u32,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mul_rn_f32,
    named_barrier,
    shared_address,
    shfl_xor_f32,
    st_global_f32x4,
    st_shared_u32,
    st_shared_u32x4,
)
from ginfer.cuda.lib.wgmma import tile_descriptor, wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_attention import (
    arrive_at_barrier,
    attention_tile,
    count_arrival,
    max_f32,
    st_release_u32,
    value_descriptor,
)
from ginfer.cuda.runtime.jit import Build, kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

ROWS, THREADS, WARPS = 128, 256, 8
K_STAGES, V_STAGES = 3, 2
GROUP_NBYTES = (256 // 8 + 1) * 2048 + 256  # sums of up to 256 dims, statistics, merged blocks
TOTAL_NBYTES = 2 * GROUP_NBYTES  # of a thread block
BLOCK_TILES = 2048 // TILE
LOWEST = -1.0e30


@cuda.jit(device=True, inline="always")
def _quad_max(x):
    x = max_f32(x, shfl_xor_f32(x, uint32(1)))
    return max_f32(x, shfl_xor_f32(x, uint32(2)))


@cuda.jit(device=True, inline="always")
def _quad_sum(x):
    x = x + shfl_xor_f32(x, uint32(1))
    return x + shfl_xor_f32(x, uint32(2))


@cuda.jit(device=True, inline="always")
def _next(slot, phase, stages):
    slot = uint32(slot + uint32(1))
    if slot == uint32(stages):
        return uint32(0), uint32(phase ^ uint32(1))
    return slot, phase


def merging(tile, D):
    """Device functions merged(total, block, stats, group, thread), the statistics of the blocks up
    to `block` after their sums have been merged in registers, and fold(...), which stores both.

    total: (address for this thread, address of the number of merged blocks, whether other thread
    blocks work on these rows); stats: maxima and sums of two rows.
    """
    stats_at, merge, store = D // 8 * 2048, tile.merge, tile.store

    @cuda.jit(device=True, inline="always")
    def merged(total, block, stats, group, thread):
        at, flag, shared, none = total
        m0, m1, l0, l1 = stats
        l0, l1 = _quad_sum(l0), _quad_sum(l1)
        if block > 0:
            if shared:
                if (thread & uint32(127)) == 0:
                    while ld_acquire_u32(flag) < block:
                        pass
                named_barrier(uint32(group + uint32(3)), uint32(128))
            old = ld_global_f32x4(at + stats_at)
            n0, n1 = max_f32(old[0], m0), max_f32(old[1], m1)
            left0, right0 = exp2_approx(old[0] - n0), exp2_approx(m0 - n0)
            left1, right1 = exp2_approx(old[1] - n1), exp2_approx(m1 - n1)
            merge(at, left0, right0, left1, right1, none)
            l0 = fma_f32(old[2], left0, mul_rn_f32(l0, right0))
            l1 = fma_f32(old[3], left1, mul_rn_f32(l1, right1))
            m0, m1 = n0, n1
        return m0, m1, l0, l1

    @cuda.jit(device=True, inline="always")
    def fold(total, block, stats, group, thread):
        at, flag, shared, _ = total
        m0, m1, l0, l1 = merged(total, block, stats, group, thread)
        store(at)
        st_global_f32x4(at + stats_at, m0, m1, l0, l1)
        if shared:
            named_barrier(uint32(group + uint32(3)), uint32(128))
            if (thread & uint32(127)) == 0:
                st_release_u32(flag, uint32(block + uint32(1)))

    return merged, fold


@kernel(*(int64,) * 8, *(uint32,) * 7, float32)
def attention_prefill_wgmma_kernel(D: int, block_tiles: int, ordered: int) -> Build:
    """Arguments out, qkgv, kv, items, row, token, pages, totals, units, split, H, G, P, bytes of a
    page, offset of the layer, scale.

    items: u32 (column of the first row, rows and, from bit 16 on, which of the column's rows is the
    first) each; a unit is an item and a K/V head, heads inside. The grid takes units in turns, the
    last ones, when they are fewer than blocks, each with `split` blocks. ordered: the warpgroups'
    products strictly alternate.
    """
    start, words, plane_nbytes = follow(1), K_STAGES + V_STAGES + 2, TILE * D * 2
    q_nbytes, tile, q_chunks = ROWS * D * 2, attention_tile(D, ROWS), D // 8
    k_at, v_at = q_nbytes, q_nbytes + K_STAGES * plane_nbytes
    shift, q_shift = block_tiles.bit_length() - 1, q_chunks.bit_length() - 1
    v_full, counters = K_STAGES * 8, (K_STAGES + V_STAGES) * 8
    wait_all, wait_scores = wgmma_wait(0), wgmma_wait(1)
    declare, score, mask, highest = tile.declare, tile.score, tile.mask, tile.highest
    weigh_scores, pack, add, rescale = tile.weigh, tile.pack, tile.add, tile.rescale
    write = tile.finish
    merged, fold = merging(tile, D)

    @cuda.jit(device=True, inline="always")
    def fetch_queries(to, x, width, M, rows, thread):
        """Rows (token, head of the group), zero those that are not there. rows: number, and which
        of its token's the first one is."""
        count, skipped = rows
        for k in range(ROWS * q_chunks // THREADS):
            i = uint32(thread + uint32(k * THREADS))
            r, chunk = uint32(i >> uint32(q_shift)), uint32(i & uint32(q_chunks - 1))
            there = r < count
            t = div_u32(uint32(r + skipped), M)
            h = uint32(r + skipped - t * M)
            at = x + int64(t) * width + int64(h) * (2 * D) + int64(chunk) * 16 if there else x
            place = uint32((chunk >> uint32(3)) * uint32(ROWS * 128))
            place = uint32(place + chunk_at(r, uint32(chunk & uint32(7))))
            cp_async_16_or_zero(uint32(to + place), at, uint32(16) if there else uint32(0))
        cp_async_commit()

    @cuda.jit(device=True, inline="always")
    def tile_of(i, first, stride):
        """Tile of keys that is the i-th of this thread block."""
        block = uint32((i >> uint32(shift)) * stride + first)
        return uint32((block << uint32(shift)) + (i & uint32(block_tiles - 1)))

    @cuda.jit(device=True, inline="always")
    def ask(to, full, history, value, key_tile):
        """Start the copy of the keys or values of a tile."""
        table, source, value_offset, page_nbytes = history
        page = int64(ld_global_u32(row_of_32(table, key_tile))) * page_nbytes
        mbarrier_expect_bytes(full, uint32(plane_nbytes))
        source += page + (value_offset if value else int64(0))
        bulk_copy_to_shared(to, source, uint32(plane_nbytes), full)

    @cuda.jit(device=True, inline="always")
    def ask_keys(base, barrier, slot, history, key_tile):
        to = uint32(base + uint32(k_at) + slot * uint32(plane_nbytes))
        ask(to, uint32(barrier + slot * uint32(8)), history, 0, key_tile)

    @cuda.jit(device=True, inline="always")
    def ask_values(base, barrier, slot, history, key_tile):
        to = uint32(base + uint32(v_at) + slot * uint32(plane_nbytes))
        ask(to, uint32(barrier + uint32(v_full) + slot * uint32(8)), history, 1, key_tile)

    @cuda.jit(device=True, inline="always")
    def ask_first(n, k_slot, v_slot, places, history, blocks):
        """Start the first copies of a unit of n tiles."""
        base, barrier = places
        first, stride = blocks
        i = uint32(0)
        while i < min(n, uint32(K_STAGES)):
            ask_keys(base, barrier, k_slot, history, tile_of(i, first, stride))
            k_slot = uint32(k_slot + uint32(1))
            k_slot = uint32(0) if k_slot == uint32(K_STAGES) else k_slot
            i = uint32(i + uint32(1))
        ask_values(base, barrier, v_slot, history, tile_of(uint32(0), first, stride))

    @cuda.jit(device=True, inline="always")
    def is_last(barrier, which, lane):
        """Whether this is the lane that asks for more: of the last warp to count itself."""
        if lane != 0:
            return False
        counter = uint32(barrier + uint32(counters) + which * uint32(4))
        return count_arrival(counter, uint32(WARPS - 1)) == uint32(WARPS - 1)

    @cuda.jit(device=True, inline="always")
    def release_keys(i, n, slot, parity, places, history, blocks, lane):
        """Keys i are done with: ask for those that come into their place."""
        base, barrier = places
        if is_last(barrier, parity, lane) and uint32(i + uint32(K_STAGES)) < n:
            key_tile = tile_of(uint32(i + uint32(K_STAGES)), blocks[0], blocks[1])
            ask_keys(base, barrier, slot, history, key_tile)

    @cuda.jit(device=True, inline="always")
    def release_values(i, n, slot, parity, places, history, blocks, lane):
        """Values i - 1 are done with: ask for those that come into their place."""
        base, barrier = places
        which = uint32(parity + uint32(2))
        if is_last(barrier, which, lane) and uint32(i + uint32(1)) < n:
            key_tile = tile_of(uint32(i + uint32(1)), blocks[0], blocks[1])
            ask_values(base, barrier, slot, history, key_tile)

    @cuda.jit(device=True, inline="always")
    def take_turn(group):
        if ordered:
            named_barrier(uint32(group + uint32(1)), uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def end_turn(group):
        if ordered:
            arrive_at_barrier(uint32(uint32(2) - group), uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def weigh(stats, scale, key, border, positions):
        """Scores to weights; key: first of the tile, positions: less the thread's first column.
        Returns maxima, sums, and the factors for what was summed before."""
        m0, m1, l0, l1 = stats
        if uint32(key + uint32(63)) > border:
            mask(uint32(positions[0] - key), uint32(positions[1] - key))
        high0, high1 = highest()
        n0 = max_f32(m0, mul_rn_f32(_quad_max(high0), scale))
        n1 = max_f32(m1, mul_rn_f32(_quad_max(high1), scale))
        sum0, sum1 = weigh_scores(scale, -n0, -n1)
        d0, d1 = exp2_approx(m0 - n0), exp2_approx(m1 - n1)
        return n0, n1, fma_f32(l0, d0, sum0), fma_f32(l1, d1, sum1), d0, d1

    @cuda.jit(device=True, inline="always")
    def clear_tail(plane, valid, group, thread):
        """Zero what a page holds beyond its last token."""
        if valid < uint32(TILE):
            local = uint32(thread & uint32(127))
            for k in range(plane_nbytes // 2048):
                i = uint32(local + uint32(k * 128))
                if ((i >> uint32(3)) & uint32(TILE - 1)) >= valid:
                    at = uint32(plane + i * uint32(16))
                    st_shared_u32x4(at, uint32(0), uint32(0), uint32(0), uint32(0))
            fence_async_proxy()
            named_barrier(uint32(group + uint32(3)), uint32(128))

    @cuda.jit(device=True, inline="always")
    def keys_of(base, slot):
        return tile_descriptor(uint32(base + uint32(k_at) + slot * uint32(plane_nbytes)))

    @cuda.jit(device=True, inline="always")
    def values_of(base, slot):
        return value_descriptor(uint32(base + uint32(v_at) + slot * uint32(plane_nbytes)))

    @cuda.jit(device=True, inline="always")
    def place(row0, M, x, to, width, H):
        """(query, result) addresses of a row: token, head."""
        token0 = div_u32(row0, M)
        head = int64(row0 - token0 * M) * (2 * D)
        return x + int64(token0) * width + head, to + int64(token0) * (int64(H) * (2 * D)) + head

    @cuda.jit(device=True, inline="always")
    def prepare(barrier, thread):
        if thread == 0:
            for s in range(words - 2):
                mbarrier_init(uint32(barrier + uint32(s * 8)), uint32(1))
            for s in range(4):
                st_shared_u32(uint32(barrier + uint32(counters + s * 4)), uint32(0))
            fence_async_proxy()

    @cuda.jit(device=True, inline="always")
    def tiles_of(position, count, first, stride):
        """Tiles of keys in blocks first, first + stride, ... up to the last column."""
        key_tiles = uint32(((position + count - uint32(1)) >> uint32(6)) + uint32(1))
        last_block = uint32((key_tiles - uint32(1)) >> uint32(shift))
        mine = div_u32(uint32(last_block + stride - first), stride)
        n = uint32(mine << uint32(shift))
        if uint32(mine * stride + first) == uint32(last_block + stride):
            n = uint32(n + key_tiles - ((last_block + uint32(1)) << uint32(shift)))
        return n

    @cuda.jit(device=True, inline="always")
    def totals_of(totals, owner, group, thread, stride, H):
        """`total` of `merging`."""
        local = totals + int64(owner) * TOTAL_NBYTES + int64(group) * GROUP_NBYTES
        at = local + int64(thread & uint32(127)) * 16
        return at, local + (GROUP_NBYTES - 256), stride > uint32(1), uint32(H >> uint32(31))

    @cuda.jit(device=True, inline="always")
    def share(done, units, grid, split, odd):
        """(unit, first block of keys, stride, block whose totals serve) of this thread block."""
        x = uint32(cuda.blockIdx.x)
        j = uint32(grid - uint32(1) - x) if odd else x
        if uint32(units - done) < grid:
            unit = div_u32(j, split)
            first = uint32(j - unit * split)
            owner = uint32(x + first) if odd else uint32(x - first)
            return uint32(done + unit), first, split, owner
        return uint32(done + j), uint32(0), uint32(1), x

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_prefill_wgmma(
        out,
        qkgv,
        kv,
        items,
        row,
        token,
        pages,
        totals,
        units,
        split,
        H,
        G,
        P,
        page_nbytes,
        layer,
        scale,
    ):
        barrier = uint32(shared_address(cuda.shared.array(words, int64)))
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 1023) & uint32(0xFFFFFC00))
        thread, places = uint32(cuda.threadIdx.x), (base, barrier)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        group, grid = uint32(warp >> uint32(2)), uint32(cuda.gridDim.x)
        prepare(barrier, thread)
        declare()
        cuda.syncthreads()
        if ordered and group == uint32(1):
            arrive_at_barrier(uint32(1), uint32(THREADS))
        start()
        M, width, factor = div_u32(H, G), int64(H + G) * (4 * D), mul_rn_f32(scale, float32(LOG2E))
        rows_at = uint32(warp * uint32(16))
        q_tile = tile_descriptor(uint32(base + group * uint32(64 * 128)))
        k_slot, k_phase, v_slot, v_phase = uint32(0), uint32(0), uint32(0), uint32(0)
        empty = (float32(LOWEST), float32(LOWEST), float32(0.0), float32(0.0))
        parity, done, odd = uint32(0), uint32(0), uint32(0)
        while done < units:
            unit, first, stride, owner = share(done, units, grid, split, odd)
            done, odd = uint32(done + grid), uint32(odd ^ uint32(1))
            item = div_u32(unit, G)
            at = items + int64(item) * 8
            n, t, count, position = uint32(0), uint32(0), uint32(0), uint32(0)
            num_rows, skipped = uint32(0), uint32(0)
            if unit < units:
                t, num_rows = ld_global_u32(at), ld_global_u32(at + 4)
                num_rows, skipped = (
                    uint32(num_rows & uint32(0xFFFF)),
                    uint32(num_rows >> uint32(16)),
                )
                count = uint32(div_u32(uint32(skipped + num_rows - uint32(1)), M) + uint32(1))
                position = ld_global_u32(row_of_32(token, t))
                n = tiles_of(position, count, first, stride)
            key_tiles = uint32(((position + count - uint32(1)) >> uint32(6)) + uint32(1))
            last_block = uint32((key_tiles - uint32(1)) >> uint32(shift))
            if n > 0:
                g = uint32(unit - item * G)
                table = pages + int64(ld_global_u32(row_of_32(row, t))) * int64(P) * 4
                source = kv + int64(layer) + int64(g) * plane_nbytes
                history = (table, source, int64(G) * plane_nbytes, int64(page_nbytes))
                blocks = (first, stride)
                x = qkgv + int64(t) * width + int64(g * M) * (2 * D)
                cuda.syncthreads()
                if thread == 0:
                    ask_first(n, k_slot, v_slot, places, history, blocks)
                fetch_queries(base, x, width, M, (num_rows, skipped), thread)
                row0 = uint32(rows_at + (lane >> uint32(2)))
                live0 = uint32(1) if row0 < num_rows else uint32(0)
                live1 = uint32(1) if uint32(row0 + uint32(8)) < num_rows else uint32(0)
                row0 = uint32(row0 + skipped)
                token0, token1 = div_u32(row0, M), div_u32(uint32(row0 + uint32(8)), M)
                column = uint32((lane & uint32(3)) * uint32(2))
                own = uint32(position - column)
                positions = (uint32(own + token0), uint32(own + token1))
                border = uint32(position + div_u32(uint32(rows_at + skipped), M))
                total = totals_of(totals, owner, group, thread, stride, H)
                cp_async_wait_0()
                fence_async_proxy()
                cuda.syncthreads()
                mbarrier_wait(uint32(barrier + k_slot * uint32(8)), k_phase)
                take_turn(group)
                wgmma_fence()
                score(q_tile, keys_of(base, k_slot))
                wgmma_commit()
                end_turn(group)
                wait_all()
                key = uint32(tile_of(uint32(0), first, stride) << uint32(6))
                m0, m1, l0, l1, d0, d1 = weigh(empty, factor, key, border, positions)
                pack()
                slot = uint32(v_slot ^ uint32(1))
                release_keys(uint32(0), n, k_slot, parity, places, history, blocks, lane)
                release_values(uint32(0), n, slot, parity, places, history, blocks, lane)
                k_slot, k_phase = _next(k_slot, k_phase, K_STAGES)
                parity = uint32(parity ^ uint32(1))
                i = uint32(1)
                while i < n:
                    mbarrier_wait(uint32(barrier + k_slot * uint32(8)), k_phase)
                    mbarrier_wait(uint32(barrier + uint32(v_full) + v_slot * uint32(8)), v_phase)
                    take_turn(group)
                    wgmma_fence()
                    score(q_tile, keys_of(base, k_slot))
                    wgmma_commit()
                    add(values_of(base, v_slot), uint32((i - uint32(1)) & uint32(block_tiles - 1)))
                    wgmma_commit()
                    end_turn(group)
                    wait_scores()
                    release_keys(i, n, k_slot, parity, places, history, blocks, lane)
                    before = (m0, m1, l0, l1)
                    fresh = (i & uint32(block_tiles - 1)) == 0
                    stats = empty if fresh else before
                    key_tile = tile_of(i, first, stride)
                    key = uint32(key_tile << uint32(6))
                    m0, m1, l0, l1, d0, d1 = weigh(stats, factor, key, border, positions)
                    wait_all()
                    pack()
                    if fresh:
                        block = uint32((key_tile >> uint32(shift)) - stride)
                        fold(total, block, before, group, thread)
                    else:
                        rescale(d0, d1)
                    release_values(i, n, v_slot, parity, places, history, blocks, lane)
                    k_slot, k_phase = _next(k_slot, k_phase, K_STAGES)
                    v_slot, v_phase = _next(v_slot, v_phase, V_STAGES)
                    parity = uint32(parity ^ uint32(1))
                    i = uint32(i + uint32(1))
                mbarrier_wait(uint32(barrier + uint32(v_full) + v_slot * uint32(8)), v_phase)
                key_tile = tile_of(uint32(n - uint32(1)), first, stride)
                if uint32(key_tile + uint32(1)) == key_tiles:
                    valid = uint32(position + count - (key_tile << uint32(6)))
                    to = uint32(base + uint32(v_at) + v_slot * uint32(plane_nbytes))
                    clear_tail(to, valid, group, thread)
                take_turn(group)
                wgmma_fence()
                add(values_of(base, v_slot), uint32((n - uint32(1)) & uint32(block_tiles - 1)))
                wgmma_commit()
                end_turn(group)
                wait_all()
                v_slot, v_phase = _next(v_slot, v_phase, V_STAGES)
                block = uint32(key_tile >> uint32(shift))
                if block < last_block:
                    fold(total, block, (m0, m1, l0, l1), group, thread)
                else:
                    m0, m1, l0, l1 = merged(total, block, (m0, m1, l0, l1), group, thread)
                    if total[2] and block > 0 and (thread & uint32(127)) == 0:
                        st_release_u32(total[1], uint32(0))
                    to = out + (int64(t) * int64(H) + int64(g * M)) * (2 * D) + int64(column) * 2
                    gates = x + (width >> 1) + int64(column) * 2
                    gate0, out0 = place(row0, M, gates, to, width, H)
                    gate1, out1 = place(uint32(row0 + uint32(8)), M, gates, to, width, H)
                    inv0, inv1 = float32(1.0) / l0, float32(1.0) / l1
                    write(out0, out1, gate0, gate1, inv0, inv1, live0, live1)

    return Build(attention_prefill_wgmma, THREADS, v_at + V_STAGES * plane_nbytes + 1024)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel of sm_90a."""
    if capability == "90a":
        yield attention_prefill_wgmma_kernel(HEAD_DIM, BLOCK_TILES, 1)
