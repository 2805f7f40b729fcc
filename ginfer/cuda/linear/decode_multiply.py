"""mma products of the decode linear on sm_90: sums of a warp's rows += k tiles in shared memory.

A scale group of a row tile is one chain of products that starts at zero and is scaled and added in
FP32, in ascending k. mma.m16n8k16 and wgmma give a chain the same bits, so widths may differ in
instruction. Codes come divided by the format's divisor, a power of two.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import (
    fma_f32,
    ldmatrix_x4,
    mbarrier_arrive_if,
    mbarrier_wait,
    mma_m16n8k16_bf16,
)
from ginfer.cuda.linear.decode_results import X_TILE
from ginfer.cuda.linear.decode_ring import Ring, advance_stage, stage_tiles
from ginfer.cuda.linear.unpack import UNPACK


@cuda.jit(device=True, inline="always")
def _mma_into(d, p, a0, a1, a2, a3, b0, b1):
    """d[p : p + 4] += A B."""
    r = mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, d[p], d[p + 1], d[p + 2], d[p + 3])
    for i in range(4):
        d[p + i] = r[i]


@cuda.jit(device=True, inline="always")
def _add_scaled(c, p, d, q, low, high):
    """c[p : p + 4] += d[q : q + 4] * scales of rows g and g + 8."""
    c[p] = fma_f32(d[q], low, c[p])
    c[p + 1] = fma_f32(d[q + 1], low, c[p + 1])
    c[p + 2] = fma_f32(d[q + 2], high, c[p + 2])
    c[p + 3] = fma_f32(d[q + 3], high, c[p + 3])


def by_mma(fmt: str, NT: int, span: int, *, resident: bool = False) -> Any:
    """Device function multiply(c, weights, tokens, warp, lane): `span` k tiles at once, all their
    chains of mma side by side. A warp has a row tile. tokens: what this lane gives to ldmatrix
    first, in fragment order or, if resident, in rows of 8."""
    f = UNPACK[fmt]
    load, codes, scales, groups = f.load, f.codes, f.scales, f.groups
    tile_bytes, words = f.tile_nbytes, f.words
    num_words, num_scales = span * words, span * groups
    num_d, num_b = span * groups * NT * 4, span * NT * 4
    x_tile, x_half = (128, 64) if resident else (NT * X_TILE, 512)

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        v = cuda.local.array(num_words, uint32)
        low = cuda.local.array(num_scales, float32)
        high = cuda.local.array(num_scales, float32)
        d = cuda.local.array(num_d, float32)
        b = cuda.local.array(num_b, uint32)
        for k in range(span):
            tile = uint32(weights + uint32(k * tile_bytes))
            load(v, k * words, tile, warp, lane)
            for g in range(groups):
                p = k * groups + g
                low[p], high[p] = scales(tile, warp, lane, uint32(g))
        for i in range(num_d):
            d[i] = float32(0.0)
        for half in range(2):
            for k in range(span):
                for n in range(NT):
                    at = uint32(tokens + uint32(k * x_tile + n * X_TILE + half * x_half))
                    q = ldmatrix_x4(at)
                    for i in range(4):
                        b[(k * NT + n) * 4 + i] = q[i]
            for j in range(2):
                for k in range(span):
                    a = codes(v, k * words, half * 2 + j)
                    chain = k * groups + half * (groups - 1)
                    for n in range(NT):
                        p, q = (chain * NT + n) * 4, (k * NT + n) * 4 + 2 * j
                        _mma_into(d, p, a[0], a[1], a[2], a[3], b[q], b[q + 1])
        for p in range(num_scales):
            for n in range(NT):
                _add_scaled(c, n * 4, d, (p * NT + n) * 4, low[p], high[p])

    return multiply


def _consume(fmt: str, NT: int, ring: Ring, *, resident: bool) -> Any:
    """Device function consume(c, at, barrier, s, phase, item, warp, lane, tokens): c += the next k
    tiles of the ring at `at`, from stage s on; returns the stage after them and its phase. item: k
    tiles, those of its run before and after them. tokens: of the first k tile, as by_mma takes
    them, where they are resident."""
    span, stages, stage_bytes = ring.span, ring.stages, ring.stage_bytes
    weight_bytes, tile_bytes = ring.weight_bytes, ring.tile_bytes
    x_bytes = 128 if resident else ring.x_bytes
    empty, advance, tiles_of = 8 * stages, advance_stage(stages), stage_tiles(span, 0)
    half, quarter = max(span // 2, 1), max(span // 4, 1)
    one, some, more, most = (
        by_mma(fmt, NT, n, resident=resident) for n in (1, quarter, half, span)
    )

    @cuda.jit(device=True, inline="always")
    def consume(c, at, barrier, s, phase, item, warp, lane, tokens):
        left, before, after = item
        chosen = uint32(1) if lane == 0 else uint32(0)
        while left > uint32(0):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(at + s * uint32(stage_bytes))
            if not resident:
                tokens = uint32(weights + uint32(weight_bytes) + lane * uint32(16))
            count = tiles_of(left, before, after)
            mbarrier_wait(full, phase)
            if count == uint32(span):
                most(c, weights, tokens, warp, lane)
                tokens = uint32(tokens + uint32(span * x_bytes))
            elif count == uint32(half):
                more(c, weights, tokens, warp, lane)
                tokens = uint32(tokens + uint32(half * x_bytes))
            elif count == uint32(quarter):
                some(c, weights, tokens, warp, lane)
                tokens = uint32(tokens + uint32(quarter * x_bytes))
            else:
                for _ in range(count):
                    one(c, weights, tokens, warp, lane)
                    weights = uint32(weights + uint32(tile_bytes))
                    tokens = uint32(tokens + uint32(x_bytes))
            cuda.syncwarp()
            mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
            left, before = uint32(left - count), uint32(before + count)
            s, phase = advance(s, phase)
        return s, phase

    return consume


def consume_by_mma(fmt: str, NT: int, ring: Ring) -> Any:
    """Device function consume(c, at, barrier, s, phase, item, warp, lane): c += the next k tiles of
    the ring at `at`, from stage s on; returns the stage after them and its phase. item: k tiles,
    those of its run before and after them."""
    products = _consume(fmt, NT, ring, resident=False)

    @cuda.jit(device=True, inline="always")
    def consume(c, at, barrier, s, phase, item, warp, lane):
        return products(c, at, barrier, s, phase, item, warp, lane, uint32(0))

    return consume


def consume_resident(fmt: str, ring: Ring) -> Any:
    """As consume_by_mma for up to 8 tokens that lie in shared memory as a whole; consume takes the
    place of the first k tile behind its other arguments, as by_mma does."""
    return _consume(fmt, 1, ring, resident=True)
