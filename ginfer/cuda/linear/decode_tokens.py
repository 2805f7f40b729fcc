"""Tokens of a decode linear in shared memory as a whole: the RMS norm of up to 8 rows, in place.

The numbers are those of `ginfer.cuda.norm`: 256 threads take a row as its block does, and what they
do is its code. Every thread block of a linear norms the rows anew: that takes less than a kernel.

Legend: T tokens, C columns, a multiple of 64. Row t lies at t * (2 C + 16): ldmatrix and stores
of neighbouring columns meet no bank twice.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import high_f32, low_f32, row_of_32, warp_sum
from ginfer.cuda.lib.ptx import (
    ld_global_u32,
    ld_global_u32x4,
    ld_shared_f32,
    named_barrier,
    st_shared_f32,
    st_shared_u32x4,
)
from ginfer.cuda.norm import HELD, THREADS, add_squares, inverse_rms, load_factors, normed_pair

MOST_TOKENS, MOST_COLUMNS = 8, 5120
NBYTES = MOST_TOKENS * (2 * MOST_COLUMNS + 16)
WARPS = THREADS // 32
NUM_SUMS = MOST_TOKENS * WARPS  # floats in shared memory
NUM_FACTORS = 8 * HELD  # of a thread
AT_ONCE = 8  # rows that all threads hold at a time


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


def row_norm(sets: int, meet: int) -> Any:
    """Device function norm(tokens, sums, x, f, columns, T, C, eps, consumer) of `sets` times 256
    threads: rows `columns` of x (0: the first T) to the place `tokens`. f: `row_factors`. Barriers
    from `meet` on are in use; it ends without a meeting of all threads."""
    rows = AT_ONCE // sets
    num_held = rows * HELD * 4

    @cuda.jit(device=True, inline="always")
    def load(held, b, x, columns, t, C, thread):
        row = t
        if columns != 0:
            row = uint32(ld_global_u32(row_of_32(columns, t)))
        for i in range(HELD):
            c = uint32((thread + uint32(i * THREADS)) * uint32(8))
            if c < C:
                q = ld_global_u32x4(x + (int64(row) * int64(C) + int64(c)) * 2)
                for j in range(4):
                    held[(b * HELD + i) * 4 + j] = q[j]

    @cuda.jit(device=True, inline="always")
    def publish(held, b, sums, t, C, thread):
        total = float32(0.0)
        for i in range(HELD):
            if uint32((thread + uint32(i * THREADS)) * uint32(8)) < C:
                total = add_squares(total, held, (b * HELD + i) * 4)
        total = warp_sum(total)
        if thread & uint32(31) == 0:
            at = uint32(t * uint32(WARPS) + (thread >> uint32(5)))
            st_shared_f32(uint32(sums + at * uint32(4)), total)

    @cuda.jit(device=True, inline="always")
    def finish(tokens, sums, held, b, f, t, C, eps, thread):
        pairs, total = cuda.local.array(4, uint32), float32(0.0)
        for i in range(WARPS):
            at = uint32(t * uint32(WARPS) + uint32(i))
            total = total + ld_shared_f32(uint32(sums + at * uint32(4)))
        inv = inverse_rms(total, C, eps)
        row = uint32(tokens + t * uint32(C * uint32(2) + uint32(16)))
        for i in range(HELD):
            c = uint32((thread + uint32(i * THREADS)) * uint32(8))
            if c < C:
                for j in range(4):
                    word, k = held[(b * HELD + i) * 4 + j], 8 * i + 2 * j
                    pairs[j] = normed_pair(low_f32(word), high_f32(word), inv, f[k], f[k + 1])
                to = uint32(row + c * uint32(2))
                st_shared_u32x4(to, pairs[0], pairs[1], pairs[2], pairs[3])

    @cuda.jit(device=True, inline="always")
    def norm(tokens, sums, x, f, columns, T, C, eps, consumer):
        held = cuda.local.array(num_held, uint32)
        mine, thread = uint32(consumer >> uint32(8)), uint32(consumer & uint32(THREADS - 1))
        first = mine
        while first < T:
            for b in range(rows):
                t = uint32(first + uint32(b * sets))
                if t < T:
                    load(held, b, x, columns, t, C, thread)
            for b in range(rows):
                t = uint32(first + uint32(b * sets))
                if t < T:
                    publish(held, b, sums, t, C, thread)
            named_barrier(uint32(mine + uint32(meet)), uint32(THREADS))
            for b in range(rows):
                t = uint32(first + uint32(b * sets))
                if t < T:
                    finish(tokens, sums, held, b, f, t, C, eps, thread)
            first = uint32(first + uint32(AT_ONCE))

    return norm
