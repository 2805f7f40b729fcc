"""Walking keys from the largest down without sorting: where a running sum crosses a threshold.

Candidates are the keys above a floor, and some of those that equal it. `descend` finds the first
candidate at which the running number, or the running weight, reaches a threshold: digit by digit of
the key (11, 11 and 10 bits), a histogram over the keys that match so far. Exact, whatever the
distribution: equal keys have equal weights, so that inside a group of ties a division tells where.

Shared memory: sums [2048] u64, counts [2048] u32, notes of 8 u64 (`NOTE`, then what callers like).
"""

from __future__ import annotations

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import (
    first_lane_u32,
    ld_global_u32,
    ld_global_u32x4,
    ld_shared_u32,
    ld_shared_u64,
    red_shared_add_u32,
    red_shared_add_u64,
    shfl_xor_u32,
    st_shared_u32,
    st_shared_u64,
)
from ginfer.cuda.sampling.exact import weight_of

THREADS = 512
SHIFT = 9  # log2 of it
DIGITS = 2048
COUNTS = DIGITS * 8  # offsets in the shared block
GROUPS = COUNTS + DIGITS * 4  # sums and counts of 32 groups of digits
NOTES = GROUPS + 32 * 16
SHARED_NBYTES = NOTES + 16 * 8


@cuda.jit(device=True, inline="always")
def clear(shared, thread):
    """Zero histogram."""
    for i in range(DIGITS // THREADS):
        digit = uint32(thread + uint32(i * THREADS))
        st_shared_u64(uint32(shared + digit * uint32(8)), int64(0))
        st_shared_u32(uint32(shared + uint32(COUNTS) + digit * uint32(4)), uint32(0))
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def enter(shared, key, count, weight, form, prefix):
    """Put a key with a number and a weight into the histogram if its digits so far match."""
    shift, bits = form
    above = uint32(shift + bits)
    if above >= uint32(32) or (key >> above) == (prefix >> above):
        digit = uint32((key >> shift) & uint32((uint32(1) << bits) - uint32(1)))
        red_shared_add_u32(uint32(shared + uint32(COUNTS) + digit * uint32(4)), count)
        red_shared_add_u64(uint32(shared + digit * uint32(8)), weight)


@cuda.jit(device=True, inline="always")
def _histogram(shared, source, floor, ties, form, prefix, scale, weighted, thread):
    """Numbers and weights per digit of the candidates that match `prefix`."""
    keys, S = source
    clear(shared, thread)
    i, four = uint32(thread * uint32(4)), first_lane_u32(uint32(4))  # one copy of the weight
    while i < S:
        q = ld_global_u32x4(keys + int64(i) * 4)
        j = uint32(0)
        while j < four:
            low, high = (q[0], q[1]), (q[2], q[3])
            pair = low if j < uint32(2) else high
            key = pair[1] if j & uint32(1) else pair[0]
            if key > floor:
                weight = weight_of(key, scale[0], scale[1]) if weighted else int64(0)
                enter(shared, key, uint32(1), weight, form, prefix)
            j = uint32(j + uint32(1))
        i = uint32(i + uint32(THREADS * 4))
    if thread == 0 and ties > uint32(0):
        weight = weight_of(floor, scale[0], scale[1]) * int64(ties) if weighted else int64(0)
        enter(shared, floor, ties, weight, form, prefix)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def group(shared, thread):
    """Sums of 64 digits each, by the first warp."""
    if thread < uint32(32):
        total, count = int64(0), uint32(0)
        for i in range(DIGITS // 32):
            digit = uint32(thread * uint32(DIGITS // 32) + uint32(i))
            total += ld_shared_u64(uint32(shared + digit * uint32(8)))
            word = ld_shared_u32(uint32(shared + uint32(COUNTS) + digit * uint32(4)))
            count = uint32(count + word)
        at = uint32(shared + uint32(GROUPS) + thread * uint32(16))
        st_shared_u64(at, total)
        st_shared_u64(uint32(at + uint32(8)), int64(count))
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def cross(shared, threshold, weighted, before, thread):
    """Thread 0: the digit at which the running sum reaches the threshold, to the notes: digit (or
    -1), weight and number before it, number at it."""
    if thread == 0:
        mass, count = before
        at = uint32(shared + uint32(GROUPS + 31 * 16))
        group, left = uint32(32), uint32(1)
        while group > uint32(0) and left:
            m = ld_shared_u64(at)
            n = ld_shared_u64(uint32(at + uint32(8)))
            if (mass + m if weighted else count + n) >= threshold:
                left = uint32(0)
            else:
                mass, count = mass + m, count + n
                at = uint32(at - uint32(16))
                group = uint32(group - uint32(1))
        note = uint32(shared + uint32(NOTES))
        st_shared_u64(note, int64(-1))
        if group > uint32(0):
            digit = uint32(group * uint32(DIGITS // 32) - uint32(1))
            left = uint32(1)
            while left:
                m = ld_shared_u64(uint32(shared + digit * uint32(8)))
                n = int64(ld_shared_u32(uint32(shared + uint32(COUNTS) + digit * uint32(4))))
                if (mass + m if weighted else count + n) >= threshold:
                    left = uint32(0)
                    st_shared_u64(note, int64(digit))
                    st_shared_u64(uint32(note + uint32(8)), mass)
                    st_shared_u64(uint32(note + uint32(16)), count)
                    st_shared_u64(uint32(note + uint32(24)), n)
                else:
                    mass, count = mass + m, count + n
                    digit = uint32(digit - uint32(1))
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def descend(shared, source, floor, ties, threshold, scale, weighted, thread):
    """(key, weight before it, number before it, candidates with this key), where the running weight
    (weighted) or number first reaches the threshold, at least 1; key 0 if it never does.

    source: (address of keys, how many, a multiple of 4). floor, ties: candidates are the keys above
    `floor` and `ties` of those that equal it. scale: (best value, temperature).
    """
    prefix, mass, count, same = uint32(0), int64(0), int64(0), int64(0)
    shift, digits = uint32(21), first_lane_u32(uint32(3))  # no constant: nothing is unrolled
    while digits > uint32(0):
        digits = uint32(digits - uint32(1))
        form = (shift, uint32(10) if shift == uint32(0) else uint32(11))
        _histogram(shared, source, floor, ties, form, prefix, scale, weighted, thread)
        group(shared, thread)
        cross(shared, threshold, weighted, (mass, count), thread)
        note = uint32(shared + uint32(NOTES))
        digit = ld_shared_u64(note)
        if digit < int64(0):
            digits, prefix = uint32(0), uint32(0)
        else:
            prefix = uint32(prefix | uint32(uint32(digit) << shift))
            mass = ld_shared_u64(uint32(note + uint32(8)))
            count = ld_shared_u64(uint32(note + uint32(16)))
            same = ld_shared_u64(uint32(note + uint32(24)))
        shift = uint32(10) if shift == uint32(21) else uint32(0)
        cuda.syncthreads()
    return prefix, mass, count, same


@cuda.jit(device=True, inline="always")
def warp_count(n):
    """Sum over the lanes of a warp."""
    n = uint32(n + shfl_xor_u32(n, uint32(16)))
    n = uint32(n + shfl_xor_u32(n, uint32(8)))
    n = uint32(n + shfl_xor_u32(n, uint32(4)))
    n = uint32(n + shfl_xor_u32(n, uint32(2)))
    return uint32(n + shfl_xor_u32(n, uint32(1)))


@cuda.jit(device=True, inline="always")
def nth_id(shared, source, key, rank, thread):
    """The rank-th lowest place (from 1) with this key, which exists; in every thread.

    A warp counts a stretch of places; the one with the wanted place walks it once more.
    """
    keys, S = source
    warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
    stretch = uint32(uint32((S + uint32(THREADS - 1)) >> uint32(SHIFT)) << uint32(5))
    first = uint32(warp * stretch)
    stop = min(uint32(first + stretch), S)
    n, i = uint32(0), uint32(first + lane)
    while i < stop:
        if ld_global_u32(keys + int64(i) * 4) == key:
            n = uint32(n + uint32(1))
        i = uint32(i + uint32(32))
    n = warp_count(n)
    totals, note = uint32(shared + uint32(COUNTS)), uint32(shared + uint32(NOTES))
    if lane == 0:
        st_shared_u32(uint32(totals + warp * uint32(4)), n)
    cuda.syncthreads()
    before = uint32(0)
    for w in range(THREADS // 32):
        if uint32(w) < warp:
            before = uint32(before + ld_shared_u32(uint32(totals + uint32(4 * w))))
    if before < rank and rank <= before + n and lane == 0:
        i = first
        while before < rank:
            if ld_global_u32(keys + int64(i) * 4) == key:
                before = uint32(before + uint32(1))
            i = uint32(i + uint32(1))
        st_shared_u64(note, int64(i - uint32(1)))
    cuda.syncthreads()
    found = uint32(ld_shared_u64(note))
    cuda.syncthreads()
    return found
