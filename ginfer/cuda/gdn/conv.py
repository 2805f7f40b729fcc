"""Causal convolution with SiLU over the raw inputs of a GDN layer, and its history.

y[t, x] = silu(sum_k taps[k, x] * m[t - taps + 1 + k, x]) in FP32, rounded to BF16; before a row's
first column stands its history, the last taps - 1 raw columns, BF16 as they were. In short rows a
thread owns two channels; in long ones eight channels of a piece of the columns, four of which it
reads at a time. The thread that reads the history of a channel writes it too, because a slot may be
read and written. Both give the same bits.

Legend: T columns, B rows, X channels, W columns of `mix` (X + those of z). Oracle:
tests.oracles.gdn.causal_conv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import (
    follow_late,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    silu,
)
from ginfer.cuda.lib.ptx import (
    div_u32,
    fma_f32,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_global_u32x4,
    st_global_u32,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

TAPS = 4
THREADS = 128
PIECE, SHORT = 32, 8  # columns of a thread block, of many and of few
FEW = 256  # thread blocks that leave a device half empty
SOON = 8  # columns that a thread of short rows reads at a time
BESIDE = 9  # blocks of short rows on a multiprocessor: registers that leave room beside a linear
WIDE, AT_ONCE = 8, 4  # channels of a thread of prefill, columns that it reads at a time
RESIDENT = 5  # blocks of prefill on a multiprocessor: 2,048 columns of 10,240 channels at a time


@kernel(*(int64,) * 7, *(uint32,) * 3)
def conv_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, mix, taps, history, indptr, state_in, state_out, X, W, blocks of a row. history:
    [slots][taps - 1][X] BF16 of the layer."""
    start, wait = follow_late(early)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, BESIDE))
    def conv(y, mix, taps, history, indptr, state_in, state_out, X, W, blocks):
        w, e = cuda.local.array(8, float32), cuda.local.array(SOON, uint32)
        start()
        row = div_u32(uint32(cuda.blockIdx.x), blocks)
        block = uint32(uint32(cuda.blockIdx.x) - row * blocks)
        c = uint32((block * uint32(THREADS) + uint32(cuda.threadIdx.x)) * uint32(2))
        first = int64(ld_global_u32(row_of_32(indptr, row)))
        end = int64(ld_global_u32(row_of_32(indptr, uint32(row + uint32(1)))))
        if c < X and first < end:
            slot_nbytes = int64(X) * (2 * TAPS - 2)
            old = history + int64(ld_global_u32(row_of_32(state_in, row))) * slot_nbytes
            new = history + int64(ld_global_u32(row_of_32(state_out, row))) * slot_nbytes
            t = first
            a = ld_global_u32(old + int64(c) * 2)
            b = ld_global_u32(old + (int64(X) + int64(c)) * 2)
            d = ld_global_u32(old + (int64(X) * 2 + int64(c)) * 2)
            for k in range(TAPS):
                at = taps + (int64(k) * int64(X) + int64(c)) * 4
                w[2 * k], w[2 * k + 1] = ld_global_f32(at), ld_global_f32(at + 4)
            wait()
            source, to = mix + (t * int64(W) + int64(c)) * 2, y + (t * int64(X) + int64(c)) * 2
            while t < end:
                for i in range(SOON):
                    if t + i < end:
                        e[i] = ld_global_u32(source)
                    source += int64(W) * 2
                for i in range(SOON):
                    if t + i < end:
                        low = fma_f32(w[2], low_f32(b), w[0] * low_f32(a))
                        low = fma_f32(w[6], low_f32(e[i]), fma_f32(w[4], low_f32(d), low))
                        high = fma_f32(w[3], high_f32(b), w[1] * high_f32(a))
                        high = fma_f32(w[7], high_f32(e[i]), fma_f32(w[5], high_f32(d), high))
                        st_global_u32(to, pack_bf16(silu(low), silu(high)))
                        a, b, d = b, d, e[i]
                    to += int64(X) * 2
                t += SOON
            st_global_u32(new + int64(c) * 2, a)
            st_global_u32(new + (int64(X) + int64(c)) * 2, b)
            st_global_u32(new + (int64(X) * 2 + int64(c)) * 2, d)
        else:
            wait()

    return Build(conv, THREADS)


