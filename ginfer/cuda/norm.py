"""RMS norm of rows: y[t, c] = x[columns[t], c] * w[c] / sqrt(mean_c(x^2) + eps), BF16 to BF16.

w is the factor itself in FP32 (1 + weight for the norms of the residual stream). Sums are FP32, in
one order for every T and both kernels.

Legend: T tokens, C columns, a multiple of 8. Oracle: tests.oracles.norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.fragment import eight_store, tiles_of
from ginfer.cuda.lib.numeric import (
    block_sum,
    follow,
    follow_late,
    high_f32,
    load_bf16x8,
    low_f32,
    pack_bf16,
    row_of_32,
)
from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    div_rn_f32,
    fma_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_global_u32x4,
    mul_rn_f32,
    rsqrt_approx,
    shared_address,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 256
HELD = 3  # groups of eight columns of a thread that stay in registers
MANY, ROWS = 256, 4  # tokens from which on a block takes several rows, and how many


@cuda.jit(device=True, inline="always")
def load_factors(f, p, w, c):
    """f[p : p + 8] = w[c : c + 8]."""
    for i in range(2):
        q = ld_global_f32x4(w + (int64(c) + 4 * i) * 4)
        for j in range(4):
            f[p + 4 * i + j] = q[j]


@cuda.jit(device=True, inline="always")
def add_squares(total, held, p):
    """total + the squares of the pairs held[p : p + 4], in turn."""
    for j in range(4):
        low, high = low_f32(held[p + j]), high_f32(held[p + j])
        total = fma_f32(high, high, fma_f32(low, low, total))
    return total


@cuda.jit(device=True, inline="always")
def fetch_row(held, row, thread, C):
    """held = pairs of the thread's columns of a row."""
    for i in range(HELD):
        c = uint32((thread + uint32(i * THREADS)) * uint32(8))
        if c < C:
            q = ld_global_u32x4(row + int64(c) * 2)
            for j in range(4):
                held[4 * i + j] = q[j]


@cuda.jit(device=True, inline="always")
def squares_of_row(held, thread, C):
    """Sum of the squares of what `fetch_row` has fetched."""
    total = float32(0.0)
    for i in range(HELD):
        if uint32((thread + uint32(i * THREADS)) * uint32(8)) < C:
            total = add_squares(total, held, 4 * i)
    return total


@cuda.jit(device=True, inline="always")
def inverse_rms(total, C, eps):
    """1 / sqrt(total / C + eps)."""
    return rsqrt_approx(add_rn_f32(div_rn_f32(total, float32(C)), eps))


@cuda.jit(device=True, inline="always")
def normed_pair(low, high, inv, f_low, f_high):
    """Two columns of a result."""
    low, high = mul_rn_f32(low, inv), mul_rn_f32(high, inv)
    return pack_bf16(mul_rn_f32(low, f_low), mul_rn_f32(high, f_high))


