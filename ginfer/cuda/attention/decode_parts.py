"""Steps of decode attention that the kernels share: scores, weights, sums of a block, their fold.

A unit of work is a matrix of rows (a column and one of its M query heads, all of K/V head g) and a
run of 256-key blocks. Each block has its own maximum m, sum l and values o; a running (m, l, o)
takes them in, left to right, by `fold_factors` and `fold`. The merge kernel does the same with what
lies in memory, so it makes no difference who folds.

Shared memory of a unit: queries [panel][rows][128 B]; scores [rows][SCORE_PITCH] FP32, in place of
which a row's weights come in BF16; facts [FACTS][rows]. Legend as in `attention.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, chunk_at
from ginfer.cuda.attention.products import key_pair, mma_add, row_fragment, value_pair
from ginfer.cuda.lib.numeric import pack_bf16, row_of_32, warp_max, warp_sum
from ginfer.cuda.lib.ptx import (
    cp_async_16_or_zero,
    div_u32,
    exp2_approx,
    f32_from_bits,
    f32_from_f16,
    fma_f32,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_u32x4,
    ldmatrix_x4,
    mul_rn_f32,
    st_global_f32,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x4,
    u16_high,
    u16_low,
)
from ginfer.sizes import align_up

BLOCK_TILES = 4
BLOCK_KEYS = BLOCK_TILES * TILE
SPAN_BLOCKS = 4
THREADS, WARPS = 256, 8  # that compute
PLANE_NBYTES = HEAD_DIM // 64 * PANEL_NBYTES
SCORE_PITCH = (BLOCK_KEYS + 4) * 4
LOWEST = -1.0e30
SEEN, PLACE, TOP, SUM, KEEP, TAKE = range(6)
FACTS = 6


def unit_nbytes(tiles: int) -> int:
    """Shared memory of a unit of `tiles` tiles of 16 rows."""
    return align_up(tiles * 16 * (HEAD_DIM * 2 + SCORE_PITCH + FACTS * 4), 128)


@cuda.jit(device=True, inline="always")
def fold_factors(top, m):
    """(maximum of both, factor of what was there, factor of what comes)."""
    both = max(top, m)
    return both, exp2_approx(top - both), exp2_approx(m - both)


@cuda.jit(device=True, inline="always")
def fold(kept, keep, coming, take):
    """kept * keep + coming * take, rounded alike wherever it is done."""
    return fma_f32(coming, take, mul_rn_f32(kept, keep))


class Parts(NamedTuple):
    """Device functions for units of one size.

    prepare(unit, members, first, token, count, slot, g, H, M, thread): facts of the rows.
    fetch_queries(unit, qkgv, members, count, g, H, G, M, thread): starts copying the rows' queries.
    score_tile(unit, keys, factors, tile, scale, warp, lane): tile 0..3 of a block; factors: scales
    of packed keys. weigh(unit, block, warp,
    lane): weights of a block and the factors of its fold. add_values(c, unit, values, tile, warp,
    lane): c += weights values. fold_block(o, c, unit, lane): into the running sums; c becomes 0.
    write(o, partials, stats, unit, warp, lane). zero_rows(plane, valid, thread): tokens of a plane
    from `valid` on.
    """

    prepare: Any
    fetch_queries: Any
    score_tile: Any
    weigh: Any
    add_values: Any
    fold_block: Any
    write: Any
    zero_rows: Any


def fetch_queries(rows: int) -> Any:
    """Device function that starts copying the queries of a unit of so many rows, by all threads."""
    D, q_panel = HEAD_DIM, rows * 128

    @cuda.jit(device=True, inline="always")
    def fetch(unit, qkgv, members, count, g, H, G, M, thread):
        i = thread
        while i < uint32(rows * 32):
            r, chunk = uint32(i >> uint32(5)), uint32(i & uint32(31))
            j = div_u32(r, M)
            there = j < count
            at = qkgv
            if there:
                t = ld_global_u32(row_of_32(members, j))
                head = int64(g * M + r - j * M)
                at = qkgv + int64(t) * (int64(H + G) * (4 * D)) + head * (2 * D) + int64(chunk) * 16
            place = uint32((chunk >> uint32(3)) * uint32(q_panel))
            place = uint32(place + chunk_at(r, uint32(chunk & uint32(7))))
            cp_async_16_or_zero(uint32(unit + place), at, uint32(16) if there else uint32(0))
            i = uint32(i + uint32(THREADS))

    return fetch


def decode_parts(tiles: int, packed: int) -> Parts:
    """The steps for units of `tiles` tiles of 16 rows; a thread has 16 sums per tile: of 32 dims of
    a warp in steps of 8."""
    D, rows = HEAD_DIM, tiles * 16
    q_panel, score_at = rows * 128, rows * HEAD_DIM * 2
    facts_at, num_c, per_warp = score_at + rows * SCORE_PITCH, tiles * 16, rows // WARPS
    num_scores = tiles * 4

    @cuda.jit(device=True, inline="always")
    def fact(unit, which, r):
        return uint32(unit + uint32(facts_at + which * rows * 4) + r * uint32(4))

    @cuda.jit(device=True, inline="always")
    def prepare(unit, members, first, token, count, slot, g, H, M, thread):
        if thread < uint32(rows):
            j = div_u32(thread, M)
            seen, place = uint32(0), uint32(0)
            if j < count:
                t = ld_global_u32(row_of_32(members, j))
                seen = uint32(ld_global_u32(row_of_32(token, t)) + uint32(1))
                place = uint32(ld_global_u32(row_of_32(first, t)) + slot)
                place = uint32(place * H + g * M + thread - j * M)
            st_shared_u32(fact(unit, SEEN, thread), seen)
            st_shared_u32(fact(unit, PLACE, thread), place)
            st_shared_f32(fact(unit, TOP, thread), float32(LOWEST))
            st_shared_f32(fact(unit, SUM, thread), float32(0.0))

    @cuda.jit(device=True, inline="always")
    def score_panel(c, unit, keys, panel, key, lane):
        for pair in range(2 * panel, 2 * panel + 2):
            b = key_pair(keys, key, uint32(pair * 2), lane)
            for m in range(tiles):
                a = row_fragment(unit, uint32(m * 16), uint32(pair * 2), q_panel, lane)
                mma_add(c, m * 4, a, b[0], b[1])
                a = row_fragment(unit, uint32(m * 16), uint32(pair * 2 + 1), q_panel, lane)
                mma_add(c, m * 4, a, b[2], b[3])

    @cuda.jit(device=True, inline="always")
    def scale_panel(c, part, at):
        """c += part times the scales of its two keys, at a shared address; part becomes 0."""
        pair = ld_shared_u32(at)
        low, high = f32_from_f16(u16_low(pair)), f32_from_f16(u16_high(pair))
        for i in range(num_scores):
            c[i] = fma_f32(part[i], high if i & 1 else low, c[i])
            part[i] = float32(0.0)

    @cuda.jit(device=True, inline="always")
    def score_tile(unit, keys, factors, tile, scale, warp, lane):
        c = cuda.local.array(num_scores, float32)
        part = cuda.local.array(num_scores, float32)
        for i in range(num_scores):
            c[i], part[i] = float32(0.0), float32(0.0)
        key = uint32(warp * uint32(8))
        at = uint32(factors + (key + (lane & uint32(3)) * uint32(2)) * uint32(2))
        for panel in range(D // 64):
            if packed:
                score_panel(part, unit, keys, panel, key, lane)
                scale_panel(c, part, uint32(at + uint32(panel * 2 * TILE)))
            else:
                score_panel(c, unit, keys, panel, key, lane)
        column = uint32(tile * uint32(TILE) + key + (lane & uint32(3)) * uint32(2))
        scores = uint32(unit + uint32(score_at) + column * uint32(4))
        for m in range(tiles):
            for i in range(4):
                r = uint32(uint32(m * 16 + (i >> 1) * 8) + (lane >> uint32(2)))
                at = uint32(scores + r * uint32(SCORE_PITCH) + uint32((i & 1) * 4))
                st_shared_f32(at, c[m * 4 + i] * scale)

    @cuda.jit(device=True, inline="always")
    def weigh(unit, block, warp, lane):
        s = cuda.local.array(8, float32)
        base, key = uint32(block * uint32(BLOCK_KEYS)), uint32(lane * uint32(8))
        for n in range(per_warp):
            r = uint32(warp * uint32(per_warp) + uint32(n))
            seen = ld_shared_u32(fact(unit, SEEN, r))
            limit = uint32(seen - base) if seen > base else uint32(0)
            row = uint32(unit + uint32(score_at) + r * uint32(SCORE_PITCH))
            low = ld_shared_u32x4(uint32(row + lane * uint32(32)))
            high = ld_shared_u32x4(uint32(row + lane * uint32(32) + uint32(16)))
            for i in range(4):
                s[i], s[4 + i] = f32_from_bits(low[i]), f32_from_bits(high[i])
            m = float32(LOWEST)
            for i in range(8):
                s[i] = s[i] if uint32(key + uint32(i)) < limit else float32(LOWEST)
                m = max(m, s[i])
            m = warp_max(m)
            total = float32(0.0)
            for i in range(8):
                there = uint32(key + uint32(i)) < limit
                s[i] = exp2_approx(s[i] - m) if there else float32(0.0)
                total = total + s[i]
            total = warp_sum(total)
            st_shared_u32x4(
                uint32(row + lane * uint32(16)),
                pack_bf16(s[0], s[1]),
                pack_bf16(s[2], s[3]),
                pack_bf16(s[4], s[5]),
                pack_bf16(s[6], s[7]),
            )
            if lane == 0:
                both, keep, take = fold_factors(ld_shared_f32(fact(unit, TOP, r)), m)
                kept = ld_shared_f32(fact(unit, SUM, r))
                st_shared_f32(fact(unit, TOP, r), both)
                st_shared_f32(fact(unit, SUM, r), fold(kept, keep, total, take))
                st_shared_f32(fact(unit, KEEP, r), keep)
                st_shared_f32(fact(unit, TAKE, r), take)

    @cuda.jit(device=True, inline="always")
    def add_values(c, unit, values, tile, warp, lane):
        weights = uint32(unit + uint32(score_at) + (lane & uint32(15)) * uint32(SCORE_PITCH))
        weights = uint32(weights + (lane >> uint32(4)) * uint32(16) + tile * uint32(2 * TILE))
        dim = uint32(warp * uint32(32))
        for step in range(TILE // 16):
            b0 = value_pair(values, step, dim, lane)
            b1 = value_pair(values, step, uint32(dim + uint32(16)), lane)
            for m in range(tiles):
                a = ldmatrix_x4(uint32(weights + uint32(m * 16 * SCORE_PITCH + step * 32)))
                mma_add(c, m * 16, a, b0[0], b0[1])
                mma_add(c, m * 16 + 4, a, b0[2], b0[3])
                mma_add(c, m * 16 + 8, a, b1[0], b1[1])
                mma_add(c, m * 16 + 12, a, b1[2], b1[3])

    @cuda.jit(device=True, inline="always")
    def fold_block(o, c, unit, lane):
        for m in range(tiles):
            for half in range(2):
                r = uint32(uint32(m * 16 + half * 8) + (lane >> uint32(2)))
                keep, take = ld_shared_f32(fact(unit, KEEP, r)), ld_shared_f32(fact(unit, TAKE, r))
                for n in range(8):
                    i = (m * 4 + (n >> 1)) * 4 + half * 2 + (n & 1)
                    o[i] = fold(o[i], keep, c[i], take)
        for i in range(num_c):
            c[i] = float32(0.0)

    @cuda.jit(device=True, inline="always")
    def write(o, partials, stats, unit, warp, lane):
        for m in range(tiles):
            for half in range(2):
                r = uint32(uint32(m * 16 + half * 8) + (lane >> uint32(2)))
                if ld_shared_u32(fact(unit, SEEN, r)) > uint32(0):
                    place = int64(ld_shared_u32(fact(unit, PLACE, r)))
                    at = partials + place * (4 * D)
                    at += int64(warp * uint32(32) + (lane & uint32(3)) * uint32(2)) * 4
                    for n in range(4):
                        i = (m * 4 + n) * 4 + half * 2
                        st_global_f32(at + n * 32, o[i])
                        st_global_f32(at + n * 32 + 4, o[i + 1])
        r = uint32(warp * uint32(32) + lane)
        if r < uint32(rows) and ld_shared_u32(fact(unit, SEEN, r)) > uint32(0):
            at = stats + int64(ld_shared_u32(fact(unit, PLACE, r))) * 8
            st_global_f32(at, ld_shared_f32(fact(unit, TOP, r)))
            st_global_f32(at + 4, ld_shared_f32(fact(unit, SUM, r)))

    @cuda.jit(device=True, inline="always")
    def zero_rows(plane, valid, thread):
        i = thread
        while i < uint32(PLANE_NBYTES // 16):
            if uint32((i >> uint32(3)) & uint32(TILE - 1)) >= valid:
                at = uint32(plane + i * uint32(16))
                st_shared_u32x4(at, uint32(0), uint32(0), uint32(0), uint32(0))
            i = uint32(i + uint32(THREADS))

    return Parts(
        prepare,
        fetch_queries(rows),
        score_tile,
        weigh,
        add_values,
        fold_block,
        write,
        zero_rows,
    )