@kernel(*(int64,) * 7, *(uint32,) * 4)
def conv_prefill_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, mix, taps, history, indptr, state_in, state_out, X, W, pieces, blocks. A row has
    `pieces` equal pieces and `blocks` blocks of channels per piece. X, W: multiples of 8."""
    (start, wait), words = follow_late(early), WIDE // 2
    ahead, all_words, all_taps = (TAPS - 1) * words, (TAPS - 1 + AT_ONCE) * words, TAPS * WIDE

    @cuda.jit(device=True, inline="always")
    def load_words(v, p, at):
        q = ld_global_u32x4(at)
        for j in range(words):
            v[p + j] = q[j]

    @cuda.jit(device=True, inline="always")
    def pair_at(v, w, p, j):
        """Results of word j of the column whose oldest tap is at v[p]."""
        low, high = w[2 * j] * low_f32(v[p + j]), w[2 * j + 1] * high_f32(v[p + j])
        for k in range(1, TAPS):
            word = v[p + k * words + j]
            low = fma_f32(w[k * WIDE + 2 * j], low_f32(word), low)
            high = fma_f32(w[k * WIDE + 2 * j + 1], high_f32(word), high)
        return pack_bf16(silu(low), silu(high))

    @cuda.jit(device=True, inline="always")
    def load_before(v, mix, old, t, first, X, W, c):
        """The columns before t, of which some may lie in the history."""
        for k in range(TAPS - 1):
            at = mix + ((t - 3 + k) * int64(W) + int64(c)) * 2
            if t - 3 + k < first:
                at = old + (t - first + k) * int64(X) * 2
            load_words(v, k * words, at)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, RESIDENT))
    def conv_prefill(y, mix, taps, history, indptr, state_in, state_out, X, W, pieces, blocks):
        w, v = cuda.local.array(all_taps, float32), cuda.local.array(all_words, uint32)
        start()
        unit = div_u32(uint32(cuda.blockIdx.x), blocks)
        block = uint32(uint32(cuda.blockIdx.x) - unit * blocks)
        row = div_u32(unit, pieces)
        c = uint32((block * uint32(THREADS) + uint32(cuda.threadIdx.x)) * uint32(WIDE))
        first = int64(ld_global_u32(row_of_32(indptr, row)))
        end = int64(ld_global_u32(row_of_32(indptr, uint32(row + uint32(1)))))
        piece = div_u32(uint32(end - first + int64(pieces) - 1), pieces)
        piece = uint32(piece + uint32(AT_ONCE - 1)) & uint32(0xFFFFFFFF - (AT_ONCE - 1))
        t = first + int64(unit - row * pieces) * int64(piece)
        stop = min(t + int64(piece), end)
        slot = int64(ld_global_u32(row_of_32(state_in, row)))
        if c < X:
            for k in range(TAPS):
                for i in range(2):
                    q = ld_global_f32x4(taps + (int64(k) * int64(X) + int64(c) + 4 * i) * 4)
                    for j in range(4):
                        w[k * WIDE + 4 * i + j] = q[j]
        wait()
        if c < X and t < end:
            old = history + (slot * int64(X) * (TAPS - 1) + int64(c)) * 2
            load_before(v, mix, old, t, first, X, W, c)
            while t < stop:
                for i in range(AT_ONCE):
                    if t + i < stop:
                        at = mix + ((t + i) * int64(W) + int64(c)) * 2
                        load_words(v, ahead + i * words, at)
                for i in range(AT_ONCE):
                    if t + i < stop:
                        to, p = y + ((t + i) * int64(X) + int64(c)) * 2, i * words
                        a, b = pair_at(v, w, p, 0), pair_at(v, w, p, 1)
                        st_global_u32x4(to, a, b, pair_at(v, w, p, 2), pair_at(v, w, p, 3))
                for j in range(ahead):
                    v[j] = v[AT_ONCE * words + j]
                t += AT_ONCE
            if unit == row * pieces:
                slot = int64(ld_global_u32(row_of_32(state_out, row)))
                new = history + (slot * int64(X) * (TAPS - 1) + int64(c)) * 2
                load_before(v, mix, old, end, first, X, W, c)
                for k in range(TAPS - 1):
                    to, p = new + int64(k) * int64(X) * 2, k * words
                    st_global_u32x4(to, v[p], v[p + 1], v[p + 2], v[p + 3])

    return Build(conv_prefill, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel for short rows, one for long ones."""
    yield conv_kernel(starts_early(capability))
    yield conv_prefill_kernel(starts_early(capability))


@dataclass(frozen=True)
class Rows:
    """Device addresses of indptr [B + 1] and slots read and written [B], all u32; B; the most
    columns of a row; how many rows of the batch lie before these, in kernels that have ended."""

    indptr: int
    state_in: int
    state_out: int
    B: int
    longest: int
    first: int = 0


@dataclass(frozen=True)
class Channels:
    """X channels of the convolution, W columns of `mix`; addresses of taps [taps][X] FP32 and of
    the layer's history [slots][taps - 1][X] BF16."""

    X: int
    W: int
    taps: int
    history: int


def conv(queue: Queue, y: int, mix: int, *, rows: Rows, channels: Channels) -> None:
    """y [T, X] BF16 = convolution of mix [T, W] BF16; the history moves from slot state_in to
    state_out."""
    tables = (rows.indptr, rows.state_in, rows.state_out)
    addresses, sizes = (y, mix, channels.taps, channels.history, *tables), (channels.X, channels.W)
    if rows.longest > PIECE or rows.first:  # the other kernel reads a history while it is written
        blocks, pieces = div_ceil(channels.X, WIDE * THREADS), div_ceil(rows.longest, PIECE)
        if rows.B * pieces * blocks < FEW:
            pieces = div_ceil(rows.longest, SHORT)
        item, grid = conv_prefill_kernel(queue.early), (rows.B * pieces * blocks,)
        queue.launch(item, grid, *addresses, *sizes, pieces, blocks)
    else:
        blocks = div_ceil(channels.X, 2 * THREADS)
        queue.launch(conv_kernel(queue.early), (rows.B * blocks,), *addresses, *sizes, blocks)
