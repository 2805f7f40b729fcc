"""Context of a drafter: the tapped streams of its target side by side, keys and values in rings.

Token p of a lane lies at slot p % R of its ring, k normed and rotated. Legend: T columns, C hidden,
K = C times the tapped layers, L layers, G K/V heads, D = 128 dims, R slots, W tokens that a query
sees. A row of `kv` is k [G, D], v [G, D] per layer, BF16. Oracle: tests.oracles.drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32

from ginfer.cuda.drafter.order import HEAD_DIM, octet_at, prepare_head, store_octet
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import (
    div_u32,
    ld_global_u32,
    ld_global_u32x4,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 128
OCTETS = THREADS * 8  # columns of a block
HEADS = THREADS // 16  # of a block


@kernel(*(int64,) * 3, *(uint32,) * 6)
def tap_kernel(fragments: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments y, x, columns (0: all in turn), C, K, place, first, rest, blocks of a token: y[t,
    place : place + C] = x[columns[t]]."""
    start, at = follow(early), octet_at(fragments)

    @cuda.jit(launch_bounds=THREADS)
    def tap(y, x, columns, C, K, place, first, rest, blocks):
        start()
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        c = uint32((uint32(cuda.blockIdx.x) - t * blocks) * uint32(OCTETS))
        c = uint32(c + uint32(cuda.threadIdx.x) * uint32(8))
        if c < C:
            source = t
            if columns != 0:
                source = uint32(ld_global_u32(row_of_32(columns, t)))
            q = ld_global_u32x4(x + (int64(source) * int64(C) + int64(c)) * 2)
            to = at(y, t, uint32(place + c), K, first, rest)
            st_global_u32x4(to, q[0], q[1], q[2], q[3])

    return Build(tap, THREADS)


@kernel(*(int64,) * 10, *(uint32,) * 5, float32)
def context_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments rings, kv, w, row, token, ring, first, used, far, near, L G, G, W, ring's tokens R,
    blocks of a column, eps.

    rings: [lanes][L][2][R][G D] BF16. w: [L][D] FP32. Of a column of row r nothing is kept unless
    its token is one of the used[r] (i32) from first[r] on, and of the last W of them.
    """
    start, D = follow(early), HEAD_DIM

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def context(
        rings, kv, w, row, token, ring, first, used, far, near, heads, G, W, R, blocks, eps
    ):
        v = cuda.local.array(8, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        block = uint32(uint32(cuda.blockIdx.x) - t * blocks)
        thread = uint32(cuda.threadIdx.x)
        head = uint32(block * uint32(HEADS) + (thread >> uint32(4)))
        there = head < heads
        head = min(head, uint32(heads - uint32(1)))
        lane, layer = uint32(thread & uint32(15)), div_u32(head, G)
        g = uint32(head - layer * G)
        r, position = ld_global_u32(row_of_32(row, t)), ld_global_u32(row_of_32(token, t))
        count = int32(ld_global_u32(row_of_32(used, r)))
        behind = int32(ld_global_u32(row_of_32(first, r)) - position)
        behind = int32(behind + count)  # tokens from this one to the last that is used
        width = int64(G) * (2 * D)
        at = kv + (int64(t) * int64(heads) * 2 + int64(layer) * int64(G) * 2 + int64(g)) * (2 * D)
        prepare_head(v, at, w + int64(layer) * (4 * D), (far, near), position, lane, eps)
        if there and behind > int32(0) and behind <= count and behind <= int32(W):
            layers = div_u32(heads, G)
            plane = int64(ld_global_u32(row_of_32(ring, r))) * int64(layers) + int64(layer)
            slot = uint32(position - div_u32(position, R) * R)
            to = rings + (plane * 2 * int64(R) + int64(slot)) * width + int64(g) * (2 * D)
            to += int64(lane) * 16
            store_octet(to, v)
            q = ld_global_u32x4(at + width + int64(lane) * 16)
            st_global_u32x4(to + int64(R) * width, q[0], q[1], q[2], q[3])

    return Build(context, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Taps of decode and of prefill, and the append."""
    early = starts_early(capability)
    yield tap_kernel(1, early)
    yield tap_kernel(0, early)
    yield context_kernel(early)


@dataclass(frozen=True)
class TapShape:
    """T columns of C, one of K / C taps; columns: address of [T] u32, which row of x each takes, or
    0 for all in turn."""

    T: int
    C: int
    K: int
    fragments: bool
    columns: int = 0


def tap(queue: Queue, y: int, x: int, *, place: int, shape: TapShape) -> None:
    """Copy rows of x [., C] BF16 to columns place .. place + C - 1 of y [T, K]; multiples of 8."""
    blocks = -(-shape.C // OCTETS)
    scalars = (shape.C, shape.K, place, *tiles_of(min(shape.T, 128)), blocks)
    item = tap_kernel(shape.fragments, queue.early)
    queue.launch(item, (shape.T * blocks,), y, x, shape.columns, *scalars)


@dataclass(frozen=True)
class Rings:
    """Address of rings [lanes][L][2][R][G D] BF16, of which queries see W tokens."""

    address: int
    L: int
    G: int
    R: int
    W: int

    @property
    def layer_nbytes(self) -> int:
        """Bytes of a layer of a ring."""
        return 2 * self.R * self.G * HEAD_DIM * 2

    @property
    def nbytes(self) -> int:
        """Bytes of one ring."""
        return self.L * self.layer_nbytes


@dataclass(frozen=True)
class ContextColumns:
    """Device addresses, 32-bit: row [T] and token [T] of columns; of rows [B] their ring, the token
    of their first column, and how many tokens from there on are used."""

    row: int
    token: int
    ring: int
    first: int
    used: int


@dataclass(frozen=True)
class KeyNorms:
    """Address of factors [L][D] FP32, (far, near) tables of angles, eps."""

    w: int
    angles: tuple[int, int]
    eps: float


def append_context(
    queue: Queue, rings: Rings, kv: int, *, T: int, columns: ContextColumns, norms: KeyNorms
) -> None:
    """Append what is used of T columns; kv: address of [T][L][2][G D] BF16."""
    heads, at = rings.L * rings.G, columns
    blocks = -(-heads // HEADS)
    queue.launch(
        context_kernel(queue.early),
        (T * blocks,),
        *(rings.address, kv, norms.w, at.row, at.token, at.ring, at.first, at.used),
        *norms.angles,
        *(heads, rings.G, rings.W, rings.R, blocks, norms.eps),
    )
