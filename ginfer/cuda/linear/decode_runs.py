"""Runs of K in decode linear on sm_90: who computes what, and how slices come together.

Row blocks of 128 from `whole` on are dealt evenly: their steps of 256 columns, one block behind the
other, are cut into `runs` of one length, give or take a step. A run that goes on in the next row
block is two slices. Items are taken in turns: runs, whose second part is what lies beyond the
border; whole row blocks, one for each who takes items; collections, one for each row block that is
cut, behind which the weights of what follows are on their way; the other whole row blocks.

A slice's sums go to a slot, word by word. A free word is zero and a sum is not (minus zero stands
for zero), so that each word says itself that it has come. A collection waits for the words of all
slices, adds them in ascending order to zero and frees them. Nobody waits who has sums to send.
Where nothing follows the runs and nobody takes two, collections need no items of their own: who has
the first slice of a row block, which is the end of its run, keeps it and waits for the others.

Legend: c: a thread's sums. cut: k tiles, row blocks, those that are whole, runs, how many take
items.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import (
    any_lane_u32,
    bits_from_f32,
    div_u32,
    f32_from_bits,
    ld_relaxed_u32x4,
    st_relaxed_u32x4,
)
from ginfer.cuda.linear.decode_results import SLICE_TILES

AT_ONCE = 16  # sums of a slot that a thread waits for together
SLICES_AT_ONCE = 5
ALL, SEND, NOTHING = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD


@cuda.jit(device=True, inline="always")
def place(item, cut):
    """(row block, first k tile, k tiles, those of the run before and after them, slot) of an item;
    no k tiles: nothing to multiply."""
    k_tiles, blocks, whole, runs, step = cut
    turn, part, zero = uint32(item >> uint32(1)), uint32(item & uint32(1)), uint32(0)
    if turn >= runs:
        block, first, left = uint32(turn - runs), min(whole, step), k_tiles
        if block >= uint32(first + blocks - whole):
            block = uint32(block - uint32(blocks - whole))
        elif block >= first:
            block, left = uint32(block - first + whole), zero
        return block, zero, left if part == zero else zero, zero, zero, zero
    steps = uint32((k_tiles + uint32(SLICE_TILES - 1)) // uint32(SLICE_TILES))
    total = uint32(uint32(blocks - whole) * steps)
    begin = div_u32(uint32(turn * total), runs)
    end = div_u32(uint32(uint32(turn + uint32(1)) * total), runs)
    j = div_u32(begin, steps)
    start, stop = begin, min(end, uint32(uint32(j + uint32(1)) * steps))
    if part != zero:
        j, start, stop = uint32(j + uint32(1)), stop, end
    first = uint32(uint32(start - j * steps) * uint32(SLICE_TILES))
    count = uint32(uint32(stop - start) * uint32(SLICE_TILES))
    if count > zero:
        count = min(count, uint32(k_tiles - first))
    before = uint32(uint32(start - begin) * uint32(SLICE_TILES))
    after = uint32(uint32(end - stop) * uint32(SLICE_TILES))
    return uint32(whole + j), first, count, before, after, uint32(turn + j)


@cuda.jit(device=True, inline="always")
def following(item, step):
    """The item after `item` of one who takes every step-th."""
    if item & uint32(1):
        return uint32(item - uint32(1) + uint32(2) * step)
    return uint32(item + uint32(1))


@cuda.jit(device=True, inline="always")
def end_of_items(cut):
    """(whether first slices stay with who has them, the end of all items)."""
    _, blocks, whole, runs, step = cut
    stay = whole == uint32(0) and runs <= step
    return stay, uint32(uint32(2) * (runs if stay else uint32(runs + blocks)))


@cuda.jit(device=True, inline="always")
def duty(item, first, left, cut, stay):
    """What is to be done with the sums of an item: SEND, NOTHING, or the slices that are in them:
    none, the first, ALL."""
    if uint32(item >> uint32(1)) < cut[3]:
        if left == uint32(0):
            return uint32(NOTHING)
        return uint32(1) if stay and first == uint32(0) else uint32(SEND)
    if item & uint32(1):
        return uint32(NOTHING)
    return uint32(ALL) if left > uint32(0) else uint32(0)


@cuda.jit(device=True, inline="always")
def slots(block, cut):
    """(first slot, slices) of a row block that is cut."""
    k_tiles, blocks, whole, runs, _ = cut
    j = uint32(block - whole)
    steps = uint32((k_tiles + uint32(SLICE_TILES - 1)) // uint32(SLICE_TILES))
    total = uint32(uint32(blocks - whole) * steps)
    low = div_u32(uint32(uint32(j * steps + uint32(1)) * runs - uint32(1)), total)
    high = div_u32(uint32(uint32(uint32(j + uint32(1)) * steps) * runs - uint32(1)), total)
    return uint32(low + j), uint32(high - low + uint32(1))


def sender(sums: int, threads: int) -> Any:
    """Device function send(c, workspace, slot, thread) of `threads` threads."""
    quarters, slot_bytes = sums // 4, sums * threads * 4

    @cuda.jit(device=True, inline="always")
    def send(c, workspace, slot, thread):
        at = workspace + int64(slot) * slot_bytes + int64(thread) * 16
        words = cuda.local.array(sums, uint32)
        for i in range(sums):
            bits = uint32(bits_from_f32(c[i]))
            words[i] = bits if bits != uint32(0) else uint32(0x80000000)
        for i in range(quarters):
            to, k = at + i * (threads * 16), 4 * i
            st_relaxed_u32x4(to, words[k], words[k + 1], words[k + 2], words[k + 3])

    return send


def collector(sums: int, threads: int) -> Any:
    """Device function collect(c, workspace, first, have, slices, thread) of `threads` threads: c +=
    the slices of a row block from `have` on."""
    count, slot_bytes = min(sums, AT_ONCE), sums * threads * 4
    quarters, num_words = count // 4, SLICES_AT_ONCE * count

    def of_part(p: int) -> Any:
        skip = p * quarters * threads * 16

        @cuda.jit(device=True, inline="always")
        def collect(c, workspace, first, have, slices, thread):
            at = workspace + int64(first) * slot_bytes + int64(thread) * 16 + skip
            words, zero = cuda.local.array(num_words, uint32), uint32(0)
            done, last = have, uint32(slices - uint32(1))
            while done < slices:
                waiting = uint32(1)
                while waiting != uint32(0):
                    for i in range(num_words):
                        words[i] = uint32(1)
                    for b in range(SLICES_AT_ONCE):
                        slot = uint32(done + uint32(b))
                        if slot <= last:
                            for i in range(quarters):
                                source = at + int64(slot) * slot_bytes + i * (threads * 16)
                                q = ld_relaxed_u32x4(source)
                                for k in range(4):
                                    words[b * count + 4 * i + k] = q[k]
                    waiting = zero
                    for i in range(num_words):
                        waiting = uint32(1) if words[i] == zero else waiting
                    waiting = any_lane_u32(waiting)
                for b in range(SLICES_AT_ONCE):
                    slot = uint32(done + uint32(b))
                    if slot <= last:
                        for i in range(count):
                            k = p * count + i
                            c[k] = c[k] + f32_from_bits(words[b * count + i])
                        for i in range(quarters):
                            to = at + int64(slot) * slot_bytes + i * (threads * 16)
                            st_relaxed_u32x4(to, zero, zero, zero, zero)
                done = uint32(done + uint32(SLICES_AT_ONCE))

        return collect

    def from_part(p: int) -> Any:
        one = of_part(p)
        if (p + 1) * count == sums:
            return one
        rest = from_part(p + 1)

        @cuda.jit(device=True, inline="always")
        def collect(c, workspace, first, have, slices, thread):
            one(c, workspace, first, have, slices, thread)
            rest(c, workspace, first, have, slices, thread)

        return collect

    return from_part(0)
