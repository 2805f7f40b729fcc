"""Linear for many tokens on mma.sync, for capabilities without wgmma (sm_80 and later).

y[t, n] = sum_k x[t, k] * W[n, k]. Legend: N rows of W, K columns of W, T tokens.

A block multiplies 128 rows by 128 tokens: eight warps of 32 rows by 64 tokens. k tiles come through
a ring by cp.async, tails of T and K as zeros; weights become fragments in registers, tokens are
read with ldmatrix. Rounding and order of sums as in `prefill`: FP32, ascending k, the same for
every T.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    bf16_from_f32,
    bf16x2_fma,
    cp_async_16,
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_1,
    div_u32,
    exp2_approx,
    ld_global_u16,
    ld_global_u32x4,
    ldmatrix_x4,
    mma_m16n8k16_bf16,
    shared_address,
    st_global_f32,
    st_global_u16,
    st_global_u32x4,
    st_shared_u16,
    u16_low,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.prefill import operand_loader, row_writer
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

THREADS = 256
TILE_T = 128
STAGES = 3
X_BYTES = TILE_T * 128  # of a k tile


@cuda.jit(device=True, inline="always")
def _silu_up(gate, up):
    return gate / (float32(1.0) + exp2_approx(gate * float32(-1.4426950408889634))) * up


@cuda.jit(device=True, inline="always")
def _put(to, w0, w1, w2, w3, add):
    if add:
        old, one = ld_global_u32x4(to), uint32(0x3F803F80)
        w0, w1 = bf16x2_fma(old[0], one, w0), bf16x2_fma(old[1], one, w1)
        w2, w3 = bf16x2_fma(old[2], one, w2), bf16x2_fma(old[3], one, w3)
    st_global_u32x4(to, w0, w1, w2, w3)


@cuda.jit(device=True, inline="always")
def _put_one(to, bits, add):
    if add:
        bits = u16_low(bf16x2_fma(uint32(ld_global_u16(to)), uint32(0x3F803F80), uint32(bits)))
    st_global_u16(to, bits)


@cuda.jit(device=True, inline="always")
def mma_into(c, p, a0, a1, a2, a3, b0, b1):
    """c[p : p + 4] += A B."""
    r = mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, c[p], c[p + 1], c[p + 2], c[p + 3])
    for i in range(4):
        c[p + i] = r[i]


@kernel(*(int64,) * 3, *(uint32,) * 6)
def linear_prefill_mma_kernel(fmt: str, epilogue: int) -> Build:
    """Arguments w, x, y, k_tiles, blocks, T, N, add, K; grid: blocks of 128 rows x tiles of 128
    tokens.

    x: [T, K] BF16 at a multiple of 16, K a multiple of 8. epilogue: STORE_BF16, which adds to y
    where `add` is not 0, STORE_F32 or SILU_UP.
    """
    tile_bytes = UNPACK[fmt].tile_nbytes
    stage_bytes, w_chunks, ahead = X_BYTES + tile_bytes, tile_bytes // 16, STAGES - 1
    store_f32, paired = epilogue == Epilogue.STORE_F32, epilogue == Epilogue.SILU_UP
    out_rows = 32 if paired else 64
    out_bytes, staging = out_rows * 2, TILE_T * out_rows * 2
    skew, mask = (1, 3) if paired else (0, 7)
    row_step, results = (8, 2) if paired else (16, 4)  # of a row tile; of four sums
    load, operand, num_words, num_scales = operand_loader(fmt, paired)
    write_rows = row_writer(TILE_T, out_bytes, _put, _put_one)

    @cuda.jit(device=True, inline="always")
    def fetch(ring, w, x, k, thread, token, T, K):
        """Begin the copies of k tile `k`; `w` at its weights."""
        to = uint32(ring + (k % uint32(STAGES)) * uint32(stage_bytes))
        chunk = uint32(thread & uint32(7))
        column = uint32(k * uint32(64) + chunk * uint32(8))
        for i in range(TILE_T // 32):
            local = uint32((thread >> uint32(3)) + uint32(32 * i))
            there = uint32(token + local) < T and column < K
            at = x + (int64(token + local) * int64(K) + int64(column)) * 2 if there else x
            place = uint32(local * uint32(128) + (chunk ^ (local & uint32(7))) * uint32(16))
            cp_async_16_or_zero(uint32(to + place), at, uint32(16) if there else uint32(0))
        chunk = thread
        while chunk < uint32(w_chunks):
            place = uint32(uint32(X_BYTES) + chunk * uint32(16))
            cp_async_16(uint32(to + place), w + int64(chunk) * 16)
            chunk = uint32(chunk + uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def dequantise(a, m, weights, rows, lane):
        """a[16 m + 4 i : 16 m + 4 i + 4] = the fragment of k16 step i of a row tile."""
        v, s = cuda.local.array(num_words, uint32), cuda.local.array(num_scales, uint32)
        load(v, s, weights, rows, lane)
        for i in range(4):
            r = operand(v, s, i, rows)
            for j in range(4):
                a[16 * m + 4 * i + j] = r[j]

    @cuda.jit(device=True, inline="always")
    def multiply_step(c, a, i, at, upper):
        """c += k16 step i; at, upper: where and which chunk of it this lane gives to ldmatrix."""
        at = uint32(at ^ uint32((uint32(2 * i) + upper) * uint32(16)))
        for n in range(4):
            t = ldmatrix_x4(uint32(at + uint32(n * 2048)))
            for m in range(2):
                f = 16 * m + 4 * i
                for h in range(2):
                    p, q = 32 * m + (2 * n + h) * 4, 2 * h
                    mma_into(c, p, a[f], a[f + 1], a[f + 2], a[f + 3], t[q], t[q + 1])

    @cuda.jit(device=True, inline="always")
    def multiply_tile(c, stage, rows, tokens, lane):
        """c += one k tile: two row tiles from `rows`, 64 tokens from `tokens`.

        Steps are spelt out: a loop too long to unroll would put its arrays into local memory.
        """
        a = cuda.local.array(32, uint32)
        weights = uint32(stage + uint32(X_BYTES))
        dequantise(a, 0, weights, rows, lane)
        dequantise(a, 1, weights, uint32(rows + uint32(1)), lane)
        line, upper = uint32(lane & uint32(7)), uint32((lane >> uint32(3)) & uint32(1))
        first = uint32(tokens + (lane >> uint32(4)) * uint32(8) + line)
        at = uint32(stage + first * uint32(128) + line * uint32(16))
        multiply_step(c, a, 0, at, upper)
        multiply_step(c, a, 1, at, upper)
        multiply_step(c, a, 2, at, upper)
        multiply_step(c, a, 3, at, upper)

    @cuda.jit(device=True, inline="always")
    def stage_results(c, staged, rows, t, g):
        """BF16 results to the shared tile; t: first token of the lane, g: its row of eight."""
        bases = cuda.local.array(8, uint32)
        for b in range(8):  # tile m, rows g or g + 8, even or odd token
            tile = uint32(rows + uint32(b >> 2))
            row = uint32(tile * uint32(row_step) + uint32(((b >> 1) & 1) * 8))
            column = uint32(t + uint32(b & 1))
            half, chunk = uint32(row // uint32(out_rows)), uint32((row // uint32(8)) & uint32(mask))
            chunk = uint32(chunk ^ ((column >> uint32(skew)) & uint32(mask)))
            at = uint32(staged + half * uint32(staging) + column * uint32(out_bytes))
            bases[b] = uint32(at + chunk * uint32(16) + g * uint32(2))
        for m in range(2):
            for n in range(8):
                for j in range(results):
                    i = 32 * m + 4 * n + j
                    value = _silu_up(c[i], c[i + results % 4]) if paired else c[i]
                    at = uint32(bases[4 * m + j] + uint32(n * 8 * out_bytes))
                    st_shared_u16(at, bf16_from_f32(value))

    @cuda.jit(device=True, inline="always")
    def store_sums(c, y, rows, t, g, left_t, left_n, N):
        """The sums in FP32 to y, the place of the block's first row and token."""
        for m in range(2):
            for n in range(8):
                for j in range(4):
                    column = uint32(t + uint32(8 * n + (j & 1)))
                    row = uint32((rows + uint32(m)) * uint32(16) + g + uint32(8 * (j >> 1)))
                    if row < left_n and column < left_t:
                        at = y + (int64(column) * int64(N) + int64(row)) * 4
                        st_global_f32(at, c[32 * m + 4 * n + j])

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def linear_prefill_mma(w, x, y, k_tiles, blocks, T, N, add, K):
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        tiles = div_u32(uint32(T + uint32(TILE_T - 1)), uint32(TILE_T))
        block = div_u32(uint32(cuda.blockIdx.x), tiles)
        token = uint32((uint32(cuda.blockIdx.x) - block * tiles) * uint32(TILE_T))
        source = w + int64(block) * int64(k_tiles) * tile_bytes
        rows, tokens = (
            uint32((warp & uint32(3)) * uint32(2)),
            uint32((warp >> uint32(2)) * uint32(64)),
        )
        c = cuda.local.array(64, float32)
        for i in range(64):
            c[i] = float32(0.0)
        for k in range(ahead):
            if uint32(k) < k_tiles:
                fetch(ring, source + k * tile_bytes, x, uint32(k), thread, token, T, K)
            cp_async_commit()
        k = uint32(0)
        while k < k_tiles:
            cp_async_wait_1()
            cuda.syncthreads()
            coming = uint32(k + uint32(ahead))
            if coming < k_tiles:
                fetch(ring, source + int64(coming) * tile_bytes, x, coming, thread, token, T, K)
            cp_async_commit()
            stage = uint32(ring + (k % uint32(STAGES)) * uint32(stage_bytes))
            multiply_tile(c, stage, rows, tokens, lane)
            k = uint32(k + uint32(1))
        cuda.syncthreads()
        g, t = uint32(lane >> uint32(2)), uint32(tokens + (lane & uint32(3)) * uint32(2))
        if store_f32:
            y_tile = y + (int64(token) * int64(N) + int64(block * uint32(128))) * 4
            left_t, left_n = uint32(T - token), uint32(N - block * uint32(128))
            store_sums(c, y_tile, rows, t, g, left_t, left_n, N)
        else:
            stage_results(c, ring, rows, t, g)
            cuda.syncthreads()
            half, out_n = uint32(thread >> uint32(7)), uint32(N >> uint32(1)) if paired else N
            first = uint32((block * uint32(2) + half) * uint32(out_rows))
            staged = uint32(ring + half * uint32(staging))
            thread, add = uint32(thread & uint32(127)), uint32(0) if paired else add
            write_rows(y, staged, thread, first, token, T, out_n, add)

    return Build(linear_prefill_mma, THREADS, max(STAGES * stage_bytes, 2 * staging) + 128)
