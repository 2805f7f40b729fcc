"""Tokens of a decode linear in shared memory as a whole: the RMS norm of up to 8 rows, in place.

The numbers are those of `ginfer.cuda.norm`: 256 threads take a row as its block does, and what they
do is its code. Every thread block of a linear norms the rows anew: that takes less than a kernel.

Legend: T tokens, C columns, a multiple of 64. Row t lies at t * (2 C + 16): ldmatrix and stores
of neighbouring columns meet no bank twice.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import high_f32, low_f32, row_of_32
from ginfer.cuda.lib.ptx import (
    lane_f32,
    ld_global_u32,
    ld_global_u32x4,
    ld_shared_f32,
    named_barrier,
    shfl_xor_f32,
    st_shared_f32,
    st_shared_u32x4,
)
from ginfer.cuda.norm import HELD, THREADS, add_squares, inverse_rms, load_factors, normed_pair

MOST_TOKENS, MOST_COLUMNS = 8, 5120
NBYTES = MOST_TOKENS * (2 * MOST_COLUMNS + 16)
WARPS = THREADS // 32
NUM_SUMS = MOST_TOKENS * WARPS  # floats in shared memory
NUM_FACTORS = 8 * HELD  # of a thread
AT_ONCE = 4  # rows of a set of threads: registers


@cuda.jit(device=True, inline="always")
def has_group(thread, i, C):
    """Whether a thread has eight columns, from 8 (thread + i THREADS) on."""
    return uint32((thread + uint32(i * THREADS)) * uint32(8)) < C


@cuda.jit(device=True, inline="always")
def row_factors(f, w, C, thread):
    """f = the factors of this thread's columns; w: [C] FP32."""
    for i in range(HELD):
        c = uint32((thread + uint32(i * THREADS)) * uint32(8))
        if c < C:
            load_factors(f, 8 * i, w, c)


@cuda.jit(device=True, inline="always")
def lane_tokens(tokens, T, C, lane):
    """What a lane gives to ldmatrix for the first k tile; tokens from T on repeat the last."""
    row = min(uint32(lane & uint32(7)), uint32(T - uint32(1)))
    stride = uint32(C * uint32(2) + uint32(16))
    return uint32(tokens + row * stride + (lane >> uint32(3)) * uint32(16))


def _lane_sums(count: int, distance: int = 16) -> Any:
    """Device function fold(v, lane): `warp_sum` of v[0] ... v[count - 1] together, whose count is a
    power of two; v[0] becomes the sum of value lane // (32 // count)."""
    half, steps = count // 2, distance.bit_length()
    if half:
        fold_rest = _lane_sums(half, distance // 2)

        @cuda.jit(device=True, inline="always")
        def fold(v, lane):
            upper = (lane & uint32(distance)) != uint32(0)
            for i in range(half):
                kept = v[half + i] if upper else v[i]
                given = v[i] if upper else v[half + i]
                v[i] = kept + shfl_xor_f32(given, uint32(distance))
            fold_rest(v, lane)

    else:

        @cuda.jit(device=True, inline="always")
        def fold(v, lane):
            for i in range(steps):
                v[0] = v[0] + shfl_xor_f32(v[0], uint32(distance >> i))

    return fold


def _norm_of(rows: int, sets: int, meet: int) -> Any:
    """As row_norm, for rows begin + set, + sets, ... of each set of threads, `rows` of them. They
    go through every step together, those from T on with any values, so that no step waits for one
    row alone; a lane finds 1 / rms of one row for all lanes."""
    num_held, lanes = rows * HELD * 4, 32 // rows
    fold = _lane_sums(rows)

    @cuda.jit(device=True, inline="always")
    def load(held, x, columns, first, T, C, thread):
        here, stride = x + int64(thread) * 16, int64(uint32(C * uint32(2)))
        for b in range(rows):
            source = uint32(first + uint32(b * sets))
            if source < T:
                if columns != 0:
                    source = uint32(ld_global_u32(row_of_32(columns, source)))
                at = here + int64(source) * stride
                for i in range(HELD):
                    if has_group(thread, i, C):
                        q = ld_global_u32x4(at + i * THREADS * 16)
                        for j in range(4):
                            held[(b * HELD + i) * 4 + j] = q[j]

    @cuda.jit(device=True, inline="always")
    def norm(tokens, sums, x, f, columns, T, C, eps, consumer, begin):
        held, total = cuda.local.array(num_held, uint32), cuda.local.array(rows, float32)
        pairs = cuda.local.array(4, uint32)
        first = uint32(begin + (consumer >> uint32(8)))
        thread = uint32(consumer & uint32(THREADS - 1))
        lane = uint32(thread & uint32(31))
        load(held, x, columns, first, T, C, thread)
        for b in range(rows):
            total[b] = float32(0.0)
        for i in range(HELD):
            if has_group(thread, i, C):
                for b in range(rows):
                    total[b] = add_squares(total[b], held, (b * HELD + i) * 4)
        fold(total, lane)
        own = uint32(
            sums + (first + uint32(lane // uint32(lanes)) * uint32(sets)) * uint32(4 * WARPS)
        )
        if lane % uint32(lanes) == uint32(0):
            st_shared_f32(uint32(own + (thread >> uint32(5)) * uint32(4)), total[0])
        named_barrier(uint32((consumer >> uint32(8)) + uint32(meet)), uint32(THREADS))
        value = float32(0.0)
        for i in range(WARPS):
            value = value + ld_shared_f32(uint32(own + uint32(i * 4)))
        inv = inverse_rms(value, C, eps)
        for b in range(rows):
            total[b] = lane_f32(inv, uint32(b * lanes))
        stride = uint32(C * uint32(2) + uint32(16))
        to = uint32(tokens + first * stride + thread * uint32(16))
        for i in range(HELD):
            if has_group(thread, i, C):
                for b in range(rows):
                    for j in range(4):
                        word, k = held[(b * HELD + i) * 4 + j], 8 * i + 2 * j
                        low, high = low_f32(word), high_f32(word)
                        pairs[j] = normed_pair(low, high, total[b], f[k], f[k + 1])
                    if uint32(first + uint32(b * sets)) < T:
                        at = uint32(to + uint32(b * sets) * stride + uint32(i * THREADS * 16))
                        st_shared_u32x4(at, pairs[0], pairs[1], pairs[2], pairs[3])

    return norm


def row_norm(sets: int, meet: int, rows: int = 1) -> Any:
    """Device function norm(tokens, sums, x, f, columns, T, C, eps, consumer) of `sets` times 256
    threads: rows `columns` of x (0: the first T) to the place `tokens`, up to 8. f: `row_factors`.
    Barriers from `meet` on are in use; it ends without a meeting of all threads. rows: at once, of
    a set, at least."""
    some, count = _norm_of(rows, sets, meet), rows * sets
    if rows == AT_ONCE or count >= MOST_TOKENS:
        times = MOST_TOKENS // count

        @cuda.jit(device=True, inline="always")
        def norm(tokens, sums, x, f, columns, T, C, eps, consumer):
            for i in range(times):
                begin = uint32(i * count)
                if begin < T:
                    some(tokens, sums, x, f, columns, T, C, eps, consumer, begin)

    else:
        more = row_norm(sets, meet, 2 * rows)

        @cuda.jit(device=True, inline="always")
        def norm(tokens, sums, x, f, columns, T, C, eps, consumer):
            if uint32(count) >= T:
                some(tokens, sums, x, f, columns, T, C, eps, consumer, uint32(0))
            else:
                more(tokens, sums, x, f, columns, T, C, eps, consumer)

    return norm
