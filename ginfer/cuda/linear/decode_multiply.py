"""Products of the decode linear on sm_90: sums of a warp's rows += k tiles in shared memory.

A scale group of a row tile is one chain of products that starts at zero and is scaled and added in
FP32, in ascending k. mma.m16n8k16 and wgmma give a chain the same bits, so widths may differ in
instruction. Codes come divided by the format's divisor, a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import fma_f32, ldmatrix_x4, mma_m16n8k16_bf16
from ginfer.cuda.lib.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_scaled import STEP, TILE, scaled_sums, tokens_descriptor
from ginfer.cuda.linear.unpack import UNPACK

if TYPE_CHECKING:
    from ginfer.cuda.lib.wgmma_scaled import ScaledSums

X_TILE = 1024  # bytes of 8 tokens x 64 columns


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


def by_mma(fmt: str, M: int, NT: int, span: int, slab: int) -> Any:
    """Device function multiply(c, weights, tokens, warp, lane): `span` k tiles at once, all their
    chains of mma side by side. A warp has M row tiles; slab: bytes of a row block's stage."""
    f = UNPACK[fmt]
    load, codes, scales, groups = f.load, f.codes, f.scales, f.groups
    tile_bytes, words = f.tile_nbytes, f.words
    num_words, num_scales = span * M * words, span * M * groups
    num_d, num_b = span * groups * M * NT * 4, span * NT * 4

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        v = cuda.local.array(num_words, uint32)
        low = cuda.local.array(num_scales, float32)
        high = cuda.local.array(num_scales, float32)
        d = cuda.local.array(num_d, float32)
        b = cuda.local.array(num_b, uint32)
        rows = uint32(warp * uint32(M))
        base = uint32(weights + (rows >> uint32(3)) * uint32(slab))
        rows = uint32(rows & uint32(7))
        for k in range(span):
            tile = uint32(base + uint32(k * tile_bytes))
            for m in range(M):
                load(v, (k * M + m) * words, tile, uint32(rows + uint32(m)), lane)
                for g in range(groups):
                    p = (k * M + m) * groups + g
                    low[p], high[p] = scales(tile, uint32(rows + uint32(m)), lane, uint32(g))
        for i in range(num_d):
            d[i] = float32(0.0)
        for half in range(2):
            for k in range(span):
                for n in range(NT):
                    at = uint32(tokens + uint32((k * NT + n) * X_TILE + half * 512))
                    q = ldmatrix_x4(uint32(at + lane * uint32(16)))
                    for i in range(4):
                        b[(k * NT + n) * 4 + i] = q[i]
            for j in range(2):
                for k in range(span):
                    for m in range(M):
                        a = codes(v, (k * M + m) * words, half * 2 + j)
                        chain = (k * groups + half * (groups - 1)) * M + m
                        for n in range(NT):
                            p, q = (chain * NT + n) * 4, (k * NT + n) * 4 + 2 * j
                            _mma_into(d, p, a[0], a[1], a[2], a[3], b[q], b[q + 1])
        for k in range(span):
            for g in range(groups):
                for m in range(M):
                    s = (k * M + m) * groups + g
                    for n in range(NT):
                        p = (((k * groups + g) * M + m) * NT + n) * 4
                        _add_scaled(c, (m * NT + n) * 4, d, p, low[s], high[s])

    return multiply


def _issue(sums: ScaledSums, steps: int) -> Any:
    """Device function issue(a, tokens): begin a chain of `steps` products."""
    product = sums.multiply

    @cuda.jit(device=True, inline="always")
    def issue(a, tokens):
        wgmma_fence()
        for j in range(steps):
            i = 4 * j
            product(a[i], a[i + 1], a[i + 2], a[i + 3], tokens + j * STEP, uint32(j))
        wgmma_commit()

    return issue


def by_wgmma(fmt: str, M: int, NT: int, span: int, slab: int) -> Any:
    """As by_mma, on wgmma: two chains are under way, one in each set of sums. M times the groups
    of the format is at most 2."""
    f = UNPACK[fmt]
    load, codes, scales, groups, words = f.load, f.codes, f.scales, f.groups, f.words
    tile_bytes, steps, per_tile, chains = f.tile_nbytes, 4 // groups, M * groups, span * M * groups
    assert per_tile <= 2
    assert chains == 1 or chains % 2 == 0
    even, odd = scaled_sums("even", NT), scaled_sums("odd", NT)
    issue_even, add_even, issue_odd, add_odd = (
        *(_issue(even, steps), even.add),
        *(_issue(odd, steps), odd.add),
    )
    wait_older, wait_all = wgmma_wait(1), wgmma_wait(0)
    # of an odd chain, seen from the even one before it: k tile, row tile, group
    next_k, next_m, next_g = int(per_tile == 1), M - 1, groups - 1
    stride, single, num_a = 2 // per_tile, chains == 1, 4 * steps
    first_step, pairs, odd_sums = next_g * steps, chains // 2, (M - 1) * NT * 4
    odd_tile, odd_tokens = next_k * tile_bytes, next_k * NT * TILE + first_step * STEP

    @cuda.jit(device=True, inline="always")
    def prepare(a, tile, row_tile, lane, group, step):
        """a = fragments of a chain from k16 step `step` on; returns its scales."""
        v = cuda.local.array(words, uint32)
        load(v, 0, tile, row_tile, lane)
        for j in range(steps):
            r = codes(v, 0, step + j)
            for i in range(4):
                a[4 * j + i] = r[i]
        return scales(tile, row_tile, lane, uint32(group))

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        a = cuda.local.array(num_a, uint32)
        b = cuda.local.array(num_a, uint32)
        row = uint32(warp * uint32(M))
        tile = uint32(weights + (row >> uint32(3)) * uint32(slab))
        row = uint32(row & uint32(7))
        next_row = uint32(row + uint32(next_m))
        x = tokens_descriptor(tokens)
        low, high = prepare(a, tile, row, lane, 0, 0)
        issue_even(a, x)
        if single:
            wait_all()
            add_even(c, 0, low, high)
        else:
            for _ in range(pairs - 1):
                other = uint32(tile + uint32(odd_tile))
                odd_low, odd_high = prepare(b, other, next_row, lane, next_g, first_step)
                issue_odd(b, x + odd_tokens)
                wait_older()
                add_even(c, 0, low, high)
                tile = uint32(tile + uint32(stride * tile_bytes))
                x = x + stride * NT * TILE
                low, high = prepare(a, tile, row, lane, 0, 0)
                issue_even(a, x)
                wait_older()
                add_odd(c, odd_sums, odd_low, odd_high)
            other = uint32(tile + uint32(odd_tile))
            odd_low, odd_high = prepare(b, other, next_row, lane, next_g, first_step)
            issue_odd(b, x + odd_tokens)
            wait_older()
            add_even(c, 0, low, high)
            wait_all()
            add_odd(c, odd_sums, odd_low, odd_high)

    return multiply
