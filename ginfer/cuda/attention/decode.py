"""Attention of the decode family: partials over absolute blocks of 256 keys, merged left to right.

A work item is (a group of columns, a block of keys): the columns' M query heads of one K/V head are
rows of one matrix, so that keys and values shared by several sequences are read once. How columns
are grouped changes no bit: a row has its own scores, maximum, sum and products, always in the same
order, and its partial lies at slot first[column] + block, wherever it was computed.

  score = q . k / sqrt(D); m = max score; p = e^(score - m); partial = (m, sum p, sum p v)

Blocks are persistent: they take items in turns and read how many there are from memory, so that one
captured launch serves every length. Tiles of 64 keys, then of values, come through a ring by
cp.async; keys beyond a column's own position weigh 0, and what a page holds beyond is not read.

Legend: T columns, H query heads, G K/V heads, M = H / G, D = 256 dims. Oracle:
tests.oracles.attention.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, chunk_at, fetch_tile
from ginfer.cuda.attention.products import key_pair, mma_add, row_fragment, value_pair
from ginfer.cuda.lib.numeric import LOG2E, follow, row_of_32, warp_max, warp_sum
from ginfer.cuda.lib.ptx import (
    bf16_from_f32,
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    div_u32,
    exp2_approx,
    ld_global_u32,
    ld_shared_f32,
    shared_address,
    st_global_f32,
    st_shared_f32,
    st_shared_u16,
)
from ginfer.cuda.runtime.jit import Build, kernel

BLOCK_TILES = 4
BLOCK_KEYS = BLOCK_TILES * TILE
THREADS, WARPS = 256, 8
PLANE_NBYTES = HEAD_DIM // 64 * PANEL_NBYTES
SCORE_PITCH = (BLOCK_KEYS + 4) * 4  # bytes of a row of scores
STAGES = 2
LOWEST = -1.0e30


def shared_nbytes(tiles: int) -> int:
    """Dynamic shared memory for `tiles` tiles of 16 rows."""
    rows = tiles * 16
    return rows * HEAD_DIM * 2 + rows * SCORE_PITCH + STAGES * PLANE_NBYTES + 128


@kernel(*(int64,) * 10, *(uint32,) * 6, float32)
def attention_decode_kernel(tiles: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments partials, stats, qkgv, kv, items, lists, first, row, token, pages, H, G, M, P,
    bytes of a page, offset of the layer, scale.

    partials [slot][H][D] FP32; stats [slot][H][2]: m in units of log2, sum. items: u32 count, then
    (place in lists, columns, block) each; lists: columns of the groups, at most 16 tiles / M each,
    whose rows share the page table in that block. first [T]: slots of the columns before.
    """
    start, D, rows = follow(early), HEAD_DIM, tiles * 16
    q_panel, score_at = rows * 128, rows * HEAD_DIM * 2
    ring_at, num_c, chunks = score_at + rows * SCORE_PITCH, tiles * 16, PLANE_NBYTES // 16
    per_warp = rows // WARPS

    @cuda.jit(device=True, inline="always")
    def fetch_queries(to, qkgv, lists, count, g, H, G, M, thread):
        """The rows of the group, others zero: row j M + h is head g M + h of column j."""
        i = thread
        while i < uint32(rows * 32):
            r, chunk = uint32(i >> uint32(5)), uint32(i & uint32(31))
            j = div_u32(r, M)
            there = j < count
            at = qkgv
            if there:
                t = ld_global_u32(row_of_32(lists, j))
                head = int64(g * M + r - j * M)
                at = qkgv + int64(t) * (int64(H + G) * (4 * D)) + head * (2 * D) + int64(chunk) * 16
            place = uint32((chunk >> uint32(3)) * uint32(q_panel))
            place = uint32(place + chunk_at(r, uint32(chunk & uint32(7))))
            cp_async_16_or_zero(uint32(to + place), at, uint32(16) if there else uint32(0))
            i = uint32(i + uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def score_tile(queries, keys, scores, tile, scale, warp, lane):
        """Scores of all rows against the eight keys of this warp."""
        c = cuda.local.array(num_c, float32)
        for i in range(num_c):
            c[i] = float32(0.0)
        token = uint32(warp * uint32(8))
        for pair in range(D // 32):
            b = key_pair(keys, token, uint32(pair * 2), lane)
            for m in range(tiles):
                a = row_fragment(queries, uint32(m * 16), uint32(pair * 2), q_panel, lane)
                mma_add(c, m * 4, a, b[0], b[1])
                a = row_fragment(queries, uint32(m * 16), uint32(pair * 2 + 1), q_panel, lane)
                mma_add(c, m * 4, a, b[2], b[3])
        column = uint32(tile * uint32(TILE) + token + (lane & uint32(3)) * uint32(2))
        for m in range(tiles):
            for i in range(4):
                r = uint32(uint32(m * 16 + (i >> 1) * 8) + (lane >> uint32(2)))
                at = uint32(scores + r * uint32(SCORE_PITCH) + (column + uint32(i & 1)) * uint32(4))
                st_shared_f32(at, c[m * 4 + i] * scale)

    @cuda.jit(device=True, inline="always")
    def weigh(queries, scores, stats, lists, first, token, count, block, g, H, M, warp, lane):
        """Scores to weights in place of the queries, and the statistics of the rows; keys from
        `limit` on weigh 0."""
        s = cuda.local.array(8, float32)
        for n in range(per_warp):
            r = uint32(warp * uint32(per_warp) + uint32(n))
            j = div_u32(r, M)
            limit, slot = uint32(0), uint32(0)
            if j < count:
                t = ld_global_u32(row_of_32(lists, j))
                seen = uint32(ld_global_u32(row_of_32(token, t)) + uint32(1))
                base = uint32(block * uint32(BLOCK_KEYS))
                limit = uint32(seen - base) if seen > base else uint32(0)
                slot = uint32(ld_global_u32(row_of_32(first, t)) + block)
            m = float32(LOWEST)
            for i in range(8):
                key = uint32(lane + uint32(32 * i))
                at = uint32(scores + r * uint32(SCORE_PITCH) + key * uint32(4))
                s[i] = ld_shared_f32(at) if key < limit else float32(LOWEST)
                m = max(m, s[i])
            m = warp_max(m)
            total = float32(0.0)
            for i in range(8):
                key = uint32(lane + uint32(32 * i))
                p = exp2_approx(s[i] - m) if key < limit else float32(0.0)
                total = total + p
                panel = uint32((key >> uint32(6)) * uint32(q_panel))
                chunk = uint32((key >> uint32(3)) & uint32(7))
                at = uint32(queries + panel + chunk_at(r, chunk) + (key & uint32(7)) * uint32(2))
                st_shared_u16(at, bf16_from_f32(p))
            total = warp_sum(total)
            if limit > uint32(0) and lane == 0:
                head = int64(g * M + r - j * M)
                at = stats + (int64(slot) * int64(H) + head) * 8
                st_global_f32(at, m)
                st_global_f32(at + 4, total)

    @cuda.jit(device=True, inline="always")
    def add_values(c, weights, values, tile, warp, lane):
        """c += weights of a tile times the 32 dims of this warp."""
        for step in range(TILE // 16):
            for q in range(2):
                dim = uint32(warp * uint32(32) + uint32(q * 16))
                b = value_pair(values, step, dim, lane)
                for m in range(tiles):
                    at = uint32(tile * uint32(4) + uint32(step))
                    a = row_fragment(weights, uint32(m * 16), at, q_panel, lane)
                    mma_add(c, (m * 4 + q * 2) * 4, a, b[0], b[1])
                    mma_add(c, (m * 4 + q * 2 + 1) * 4, a, b[2], b[3])

    @cuda.jit(device=True, inline="always")
    def write_partials(c, partials, lists, first, token, count, block, g, H, M, warp, lane):
        """The sums of rows that see at least one key of the block."""
        for m in range(tiles):
            for half in range(2):
                r = uint32(uint32(m * 16 + half * 8) + (lane >> uint32(2)))
                j = div_u32(r, M)
                if j < count:
                    t = ld_global_u32(row_of_32(lists, j))
                    seen = uint32(ld_global_u32(row_of_32(token, t)) + uint32(1))
                    if seen > block * uint32(BLOCK_KEYS):
                        slot = int64(ld_global_u32(row_of_32(first, t)) + block)
                        head = int64(g * M + r - j * M)
                        at = partials + (slot * int64(H) + head) * (4 * D)
                        at += int64(warp * uint32(32) + (lane & uint32(3)) * uint32(2)) * 4
                        for n in range(4):
                            i = (m * 4 + n) * 4 + half * 2
                            st_global_f32(at + n * 32, c[i])
                            st_global_f32(at + n * 32 + 4, c[i + 1])

    @cuda.jit(device=True, inline="always")
    def longest(lists, token, count):
        """Tokens that the group's longest column sees."""
        seen = uint32(0)
        for j in range(count):
            t = ld_global_u32(row_of_32(lists, j))
            seen = max(seen, uint32(ld_global_u32(row_of_32(token, t)) + uint32(1)))
        return seen

    @cuda.jit(device=True, inline="always")
    def fetch(i, np, ring, table, kv, plane, value, page_nbytes, seen, block, thread):
        """Tile i of an item: keys of np pages, then their values."""
        is_value = i >= np
        page = uint32(i - np) if is_value else i
        base = uint32(uint32(block * uint32(BLOCK_TILES) + page) * uint32(TILE))
        source = kv + int64(ld_global_u32(row_of_32(table, page))) * int64(page_nbytes) + plane
        if is_value:
            source += value
        to = uint32(ring + (i & uint32(1)) * uint32(PLANE_NBYTES))
        fetch_tile(to, source, uint32(seen - base), thread, THREADS, chunks)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_decode(
        partials,
        stats,
        qkgv,
        kv,
        items,
        lists,
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
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        scores, ring = uint32(base + uint32(score_at)), uint32(base + uint32(ring_at))
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        c = cuda.local.array(num_c, float32)
        start()
        work = uint32(ld_global_u32(items) * G)
        unit = uint32(cuda.blockIdx.x)
        value = int64(G) * PLANE_NBYTES
        while unit < work:
            item = div_u32(unit, G)
            g = uint32(unit - item * G)
            at = items + (int64(item) * 3 + 1) * 4
            group, count = lists + int64(ld_global_u32(at)) * 4, ld_global_u32(at + 4)
            block = ld_global_u32(at + 8)
            seen = longest(group, token, count)
            last = uint32((seen - uint32(1)) >> uint32(6))
            np = min(uint32(BLOCK_TILES), uint32(last - block * uint32(BLOCK_TILES) + uint32(1)))
            entry = int64(ld_global_u32(row_of_32(row, ld_global_u32(group)))) * int64(P)
            table = pages + (entry + int64(block) * BLOCK_TILES) * 4
            plane = int64(layer) + int64(g) * PLANE_NBYTES
            fetch_queries(base, qkgv, group, count, g, H, G, M, thread)
            fetch(uint32(0), np, ring, table, kv, plane, value, page_nbytes, seen, block, thread)
            cp_async_commit()
            for i in range(num_c):
                c[i] = float32(0.0)
            i = uint32(0)
            while i < np + np:
                coming = uint32(i + uint32(1))
                if coming < np + np:
                    fetch(
                        coming, np, ring, table, kv, plane, value, page_nbytes, seen, block, thread
                    )
                cp_async_commit()
                cp_async_wait_1()
                cuda.syncthreads()
                tile = uint32(ring + (i & uint32(1)) * uint32(PLANE_NBYTES))
                if i < np:
                    score_tile(base, tile, scores, i, scale * float32(LOG2E), warp, lane)
                else:
                    add_values(c, base, tile, uint32(i - np), warp, lane)
                cuda.syncthreads()
                if coming == np:
                    weigh(
                        base, scores, stats, group, first, token, count, block, g, H, M, warp, lane
                    )
                    cuda.syncthreads()
                i = coming
            write_partials(c, partials, group, first, token, count, block, g, H, M, warp, lane)
            unit = uint32(unit + uint32(cuda.gridDim.x))
        cp_async_wait_0()

    return Build(attention_decode, THREADS, shared_nbytes(tiles))