@kernel(*(int64,) * 4, *(uint32,) * 3, float32)
def rms_norm_kernel(fragments: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments y, x, w, columns (0: t itself), C, first, rest, eps. A block takes one row."""
    (start, wait), store = follow_late(early), eight_store(fragments)
    warps, held_words, held_factors = THREADS // 32, 4 * HELD, 8 * HELD

    @cuda.jit(device=True, inline="always")
    def finish(y, v, f, p, token, c, C, first, rest, inv):
        """Eight columns from c of a result, whose factors are f[p : p + 8]."""
        pairs = cuda.local.array(4, uint32)
        for i in range(4):
            k = p + 2 * i
            pairs[i] = normed_pair(v[2 * i], v[2 * i + 1], inv, f[k], f[k + 1])
        store(y, token, c, C, first, rest, pairs)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def rms_norm(y, x, w, columns, C, first, rest, eps):
        words = shared_address(cuda.shared.array(warps, float32))
        v, held = cuda.local.array(8, float32), cuda.local.array(held_words, uint32)
        f = cuda.local.array(held_factors, float32)
        start()
        token, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        source = token
        if columns != 0:
            source = uint32(ld_global_u32(row_of_32(columns, token)))
        row = x + int64(source) * int64(C) * 2
        for i in range(HELD):
            c = uint32((thread + uint32(i * THREADS)) * uint32(8))
            if c < C:
                load_factors(f, 8 * i, w, c)
        wait()
        fetch_row(held, row, thread, C)
        total = squares_of_row(held, thread, C)
        c = uint32((thread + uint32(HELD * THREADS)) * uint32(8))
        while c < C:
            load_bf16x8(v, row + int64(c) * 2)
            for i in range(8):
                total = fma_f32(v[i], v[i], total)
            c = uint32(c + uint32(THREADS * 8))
        inv = inverse_rms(block_sum(total, words, warps), C, eps)
        for i in range(HELD):
            c = uint32((thread + uint32(i * THREADS)) * uint32(8))
            if c < C:
                for j in range(4):
                    v[2 * j] = low_f32(held[4 * i + j])
                    v[2 * j + 1] = high_f32(held[4 * i + j])
                finish(y, v, f, 8 * i, token, c, C, first, rest, inv)
        c = uint32((thread + uint32(HELD * THREADS)) * uint32(8))
        while c < C:
            load_bf16x8(v, row + int64(c) * 2)
            load_factors(f, 0, w, c)
            finish(y, v, f, 0, token, c, C, first, rest, inv)
            c = uint32(c + uint32(THREADS * 8))

    return Build(rms_norm, THREADS)


@kernel(*(int64,) * 3, *(uint32,) * 2, float32)
def rms_norm_rows_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, x, w, T, C, eps; C at most 8 * HELD * THREADS. A block takes every gridDim-th
    row, and reads the next one while it works on one."""
    start, warps, held_words = follow(early), THREADS // 32, 4 * HELD

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def rms_norm_rows(y, x, w, T, C, eps):
        words = shared_address(cuda.shared.array(warps, float32))
        held, ahead = cuda.local.array(held_words, uint32), cuda.local.array(held_words, uint32)
        pairs, f = cuda.local.array(4, uint32), cuda.local.array(8, float32)
        start()
        token, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        fetch_row(ahead, x + int64(token) * int64(C) * 2, thread, C)
        while token < T:
            for i in range(held_words):
                held[i] = ahead[i]
            following = uint32(token + uint32(cuda.gridDim.x))
            if following < T:
                fetch_row(ahead, x + int64(following) * int64(C) * 2, thread, C)
            total = squares_of_row(held, thread, C)
            inv = inverse_rms(block_sum(total, words, warps), C, eps)
            for i in range(HELD):
                c = uint32((thread + uint32(i * THREADS)) * uint32(8))
                if c < C:
                    load_factors(f, 0, w, c)
                    for j in range(4):
                        word = held[4 * i + j]
                        low, high = low_f32(word), high_f32(word)
                        pairs[j] = normed_pair(low, high, inv, f[2 * j], f[2 * j + 1])
                    to = y + (int64(token) * int64(C) + int64(c)) * 2
                    st_global_u32x4(to, pairs[0], pairs[1], pairs[2], pairs[3])
            cuda.syncthreads()  # everyone has read `words`
            token = following

    return Build(rms_norm_rows, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Row-major results, of few rows and of many, and the fragment order that decode linear kernels
    read."""
    early = starts_early(capability)
    yield rms_norm_rows_kernel(early)
    yield rms_norm_kernel(0, early)
    yield rms_norm_kernel(1, early)


@dataclass(frozen=True)
class RowNorm:
    """eps; fragments: results in fragment order; columns: address of [T] u32, which row of x each
    result takes, or 0 for all in turn."""

    eps: float
    fragments: bool = False
    columns: int = 0


def rms_norm(queue: Queue, y: int, x: int, w: int, *, shape: tuple[int, int], how: RowNorm) -> None:
    """Norm of T rows. y, x: [T, C] BF16; w: [C] FP32; shape: (T, C)."""
    T, C = shape
    if T >= MANY and C <= 8 * HELD * THREADS and not (how.fragments or how.columns):
        item = rms_norm_rows_kernel(queue.early)
        queue.launch(item, (div_ceil(T, ROWS),), y, x, w, T, C, how.eps)
        return
    item = rms_norm_kernel(how.fragments, queue.early)
    queue.launch(item, (T,), y, x, w, how.columns, C, *tiles_of(T), how.eps)
