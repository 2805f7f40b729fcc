"""Linear of a small BF16 matrix for 9 to 64 tokens on sm_90: y[t, n] = sum_k x[t, k] * W[n, k].

The numbers of `decode`. There one thread block would read the slices of all tokens, one behind the
other, which takes longer than the products; here a block has 16 rows and 8 tokens, a warp one slice
of K, and slices meet in shared memory.

Legend: N rows of W, K columns of W, T tokens, NT = tiles of 8 tokens. Tokens arrive in the order of
`fragment_offset`, whose 128 bytes are what the lanes of a warp multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    div_u32,
    ld_global_u32,
    let_next_kernel_start,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.linear.decode_beside import (
    AT_ONCE,
    ROW_TILE_NBYTES,
    TILE_NBYTES,
    add_k_tile,
    finish_row_tile,
    load_weights,
    put_slice,
)
from ginfer.cuda.linear.decode_results import MAX_SLICES, X_TILE
from ginfer.cuda.linear.decode_runs import place
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

MOST_ROWS = 128  # one row block
THREADS = 32 * MAX_SLICES  # a warp each


@cuda.jit(device=True, inline="always")
def load_tokens(x, p, at, lane):
    """x[p : p + 8] = B of the four steps of a k tile of 8 tokens at an address."""
    for i in range(8):
        x[p + i] = ld_global_u32(at + i * 128 + int64(lane) * 4)


@kernel(*(int64,) * 3, *(uint32,) * 5)
def linear_decode_small_kernel():
    """Arguments w, x, y, k_tiles, slices, NT, T, N. w: [N, K] BF16 in tiles, N at most MOST_ROWS;
    y: [T, N] FP32. A block takes a row tile and a tile of tokens."""
    num_weights, num_tokens, room_words = AT_ONCE * 16, AT_ONCE * 8, MAX_SLICES * 128

    @cuda.jit(device=True, inline="always")
    def load_all(v, w, done, count, lane):
        for b in range(AT_ONCE):
            if uint32(done + uint32(b)) < count:
                load_weights(v, b, w + int64(done + uint32(b)) * TILE_NBYTES, lane)

    @cuda.jit(device=True, inline="always")
    def add_all(c, v, u, done, count):
        for b in range(AT_ONCE):
            if uint32(done + uint32(b)) < count:
                p = b * 8
                low = (u[p], u[p + 1], u[p + 2], u[p + 3])
                high = (u[p + 4], u[p + 5], u[p + 6], u[p + 7])
                add_k_tile(c, v, b, low, high)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def linear_decode_small(w, x, y, k_tiles, slices, NT, T, N):
        room = shared_address(cuda.shared.array(room_words, float32))
        v, u = cuda.local.array(num_weights, uint32), cuda.local.array(num_tokens, uint32)
        c = cuda.local.array(4, float32)
        thread, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        s, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        row_tile = div_u32(block, NT)
        n = uint32(block - row_tile * NT)
        let_next_kernel_start()
        if s < slices:
            cut = (k_tiles, uint32(1), uint32(0), slices, uint32(1))
            _, first, count, _, _, _ = place(uint32(s * uint32(2)), cut)
            weights = w + int64(first) * TILE_NBYTES + int64(row_tile) * ROW_TILE_NBYTES
            tokens = x + (int64(first) * int64(NT) + int64(n)) * X_TILE
            load_all(v, weights, uint32(0), count, lane)
            wait_for_previous_kernel()
            for i in range(4):
                c[i] = float32(0.0)
            done = uint32(0)
            while done < count:
                for b in range(AT_ONCE):
                    k = uint32(done + uint32(b))
                    if k < count:
                        at = tokens + int64(k) * int64(NT) * X_TILE
                        load_tokens(u, 8 * b, at, lane)
                add_all(c, v, u, done, count)
                done = uint32(done + uint32(AT_ONCE))
                load_all(v, weights, done, count, lane)
            put_slice(c, room, s, lane)
        else:
            wait_for_previous_kernel()
        cuda.syncthreads()
        if s == uint32(0):
            mine = uint32(T - min(T, uint32(n * uint32(8))))
            to = y + int64(n) * 8 * int64(N) * 4
            finish_row_tile(c, to, room, row_tile, slices, mine, N, lane)

    return Build(linear_decode_small, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel, where decode linears wait for slices."""
    if starts_early(capability):
        yield linear_decode_small_kernel()
