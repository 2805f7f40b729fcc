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
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

FORMATS = ("W8G32_F16S", "BF16")
THREADS = 320
COLUMNS = 16  # of a thread at a time; THREADS of them are a row of the 27B
MANY, ROWS = 256, 4  # tokens from which on a block takes several rows, and how many


@kernel(*(int64,) * 4, *(uint32,) * 3)
def embedding_kernel(fmt: str, each: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments y, ids, tokens [lanes], table, T, C, bytes of a row. A block copies `each` rows,
    and reads all of them before it writes."""
    start, plain = follow(early), fmt == "BF16"
    words = 8 if plain else 4  # of a row's columns of a thread
    held_words = words * each

    @cuda.jit(device=True, inline="always")
    def scaled_pair(codes, i, scale):
        """Bytes i and i + 1 of a word, signed, times the scale."""
        low = uint32(((codes >> uint32(8 * i)) & uint32(0xFF)) ^ uint32(0x80))
        high = uint32(((codes >> uint32(8 * i + 8)) & uint32(0xFF)) ^ uint32(0x80))
        bias = float32(128.0)
        return pack_bf16((float32(low) - bias) * scale, (float32(high) - bias) * scale)

    @cuda.jit(device=True, inline="always")
    def read(held, scales, i, row, C, c):
        """The columns from c on of a row, as they are stored."""
        for half in range(words // 4):
            q = ld_global_u32x4(row + int64(c) * (words // 4) + 16 * half)
            for j in range(4):
                held[words * i + 4 * half + j] = q[j]
        if not plain:
            at = row + int64(C) + int64(c >> uint32(5)) * 2
            scales[i] = f32_from_f16(ld_global_u16(at))

    @cuda.jit(device=True, inline="always")
    def write(to, held, scales, i):
        for half in range(2):
            if plain:
                p = 8 * i + 4 * half
                st_global_u32x4(to + 16 * half, held[p], held[p + 1], held[p + 2], held[p + 3])
            else:
                low, high = held[4 * i + 2 * half], held[4 * i + 2 * half + 1]
                st_global_u32x4(
                    to + 16 * half,
                    scaled_pair(low, 0, scales[i]),
                    scaled_pair(low, 2, scales[i]),
                    scaled_pair(high, 0, scales[i]),
                    scaled_pair(high, 2, scales[i]),
                )

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 4))
    def embedding(y, ids, tokens, table, T, C, stride):
        held, scales = cuda.local.array(held_words, uint32), cuda.local.array(each, float32)
        names = cuda.local.array(each, uint32)
        start()
        first = uint32(uint32(cuda.blockIdx.x) * uint32(each))
        for i in range(each):
            if uint32(first + uint32(i)) < T:
                names[i] = ld_global_u32(row_of_32(ids, uint32(first + uint32(i))))
        for i in range(each):
            if uint32(first + uint32(i)) < T and names[i] >= uint32(0x80000000):
                names[i] = ld_global_u32(row_of_32(tokens, uint32(~names[i])))
        c = uint32(uint32(cuda.threadIdx.x) * uint32(COLUMNS))
        while c < C:
            for i in range(each):
                if uint32(first + uint32(i)) < T:
                    read(held, scales, i, table + int64(names[i]) * int64(stride), C, c)
            for i in range(each):
                if uint32(first + uint32(i)) < T:
                    to = y + (int64(first + uint32(i)) * int64(C) + int64(c)) * 2
                    write(to, held, scales, i)
            c = uint32(c + uint32(THREADS * COLUMNS))

    return Build(embedding, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Kernels of few tokens and of many per format of an embedding."""
    for fmt in FORMATS:
        for each in (1, ROWS):
            yield embedding_kernel(fmt, each, starts_early(capability))


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
    (address, fmt, stride), T = table, shape[0]
    each = ROWS if T >= MANY else 1
    item = embedding_kernel(fmt, each, queue.early)
    queue.launch(item, (div_ceil(T, each),), y, *ids, address, *shape, stride)
