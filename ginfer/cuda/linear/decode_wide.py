"""wgmma products of the decode linear on sm_90, for 17 tokens and more, in the order of mma's.

A scale group of a row tile is one chain of products, as in `decode_multiply`, and has its bits. The
chains of a stage take turns in a few sets of sums: while some are under way, the next is unpacked
and follows them at once, and only then is the first waited for and added. Nothing is under way
between stages, or ptxas would wait after every single product.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import mbarrier_arrive_if, mbarrier_wait
from ginfer.cuda.lib.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from ginfer.cuda.lib.wgmma_scaled import (
    SETS,
    STEP,
    TILE,
    ScaledSums,
    scaled_sums,
    tokens_descriptor,
)
from ginfer.cuda.linear.decode_ring import Ring, advance_stage
from ginfer.cuda.linear.unpack import UNPACK

# A step is a device function step(c, a, s, tile, row, lane, x). a: operands of as many chains as
# are under way; s: two scales of each chain of a stage.


def _start(fmt: str, NT: int, sums: ScaledSums, chain: tuple[int, int, int, int]) -> Any:
    """The step that unpacks a chain and begins its products. chain: its index, k tile and group,
    and where its operands are in a."""
    f, product = UNPACK[fmt], sums.multiply
    load, codes, scales, words, steps = f.load, f.codes, f.scales, f.words, 4 // f.groups
    index, k, group, at = chain
    tile_at, first = k * f.tile_nbytes, group * steps
    tokens_at = k * NT * TILE + first * STEP

    @cuda.jit(device=True, inline="always")
    def start(c, a, s, tile, row, lane, x):
        v, here = cuda.local.array(words, uint32), uint32(tile + uint32(tile_at))
        load(v, 0, here, row, lane)
        for j in range(steps):
            r = codes(v, 0, first + j)
            for i in range(4):
                a[at + 4 * j + i] = r[i]
        low, high = scales(here, row, lane, uint32(group))
        s[2 * index] = low
        s[2 * index + 1] = high
        wgmma_fence()
        for j in range(steps):
            i, tokens = at + 4 * j, x + tokens_at + j * STEP
            product(a[i], a[i + 1], a[i + 2], a[i + 3], tokens, uint32(j))
        wgmma_commit()

    return start


def _finish(sums: ScaledSums, index: int, under_way: int) -> Any:
    """The step that waits for all but so many chains, and adds the sums of one."""
    wait, add_scaled = wgmma_wait(under_way), sums.add

    @cuda.jit(device=True, inline="always")
    def finish(c, a, s, tile, row, lane, x):
        wait()
        add_scaled(c, 0, s[2 * index], s[2 * index + 1])

    return finish


def _in_turn(steps: list[Any]) -> Any:
    """The step that takes those."""
    first = steps[0]
    if len(steps) == 1:
        return first
    rest = _in_turn(steps[1:])

    @cuda.jit(device=True, inline="always")
    def both(c, a, s, tile, row, lane, x):
        first(c, a, s, tile, row, lane, x)
        rest(c, a, s, tile, row, lane, x)

    return both


def by_wgmma(fmt: str, NT: int, span: int) -> Any:
    """As by_mma: a device function multiply(c, weights, tokens, warp, lane)."""
    groups, num_a = UNPACK[fmt].groups, 16 // UNPACK[fmt].groups
    places = [(k, g) for k in range(span) for g in range(groups)]
    count, most = len(places), min(len(places), 3 if NT <= 4 else 2)  # three of 64: registers
    sets, steps = [scaled_sums(SETS[i % most], NT) for i in range(count)], []
    for i, place in enumerate(places):
        steps.append(_start(fmt, NT, sets[i], (i, *place, i % most * num_a)))
        if i + 1 >= most:
            steps.append(_finish(sets[i + 1 - most], i + 1 - most, most - 1))
    steps += [_finish(sets[i], i, count - 1 - i) for i in range(count + 1 - most, count)]
    run, num_operands, num_scales = _in_turn(steps), most * num_a, 2 * count

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        a = cuda.local.array(num_operands, uint32)
        s = cuda.local.array(num_scales, float32)
        run(c, a, s, weights, warp, lane, tokens_descriptor(tokens))

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
