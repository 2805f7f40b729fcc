"""Gated DeltaNet from chunk to chunk (prefill family): results and the state.

Per chunk of up to 64 tokens and value head, with T and P of `prepare` and G the running sum of g:
  R = V - e^G K S, U = T R, O = e^G Q S + P U, S = e^G_last S + (e^(G_last - G) K)^T U.
A block has a value head of a row, or a slice of its V columns, and goes through the row's chunks.
Chunks lie on absolute multiples of 64, so a column's value depends on the columns before it alone,
however a prompt is cut.

Everything is kept transposed: a warp owns 16 columns of V, its part of S^T in FP32 registers from
first chunk to last, and the sums of one product are the A operand of the next. K, Q and V are
BF16 as they are; S, R, U, T and P are two BF16 numbers, so that a product is exact to 2^-16.

Legend: T tokens, HK key heads, HV value heads, K = V = 128, X channels. Oracle: tests.oracles.gdn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES
from ginfer.cuda.gdn.gate import gated_norm
from ginfer.cuda.gdn.prepare import (
    BLOCK_NBYTES,
    CHUNK,
    END_AT,
    FACTORS_AT,
    LOW_AT,
    P_AT,
    TILE_NBYTES,
    WITHIN_NBYTES,
    gdn_prepare_kernel,
    rows_at,
    rows_fetch,
)
from ginfer.cuda.gdn.recurrence import WIDTH
from ginfer.cuda.lib.numeric import follow, high_f32, low_f32, row_of_32
from ginfer.cuda.lib.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_pair_add,
    shared_address,
    split_bf16,
    st_global_f32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ginfer.cuda.gdn.conv import Rows
    from ginfer.cuda.gdn.step import GdnInputs, GdnLayer
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

TILE_ROWS = 16  # columns of V of a warp
BLOCK_ROWS_NBYTES = 16 * 128  # from a 16 x 16 block of a panel to the one below


@kernel(*(int64,) * 8, *(uint32,) * 2)
def gdn_chunk_kernel(warps: int, stages: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments results, convolved, within, chunks, chunk_indptr, state, state_in, state_out, HK,
    HV.

    results: [T][HV V] FP32. chunks: u32 (first column, columns) each, of row b those from
    chunk_indptr[b]. state: [slots][HV][K][V] FP32 of the layer. warps: 4 or 8, of 16
    columns of V each. stages: chunks in shared memory; with one, a chunk is waited for.
    """
    start, threads, slices = follow(early), 32 * warps, WIDTH // (16 * warps)
    width = WIDTH // slices
    queries_at, values_at = TILE_NBYTES, 2 * TILE_NBYTES
    within_at = values_at + -(-width // 64) * PANEL_NBYTES
    stage_nbytes = align_up(within_at + WITHIN_NBYTES, 1024)
    fetch_heads, fetch_values = rows_fetch(threads, WIDTH), rows_fetch(threads, width)

    @cuda.jit(device=True, inline="always")
    def fetch_within(to, source, thread):
        i = thread
        while i < uint32(WITHIN_NBYTES // 16):
            cp_async_16(uint32(to + i * uint32(16)), source + int64(i) * 16)
            i = uint32(i + uint32(threads))

    @cuda.jit(device=True, inline="always")
    def multiply_state(x, y, s, high, low, step, keys):
        """x += S^T K^T and y += S^T Q^T for 16 elements of k. Steps are spelt out, for a loop too
        long to unroll keeps its sums in local memory."""
        split_bf16(high, low, s, 8 * step)
        at = uint32(keys ^ uint32(32 * (step & 3))) + uint32((step >> 2) * PANEL_NBYTES)
        for n in range(2):
            k = ldmatrix_x4(uint32(at + uint32(2 * n * BLOCK_ROWS_NBYTES)))
            q = ldmatrix_x4(uint32(at + uint32(queries_at + 2 * n * BLOCK_ROWS_NBYTES)))
            m = ldmatrix_x4(uint32(at + uint32((2 * n + 1) * BLOCK_ROWS_NBYTES)))
            r = ldmatrix_x4(uint32(at + uint32(queries_at + (2 * n + 1) * BLOCK_ROWS_NBYTES)))
            # what adds to the same sums stands far apart: each waits for the one before
            mma_pair_add(x, 16 * n, high, k[0], k[1], k[2], k[3])
            mma_pair_add(y, 16 * n, high, q[0], q[1], q[2], q[3])
            mma_pair_add(x, 16 * n + 8, high, m[0], m[1], m[2], m[3])
            mma_pair_add(y, 16 * n + 8, high, r[0], r[1], r[2], r[3])
            mma_pair_add(x, 16 * n, low, k[0], k[1], k[2], k[3])
            mma_pair_add(y, 16 * n, low, q[0], q[1], q[2], q[3])
            mma_pair_add(x, 16 * n + 8, low, m[0], m[1], m[2], m[3])
            mma_pair_add(y, 16 * n + 8, low, r[0], r[1], r[2], r[3])

    @cuda.jit(device=True, inline="always")
    def factor_pair(factors, token, lane):
        """Factors of the two rows of a chunk that a lane holds of eight from `token`."""
        f = ld_shared_u32x2(uint32(factors + uint32(4 * token) + (lane & uint32(3)) * uint32(8)))
        return f32_from_bits(f[0]), f32_from_bits(f[1])

    @cuda.jit(device=True, inline="always")
    def scale(v, factors, lane):
        """Each row of a chunk by its factor."""
        for n in range(8):
            low, high = factor_pair(factors, 8 * n, lane)
            v[4 * n], v[4 * n + 1] = v[4 * n] * low, v[4 * n + 1] * high
            v[4 * n + 2], v[4 * n + 3] = v[4 * n + 2] * low, v[4 * n + 3] * high

    @cuda.jit(device=True, inline="always")
    def remainder(x, values, factors, lane):
        """x = V^T - factors x."""
        for n in range(4):
            v = ldmatrix_x4_trans(uint32(values + uint32(n * BLOCK_ROWS_NBYTES)))
            for half in range(2):
                p = 8 * n + 4 * half
                low, high = factor_pair(factors, 16 * n + 8 * half, lane)
                x[p] = fma_f32(-low, x[p], low_f32(v[half]))
                x[p + 1] = fma_f32(-high, x[p + 1], high_f32(v[half]))
                x[p + 2] = fma_f32(-low, x[p + 2], low_f32(v[2 + half]))
                x[p + 3] = fma_f32(-high, x[p + 3], high_f32(v[2 + half]))

    @cuda.jit(device=True, inline="always")
    def multiply_lower(u, x, high, low, step, blocks):
        """u += X^T M^T for rows 16 step .. 16 step + 15 of X, M lower triangular, both of two
        parts."""
        w = cuda.local.array(16, uint32)
        split_bf16(high, low, x, 8 * step)
        for n in range(4):
            if n >= step:
                at = uint32(blocks + uint32((n * (n + 1) // 2 + step) * BLOCK_NBYTES))
                b = ld_shared_u32x4(at)
                mma_pair_add(u, 8 * n, high, b[0], b[1], b[2], b[3])
                for i in range(4):
                    w[4 * n + i] = b[i]
        for n in range(4):
            if n >= step:
                p = 4 * n
                mma_pair_add(u, 8 * n, low, w[p], w[p + 1], w[p + 2], w[p + 3])
        for n in range(4):
            if n >= step:
                at = uint32(LOW_AT + (n * (n + 1) // 2 + step) * BLOCK_NBYTES)
                b = ld_shared_u32x4(uint32(blocks + at))
                mma_pair_add(u, 8 * n, high, b[0], b[1], b[2], b[3])

    @cuda.jit(device=True, inline="always")
    def add_to_state(s, u, high, low, step, keys):
        """S^T += U^T K for rows 16 step .. 16 step + 15 of U."""
        split_bf16(high, low, u, 8 * step)
        for n in range(2):
            at = uint32(keys + uint32(n * PANEL_NBYTES + step * BLOCK_ROWS_NBYTES))
            b, c = ldmatrix_x4_trans(at), ldmatrix_x4_trans(uint32(at ^ uint32(32)))
            d, e = (
                ldmatrix_x4_trans(uint32(at ^ uint32(64))),
                ldmatrix_x4_trans(uint32(at ^ uint32(96))),
            )
            p = 32 * n
            mma_pair_add(s, p, high, b[0], b[1], b[2], b[3])
            mma_pair_add(s, p + 8, high, c[0], c[1], c[2], c[3])
            mma_pair_add(s, p + 16, high, d[0], d[1], d[2], d[3])
            mma_pair_add(s, p + 24, high, e[0], e[1], e[2], e[3])
            mma_pair_add(s, p, low, b[0], b[1], b[2], b[3])
            mma_pair_add(s, p + 8, low, c[0], c[1], c[2], c[3])
            mma_pair_add(s, p + 16, low, d[0], d[1], d[2], d[3])
            mma_pair_add(s, p + 24, low, e[0], e[1], e[2], e[3])

    @cuda.jit(device=True, inline="always")
    def store(results, y, row_nbytes, count, lane):
        """Columns of V of the warp; results: a lane's first element at the chunk's first token."""
        for n in range(8):
            token = uint32(uint32(8 * n) + (lane & uint32(3)) * uint32(2))
            to = results + int64(token) * row_nbytes
            if token < count:
                st_global_f32(to, y[4 * n])
                st_global_f32(to + 32, y[4 * n + 2])
            if uint32(token + uint32(1)) < count:
                st_global_f32(to + row_nbytes, y[4 * n + 1])
                st_global_f32(to + row_nbytes + 32, y[4 * n + 3])

    @cuda.jit(device=True, inline="always")
    def state_at(state, slot, HV, h, column, lane):
        """Address of a lane's first element of S^T: row g of the warp's, element 2 t of k."""
        at = state + (int64(slot) * int64(HV) + int64(h)) * (WIDTH * WIDTH * 4)
        at += int64(lane & uint32(3)) * (2 * WIDTH * 4)
        return at + int64(column + (lane >> uint32(2))) * 4

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def gdn_chunk(
        results, convolved, within, chunks, chunk_indptr, state, state_in, state_out, HK, HV
    ):
        base = uint32(shared_address(cuda.shared.array(0, uint32)))
        s = cuda.local.array(64, float32)
        x, y, u = (
            cuda.local.array(32, float32),
            cuda.local.array(32, float32),
            cuda.local.array(32, float32),
        )
        a, b = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        start()
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        block = div_u32(uint32(cuda.blockIdx.x), uint32(slices))
        first_column = uint32((uint32(cuda.blockIdx.x) - block * uint32(slices)) * uint32(width))
        row = div_u32(block, HV)
        h = uint32(block - row * HV)
        key = div_u32(h, div_u32(HV, HK))
        column = uint32(first_column + warp * uint32(TILE_ROWS))
        # of a lane in a 16 x 16 block of a panel, as it is and transposed: operands of an mma come
        # into neighbouring registers. Then the warp's columns of V in their panel
        straight = rows_at(lane)
        swizzled = uint32((lane & uint32(15)) * uint32(128))
        swizzled = uint32(swizzled + ((lane >> uint32(4)) ^ (lane & uint32(7))) * uint32(16))
        value_panel = uint32(uint32(values_at) + (warp >> uint32(2)) * uint32(PANEL_NBYTES))
        value_chunk = uint32((warp & uint32(3)) * uint32(32))
        place = state_at(state, ld_global_u32(row_of_32(state_in, row)), HV, h, column, lane)
        for n in range(16):
            for i in range(4):
                at = place + ((8 * n + (i & 1)) * WIDTH + (i >> 1) * 8) * 4
                s[4 * n + i] = ld_global_f32(at)
        row_nbytes = int64(HK * uint32(2) + HV) * (2 * WIDTH)
        result_nbytes = int64(HV) * (4 * WIDTH)
        q_at = int64(key) * (2 * WIDTH)
        k_at = q_at + int64(HK) * (2 * WIDTH)
        v_at = int64(HK) * (4 * WIDTH) + int64(h) * (2 * WIDTH) + int64(first_column) * 2
        c = ld_global_u32(row_of_32(chunk_indptr, row))
        end = ld_global_u32(row_of_32(chunk_indptr, uint32(row + uint32(1))))
        ahead = c
        while c < end:
            while ahead < end and ahead < c + uint32(stages):
                t = ld_global_u32(row_of_32(chunks, uint32(ahead * uint32(2))))
                count = ld_global_u32(row_of_32(chunks, uint32(ahead * uint32(2) + uint32(1))))
                source = convolved + int64(t) * row_nbytes
                to = uint32(base + (ahead & uint32(stages - 1)) * uint32(stage_nbytes))
                fetch_heads(to, source + k_at, row_nbytes, count, thread)
                to = uint32(to + uint32(queries_at))
                fetch_heads(to, source + q_at, row_nbytes, count, thread)
                to = uint32(to + uint32(values_at - queries_at))
                fetch_values(to, source + v_at, row_nbytes, count, thread)
                to = uint32(to + uint32(within_at - values_at))
                at = within + (int64(ahead) * int64(HV) + int64(h)) * WITHIN_NBYTES
                fetch_within(to, at, thread)
                cp_async_commit()
                ahead = uint32(ahead + uint32(1))
            if stages == 2 and ahead > c + uint32(1):
                cp_async_wait_1()
            else:
                cp_async_wait_0()
            cuda.syncthreads()
            keys = uint32(base + (c & uint32(stages - 1)) * uint32(stage_nbytes))
            lane_keys, inside = uint32(keys + swizzled), uint32(keys + uint32(within_at))
            lane_rows = uint32(keys + straight)
            values = uint32(uint32(lane_keys + value_panel) ^ value_chunk)
            lane_inside = uint32(inside + lane * uint32(16))
            lane_scores = uint32(lane_inside + uint32(P_AT))
            factors = uint32(inside + uint32(FACTORS_AT))
            for i in range(32):
                x[i], y[i], u[i] = float32(0.0), float32(0.0), float32(0.0)
            multiply_state(x, y, s, a, b, 0, lane_rows)
            multiply_state(x, y, s, a, b, 1, lane_rows)
            multiply_state(x, y, s, a, b, 2, lane_rows)
            multiply_state(x, y, s, a, b, 3, lane_rows)
            multiply_state(x, y, s, a, b, 4, lane_rows)
            multiply_state(x, y, s, a, b, 5, lane_rows)
            multiply_state(x, y, s, a, b, 6, lane_rows)
            multiply_state(x, y, s, a, b, 7, lane_rows)
            remainder(x, values, factors, lane)
            multiply_lower(u, x, a, b, 0, lane_inside)
            multiply_lower(u, x, a, b, 1, lane_inside)
            multiply_lower(u, x, a, b, 2, lane_inside)
            multiply_lower(u, x, a, b, 3, lane_inside)
            scale(y, uint32(factors + uint32(4 * CHUNK)), lane)
            multiply_lower(y, u, a, b, 0, lane_scores)
            multiply_lower(y, u, a, b, 1, lane_scores)
            multiply_lower(y, u, a, b, 2, lane_scores)
            multiply_lower(y, u, a, b, 3, lane_scores)
            t = ld_global_u32(row_of_32(chunks, uint32(c * uint32(2))))
            count = ld_global_u32(row_of_32(chunks, uint32(c * uint32(2) + uint32(1))))
            to = results + int64(t) * result_nbytes + int64(h) * (4 * WIDTH)
            to += int64(column + (lane >> uint32(2))) * 4
            store(to, y, result_nbytes, count, lane)
            scale(u, uint32(factors + uint32(8 * CHUNK)), lane)
            decay = ld_shared_f32(uint32(inside + uint32(END_AT)))
            for i in range(64):
                s[i] = s[i] * decay
            add_to_state(s, u, a, b, 0, lane_keys)
            add_to_state(s, u, a, b, 1, lane_keys)
            add_to_state(s, u, a, b, 2, lane_keys)
            add_to_state(s, u, a, b, 3, lane_keys)
            cuda.syncthreads()
            c = uint32(c + uint32(1))
        place = state_at(state, ld_global_u32(row_of_32(state_out, row)), HV, h, column, lane)
        for n in range(16):
            for i in range(4):
                at = place + ((8 * n + (i & 1)) * WIDTH + (i >> 1) * 8) * 4
                st_global_f32(at, s[4 * n + i])

    return Build(gdn_chunk, threads, stages * stage_nbytes)


def form_of(capability: str) -> tuple[int, int]:
    """(warps, stages) of a capability: two stages need 122 KB."""
    return 4, 2 if capability in ("80", "90", "90a") else 1


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The form in use, or all."""
    early, used = starts_early(capability), form_of(capability)
    for warps, stages in dict.fromkeys((used, (4, 1), (8, 1)) if every else (used,)):
        yield gdn_chunk_kernel(warps, stages, early)


@dataclass(frozen=True)
class Chunks:
    """Device addresses: chunks (first column, columns) [num][2] and chunk_indptr [B + 1] u32;
    workspaces within [num][HV][WITHIN_NBYTES] and results [T][HV V] FP32; num."""

    chunks: int
    indptr: int
    within: int
    results: int
    num: int


def gdn_chunks(
    queue: Queue,
    out: int,
    inputs: GdnInputs,
    *,
    T: int,
    tables: tuple[Sequence[Rows], GdnLayer, Chunks],
) -> None:
    """out [T, HV V] BF16, row-major; slots state_in are read, state_out written, by one run of rows
    after the other."""
    runs, layer, at = tables
    heads = (layer.HK, layer.HV)
    queue.launch(
        gdn_prepare_kernel(queue.early),
        (at.num * layer.HV,),
        *(at.within, inputs.convolved, inputs.ab, layer.gates, at.chunks, *heads),
    )
    warps, stages = form_of(queue.image.capability)
    for rows in runs:
        indptr = at.indptr + 4 * rows.first
        queue.launch(
            gdn_chunk_kernel(warps, stages, queue.early),
            (rows.B * layer.HV * WIDTH // (16 * warps),),
            *(at.results, inputs.convolved, at.within, at.chunks, indptr, layer.state),
            *(rows.state_in, rows.state_out, *heads),
        )
    gated_norm(queue, out, at.results, inputs.mix, T=T, layer=layer)
