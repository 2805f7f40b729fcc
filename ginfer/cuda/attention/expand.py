"""Packed pages in BF16 for prefill, which reads each of them many times: one layer at a time.

Page i of `out` is page ids[i] of the cache, as pages of one layer in BF16. A block opens a plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, int64, uint32

from ginfer.cuda.attention.append import HEAD_DIM
from ginfer.cuda.attention.pages import (
    PANEL_NBYTES,
    TILE,
    chunk_at,
    four_values,
    packed_plane,
)
from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import (
    div_u32,
    f32_from_f16,
    ld_global_u16,
    ld_global_u32,
    ld_global_u32x4,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.attention.pages import PageShape
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 256


@kernel(*(int64,) * 4, *(uint32,) * 3)
def attention_expand_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments out, kv, scales, ids, planes of a layer, bytes of a page, offset of the layer."""
    start, (codes, _) = follow(early), packed_plane(HEAD_DIM)
    plane_nbytes = HEAD_DIM // 64 * PANEL_NBYTES

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def attention_expand(out, kv, scales, ids, planes, page_nbytes, layer):
        start()
        entry = div_u32(uint32(cuda.blockIdx.x), planes)
        plane = uint32(uint32(cuda.blockIdx.x) - entry * planes)
        offset = int64(ld_global_u32(row_of_32(ids, entry))) * int64(page_nbytes)
        offset += int64(layer) + int64(plane) * codes
        to = out + int64(cuda.blockIdx.x) * plane_nbytes
        i = uint32(cuda.threadIdx.x)
        while i < uint32(codes // 16):
            panel, token = uint32(i >> uint32(8)), uint32((i >> uint32(2)) & uint32(TILE - 1))
            at = scales + (offset >> 5) + int64(panel * uint32(2 * TILE) + token * uint32(2))
            scale = f32_from_f16(ld_global_u16(at))
            q = ld_global_u32x4(kv + offset + int64(i) * 16)
            chunk = uint32((i & uint32(3)) * uint32(2))
            row = to + int64(panel) * PANEL_NBYTES
            a, b = four_values(q[0], scale), four_values(q[1], scale)
            st_global_u32x4(row + int64(chunk_at(token, chunk)), a[0], a[1], b[0], b[1])
            a, b = four_values(q[2], scale), four_values(q[3], scale)
            chunk = uint32(chunk + uint32(1))
            st_global_u32x4(row + int64(chunk_at(token, chunk)), a[0], a[1], b[0], b[1])
            i = uint32(i + uint32(THREADS))

    return Build(attention_expand, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The one shape of our models' heads."""
    yield attention_expand_kernel(starts_early(capability))


def attention_expand(
    queue: Queue, out: int, *, kv: tuple[int, int, PageShape], ids: int, count: int
) -> None:
    """out = `count` pages of one layer in BF16; ids: address of their ids, [count] int32. kv:
    address of page 0, attention layer, shape of the packed pages."""
    address, layer_idx, pages = kv
    planes = 2 * pages.G
    queue.launch(
        attention_expand_kernel(queue.early),
        (count * planes,),
        *(out, address, pages.scales, ids),
        *(planes, pages.page_nbytes, pages.layer_offset(layer_idx)),
    )
