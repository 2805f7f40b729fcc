"""Norm and rotation of q and k, and the append of k and v to their pages, in one pass.

q[t, h] = rotate(norm(q[t, h]) * w_q) in place; k likewise with w_k, then with v to the page and
slot of its token. The first 2 F of D dims turn: pairs (f, f + F) by the angle whose cosine and sine
the host put into `rope` [T][2 F]. Eight lanes per head, each with eight dims of every panel of 64:
what turns is one panel, so that all lanes turn it. Packed pages get codes: scale = F16(max |x| /
127) per panel of BF16 x, code = round(x / scale), 0 where scale is 0.

Legend: T columns, H query heads, G K/V heads, M = H / G, D dims, P pages of a row. A row of `qkgv`
is q [H, D], k [G, D], gate [H, D], v [G, D], BF16. Oracles: tests.oracles.norm, tests.oracles.rope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, PageShape, chunk_at
from ginfer.cuda.lib.numeric import (
    follow_late,
    high_f32,
    load_f32x8,
    low_f32,
    pack_bf16,
    row_of_32,
)
from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    bits_from_f32,
    div_rn_f32,
    div_u32,
    f16_from_f32,
    f32_from_f16,
    fma_f32,
    ld_global_u32,
    ld_global_u32x4,
    mul_rn_f32,
    rsqrt_approx,
    shfl_xor_f32,
    st_global_u16,
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

HEAD_DIM, HALF_ROTARY = 256, 32  # of both models with this kernel
PANELS = HEAD_DIM // 64
WORDS = 4 * PANELS  # of a lane, a pair of dims each
WARPS = 4  # four heads each


@dataclass(frozen=True)
class Columns:
    """Device addresses: row [T] and token [T] (index in the sequence) of each column, pages
    [B][P], rope [T][2 F] FP32; P."""

    row: int
    token: int
    pages: int
    rope: int
    P: int


@cuda.jit(device=True, inline="always")
def _fetch(words, at):
    """The eight dims of a lane in each panel of a head."""
    for p in range(PANELS):
        q = ld_global_u32x4(at + 128 * p)
        for j in range(4):
            words[4 * p + j] = q[j]


@cuda.jit(device=True, inline="always")
def _store_panel(at, words, p):
    """Eight dims as BF16 at a global address."""
    st_global_u32x4(at, words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3])


@cuda.jit(device=True, inline="always")
def _squares(words, p):
    """Sum of the squares of a lane's dims in a panel."""
    total = float32(0.0)
    for j in range(4):
        low, high = low_f32(words[4 * p + j]), high_f32(words[4 * p + j])
        total = fma_f32(high, high, fma_f32(low, low, total))
    return total


@cuda.jit(device=True, inline="always")
def _store_bf16(words, kv, scales, offset, slot, lane, keeps):
    """A head to token `slot` of the plane at kv + offset, if it is one to keep."""
    to = kv + offset + int64(chunk_at(slot, lane))
    if keeps:
        for p in range(PANELS):
            _store_panel(to + p * PANEL_NBYTES, words, p)


@cuda.jit(device=True, inline="always")
def _code(x, inverse):
    """The code of x in the lowest byte."""
    steps = min(max(mul_rn_f32(x, inverse), float32(-127.0)), float32(127.0))
    return uint32(bits_from_f32(add_rn_f32(steps, float32(12582912.0))) & uint32(0xFF))


@cuda.jit(device=True, inline="always")
def _store_packed(words, kv, scales, offset, slot, lane, keeps):
    """As `_store_bf16`; a NaN or infinity makes the scale of its panel NaN."""
    v = cuda.local.array(8, float32)
    for p in range(PANELS):
        top, flaw = float32(0.0), float32(0.0)
        for j in range(4):
            v[2 * j], v[2 * j + 1] = low_f32(words[4 * p + j]), high_f32(words[4 * p + j])
        for i in range(8):
            top = max(top, abs(v[i]))
            flaw = fma_f32(v[i], float32(0.0), flaw)
        for i in range(3):
            top = max(top, shfl_xor_f32(top, uint32(1 << i)))
            flaw = flaw + shfl_xor_f32(flaw, uint32(1 << i))
        bits = f16_from_f32(add_rn_f32(div_rn_f32(top, float32(127.0)), flaw))
        scale, inverse = f32_from_f16(bits), float32(0.0)
        if scale > float32(0.0):
            inverse = div_rn_f32(float32(1.0), scale)
        to = kv + offset + p * (TILE * 64) + int64(slot) * 64 + int64(lane) * 8
        if keeps:
            for i in range(2):
                word = uint32(
                    _code(v[4 * i], inverse) | (_code(v[4 * i + 1], inverse) << uint32(8))
                )
                word = uint32(word | (_code(v[4 * i + 2], inverse) << uint32(16)))
                word = uint32(word | (_code(v[4 * i + 3], inverse) << uint32(24)))
                st_global_u32(to + i * 4, word)
            if lane == 0:
                st_global_u16(scales + (offset >> 5) + p * (2 * TILE) + int64(slot) * 2, bits)


