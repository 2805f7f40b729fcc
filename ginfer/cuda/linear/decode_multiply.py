"""Products of the decode linear on sm_90: sums of a warp's rows += k tiles in shared memory.

A scale group of a row tile is one chain of products that starts at zero and is scaled and added in
FP32, in ascending k. mma.m16n8k16 and wgmma give a chain the same bits, so widths may differ in
instruction. Codes come divided by the format's divisor, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import (
    fma_f32,
    ldmatrix_x4,
    mbarrier_arrive_if,
    mbarrier_wait,
    mma_m16n8k16_bf16,
)
from ginfer.cuda.lib.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_scaled import STEP, TILE, scaled_sums, tokens_descriptor
from ginfer.cuda.linear.decode_results import X_TILE
from ginfer.cuda.linear.unpack import UNPACK

if TYPE_CHECKING:
    from ginfer.cuda.lib.wgmma_scaled import ScaledSums


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


@dataclass(frozen=True)
class WarpgroupProducts:
    """Device functions of by_wgmma.

    stage(c, pending, weights, tokens, warp, lane, before, arrives): c += a stage but for its last
    chain, whose scales it returns; pending: those of the last chain of the stage before, which ends
    at barrier `before`. finish(c, pending): c += that chain. one(c, weights, tokens, warp, lane): c
    += one k tile. clear(): a pending chain of zero.
    """

    stage: Any
    finish: Any
    one: Any
    clear: Any


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


def by_wgmma(fmt: str, M: int, NT: int, span: int, slab: int) -> WarpgroupProducts:
    """As by_mma, on wgmma: while a chain is under way in one set of sums, the one before it is
    added from the other and the next is unpacked. M times the groups of the format is at most 2."""
    f = UNPACK[fmt]
    load, codes, scales, groups, words = f.load, f.codes, f.scales, f.groups, f.words
    tile_bytes, steps, per_tile, chains = f.tile_nbytes, 4 // groups, M * groups, span * M * groups
    assert per_tile <= 2
    assert chains % 2 == 0
    even, odd, wait_all = scaled_sums("even", NT), scaled_sums("odd", NT), wgmma_wait(0)
    issue_even, add_even, add_odd = _issue(even, steps), even.add, odd.add
    issue_odd, clear_odd = _issue(odd, steps), odd.clear
    # of an odd chain, seen from the even one before it: k tile, row tile, group
    next_k, next_m, next_g = int(per_tile == 1), M - 1, groups - 1
    stride, num_a, pairs, odd_sums = 2 // per_tile, 4 * steps, chains // 2, (M - 1) * NT * 4
    first_step, x_tile = next_g * steps, NT * TILE
    odd_tile, odd_tokens = next_k * tile_bytes, next_k * x_tile + first_step * STEP

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
    def stage(c, pending, weights, tokens, warp, lane, before, arrives):
        a = cuda.local.array(num_a, uint32)
        b = cuda.local.array(num_a, uint32)
        row = uint32(warp * uint32(M))
        tile = uint32(weights + (row >> uint32(3)) * uint32(slab))
        row = uint32(row & uint32(7))
        other_row = uint32(row + uint32(next_m))
        x = tokens_descriptor(tokens)
        odd_low, odd_high = pending
        for p in range(pairs):
            low, high = prepare(a, tile, row, lane, 0, 0)
            wait_all()
            if p == 0:
                mbarrier_arrive_if(before, arrives)
            issue_even(a, x)
            add_odd(c, odd_sums, odd_low, odd_high)
            other = uint32(tile + uint32(odd_tile))
            odd_low, odd_high = prepare(b, other, other_row, lane, next_g, first_step)
            wait_all()
            issue_odd(b, x + odd_tokens)
            add_even(c, 0, low, high)
            tile = uint32(tile + uint32(stride * tile_bytes))
            x = x + stride * x_tile
        return odd_low, odd_high

    @cuda.jit(device=True, inline="always")
    def finish(c, pending):
        wait_all()
        add_odd(c, odd_sums, pending[0], pending[1])

    @cuda.jit(device=True, inline="always")
    def one(c, weights, tokens, warp, lane):
        a = cuda.local.array(num_a, uint32)
        row = uint32(warp * uint32(M))
        tile = uint32(weights + (row >> uint32(3)) * uint32(slab))
        row = uint32(row & uint32(7))
        x = tokens_descriptor(tokens)
        for m in range(M):
            for g in range(groups):
                low, high = prepare(a, tile, uint32(row + uint32(m)), lane, g, g * steps)
                issue_even(a, x + g * steps * STEP)
                wait_all()
                add_even(c, m * NT * 4, low, high)

    return WarpgroupProducts(stage, finish, one, clear_odd)


@dataclass(frozen=True)
class Ring:
    """Stages of k tiles in shared memory, in bytes: span tiles of weights of each of the row
    blocks, then of tokens; span, stages: how many."""

    span: int
    stages: int
    tile_bytes: int
    x_bytes: int
    row_blocks: int

    @property
    def slab(self) -> int:
        """Weights of a row block in a stage."""
        return self.span * self.tile_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights of a stage."""
        return self.row_blocks * self.slab

    @property
    def stage_bytes(self) -> int:
        """A stage."""
        return self.weight_bytes + self.span * self.x_bytes


