"""Decode attention with bulk copies (sm_90a, sm_120a): units as in `attention.decode`.

A warp keeps a ring of planes full, keys of a block and then its values, and begins with what no
kernel in front of this one writes: all tables, and tokens before this forward. Eight warps compute.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.decode_parts import (
    BLOCK_KEYS,
    BLOCK_TILES,
    PLANE_NBYTES,
    THREADS,
    WARPS,
    decode_parts,
    unit_nbytes,
)
from ginfer.cuda.attention.pages import TILE, packed_plane, plane_opener
from ginfer.cuda.lib.numeric import LOG2E, row_of_32
from ginfer.cuda.lib.ptx import (
    bulk_stream_to_shared,
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    fence_async_proxy,
    first_lane_u32,
    ld_global_u32,
    let_next_kernel_start,
    mbarrier_arrive_if,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.runtime.jit import Build, kernel


@cuda.jit(device=True, inline="always")
def unit_at(units, members, item):
    """(members of unit `item`, how many, its first block)."""
    at = units + (int64(item) * 3 + 2) * 4
    return members + int64(ld_global_u32(at)) * 4, ld_global_u32(at + 4), ld_global_u32(at + 8)


@cuda.jit(device=True, inline="always")
def last_token(token, group, count):
    """The token of the last column of a unit, which sees most."""
    t = ld_global_u32(row_of_32(group, uint32(count - uint32(1))))
    return ld_global_u32(row_of_32(token, t))


def _ring_step(stages: int) -> Any:
    @cuda.jit(device=True, inline="always")
    def advance(s, phase):
        s = uint32(s + uint32(1))
        if s == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return s, phase

    return advance


def follower(early: int) -> Any:
    """Device function that waits for the kernel in front of this one."""

    @cuda.jit(device=True, inline="always")
    def wait():
        wait_for_previous_kernel()

    @cuda.jit(device=True, inline="always")
    def go_on():
        pass

    return wait if early else go_on


def _stage(packed: int) -> tuple[int, int]:
    """Bytes of a plane, and of its scales."""
    return packed_plane(HEAD_DIM) if packed else (PLANE_NBYTES, 0)


def producer(stages: int, packed: int, early: int) -> Any:
    """Device function of one thread that fetches the planes of all units of its block, in turns."""
    advance, follow, empty = _ring_step(stages), follower(early), stages * 8
    plane_nbytes, factors = _stage(packed)
    stage_nbytes = plane_nbytes + factors

    @cuda.jit(device=True, inline="always")
    def produce(kv, scales, work_tables, columns, ring, barrier, G, P, page_nbytes, layer):
        units, members = work_tables
        row, token, pages = columns
        work, grain = uint32(ld_global_u32(units) * G), ld_global_u32(units + 4)
        s, phase, unit, waits = uint32(0), uint32(1), uint32(cuda.blockIdx.x), uint32(1)
        while unit < work:
            item = div_u32(unit, G)
            group, count, block = unit_at(units, members, item)
            t = ld_global_u32(group)
            table = pages + int64(ld_global_u32(row_of_32(row, t))) * int64(P) * 4
            known = ld_global_u32(row_of_32(token, t))
            known = uint32(known - t) if known > t else uint32(0)  # tokens before this forward
            last = uint32(last_token(token, group, count) >> uint32(6))
            plane = int64(layer) + int64(uint32(unit - item * G)) * plane_nbytes
            page = uint32(block * uint32(BLOCK_TILES))
            stop = min(uint32(page + grain * uint32(BLOCK_TILES)), uint32(last + uint32(1)))
            while page < stop:
                end = min(uint32(page + uint32(BLOCK_TILES)), stop)
                if waits != uint32(0) and uint32(end * uint32(TILE)) > known:
                    follow()
                    waits = uint32(0)
                source, i = plane, page
                while i < uint32(end + end - page):
                    at = i
                    if i >= end:
                        source, at = plane + int64(G) * plane_nbytes, uint32(i - end + page)
                    place = ld_global_u32(row_of_32(table, at))
                    full = uint32(barrier + s * uint32(8))
                    mbarrier_wait(uint32(full + uint32(empty)), phase)
                    mbarrier_expect_bytes(full, uint32(stage_nbytes))
                    to = uint32(ring + s * uint32(stage_nbytes))
                    offset = source + int64(place) * int64(page_nbytes)
                    bulk_stream_to_shared(to, kv + offset, uint32(plane_nbytes), full)
                    if packed:
                        to = uint32(to + uint32(plane_nbytes))
                        bulk_stream_to_shared(to, scales + (offset >> 5), uint32(factors), full)
                    s, phase = advance(s, phase)
                    i = uint32(i + uint32(1))
                page = end
            unit = uint32(unit + uint32(cuda.gridDim.x))
        if waits != uint32(0):
            follow()

    return produce


def _consumer(tiles: int, stages: int, packed: int) -> Any:
    """Device function of the computing threads for one unit; returns the place in the ring."""
    parts, advance = decode_parts(tiles, packed), _ring_step(stages)
    prepare, fetch_queries, score_tile, weigh = parts[:4]
    add_values, fold_block, write, zero_rows = parts[4:]
    num_c, empty, stage_nbytes = tiles * 16, stages * 8, sum(_stage(packed))
    codes, _ = _stage(packed)
    open_plane = plane_opener(HEAD_DIM, THREADS)

    @cuda.jit(device=True, inline="always")
    def meet():
        named_barrier(uint32(1), uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def consume(partials, stats, qkgv, first, token, item, shared, heads, scale, s, phase):
        group, count, block, grain = item
        base, ring, barrier, opened = shared
        g, H, G, M = heads
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        chosen = uint32(1) if lane == 0 else uint32(0)
        c = cuda.local.array(num_c, float32)
        o = cuda.local.array(num_c, float32)
        for i in range(num_c):
            c[i], o[i] = float32(0.0), float32(0.0)
        fetch_queries(base, qkgv, group, count, g, H, G, M, thread)
        cp_async_commit()
        prepare(base, group, first, token, count, div_u32(block, grain), g, H, M, thread)
        seen = uint32(last_token(token, group, count) + uint32(1))
        stop = min(uint32(block + grain), uint32((seen + uint32(BLOCK_KEYS - 1)) >> uint32(8)))
        cp_async_wait_0()
        meet()
        while block < stop:
            left = uint32(seen - block * uint32(BLOCK_KEYS))
            np = min(uint32(BLOCK_TILES), uint32((left + uint32(TILE - 1)) >> uint32(6)))
            i = uint32(0)
            while i < np + np:
                full = uint32(barrier + s * uint32(8))
                mbarrier_wait(full, phase)
                plane = uint32(ring + s * uint32(stage_nbytes))
                factors = uint32(plane + uint32(codes))
                valid = uint32(TILE)
                if i >= np:
                    valid = min(valid, uint32(left - uint32(i - np) * uint32(TILE)))
                if packed:
                    to = uint32(opened + (i & uint32(1)) * uint32(PLANE_NBYTES))
                    open_plane(to, plane, valid, i >= np, thread)
                    plane = to
                    meet()
                elif valid < uint32(TILE):
                    zero_rows(plane, valid, thread)
                    fence_async_proxy()
                    meet()
                if i < np:
                    score_tile(base, plane, factors, i, scale, warp, lane)
                else:
                    add_values(c, base, plane, uint32(i - np), warp, lane)
                cuda.syncwarp()
                mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
                s, phase = advance(s, phase)
                i = uint32(i + uint32(1))
                if i == np:
                    meet()
                    weigh(base, block, warp, lane)
                    meet()
            fold_block(o, c, base, lane)
            block = uint32(block + uint32(1))
            if block == stop:
                write(o, partials, stats, base, warp, lane)
            meet()
        return s, phase

    return consume


@cuda.jit(device=True, inline="always")
def _never(partials, stats, qkgv, first, token, item, shared, heads, scale, s, phase):
    """In place of a consumer for units that do not occur."""
    return s, phase


@kernel(*(int64,) * 11, *(uint32,) * 6, float32)
def attention_decode_bulk_kernel(tiles: int, stages: int, packed: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments as those of `attention_decode_kernel`; stages of the ring. Units of few columns are
    computed as one tile of rows."""
    produce, follow = producer(stages, packed, early), follower(early)
    few = _consumer(1, stages, packed)
    many = _consumer(tiles, stages, packed) if tiles > 1 else _never
    barriers, empty, opened_at = 2 * stages, stages * 8, unit_nbytes(tiles)
    ring_at = opened_at + (2 * PLANE_NBYTES if packed else 0)
    threads = THREADS + 32

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def attention_decode_bulk(
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
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        ring, thread = uint32(base + uint32(ring_at)), uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
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
            follow()
            work, grain = uint32(ld_global_u32(units) * G), ld_global_u32(units + 4)
            s, phase, unit = uint32(0), uint32(0), uint32(cuda.blockIdx.x)
            shared = (base, ring, barrier, uint32(base + uint32(opened_at)))
            factor = scale * float32(LOG2E)
            while unit < work:
                place = div_u32(unit, G)
                heads = (uint32(unit - place * G), H, G, M)
                group, count, block = unit_at(units, members, place)
                item = (group, count, block, grain)
                if uint32(count * M) <= uint32(16):
                    s, phase = few(
                        partials, stats, qkgv, first, token, item, shared, heads, factor, s, phase
                    )
                else:
                    s, phase = many(
                        partials, stats, qkgv, first, token, item, shared, heads, factor, s, phase
                    )
                unit = uint32(unit + uint32(cuda.gridDim.x))

    nbytes = ring_at + stages * sum(_stage(packed)) + 128
    return Build(attention_decode_bulk, threads, nbytes, since_sm_90=True)
