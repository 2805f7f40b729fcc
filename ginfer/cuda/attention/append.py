"""Norm and rotation of q and k, and the append of k and v to their pages, in one pass.

q[t, h] = rotate(norm(q[t, h]) * w_q) in place; k likewise with w_k, then with v to the page and
slot of its token. The first 2 F of D dims turn: pairs (f, f + F) by the angle whose cosine and sine
the host put into `rope` [T][2 F]. One warp per head, D / 32 dims per lane.

Legend: T columns, H query heads, G K/V heads, M = H / G, D dims, P pages of a row. A row of `qkgv`
is q [H, D], k [G, D], gate [H, D], v [G, D], BF16. Oracles: tests.oracles.norm, tests.oracles.rope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, PageShape, chunk_at
from ginfer.cuda.lib.numeric import follow, load_bf16x8, load_f32x8, pack_bf16, row_of_32, warp_sum
from ginfer.cuda.lib.ptx import (
    div_u32,
    fma_f32,
    ld_global_u32,
    ld_global_u32x4,
    rsqrt_approx,
    shfl_xor_f32,
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


@kernel(*(int64,) * 8, *(uint32,) * 6, float32)
def append_kernel(F: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments qkgv, kv, w_q, w_k, row, token, pages, rope, H, G, P, bytes of a page, offset of
    the layer, blocks per column, eps. kv: address of page 0. D is 256."""
    start, span = follow(early), F // 8  # lanes that hold the first halves of the pairs
    D = HEAD_DIM

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
        qkgv, kv, w_q, w_k, row, token, pages, rope, H, G, P, page_nbytes, layer, blocks, eps
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
            to = at
            if head >= H:
                position = uint32(ld_global_u32(row_of_32(token, t)))
                slot = uint32(position & uint32(TILE - 1))
                entry = int64(ld_global_u32(row_of_32(row, t))) * int64(P)
                entry += int64(position >> uint32(6))
                page = kv + int64(ld_global_u32(pages + entry * 4)) * int64(page_nbytes)
                plane = page + int64(layer) + int64(head - H) * (TILE * D * 2)
                place = int64(lane >> uint32(3)) * PANEL_NBYTES
                place += int64(chunk_at(slot, uint32(lane & uint32(7))))
                to = plane + place
                source = at + int64(H + G) * (2 * D)
                q = ld_global_u32x4(source)
                st_global_u32x4(to + int64(G) * (TILE * D * 2), q[0], q[1], q[2], q[3])
            st_global_u32x4(
                to,
                pack_bf16(v[0], v[1]),
                pack_bf16(v[2], v[3]),
                pack_bf16(v[4], v[5]),
                pack_bf16(v[6], v[7]),
            )

    return Build(append, WARPS * 32)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The one shape of our models' heads."""
    yield append_kernel(HALF_ROTARY, starts_early(capability))


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
        append_kernel(HALF_ROTARY, queue.early),
        (T * blocks,),
        *(qkgv, address, weights.q, weights.k),
        *(columns.row, columns.token, columns.pages, columns.rope),
        *(H, pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx), blocks),
        weights.eps,
    )