@kernel(*(int64,) * 9, *(uint32,) * 6, float32)
def append_kernel(F: int, packed: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments qkgv, kv, scales, w_q, w_k, row, token, pages, rope, H, G, P, bytes of a page,
    offset of the layer, blocks per column, eps. kv, scales: addresses of page 0. D is 256."""
    (start, wait), span = follow_late(early), F // 8  # lanes with the first halves of the pairs
    D, store = HEAD_DIM, _store_packed if packed else _store_bf16
    plane_nbytes = TILE * D * (1 if packed else 2)

    @cuda.jit(device=True, inline="always")
    def norm_rotate(words, w, angles, lane, eps, normed):
        """Normalise and rotate a head, if that is to be done to it."""
        v, f = cuda.local.array(8, float32), cuda.local.array(8, float32)
        sin, other = cuda.local.array(8, float32), cuda.local.array(8, float32)
        a = _squares(words, 0) + _squares(words, 2)
        total = a + (_squares(words, 1) + _squares(words, 3))
        for i in range(3):
            total = total + shfl_xor_f32(total, uint32(4 >> i))
        inv = rsqrt_approx(total / float32(D) + eps)
        for p in range(PANELS):
            load_f32x8(f, w + 256 * p)
            for j in range(4):
                v[2 * j] = low_f32(words[4 * p + j]) * inv * f[2 * j]
                v[2 * j + 1] = high_f32(words[4 * p + j]) * inv * f[2 * j + 1]
            if p == 0:
                load_f32x8(sin, angles + 4 * F)
                for i in range(8):
                    other[i] = shfl_xor_f32(v[i], uint32(span))
                load_f32x8(f, angles)
                for i in range(8):
                    s = -sin[i] if lane < uint32(span) else sin[i]
                    v[i] = fma_f32(other[i], s, v[i] * f[i])
            for j in range(4):
                pair = pack_bf16(v[2 * j], v[2 * j + 1])
                words[4 * p + j] = pair if normed else words[4 * p + j]

    @cuda.jit(fastmath=True, launch_bounds=(WARPS * 32, 6))
    def append(
        qkgv,
        kv,
        scales,
        w_q,
        w_k,
        row,
        token,
        pages,
        rope,
        H,
        G,
        P,
        page_nbytes,
        layer,
        blocks,
        eps,
    ):
        words = cuda.local.array(WORDS, uint32)
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(7))
        first = uint32((uint32(cuda.blockIdx.x) - t * blocks) * uint32(4 * WARPS))
        first = uint32(first + (thread >> uint32(5)) * uint32(4))  # head of the warp
        head, last = uint32(first + ((thread >> uint32(3)) & uint32(3))), uint32(H + 2 * G - 1)
        exists, head = head <= last, min(head, last)
        source = uint32(head + H) if head >= H + G else head
        width = int64(H + G) * (4 * D)
        at = qkgv + int64(t) * width + (int64(source) * D + int64(lane) * 8) * 2
        w = (w_q if head < H else w_k) + int64(lane) * 32
        angles = rope + int64(t) * (8 * F) + int64(lane & uint32(span - 1)) * 32
        wait()
        start()  # not before: K/V that is asked for early holds up the linear in front
        _fetch(words, at)
        norm_rotate(words, w, angles, lane, eps, head < H + G)
        if exists and head < H:
            for p in range(PANELS):
                _store_panel(at + 128 * p, words, p)
        if uint32(first + uint32(3)) >= H:
            position = uint32(ld_global_u32(row_of_32(token, t)))
            slot = uint32(position & uint32(TILE - 1))
            entry = int64(ld_global_u32(row_of_32(row, t))) * int64(P) + int64(
                position >> uint32(6)
            )
            offset = int64(ld_global_u32(pages + entry * 4)) * int64(page_nbytes) + int64(layer)
            plane = uint32(head - H) if head >= H else uint32(0)
            offset += int64(plane) * plane_nbytes
            store(words, kv, scales, offset, slot, lane, exists and head >= H)

    return Build(append, WARPS * 32)


def blocks_of(H: int, G: int) -> int:
    """Thread blocks of a column."""
    return div_ceil(H + 2 * G, 4 * WARPS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The one shape of our models' heads, pages of both kinds."""
    for packed in (0, 1):
        yield append_kernel(HALF_ROTARY, packed, starts_early(capability))


@dataclass(frozen=True)
class HeadNorms:
    """Addresses of the factors of q and k, [D] FP32 each, and eps."""

    q: int
    k: int
    eps: float


def append(
    queue: Queue,
    qkgv: int,
    kv: tuple[int, int, PageShape],
    *,
    T: int,
    columns: Columns,
    norms: tuple[HeadNorms, int],
) -> None:
    """Prepare q and k of T columns in place and append k and v. kv: address of page 0, attention
    layer, shape of the pages; norms: with the number of query heads."""
    address, layer_idx, pages = kv
    weights, H = norms
    blocks = blocks_of(H, pages.G)
    queue.launch(
        append_kernel(HALF_ROTARY, pages.packed, queue.early),
        (T * blocks,),
        *(qkgv, address, pages.scales, weights.q, weights.k),
        *(columns.row, columns.token, columns.pages, columns.rope),
        *(H, pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx), blocks),
        weights.eps,
    )
