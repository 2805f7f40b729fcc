"""Norm and rotation of q and k, and the append of k and v to their pages, in one pass.

q[t, h] = rotate(norm(q[t, h]) * w_q) in place; k likewise with w_k, then with v to the page and
slot of its token. The first 2 F of D dims turn: pairs (f, f + F) by the angle whose cosine and sine
the host put into `rope` [T][2 F]. One warp per head, D / 32 dims per lane. Packed pages get codes:
scale = F16(max |x| / 127) per 64 dims of BF16 x, code = round(x / scale), 0 where scale is 0.

Legend: T columns, H query heads, G K/V heads, M = H / G, D dims, P pages of a row. A row of `qkgv`
is q [H, D], k [G, D], gate [H, D], v [G, D], BF16. Oracles: tests.oracles.norm, tests.oracles.rope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, PageShape, chunk_at
from ginfer.cuda.lib.numeric import (
    follow,
    high_f32,
    load_bf16x8,
    load_f32x8,
    low_f32,
    pack_bf16,
    row_of_32,
    warp_sum,
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
    mul_rn_f32,
    rsqrt_approx,
    shfl_xor_f32,
    st_global_u16,
    st_global_u32,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

HEAD_DIM, HALF_ROTARY = 256, 32  # of both models with this kernel
WARPS = 4


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
def _store_row(v, at):
    """Eight dims as BF16 at a global address."""
    st_global_u32x4(
        at,
        pack_bf16(v[0], v[1]),
        pack_bf16(v[2], v[3]),
        pack_bf16(v[4], v[5]),
        pack_bf16(v[6], v[7]),
    )


@cuda.jit(device=True, inline="always")
def _store_bf16(v, kv, scales, offset, slot, lane):
    """Eight dims of a lane to token `slot` of the plane at kv + offset."""
    place = int64(lane >> uint32(3)) * PANEL_NBYTES
    _store_row(v, kv + offset + place + int64(chunk_at(slot, uint32(lane & uint32(7)))))


@cuda.jit(device=True, inline="always")
def _code(x, inverse):
    """The code of x in the lowest byte."""
    steps = min(max(mul_rn_f32(x, inverse), float32(-127.0)), float32(127.0))
    return uint32(bits_from_f32(add_rn_f32(steps, float32(12582912.0))) & uint32(0xFF))


@cuda.jit(device=True, inline="always")
def _store_packed(v, kv, scales, offset, slot, lane):
    """As `_store_bf16`; a NaN or infinity makes the scale of its dims NaN."""
    top, flaw = float32(0.0), float32(0.0)
    for i in range(4):
        pair = pack_bf16(v[2 * i], v[2 * i + 1])
        v[2 * i], v[2 * i + 1] = low_f32(pair), high_f32(pair)
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
    panel = int64(lane >> uint32(3))
    to = kv + offset + panel * (TILE * 64) + int64(slot) * 64 + int64(lane & uint32(7)) * 8
    for i in range(2):
        word = uint32(_code(v[4 * i], inverse) | (_code(v[4 * i + 1], inverse) << uint32(8)))
        word = uint32(word | (_code(v[4 * i + 2], inverse) << uint32(16)))
        word = uint32(word | (_code(v[4 * i + 3], inverse) << uint32(24)))
        st_global_u32(to + i * 4, word)
    if lane & uint32(7) == 0:
        st_global_u16(scales + (offset >> 5) + panel * (2 * TILE) + int64(slot) * 2, bits)


@kernel(*(int64,) * 9, *(uint32,) * 6, float32)
def append_kernel(F: int, packed: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments qkgv, kv, scales, w_q, w_k, row, token, pages, rope, H, G, P, bytes of a page,
    offset of the layer, blocks per column, eps. kv, scales: addresses of page 0. D is 256."""
    start, span = follow(early), F // 8  # lanes that hold the first halves of the pairs
    D, store = HEAD_DIM, _store_packed if packed else _store_bf16
    plane_nbytes = TILE * D * (1 if packed else 2)

    @cuda.jit(device=True, inline="always")
    def norm_rotate(v, at, w, rope, lane, eps):
        """Load a head's eight dims of a lane, normalise and rotate them."""
        f, other = cuda.local.array(8, float32), cuda.local.array(8, float32)
        load_bf16x8(v, at)
        total = float32(0.0)
        for i in range(8):
            total = fma_f32(v[i], v[i], total)
        inv = rsqrt_approx(warp_sum(total) / float32(D) + eps)
        load_f32x8(f, w + int64(lane) * 32)
        for i in range(8):
            v[i] = v[i] * inv * f[i]
            other[i] = shfl_xor_f32(v[i], uint32(span))
        if lane < uint32(2 * span):
            angles = rope + int64(lane & uint32(span - 1)) * 32
            load_f32x8(f, angles)
            for i in range(8):
                v[i] = v[i] * f[i]
            load_f32x8(f, angles + 4 * F)
            for i in range(8):
                sin = -f[i] if lane < uint32(span) else f[i]
                v[i] = fma_f32(other[i], sin, v[i])

    @cuda.jit(fastmath=True, launch_bounds=WARPS * 32)
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
        v = cuda.local.array(8, float32)
        start()
        t = div_u32(uint32(cuda.blockIdx.x), blocks)
        warp, lane = uint32(cuda.threadIdx.x >> 5), uint32(cuda.threadIdx.x & 31)
        head = uint32((uint32(cuda.blockIdx.x) - t * blocks) * uint32(WARPS) + warp)
        if head < H + G:
            width = int64(H + G) * (4 * D)
            x = qkgv + int64(t) * width
            at = x + (int64(head) * D + int64(lane) * 8) * 2
            norm_rotate(v, at, w_q if head < H else w_k, rope + int64(t) * (8 * F), lane, eps)
            if head < H:
                _store_row(v, at)
            else:
                position = uint32(ld_global_u32(row_of_32(token, t)))
                slot = uint32(position & uint32(TILE - 1))
                entry = int64(ld_global_u32(row_of_32(row, t))) * int64(P)
                entry += int64(position >> uint32(6))
                offset = int64(ld_global_u32(pages + entry * 4)) * int64(page_nbytes)
                offset += int64(layer) + int64(head - H) * plane_nbytes
                store(v, kv, scales, offset, slot, lane)
                load_bf16x8(v, at + int64(H + G) * (2 * D))
                store(v, kv, scales, offset + int64(G) * plane_nbytes, slot, lane)

    return Build(append, WARPS * 32)


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
    blocks = -(-(H + pages.G) // WARPS)
    queue.launch(
        append_kernel(HALF_ROTARY, pages.packed, queue.early),
        (T * blocks,),
        *(qkgv, address, pages.scales, weights.q, weights.k),
        *(columns.row, columns.token, columns.pages, columns.rope),
        *(H, pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx), blocks),
        weights.eps,
    )
