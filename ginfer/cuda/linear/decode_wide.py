"""wgmma products of the decode linear on sm_90, for 17 tokens and more, in the order of mma's.

A scale group of a row tile is one chain of products, as in `decode_multiply`, and has its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import mbarrier_arrive_if, mbarrier_wait
from ginfer.cuda.lib.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_scaled import STEP, TILE, scaled_sums, tokens_descriptor
from ginfer.cuda.linear.decode_ring import Ring, advance_stage
from ginfer.cuda.linear.unpack import UNPACK

if TYPE_CHECKING:
    from ginfer.cuda.lib.wgmma_scaled import ScaledSums


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


def consume_by_wgmma(fmt: str, M: int, NT: int, ring: Ring) -> Any:
    """As consume_by_mma, on wgmma; the last chain of a stage is added in the next stage."""
    span, stages, stage_bytes = ring.span, ring.stages, ring.stage_bytes
    weight_bytes, tile_bytes, x_bytes = ring.weight_bytes, ring.tile_bytes, ring.x_bytes
    empty, advance = 8 * stages, advance_stage(stages)
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
