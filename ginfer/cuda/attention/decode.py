"""Attention of the decode family: 256-key blocks folded in spans of four, then the spans.

Blocks and spans lie at absolute positions, and both are taken in from the left.

A unit of work is (a group of columns, a run of `grain` blocks, 1 or a span): the columns' M query
heads of one K/V head are rows of one matrix, so that keys and values shared by several sequences
are read once. Neither how columns are grouped nor the grain changes a bit: a row has its own
scores, maximum, sum and products, always in the same order, and the partial of run i of a column
lies at slot first[column] + i, wherever it was computed.

  score = q . k / sqrt(D); m = max score; p = e^(score - m); partial = (m, sum p, sum p v)

Thread blocks are persistent: they take units in turns and read how many there are from memory, so
that one captured launch serves every length. Tiles of 64 keys, then of values, come through a ring
by cp.async; keys beyond a column's own position weigh 0, and what a page holds beyond is not read.

Legend: T columns, H query heads, G K/V heads, M = H / G, D = 256 dims. Oracle:
tests.oracles.attention.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.decode_parts import (
    BLOCK_KEYS,
    BLOCK_TILES,
    PLANE_NBYTES,
    THREADS,
    decode_parts,
    unit_nbytes,
)
from ginfer.cuda.attention.pages import TILE, copy_bytes, fetch_tile, packed_plane, plane_opener
from ginfer.cuda.lib.numeric import LOG2E, follow, row_of_32
from ginfer.cuda.lib.ptx import (
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    div_u32,
    ld_global_u32,
    shared_address,
)
from ginfer.cuda.runtime.jit import Build, kernel

STAGES = 2


@kernel(*(int64,) * 11, *(uint32,) * 6, float32)
def attention_decode_kernel(tiles: int, packed: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments partials, stats, qkgv, kv, scales, units, members, first, row, token, pages, H, G,
    M, P, bytes of a page, offset of the layer, scale. packed: pages of codes.

    partials [slot][H][D] FP32; stats [slot][H][2]: m in units of log2, sum. units: u32 count and
    grain, then units; these, members and first as in `batch.WorkUnits`, with groups of at most
    16 tiles / M columns.
    """
    start, parts = follow(early), decode_parts(tiles, packed)
    prepare, fetch_queries, score_tile, weigh = parts[:4]
    add_values, fold_block, write, _ = parts[4:]
    num_c, plane_at = tiles * 16, unit_nbytes(tiles)
    ring_at = plane_at + (PLANE_NBYTES if packed else 0)
    codes, factors = packed_plane(HEAD_DIM)
    open_plane, plane_nbytes = plane_opener(HEAD_DIM, THREADS), codes if packed else PLANE_NBYTES
    stage_nbytes, chunks = plane_nbytes + (factors if packed else 0), PLANE_NBYTES // 16

    @cuda.jit(device=True, inline="always")
    def fetch(i, np, ring, n, source, block, seen, thread):
        """Tile i of a block: keys of np pages, then their values; the n-th tile of the ring."""
        table, kv, scales, plane, value, page_nbytes = source
        is_value = i >= np
        page = uint32(block * uint32(BLOCK_TILES) + (uint32(i - np) if is_value else i))
        offset = plane + int64(ld_global_u32(row_of_32(table, page))) * int64(page_nbytes)
        if is_value:
            offset += value
        to = uint32(ring + (n & uint32(1)) * uint32(stage_nbytes))
        if packed:
            copy_bytes(to, kv + offset, codes, thread, THREADS)
            at = scales + (offset >> 5)
            copy_bytes(uint32(to + uint32(codes)), at, factors, thread, THREADS)
        else:
            valid = uint32(seen - page * uint32(TILE))
            fetch_tile(to, kv + offset, valid, thread, THREADS, chunks)

    @cuda.jit(device=True, inline="always")
    def pages_of(block, seen):
        left = uint32(uint32(seen - block * uint32(BLOCK_KEYS)) + uint32(TILE - 1))
        return min(uint32(BLOCK_TILES), uint32(left >> uint32(6)))

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_decode(
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
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        ring, thread = uint32(base + uint32(ring_at)), uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        c = cuda.local.array(num_c, float32)
        o = cuda.local.array(num_c, float32)
        for i in range(num_c):
            c[i] = float32(0.0)
        start()
        work, grain = uint32(ld_global_u32(units) * G), ld_global_u32(units + 4)
        unit, n, value = uint32(cuda.blockIdx.x), uint32(0), int64(G) * plane_nbytes
        while unit < work:
            item = div_u32(unit, G)
            g = uint32(unit - item * G)
            at = units + (int64(item) * 3 + 2) * 4
            group, count = members + int64(ld_global_u32(at)) * 4, ld_global_u32(at + 4)
            block = ld_global_u32(at + 8)
            t = ld_global_u32(row_of_32(group, uint32(count - uint32(1))))
            seen = uint32(ld_global_u32(row_of_32(token, t)) + uint32(1))
            stop = min(uint32(block + grain), uint32((seen + uint32(BLOCK_KEYS - 1)) >> uint32(8)))
            table = pages + int64(ld_global_u32(row_of_32(row, t))) * int64(P) * 4
            plane = int64(layer) + int64(g) * plane_nbytes
            fetch_queries(base, qkgv, group, count, g, H, G, M, thread)
            np = pages_of(block, seen)
            source = (table, kv, scales, plane, value, page_nbytes)
            fetch(uint32(0), np, ring, n, source, block, seen, thread)
            cp_async_commit()
            prepare(base, group, first, token, count, div_u32(block, grain), g, H, M, thread)
            for i in range(num_c):
                o[i] = float32(0.0)
            while block < stop:
                np = pages_of(block, seen)
                i = uint32(0)
                while i < np + np:
                    n = uint32(n + uint32(1))
                    after, coming, pages_after = block, uint32(i + uint32(1)), np
                    if coming == np + np:
                        after, coming = uint32(block + uint32(1)), uint32(0)
                        if after < stop:
                            pages_after = pages_of(after, seen)
                    if after < stop:
                        fetch(coming, pages_after, ring, n, source, after, seen, thread)
                    cp_async_commit()
                    cp_async_wait_1()
                    cuda.syncthreads()
                    tile = uint32(ring + ((n & uint32(1)) ^ uint32(1)) * uint32(stage_nbytes))
                    factors = tile
                    if packed:
                        left = uint32(seen - block * uint32(BLOCK_KEYS))
                        valid, is_value = uint32(TILE), i >= np
                        if is_value:
                            valid = uint32(left - uint32(i - np) * uint32(TILE))
                        to = uint32(base + uint32(plane_at))
                        open_plane(to, tile, valid, is_value, thread)
                        factors, tile = uint32(tile + uint32(codes)), to
                        cuda.syncthreads()
                    if i < np:
                        score_tile(base, tile, factors, i, scale * float32(LOG2E), warp, lane)
                    else:
                        add_values(c, base, tile, uint32(i - np), warp, lane)
                    cuda.syncthreads()
                    i = uint32(i + uint32(1))
                    if i == np:
                        weigh(base, block, warp, lane)
                        cuda.syncthreads()
                fold_block(o, c, base, lane)
                block = uint32(block + uint32(1))
            write(o, partials, stats, base, warp, lane)
            cuda.syncthreads()
            unit = uint32(unit + uint32(cuda.gridDim.x))
        cp_async_wait_0()

    return Build(attention_decode, THREADS, ring_at + STAGES * stage_nbytes + 128)
