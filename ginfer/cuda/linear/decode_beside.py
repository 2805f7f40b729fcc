"""A small BF16 matrix beside a decode linear of up to 8 tokens: rows for thread blocks to spare.

Numbers are those of `decode`: a slice's sum of mma chains starts at zero, slices are added in
ascending order. A block takes row tiles of 16; its warps take their slices, weights straight from
global memory. Legend: N rows of W, T tokens, tokens as in `decode_tokens`.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    ld_global_u32x4,
    ld_shared_f32,
    ldmatrix_x4,
    mma_m16n8k16_bf16,
    named_barrier,
    st_global_f32,
    st_shared_f32,
)
from ginfer.cuda.linear.decode_runs import place
from ginfer.cuda.linear.unpack import UNPACK

TILE_NBYTES = UNPACK["BF16"].tile_nbytes
ROW_TILE_NBYTES = TILE_NBYTES // 8
AT_ONCE = 4  # k tiles whose weights are on their way


@cuda.jit(device=True, inline="always")
def load_weights(v, b, at, lane):
    """v[16 b : 16 b + 16] = A of the four steps of a k tile, at the address of a row tile."""
    for step in range(4):
        q = ld_global_u32x4(at + int64(lane) * 16 + step * 512)
        for j in range(4):
            v[(b * 4 + step) * 4 + j] = q[j]


@cuda.jit(device=True, inline="always")
def add_k_tile(c, v, b, low, high):
    """c[0:4] += the chain of k tile b of v; low, high: B of its first two steps and of the others,
    four words each."""
    d = cuda.local.array(4, float32)
    for i in range(4):
        d[i] = float32(0.0)
    for step in range(4):
        p, j = (b * 4 + step) * 4, 2 * (step & 1)
        q = low if step < 2 else high
        r = mma_m16n8k16_bf16(
            *(v[p], v[p + 1], v[p + 2], v[p + 3]),
            *(q[j], q[j + 1]),
            *(d[0], d[1], d[2], d[3]),
        )
        for i in range(4):
            d[i] = r[i]
    for i in range(4):
        c[i] = add_rn_f32(d[i], c[i])


@cuda.jit(device=True, inline="always")
def finish_row_tile(c, y, room, row_tile, slices, T, N, lane):
    """One warp: the sums of all slices, 512 bytes each in `room`, to rows of y [T, N] FP32."""
    for i in range(4):
        c[i] = float32(0.0)
        for s in range(slices):
            at = uint32(room + uint32(s) * uint32(512) + lane * uint32(16) + uint32(4 * i))
            c[i] = c[i] + ld_shared_f32(at)
        row = uint32(row_tile * uint32(16) + (lane >> uint32(2)) + uint32((i >> 1) * 8))
        t = uint32((lane & uint32(3)) * uint32(2) + uint32(i & 1))
        if t < T and row < N:
            st_global_f32(y + (int64(t) * int64(N) + int64(row)) * 4, c[i])


@cuda.jit(device=True, inline="always")
def put_slice(c, room, s, lane):
    """A warp's sums of a slice, for `finish_row_tile`."""
    for i in range(4):
        to = uint32(room + s * uint32(512) + lane * uint32(16) + uint32(4 * i))
        st_shared_f32(to, c[i])


def row_tiles(warps: int, meet: int) -> Any:
    """Device function rows(w, y, tokens, room, shares, k_tiles, slices, T, N, thread) of that many
    warps, which meet at barrier `meet`: row tiles first, first + step, ... of y [T, N] FP32 with
    (first, step) = shares. tokens: of this lane; room: 512 bytes per slice."""
    threads = warps * 32
    num_words = AT_ONCE * 16

    @cuda.jit(device=True, inline="always")
    def add_slice(c, w, tokens, first, count, lane):
        v = cuda.local.array(num_words, uint32)
        for i in range(4):
            c[i] = float32(0.0)
        done = uint32(0)
        while done < count:
            for b in range(AT_ONCE):
                if uint32(done + uint32(b)) < count:
                    load_weights(v, b, w + int64(first + done + uint32(b)) * TILE_NBYTES, lane)
            for b in range(AT_ONCE):
                k = uint32(done + uint32(b))
                if k < count:
                    at = uint32(tokens + (first + k) * uint32(128))
                    add_k_tile(c, v, b, ldmatrix_x4(at), ldmatrix_x4(uint32(at + uint32(64))))
            done = uint32(done + uint32(AT_ONCE))

    @cuda.jit(device=True, inline="always")
    def rows(w, y, tokens, room, shares, k_tiles, slices, T, N, thread):
        c = cuda.local.array(4, float32)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        row_tile, step = shares
        while uint32(row_tile * uint32(16)) < N:
            s, at = warp, w + int64(row_tile) * ROW_TILE_NBYTES
            while s < slices:
                _, first, count, _, _, _ = place(
                    uint32(s * uint32(2)), (k_tiles, uint32(1), uint32(0), slices, uint32(1))
                )
                add_slice(c, at, tokens, first, count, lane)
                put_slice(c, room, s, lane)
                s = uint32(s + uint32(warps))
            named_barrier(uint32(meet), uint32(threads))
            if warp == uint32(0):
                finish_row_tile(c, y, room, row_tile, slices, T, N, lane)
            named_barrier(uint32(meet), uint32(threads))
            row_tile = uint32(row_tile + step)

    return rows
