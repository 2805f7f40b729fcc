"""Merge of attention partials: blocks left to right inside spans, then spans, and the output gate.

out[t, h] = sum_s w_s span_s / sum_s w_s l_s * sigmoid(gate[t, h]), w_s = e^(m_s - max m), spans s
ascending; a span is the fold of its blocks where these are separate partials. A thread block takes
a column and a head. Legend as in `attention.decode`.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.decode_parts import BLOCK_KEYS, LOWEST, SPAN_BLOCKS, fold, fold_factors
from ginfer.cuda.lib.fragment import pair_store
from ginfer.cuda.lib.numeric import (
    follow_late,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    sigmoid,
    warp_max,
)
from ginfer.cuda.lib.ptx import (
    bits_from_f32,
    div_u32,
    exp2_approx,
    f32_from_bits,
    fma_f32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32x4,
    shared_address,
    st_shared_f32,
    st_shared_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel

THREADS = HEAD_DIM // 2
STEP, HALF = 16, 8  # partials in flight per thread, and where there are few
RESIDENT = 8  # blocks on a multiprocessor: all of 64 columns at most twice
SPAN_LOW, SPAN_HIGH, LOW, HIGH, TOTAL = range(5)


@kernel(*(int64,) * 7, *(uint32,) * 4)
def attention_merge_kernel(fragments: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments out, partials, stats, qkgv, units, first, token, H, G, first_tiles, rest_tiles;
    units as in `attention_decode_kernel`, of which the grain matters. A thread owns two dims."""
    (start, wait), store = follow_late(early), pair_store(fragments)
    D, warps = HEAD_DIM, THREADS // 32
    held, factor_words = 2 * STEP, 4 * THREADS

    @cuda.jit(device=True, inline="always")
    def highest(stats, slots, pitch, words, thread):
        """Largest m of the partials."""
        top = float32(LOWEST)
        i = thread
        while i < slots:
            top = max(top, ld_global_f32(stats + int64(i) * pitch))
            i = uint32(i + uint32(THREADS))
        top = warp_max(top)
        if thread & uint32(31) == 0:
            st_shared_f32(uint32(words + (thread >> uint32(5)) * uint32(4)), top)
        cuda.syncthreads()
        for i in range(warps):
            top = max(top, ld_shared_f32(uint32(words + uint32(i * 4))))
        return top

    @cuda.jit(device=True, inline="always")
    def factors(stats, slot, slots, pitch, per_span, top, at):
        """For partial `slot`: its two factors in the fold of its span, and if it is the span's last
        the weight of the span and its sum (else 0)."""
        m, l = float32(LOWEST), float32(0.0)
        keep, take = float32(0.0), float32(0.0)
        base = uint32(slot - (slot & uint32(per_span - uint32(1))))
        for j in range(SPAN_BLOCKS):
            i = uint32(base + uint32(j))
            if i <= slot:
                coming = stats + int64(i) * pitch
                m, keep, take = fold_factors(m, ld_global_f32(coming))
                l = fold(l, keep, ld_global_f32(coming + 4), take)
        weight = float32(0.0)
        if uint32(slot - base) + uint32(1) == per_span or slot + uint32(1) == slots:
            weight = exp2_approx(m - top)
        st_shared_u32x4(
            at, bits_from_f32(keep), bits_from_f32(take), bits_from_f32(weight), bits_from_f32(l)
        )

    @cuda.jit(device=True, inline="always")
    def load(v, j, source, step, done, i, count):
        """Two dims of partial i + j after the first `done`, or of the last one."""
        b = min(uint32(i + uint32(j)), uint32(count - uint32(1)))
        at = source + int64(done + b) * step
        v[2 * j], v[2 * j + 1] = ld_global_f32(at), ld_global_f32(at + 4)

    @cuda.jit(device=True, inline="always")
    def take_in(sums, v, j, table, i):
        """Fold the partial into its span, and the span, if it ends here, into the sums."""
        q = ld_shared_u32x4(uint32(table + (i + uint32(j)) * uint32(16)))
        keep, take, weight = f32_from_bits(q[0]), f32_from_bits(q[1]), f32_from_bits(q[2])
        sums[SPAN_LOW] = fold(sums[SPAN_LOW], keep, v[2 * j], take)
        sums[SPAN_HIGH] = fold(sums[SPAN_HIGH], keep, v[2 * j + 1], take)
        sums[TOTAL] = fma_f32(weight, f32_from_bits(q[3]), sums[TOTAL])
        sums[LOW] = fma_f32(weight, sums[SPAN_LOW], sums[LOW])
        sums[HIGH] = fma_f32(weight, sums[SPAN_HIGH], sums[HIGH])

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, RESIDENT))
    def attention_merge(
        out, partials, stats, qkgv, units, first, token, H, G, first_tiles, rest_tiles
    ):
        words = shared_address(cuda.shared.array(warps, float32))
        table = shared_address(cuda.shared.array(factor_words, float32))
        table = uint32(table)
        v, sums = cuda.local.array(held, float32), cuda.local.array(5, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), H)
        h, thread = uint32(uint32(cuda.blockIdx.x) - t * H), uint32(cuda.threadIdx.x)
        grain = ld_global_u32(units + 4)
        per_span = div_u32(uint32(SPAN_BLOCKS), grain)
        keys = uint32(grain * uint32(BLOCK_KEYS))
        slots = uint32(div_u32(ld_global_u32(row_of_32(token, t)), keys) + uint32(1))
        home = int64(ld_global_u32(row_of_32(first, t))) * int64(H) + int64(h)
        stats_at, pitch = stats + home * 8, int64(H) * 8
        source, step = partials + home * (4 * D) + int64(thread) * 8, int64(H) * (4 * D)
        wait()
        top = highest(stats_at, slots, pitch, words, thread)
        for i in range(5):
            sums[i] = float32(0.0)
        done = uint32(0)
        while done < slots:
            slot, at = uint32(done + thread), uint32(table + thread * uint32(16))
            if slot < slots:
                factors(stats_at, slot, slots, pitch, per_span, top, at)
            else:  # changes nothing
                one, none = bits_from_f32(float32(1.0)), uint32(0)
                st_shared_u32x4(at, one, none, none, none)
            cuda.syncthreads()
            count = min(uint32(slots - done), uint32(THREADS))
            i = uint32(0)
            while i < count:
                more = uint32(count - i) > uint32(HALF)
                for j in range(HALF):
                    load(v, j, source, step, uint32(done), i, count)
                if more:
                    for j in range(HALF, STEP):
                        load(v, j, source, step, uint32(done), i, count)
                for j in range(HALF):
                    take_in(sums, v, j, table, i)
                if more:
                    for j in range(HALF, STEP):
                        take_in(sums, v, j, table, i)
                i = uint32(i + uint32(STEP))
            cuda.syncthreads()
            done = uint32(done + uint32(THREADS))
        width = int64(H + G) * D
        gate = qkgv + (int64(t) * width * 2 + width + int64(h) * D) * 2 + int64(thread) * 4
        pair = ld_global_u32(gate)
        low = sums[LOW] / sums[TOTAL] * sigmoid(low_f32(pair))
        high = sums[HIGH] / sums[TOTAL] * sigmoid(high_f32(pair))
        column = uint32(h * uint32(D) + thread * uint32(2))
        width_out = uint32(H * uint32(D))
        store(out, t, column, width_out, first_tiles, rest_tiles, pack_bf16(low, high))

    return Build(attention_merge, THREADS)
