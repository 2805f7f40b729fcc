"""wgmma products of the decode linear on sm_90, for 17 tokens and more, in the order of mma's.

A scale group of a row tile is one chain of products, as in `decode_multiply`, and has its bits. The
chains of a stage take turns in two sets of sums: while one is under way, the next is unpacked and
follows it at once, and only then is the first waited for and added. Nothing is under way between
stages, or ptxas would wait after every single product.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, uint32

from ginfer.cuda.lib.ptx import mbarrier_arrive_if, mbarrier_wait
from ginfer.cuda.lib.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_scaled import STEP, TILE, scaled_sums, tokens_descriptor
from ginfer.cuda.linear.decode_ring import Ring, advance_stage
from ginfer.cuda.linear.unpack import UNPACK


def _chain_starter(fmt: str, NT: int, sums: Any, place: tuple[int, int]) -> Any:
    """Device function start(a, tile, row, lane, x): unpack a chain into a, begin its products, and
    return its scales. place: k tile and group of the chain, from tile and x on."""
    f, product = UNPACK[fmt], sums.multiply
    load, codes, scales, words, steps = f.load, f.codes, f.scales, f.words, 4 // f.groups
    k, group = place
    tile_at, first = k * f.tile_nbytes, group * steps
    tokens_at = k * NT * TILE + first * STEP

    @cuda.jit(device=True, inline="always")
    def start(a, tile, row, lane, x):
        v = cuda.local.array(words, uint32)
        at = uint32(tile + uint32(tile_at))
        load(v, 0, at, row, lane)
        for j in range(steps):
            r = codes(v, 0, first + j)
            for i in range(4):
                a[4 * j + i] = r[i]
        low, high = scales(at, row, lane, uint32(group))
        wgmma_fence()
        for j in range(steps):
            i, tokens = 4 * j, x + tokens_at + j * STEP
            product(a[i], a[i + 1], a[i + 2], a[i + 3], tokens, uint32(j))
        wgmma_commit()
        return low, high

    return start


def by_wgmma(fmt: str, NT: int, span: int) -> Any:
    """As by_mma: a device function multiply(c, weights, tokens, warp, lane)."""
    groups, num_a = UNPACK[fmt].groups, 16 // UNPACK[fmt].groups
    places = [(k, g) for k in range(span) for g in range(groups)]
    sets = [scaled_sums(("even", "odd")[i % 2], NT) for i in range(len(places))]
    starts = [_chain_starter(fmt, NT, *chain) for chain in zip(sets, places, strict=True)]
    wait_but_one, wait_all, begin = wgmma_wait(1), wgmma_wait(0), starts[0]

    def follow(i: int) -> Any:
        """Device function: all that follows the start of chain i, whose operand is in a."""
        add = sets[i].add
        if i + 1 == len(places):

            @cuda.jit(device=True, inline="always")
            def end(c, a, b, tile, row, lane, x, low, high):
                wait_all()
                add(c, 0, low, high)

            return end
        start, rest = starts[i + 1], follow(i + 1)

        @cuda.jit(device=True, inline="always")
        def go_on(c, a, b, tile, row, lane, x, low, high):
            next_low, next_high = start(b, tile, row, lane, x)
            wait_but_one()
            add(c, 0, low, high)
            rest(c, b, a, tile, row, lane, x, next_low, next_high)

        return go_on

    rest = follow(0)

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        a = cuda.local.array(num_a, uint32)
        b = cuda.local.array(num_a, uint32)
        x = tokens_descriptor(tokens)
        low, high = begin(a, weights, warp, lane, x)
        rest(c, a, b, weights, warp, lane, x, low, high)

    return multiply


def consume_by_wgmma(fmt: str, NT: int, ring: Ring) -> Any:
    """As consume_by_mma, on wgmma."""
    span, stages, stage_bytes = ring.span, ring.stages, ring.stage_bytes
    weight_bytes, tile_bytes, x_bytes = ring.weight_bytes, ring.tile_bytes, ring.x_bytes
    empty, advance = 8 * stages, advance_stage(stages)
    multiply, one = (by_wgmma(fmt, NT, tiles) for tiles in (span, 1))

    @cuda.jit(device=True, inline="always")
    def consume(c, at, barrier, s, phase, item, warp, lane):
        chosen, left = uint32(1) if lane == 0 else uint32(0), item[0]
        while left > uint32(0):
            full = uint32(barrier + s * uint32(8))
            weights = uint32(at + s * uint32(stage_bytes))
            tokens = uint32(weights + uint32(weight_bytes))
            mbarrier_wait(full, phase)
            if left >= uint32(span):
                multiply(c, weights, tokens, warp, lane)
                left = uint32(left - uint32(span))
            else:
                for _ in range(left):
                    one(c, weights, tokens, warp, lane)
                    weights = uint32(weights + uint32(tile_bytes))
                    tokens = uint32(tokens + uint32(x_bytes))
                left = uint32(0)
            mbarrier_arrive_if(uint32(full + uint32(empty)), chosen)
            s, phase = advance(s, phase)
        return s, phase

    return consume
