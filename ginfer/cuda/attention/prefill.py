"""Attention of the prefill family: many columns of a row over absolute blocks of 2,048 keys.

A work item is up to 16 tiles' columns of a row (64; 32 where shared memory is small) and a query
head. Within a block of keys the softmax is
online, tile after tile of 64 keys from the left; the blocks are merged left to right. So a column's
value depends on its position and history alone, however a prompt is cut. Keys beyond a column's own
position weigh 0, and what a page holds beyond the last column is not read.

Sixteen warps: warp w has row tile w % tiles, and part w / tiles of the keys (scores) or dims
(values). Legend: H query heads, G K/V heads, D = 256 dims. Oracle: tests.oracles.attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, chunk_at, fetch_tile
from ginfer.cuda.attention.products import key_pair, mma_add, row_fragment, value_pair
from ginfer.cuda.lib.numeric import (
    LOG2E,
    follow,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    sigmoid,
    warp_max,
    warp_sum,
)
from ginfer.cuda.lib.ptx import (
    bf16_from_f32,
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    div_u32,
    exp2_approx,
    fma_f32,
    ld_global_u32,
    ld_shared_f32,
    shared_address,
    st_global_u32,
    st_shared_f32,
    st_shared_u16,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

BLOCK_TILES = 2048 // TILE
THREADS = 512
PLANE_NBYTES = HEAD_DIM // 64 * PANEL_NBYTES
SCORE_PITCH = (TILE + 4) * 4
LOWEST = -1.0e30


@kernel(*(int64,) * 7, *(uint32,) * 5, float32)
def attention_prefill_kernel(tiles: int, stages: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments out, qkgv, kv, items, row, token, pages, H, G, P, bytes of a page, offset of the
    layer, scale. items: u32 (first column, columns) each; blocks: item-major, heads inside.

    tiles: of 16 columns, 4 or 2. stages: planes of keys or values in shared memory; with one, a
    plane is waited for.
    """
    start, D, rows, parts = follow(early), HEAD_DIM, 16 * tiles, 16 // tiles
    keys_each, dims_each, rows_each = TILE // parts, HEAD_DIM // parts, rows // 16
    key_tiles, dim_tiles, num_c, num_s = (
        keys_each // 8,
        dims_each // 8,
        dims_each // 2,
        keys_each // 2,
    )
    score_at = rows * HEAD_DIM * 2
    weight_at = score_at + rows * SCORE_PITCH
    stats_at = weight_at + rows * 128
    ring_at = stats_at + rows * 32
    chunks = PLANE_NBYTES // 16
    q_panel = rows * 128
    # of a row: m, sum, decay of the open block; m, sum of the blocks before it
    m_at, l_at, decay_at, top_at, all_at = (stats_at + rows * 4 * i for i in range(5))

    @cuda.jit(device=True, inline="always")
    def fetch_queries(to, x, width, count, thread):
        """The rows of a head, those from `count` on zero."""
        i = thread
        while i < uint32(rows * 32):
            r, chunk = uint32(i >> uint32(5)), uint32(i & uint32(31))
            there = r < count
            at = x + int64(r) * width + int64(chunk) * 16 if there else x
            place = uint32((chunk >> uint32(3)) * uint32(q_panel))
            place = uint32(place + chunk_at(r, uint32(chunk & uint32(7))))
            cp_async_16_or_zero(uint32(to + place), at, uint32(16) if there else uint32(0))
            i = uint32(i + uint32(THREADS))

    @cuda.jit(device=True, inline="always")
    def score_tile(base, keys, scale, warp, lane):
        """Scores of the warp's 16 rows against its quarter of the keys."""
        c = cuda.local.array(num_s, float32)
        for i in range(num_s):
            c[i] = float32(0.0)
        row = uint32(uint32(warp % uint32(tiles)) * uint32(16))
        token = uint32(uint32(warp // uint32(tiles)) * uint32(keys_each))
        for pair in range(D // 32):
            low = row_fragment(base, row, uint32(pair * 2), q_panel, lane)
            high = row_fragment(base, row, uint32(pair * 2 + 1), q_panel, lane)
            for n in range(key_tiles):
                b = key_pair(keys, uint32(token + uint32(8 * n)), uint32(pair * 2), lane)
                mma_add(c, 4 * n, low, b[0], b[1])
                mma_add(c, 4 * n, high, b[2], b[3])
        column = uint32(token + (lane & uint32(3)) * uint32(2))
        for n in range(key_tiles):
            for i in range(4):
                r = uint32(row + uint32((i >> 1) * 8) + (lane >> uint32(2)))
                at = uint32(base + uint32(score_at) + r * uint32(SCORE_PITCH))
                at = uint32(at + (column + uint32(8 * n + (i & 1))) * uint32(4))
                st_shared_f32(at, c[4 * n + i] * scale)

    @cuda.jit(device=True, inline="always")
    def weigh(base, position, key, warp, lane):
        """Online softmax of a tile whose first key is `key`; row r sees keys up to position + r."""
        for n in range(rows_each):
            r = uint32(warp * uint32(rows_each) + uint32(n))
            at = uint32(base + uint32(score_at) + r * uint32(SCORE_PITCH) + lane * uint32(8))
            word = uint32(base + r * uint32(4))
            first = uint32(key + lane * uint32(2))
            sees_low = first <= position + r
            sees_high = uint32(first + uint32(1)) <= position + r
            low = ld_shared_f32(at) if sees_low else float32(LOWEST)
            high = ld_shared_f32(uint32(at + uint32(4))) if sees_high else float32(LOWEST)
            old = ld_shared_f32(uint32(word + uint32(m_at)))
            sum_before = ld_shared_f32(uint32(word + uint32(l_at)))
            m = max(old, warp_max(max(low, high)))
            low = exp2_approx(low - m) if sees_low else float32(0.0)
            high = exp2_approx(high - m) if sees_high else float32(0.0)
            total = warp_sum(low + high)
            decay = exp2_approx(old - m)
            if lane == 0:
                st_shared_f32(uint32(word + uint32(m_at)), m)
                st_shared_f32(uint32(word + uint32(l_at)), fma_f32(sum_before, decay, total))
                st_shared_f32(uint32(word + uint32(decay_at)), decay)
            to = uint32(base + uint32(weight_at) + chunk_at(r, uint32(lane >> uint32(2))))
            to = uint32(to + (lane & uint32(3)) * uint32(4))
            st_shared_u16(to, bf16_from_f32(low))
            st_shared_u16(uint32(to + uint32(2)), bf16_from_f32(high))

    @cuda.jit(device=True, inline="always")
    def add_step(c, weights, values, row, first, step, lane):
        """Sixteen tokens. Steps are spelt out, for a loop too long to unroll keeps its sums in
        local memory."""
        a = row_fragment(weights, row, uint32(step), 0, lane)
        for n in range(dim_tiles // 2):
            b = value_pair(values, step, uint32(first + uint32(16 * n)), lane)
            mma_add(c, 8 * n, a, b[0], b[1])
            mma_add(c, 8 * n + 4, a, b[2], b[3])

    @cuda.jit(device=True, inline="always")
    def add_values(c, base, values, warp, lane):
        """c = c * decay of the rows + weights times the warp's quarter of the dims."""
        row = uint32(uint32(warp % uint32(tiles)) * uint32(16))
        word = uint32(base + uint32(decay_at) + (row + (lane >> uint32(2))) * uint32(4))
        low, high = ld_shared_f32(word), ld_shared_f32(uint32(word + uint32(32)))
        for n in range(dim_tiles):
            c[4 * n] = c[4 * n] * low
            c[4 * n + 1] = c[4 * n + 1] * low
            c[4 * n + 2] = c[4 * n + 2] * high
            c[4 * n + 3] = c[4 * n + 3] * high
        weights = uint32(base + uint32(weight_at))
        first = uint32(uint32(warp // uint32(tiles)) * uint32(dims_each))
        add_step(c, weights, values, row, first, 0, lane)
        add_step(c, weights, values, row, first, 1, lane)
        add_step(c, weights, values, row, first, 2, lane)
        add_step(c, weights, values, row, first, 3, lane)

    @cuda.jit(device=True, inline="always")
    def merge_four(total, c, p, left, right):
        """Two pairs of dims. Spelt out, for the reason of `add_step`."""
        total[p] = fma_f32(total[p], left, c[p] * right)
        total[p + 1] = fma_f32(total[p + 1], left, c[p + 1] * right)
        total[p + 4] = fma_f32(total[p + 4], left, c[p + 4] * right)
        total[p + 5] = fma_f32(total[p + 5], left, c[p + 5] * right)
        c[p], c[p + 1], c[p + 4], c[p + 5] = (
            float32(0.0),
            float32(0.0),
            float32(0.0),
            float32(0.0),
        )

    @cuda.jit(device=True, inline="always")
    def merge(total, c, half, base, warp, lane):
        """total = total * left + c * right for rows g (half 0) or g + 8 of the warp; c = 0."""
        row = uint32(
            uint32(warp % uint32(tiles)) * uint32(16) + (lane >> uint32(2)) + uint32(8 * half)
        )
        word = uint32(base + row * uint32(4))
        old = ld_shared_f32(uint32(word + uint32(top_at)))
        m = ld_shared_f32(uint32(word + uint32(m_at)))
        top = max(old, m)
        left, right = exp2_approx(old - top), exp2_approx(m - top)
        merge_four(total, c, 2 * half, left, right)
        merge_four(total, c, 8 + 2 * half, left, right)
        if tiles == 4:
            merge_four(total, c, num_c - 16 + 2 * half, left, right)
            merge_four(total, c, num_c - 8 + 2 * half, left, right)

    @cuda.jit(device=True, inline="always")
    def merge_stats(base, thread):
        """The same for maximum and sum of a row, and an open block without keys."""
        if thread < uint32(rows):
            word = uint32(base + thread * uint32(4))
            old, m = (
                ld_shared_f32(uint32(word + uint32(top_at))),
                ld_shared_f32(uint32(word + uint32(m_at))),
            )
            before, added = (
                ld_shared_f32(uint32(word + uint32(all_at))),
                ld_shared_f32(uint32(word + uint32(l_at))),
            )
            top = max(old, m)
            total = fma_f32(before, exp2_approx(old - top), added * exp2_approx(m - top))
            st_shared_f32(uint32(word + uint32(all_at)), total)
            st_shared_f32(uint32(word + uint32(top_at)), top)
            st_shared_f32(uint32(word + uint32(m_at)), float32(LOWEST))
            st_shared_f32(uint32(word + uint32(l_at)), float32(0.0))

    @cuda.jit(device=True, inline="always")
    def finish_two(total, p, out, gate, at, inv):
        """A pair of dims of a row: out = total / sum * sigmoid(gate)."""
        pair = ld_global_u32(gate + at)
        low = total[p] * inv * sigmoid(low_f32(pair))
        high = total[p + 1] * inv * sigmoid(high_f32(pair))
        st_global_u32(out + at, pack_bf16(low, high))

    @cuda.jit(device=True, inline="always")
    def finish(total, half, base, out, gate, widths, count, warp, lane):
        """Rows g (half 0) or g + 8 (half 1) of the warp."""
        r = uint32(
            uint32(warp % uint32(tiles)) * uint32(16) + (lane >> uint32(2)) + uint32(8 * half)
        )
        if r < count:
            inv = float32(1.0) / ld_shared_f32(uint32(base + uint32(all_at) + r * uint32(4)))
            dim = uint32(
                uint32(warp // uint32(tiles)) * uint32(dims_each) + (lane & uint32(3)) * uint32(2)
            )
            gate, out = gate + int64(r) * widths[0], out + int64(r) * widths[1]
            for n in range(dim_tiles):
                at = int64(dim + uint32(8 * n)) * 2
                finish_two(total, 4 * n + 2 * half, out, gate, at, inv)

    @cuda.jit(device=True, inline="always")
    def fetch(i, ring, table, kv, plane, value, page_nbytes, last, thread):
        """Plane i: keys and values of a page in turns."""
        page = uint32(i >> uint32(1))
        source = kv + int64(ld_global_u32(row_of_32(table, page))) * int64(page_nbytes) + plane
        if i & uint32(1):
            source += value
        valid = uint32(last + uint32(1) - page * uint32(TILE))
        to = uint32(ring + (i % uint32(stages)) * uint32(PLANE_NBYTES))
        fetch_tile(to, source, valid, thread, THREADS, chunks)
        cp_async_commit()

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_prefill(
        out, qkgv, kv, items, row, token, pages, H, G, P, page_nbytes, layer, scale
    ):
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        ring, thread = uint32(base + uint32(ring_at)), uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        c, total = cuda.local.array(num_c, float32), cuda.local.array(num_c, float32)
        for i in range(num_c):
            c[i], total[i] = float32(0.0), float32(0.0)
        start()
        item = div_u32(uint32(cuda.blockIdx.x), H)
        h = uint32(uint32(cuda.blockIdx.x) - item * H)
        at = items + int64(item) * 8
        t, count = ld_global_u32(at), ld_global_u32(at + 4)
        position = ld_global_u32(row_of_32(token, t))
        last = uint32(position + count - uint32(1))
        entry = int64(ld_global_u32(row_of_32(row, t))) * int64(P)
        table = pages + entry * 4
        plane = int64(layer) + int64(div_u32(h, div_u32(H, G))) * PLANE_NBYTES
        value, width = int64(G) * PLANE_NBYTES, int64(H + G) * (4 * D)
        x = qkgv + int64(t) * width + int64(h) * (2 * D)
        fetch_queries(base, x, width, count, thread)
        if thread < uint32(rows):
            word = uint32(base + thread * uint32(4))
            st_shared_f32(uint32(word + uint32(m_at)), float32(LOWEST))
            st_shared_f32(uint32(word + uint32(top_at)), float32(LOWEST))
            st_shared_f32(uint32(word + uint32(l_at)), float32(0.0))
            st_shared_f32(uint32(word + uint32(all_at)), float32(0.0))
        planes = uint32(((last >> uint32(6)) + uint32(1)) * uint32(2))
        i, ahead = uint32(0), uint32(0)
        while i < planes:
            while ahead < planes and ahead < i + uint32(stages):
                fetch(ahead, ring, table, kv, plane, value, page_nbytes, last, thread)
                ahead = uint32(ahead + uint32(1))
            if ahead > i + uint32(1):
                cp_async_wait_1()
            else:
                cp_async_wait_0()
            cuda.syncthreads()
            tile = uint32(ring + (i % uint32(stages)) * uint32(PLANE_NBYTES))
            page = uint32(i >> uint32(1))
            if i & uint32(1) == 0:
                score_tile(base, tile, scale * float32(LOG2E), warp, lane)
                cuda.syncthreads()
                weigh(base, position, uint32(page * uint32(TILE)), warp, lane)
            else:
                add_values(c, base, tile, warp, lane)
                cuda.syncthreads()
                whole = page % uint32(BLOCK_TILES) == uint32(BLOCK_TILES - 1)
                if whole or i + uint32(1) == planes:
                    merge(total, c, 0, base, warp, lane)
                    merge(total, c, 1, base, warp, lane)
                    cuda.syncthreads()
                    merge_stats(base, thread)
            i = uint32(i + uint32(1))
        cuda.syncthreads()
        to = out + (int64(t) * int64(H) + int64(h)) * (2 * D)
        widths = (width, int64(H) * (2 * D))
        finish(total, 0, base, to, x + (width >> 1), widths, count, warp, lane)
        finish(total, 1, base, to, x + (width >> 1), widths, count, warp, lane)

    return Build(attention_prefill, THREADS, ring_at + stages * PLANE_NBYTES + 128)


def form_of(capability: str) -> tuple[int, int]:
    """(tiles, stages): less where a block has 99 KiB."""
    return (2, 1) if capability in ("86", "89", "120a") else (4, 2)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel; on sm_90a it runs in tests alone."""
    yield attention_prefill_kernel(*form_of(capability), starts_early(capability))
