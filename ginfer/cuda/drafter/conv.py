"""Between the linear operators of a drafter's block: grouped dynamic convolution, norm, SiLU.

conv(u)[t, c] = sum over taps 0, 1 of (base[side, tap, c] + coef[t, side, tap, c / group]) times
u[t - tap, c]; nothing precedes a block. Before a sublayer it takes the normed stream, behind it the
sublayer's result, which it adds to the stream.

Legend: T columns, B rows, S columns of a row, C hidden, I columns of the MLP. Oracle:
tests.oracles.drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.drafter.order import octet_at, store_octet
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.lib.numeric import (
    block_sum,
    follow,
    high_f32,
    load_bf16x8,
    load_f32x8,
    low_f32,
    pack_bf16,
    silu,
)
from ginfer.cuda.lib.ptx import div_u32, fma_f32, ld_global_f32, rsqrt_approx, shared_address
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 128  # of a piece of a token's columns
OCTETS = THREADS * 8
ROW_THREADS, HELD = 256, 4  # of a whole token; groups of eight columns of a thread
MOST_COLUMNS = ROW_THREADS * HELD * 8
BEFORE, AFTER = 0, 1  # sides of a sublayer


@cuda.jit(device=True, inline="always")
def _taps(coef, base, t, side, c, C, group):
    """(address of base[side, 0, c], coefficient of tap 0, of tap 1)."""
    groups = div_u32(C, group)
    at = coef + (int64(t) * int64(groups) * 4 + int64(side * groups * uint32(2))) * 4
    at += int64(div_u32(c, group)) * 4
    now, before = ld_global_f32(at), ld_global_f32(at + int64(groups) * 4)
    return base + (int64(side) * 2 * int64(C) + int64(c)) * 4, now, before


@kernel(*(int64,) * 4, *(uint32,) * 6)
def mix_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, x, coef, base, C, group, S, first, rest, blocks of a token: y = conv(x) before
    a sublayer, both in fragment order."""
    start, at = follow(early), octet_at(1)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def mix(y, x, coef, base, C, group, S, first, rest, blocks):
        u, v = cuda.local.array(8, float32), cuda.local.array(8, float32)
        b0, b1 = cuda.local.array(8, float32), cuda.local.array(8, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        c = uint32((uint32(cuda.blockIdx.x) - t * blocks) * uint32(OCTETS))
        c = uint32(c + uint32(cuda.threadIdx.x) * uint32(8))
        if c < C:
            weights, now, before = _taps(coef, base, t, uint32(BEFORE), c, C, group)
            head = uint32(t - div_u32(t, S) * S) == uint32(0)
            load_bf16x8(v, at(x, t, c, C, first, rest))
            load_bf16x8(u, at(x, t if head else uint32(t - uint32(1)), c, C, first, rest))
            load_f32x8(b0, weights)
            load_f32x8(b1, weights + int64(C) * 4)
            for i in range(8):
                value = (b0[i] + now) * v[i]
                v[i] = value if head else fma_f32(b1[i] + before, u[i], value)
            store_octet(at(y, t, c, C, first, rest), v)

    return Build(mix, THREADS)


@kernel(*(int64,) * 6, *(uint32,) * 6, float32)
def finish_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, hidden, a, coef, base, w, C, group, S, N, first, rest, eps. A block takes one of
    the last N columns of a row: hidden += conv(a) behind a sublayer, y = norm(hidden) * w in
    fragment order, column b N + i for column b S + S - N + i."""
    start, at, warps = follow(early), octet_at(1), ROW_THREADS // 32
    num_held = 8 * HELD

    @cuda.jit(fastmath=True, launch_bounds=ROW_THREADS)
    def finish(y, hidden, a, coef, base, w, C, group, S, N, first, rest, eps):
        words = shared_address(cuda.shared.array(warps, float32))
        u, v = cuda.local.array(8, float32), cuda.local.array(8, float32)
        b0, b1 = cuda.local.array(8, float32), cuda.local.array(8, float32)
        held = cuda.local.array(num_held, float32)
        start()
        out, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        row = div_u32(out, N)
        i = uint32(uint32(out - row * N) + uint32(S - N))
        t, head = uint32(row * S + i), i == uint32(0)
        total = float32(0.0)
        for p in range(HELD):
            c = uint32((thread + uint32(p * ROW_THREADS)) * uint32(8))
            if c < C:
                weights, now, before = _taps(coef, base, t, uint32(AFTER), c, C, group)
                source = a + (int64(t) * int64(C) + int64(c)) * 2
                load_bf16x8(v, source)
                load_bf16x8(u, source if head else source - int64(C) * 2)
                load_f32x8(b0, weights)
                load_f32x8(b1, weights + int64(C) * 4)
                for j in range(8):
                    value = (b0[j] + now) * v[j]
                    v[j] = value if head else fma_f32(b1[j] + before, u[j], value)
                to = hidden + (int64(t) * int64(C) + int64(c)) * 2
                load_bf16x8(u, to)
                for j in range(4):
                    pair = pack_bf16(u[2 * j] + v[2 * j], u[2 * j + 1] + v[2 * j + 1])
                    v[2 * j], v[2 * j + 1] = low_f32(pair), high_f32(pair)
                    held[8 * p + 2 * j], held[8 * p + 2 * j + 1] = v[2 * j], v[2 * j + 1]
                store_octet(to, v)
                for j in range(8):
                    total = fma_f32(v[j], v[j], total)
        inv = rsqrt_approx(block_sum(total, words, warps) / float32(C) + eps)
        for p in range(HELD):
            c = uint32((thread + uint32(p * ROW_THREADS)) * uint32(8))
            if c < C:
                load_f32x8(b0, w + int64(c) * 4)
                for j in range(8):
                    v[j] = held[8 * p + j] * inv * b0[j]
                store_octet(at(y, out, c, C, first, rest), v)

    return Build(finish, ROW_THREADS)


@kernel(int64, int64, *(uint32,) * 4)
def silu_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, x, I, first, rest, blocks of a token: y = silu(gate) * up in fragment order; a
    row of x is gate [I], up [I], BF16."""
    start, at = follow(early), octet_at(1)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def silu_up(y, x, width, first, rest, blocks):
        u, v = cuda.local.array(8, float32), cuda.local.array(8, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        c = uint32((uint32(cuda.blockIdx.x) - t * blocks) * uint32(OCTETS))
        c = uint32(c + uint32(cuda.threadIdx.x) * uint32(8))
        if c < width:
            gate = x + (int64(t) * int64(width) * 2 + int64(c)) * 2
            load_bf16x8(v, gate)
            load_bf16x8(u, gate + int64(width) * 2)
            for i in range(8):
                v[i] = silu(v[i]) * u[i]
            store_octet(at(y, t, c, width, first, rest), v)

    return Build(silu_up, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The three steps."""
    early = starts_early(capability)
    yield mix_kernel(early)
    yield finish_kernel(early)
    yield silu_kernel(early)


@dataclass(frozen=True)
class BlockShape:
    """B rows of S columns of C, `group` columns to a coefficient (multiples of 8)."""

    B: int
    S: int
    C: int
    group: int

    @property
    def T(self) -> int:
        """Columns of all rows."""
        return self.B * self.S


@dataclass(frozen=True)
class Convolution:
    """Addresses: coefficients [T][side][tap][C / group] FP32, base [side][tap][C] FP32."""

    coef: int
    base: int


def mix(queue: Queue, y: int, x: int, *, conv: Convolution, shape: BlockShape) -> None:
    """y = conv(x) before a sublayer; y, x: [T, C] BF16 in fragment order, apart."""
    T, C, blocks = shape.T, shape.C, -(-shape.C // OCTETS)
    scalars = (C, shape.group, shape.S, *tiles_of(T), blocks)
    queue.launch(mix_kernel(queue.early), (T * blocks,), y, x, conv.coef, conv.base, *scalars)


@dataclass(frozen=True)
class NextNorm:
    """The norm of what comes next: factors [C] FP32, eps; of the last N columns of each row."""

    w: int
    eps: float
    N: int


def finish(
    queue: Queue,
    y: int,
    streams: tuple[int, int],
    *,
    conv: Convolution,
    norm: NextNorm,
    shape: BlockShape,
) -> None:
    """hidden += conv(a) behind a sublayer, y = its norm, [B N, C] in fragment order. streams: the
    addresses of hidden and a, [T, C] BF16 each."""
    assert shape.C <= MOST_COLUMNS
    rows, addresses = shape.B * norm.N, (y, *streams, conv.coef, conv.base, norm.w)
    scalars = (shape.C, shape.group, shape.S, norm.N, *tiles_of(rows), norm.eps)
    queue.launch(finish_kernel(queue.early), (rows,), *addresses, *scalars)


def silu_up(queue: Queue, y: int, x: int, *, shape: tuple[int, int]) -> None:
    """y [T, I] in fragment order = silu(gate) * up; x: [T, 2 I] BF16; shape: (T, I)."""
    (T, width), blocks = shape, -(-shape[1] // OCTETS)
    item = silu_kernel(queue.early)
    queue.launch(item, (T * blocks,), y, x, width, *tiles_of(T), blocks)