def _advance(stages: int) -> Any:
    """Device function: the next stage of a ring and the phase of its barriers."""

    @cuda.jit(device=True, inline="always")
    def advance(s, phase):
        s = uint32(s + uint32(1))
        if s == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return s, phase

    return advance


LONG_ITEM = 88  # k tiles


def stage_tiles(span: int, wgmma: int) -> Any:
    """Device function: k tiles of the next stage of an item, by how many are left and done. On mma
    the first and the last stages of long items are short: work begins early, and little is left
    behind the last bytes. In short items more stages cost more than that brings."""
    half, quarter = max(span // 2, 1), max(span // 4, 1)

    @cuda.jit(device=True, inline="always")
    def tapered(left, done):
        count = uint32(span)
        if uint32(left + done) >= uint32(LONG_ITEM):
            if done < uint32(span) or left <= uint32(span):
                count = uint32(half)
            if done < uint32(half) or left <= uint32(half):
                count = uint32(quarter)
        return min(left, count)

    @cuda.jit(device=True, inline="always")
    def equal(left, done):
        return min(left, uint32(span))

    return equal if wgmma else tapered


def consume_by_mma(fmt: str, M: int, NT: int, ring: Ring) -> Any:
    """Device function consume(c, at, barrier, s, phase, left, warp, lane): c += the next `left` k
    tiles of the ring at `at`, from stage s on; returns the stage after them and its phase."""
    span, stages, stage_bytes = ring.span, ring.stages, ring.stage_bytes
    weight_bytes, tile_bytes, x_bytes = ring.weight_bytes, ring.tile_bytes, ring.x_bytes
    empty, advance, tiles_of = 8 * stages, _advance(stages), stage_tiles(span, 0)
    half, quarter, slab = max(span // 2, 1), max(span // 4, 1), ring.slab
    one, some = by_mma(fmt, M, NT, 1, slab), by_mma(fmt, M, NT, quarter, slab)
    more, most = by_mma(fmt, M, NT, half, slab), by_mma(fmt, M, NT, span, slab)

    @cuda.jit(device=True, inline="always")
    def consume(c, at, barrier, s, phase, left, warp, lane):
        chosen, done = uint32(1) if lane == 0 else uint32(0), uint32(0)
        while left > uint32(0):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(at + s * uint32(stage_bytes))
            tokens = uint32(weights + uint32(weight_bytes))
            count = tiles_of(left, done)
            mbarrier_wait(full, phase)
            if count == uint32(span):
                most(c, weights, tokens, warp, lane)
            elif count == uint32(half):
                more(c, weights, tokens, warp, lane)
            elif count == uint32(quarter):
                some(c, weights, tokens, warp, lane)
            else:
                for _ in range(count):
                    one(c, weights, tokens, warp, lane)
                    weights = uint32(weights + uint32(tile_bytes))
                    tokens = uint32(tokens + uint32(x_bytes))
            cuda.syncwarp()
            mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
            left, done = uint32(left - count), uint32(done + count)
            s, phase = advance(s, phase)
        return s, phase

    return consume


def consume_by_wgmma(fmt: str, M: int, NT: int, ring: Ring) -> Any:
    """As consume_by_mma, on wgmma; the last chain of a stage is added in the next stage."""
    span, stages, stage_bytes = ring.span, ring.stages, ring.stage_bytes
    weight_bytes, tile_bytes, x_bytes = ring.weight_bytes, ring.tile_bytes, ring.x_bytes
    empty, advance = 8 * stages, _advance(stages)
    products = by_wgmma(fmt, M, NT, span, ring.slab)
    multiply, finish, one, clear = products.stage, products.finish, products.one, products.clear

    @cuda.jit(device=True, inline="always")
    def consume(c, at, barrier, s, phase, left, warp, lane):
        chosen = uint32(1) if lane == 0 else uint32(0)
        before, arrives = barrier, uint32(0)
        pending = float32(0.0), float32(0.0)
        clear()
        while left >= uint32(span):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(at + s * uint32(stage_bytes))
            tokens = uint32(weights + uint32(weight_bytes))
            mbarrier_wait(full, phase)
            pending = multiply(c, pending, weights, tokens, warp, lane, before, arrives)
            before, arrives = uint32(full + uint32(empty)), chosen
            left = uint32(left - uint32(span))
            s, phase = advance(s, phase)
        finish(c, pending)
        mbarrier_arrive_if(before, arrives)
        if left > uint32(0):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(at + s * uint32(stage_bytes))
            tokens = uint32(weights + uint32(weight_bytes))
            mbarrier_wait(full, phase)
            for _ in range(left):
                one(c, weights, tokens, warp, lane)
                weights = uint32(weights + uint32(tile_bytes))
                tokens = uint32(tokens + uint32(x_bytes))
            mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
            s, phase = advance(s, phase)
        return s, phase

    return consume
