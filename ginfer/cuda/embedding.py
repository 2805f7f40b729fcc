"""Embedding rows: y[t] = row ids[t] of a `rows-v1` table, rounded to BF16. A negative id ~l stands
for the id that lane l drew last.

Legend: T tokens, C columns (a multiple of 32). Oracle: the format's decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import follow, pack_bf16, row_of_32
from ginfer.cuda.lib.ptx import (
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

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

FORMATS = ("W8G32_F16S", "BF16")
THREADS = 320
COLUMNS = 16  # of a thread at a time; THREADS of them are a row of the 27B


@kernel(*(int64,) * 4, *(uint32,) * 2)
def embedding_kernel(fmt: str, early: int):  # type: ignore[no-untyped-def]
    """Arguments y, ids, tokens [lanes], table, C, bytes of a row. A block copies one row."""
    start, plain = follow(early), fmt == "BF16"

    @cuda.jit(device=True, inline="always")
    def scaled_pair(codes, i, scale):
        """Bytes i and i + 1 of a word, signed, times the scale."""
        low = uint32(((codes >> uint32(8 * i)) & uint32(0xFF)) ^ uint32(0x80))
        high = uint32(((codes >> uint32(8 * i + 8)) & uint32(0xFF)) ^ uint32(0x80))
        bias = float32(128.0)
        return pack_bf16((float32(low) - bias) * scale, (float32(high) - bias) * scale)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def embedding(y, ids, tokens, table, C, stride):
        start()
        token = uint32(cuda.blockIdx.x)
        name = ld_global_u32(row_of_32(ids, token))
        if name >= uint32(0x80000000):
            name = ld_global_u32(row_of_32(tokens, uint32(~name)))
        row = table + int64(name) * int64(stride)
        c = uint32(uint32(cuda.threadIdx.x) * uint32(COLUMNS))
        while c < C:
            to = y + (int64(token) * int64(C) + int64(c)) * 2
            if plain:
                q, r = ld_global_u32x4(row + int64(c) * 2), ld_global_u32x4(row + int64(c) * 2 + 16)
                st_global_u32x4(to, q[0], q[1], q[2], q[3])
                st_global_u32x4(to + 16, r[0], r[1], r[2], r[3])
            else:
                q = ld_global_u32x4(row + int64(c))
                scale = f32_from_f16(ld_global_u16(row + int64(C) + int64(c >> uint32(5)) * 2))
                for i in range(2):
                    low, high = q[2 * i], q[2 * i + 1]
                    st_global_u32x4(
                        to + 16 * i,
                        scaled_pair(low, 0, scale),
                        scaled_pair(low, 2, scale),
                        scaled_pair(high, 0, scale),
                        scaled_pair(high, 2, scale),
                    )
            c = uint32(c + uint32(THREADS * COLUMNS))

    return Build(embedding, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel per format of an embedding."""
    for fmt in FORMATS:
        yield embedding_kernel(fmt, starts_early(capability))


def embedding(
    queue: Queue,
    y: int,
    ids: tuple[int, int],
    *,
    table: tuple[int, str, int],
    shape: tuple[int, int],
) -> None:
    """y [T, C] BF16 = rows ids of a table: its address, format, bytes of a row. ids: addresses of
    those of the batch [T] i32 and of what the lanes drew last, u32. shape: (T, C)."""
    address, fmt, stride = table
    item = embedding_kernel(fmt, queue.early)
    queue.launch(item, (shape[0],), y, *ids, address, shape[1], stride)
