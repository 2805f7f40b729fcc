"""Merge of attention partials, left to right, and the output gate.

out[t, h] = sum_b w_b part_b / sum_b w_b l_b * sigmoid(gate[t, h]), w_b = e^(m_b - max m), blocks
b ascending. A block takes a column and a head. Legend as in `attention.decode`.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.decode import BLOCK_KEYS, LOWEST
from ginfer.cuda.lib.fragment import pair_store
from ginfer.cuda.lib.numeric import (
    follow,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    sigmoid,
    warp_max,
)
from ginfer.cuda.lib.ptx import (
    div_u32,
    exp2_approx,
    fma_f32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_f32,
    shared_address,
    st_shared_f32,
)
from ginfer.cuda.runtime.jit import Build, kernel

THREADS = HEAD_DIM // 2
STEP = 8  # partials in flight per thread


@kernel(*(int64,) * 6, *(uint32,) * 4)
def attention_merge_kernel(fragments: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments out, partials, stats, qkgv, first, token, H, G, first_tiles, rest_tiles. A thread
    owns two dims."""
    start, store, D, warps = follow(early), pair_store(fragments), HEAD_DIM, THREADS // 32
    chunk, held = THREADS, 2 * STEP

    @cuda.jit(device=True, inline="always")
    def highest(stats, blocks, pitch, words, thread):
        """Largest m of the blocks."""
        top = float32(LOWEST)
        b = thread
        while b < blocks:
            top = max(top, ld_global_f32(stats + int64(b) * pitch))
            b = uint32(b + uint32(THREADS))
        top = warp_max(top)
        if thread & uint32(31) == 0:
            st_shared_f32(uint32(words + (thread >> uint32(5)) * uint32(4)), top)
        cuda.syncthreads()
        for i in range(warps):
            top = max(top, ld_shared_f32(uint32(words + uint32(i * 4))))
        return top

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_merge(out, partials, stats, qkgv, first, token, H, G, first_tiles, rest_tiles):
        words = shared_address(cuda.shared.array(warps, float32))
        weights = shared_address(cuda.shared.array(chunk, float32))
        sums = shared_address(cuda.shared.array(chunk, float32))
        v = cuda.local.array(held, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), H)
        h, thread = uint32(uint32(cuda.blockIdx.x) - t * H), uint32(cuda.threadIdx.x)
        blocks = uint32(div_u32(ld_global_u32(row_of_32(token, t)), uint32(BLOCK_KEYS)) + uint32(1))
        home = int64(ld_global_u32(row_of_32(first, t))) * int64(H) + int64(h)
        stats_at, pitch = stats + home * 8, int64(H) * 8
        source, step = partials + home * (4 * D) + int64(thread) * 8, int64(H) * (4 * D)
        top = highest(stats_at, blocks, pitch, words, thread)
        low, high, total = float32(0.0), float32(0.0), float32(0.0)
        done = uint32(0)
        while done < blocks:
            b = uint32(done + thread)
            weight, part = float32(0.0), float32(0.0)
            if b < blocks:
                at = stats_at + int64(b) * pitch
                weight = exp2_approx(ld_global_f32(at) - top)
                part = ld_global_f32(at + 4)
            st_shared_f32(uint32(weights + thread * uint32(4)), weight)
            st_shared_f32(uint32(sums + thread * uint32(4)), part)
            cuda.syncthreads()
            count = min(uint32(blocks - done), uint32(chunk))
            i = uint32(0)
            while i < count:
                for j in range(STEP):
                    b = min(uint32(i + uint32(j)), uint32(count - uint32(1)))
                    at = source + int64(done + b) * step
                    v[2 * j], v[2 * j + 1] = ld_global_f32(at), ld_global_f32(at + 4)
                for j in range(STEP):
                    b = uint32(i + uint32(j))
                    if b < count:
                        weight = ld_shared_f32(uint32(weights + b * uint32(4)))
                        part = ld_shared_f32(uint32(sums + b * uint32(4)))
                        total = fma_f32(weight, part, total)
                        low = fma_f32(weight, v[2 * j], low)
                        high = fma_f32(weight, v[2 * j + 1], high)
                i = uint32(i + uint32(STEP))
            cuda.syncthreads()
            done = uint32(done + uint32(chunk))
        width = int64(H + G) * D
        gate = qkgv + (int64(t) * width * 2 + width + int64(h) * D) * 2 + int64(thread) * 4
        pair = ld_global_u32(gate)
        low = low / total * sigmoid(low_f32(pair))
        high = high / total * sigmoid(high_f32(pair))
        column = uint32(h * uint32(D) + thread * uint32(2))
        width_out = uint32(H * uint32(D))
        store(out, t, column, width_out, first_tiles, rest_tiles, pack_bf16(low, high))

    return Build(attention_merge, THREADS)
