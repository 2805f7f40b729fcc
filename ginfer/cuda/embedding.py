"""Embedding rows: y[t] = row ids[t] of a `rows-v1` table, rounded to BF16. A negative id ~l stands
for the id that lane l drew last.

Legend: T tokens, C columns (a multiple of 32). Oracle: the format's decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import follow_late, pack_bf16, row_of_32
from ginfer.cuda.lib.ptx import (
    f32_from_bits,
    f32_from_f16,
    ld_global_u16,
    ld_global_u32,
    ld_global_u32x4,
    ld_global_u64,
    permute_bytes,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

FORMATS = ("W8G32_F16S", "BF16")
THREADS = 128
GROUPS = 5  # of eight columns that a thread reads at a time; with THREADS a row of the 27B
RESIDENT = 10  # blocks on a multiprocessor: most of 2,048 rows are on their way at once


@cuda.jit(device=True, inline="always")
def four_scaled(word, scale):
    """Signed bytes of a word times the scale: two BF16 pairs."""
    v = cuda.local.array(4, float32)
    biased = uint32(word ^ uint32(0x80808080))
    for i in range(4):
        # the float 2^23 + code + 128
        bits = permute_bytes(biased, uint32(0x4B000000), uint32(0x7440 + i))
        v[i] = (f32_from_bits(bits) - float32(8388736.0)) * scale
    return pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])


@kernel(*(int64,) * 4, *(uint32,) * 2)
def embedding_kernel(fmt: str, early: int):  # type: ignore[no-untyped-def]
    """Arguments y, ids, tokens [lanes], table, C, bytes of a row. A block copies one row, and reads
    it before it waits, unless its id is one that a lane drew."""
    (start, wait), plain = follow_late(early), fmt == "BF16"
    words = 4 if plain else 2
    held_words = words * GROUPS

    @cuda.jit(device=True, inline="always")
    def read(held, scales, g, row, C, c):
        """Eight columns from c on of a row, as they are stored."""
        if plain:
            q = ld_global_u32x4(row + int64(c) * 2)
            for j in range(words):
                held[words * g + j] = q[j]
        else:
            codes = ld_global_u64(row + int64(c))
            held[words * g] = uint32(codes & 0xFFFFFFFF)
            held[words * g + 1] = uint32(codes >> 32)
            at = row + int64(C) + int64(c >> uint32(5)) * 2
            scales[g] = f32_from_f16(ld_global_u16(at))

    @cuda.jit(device=True, inline="always")
    def write(to, held, scales, g):
        p = words * g
        if plain:
            st_global_u32x4(to, held[p], held[p + 1], held[p + 2], held[p + 3])
        else:
            a, b = four_scaled(held[p], scales[g]), four_scaled(held[p + 1], scales[g])
            st_global_u32x4(to, a[0], a[1], b[0], b[1])

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, RESIDENT))
    def embedding(y, ids, tokens, table, C, stride):
        held, scales = cuda.local.array(held_words, uint32), cuda.local.array(GROUPS, float32)
        start()
        token = uint32(cuda.blockIdx.x)
        name = ld_global_u32(row_of_32(ids, token))
        if name >= uint32(0x80000000):
            wait()
            name = ld_global_u32(row_of_32(tokens, uint32(~name)))
        row, to = table + int64(name) * int64(stride), y + int64(token) * int64(C) * 2
        first = uint32(uint32(cuda.threadIdx.x) * uint32(8))
        while first < C:
            for g in range(GROUPS):
                c = uint32(first + uint32(8 * THREADS * g))
                if c < C:
                    read(held, scales, g, row, C, c)
            wait()
            for g in range(GROUPS):
                c = uint32(first + uint32(8 * THREADS * g))
                if c < C:
                    write(to + int64(c) * 2, held, scales, g)
            first = uint32(first + uint32(8 * THREADS * GROUPS))

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
