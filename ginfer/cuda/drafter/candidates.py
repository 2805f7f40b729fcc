"""The best ids of rows of logits, exactly, in two passes: of pieces of a row, then of their best.

A candidate is its key << 32 | ~id, so that no two are equal and ties fall to the lower id; 0 stands
for none. A thread holds its share; the K-th best of the threads' best ones is a floor that at least
K candidates reach, and only of K threads: those few are ranked against each other.

Legend: R rows, V legal ids, K best ids (16). Oracle: tests.oracles.drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, int64, uint32

from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import (
    atom_shared_add_u32,
    bits_from_f32,
    div_u32,
    ld_global_f32,
    ld_global_u32,
    ld_global_u64,
    ld_shared_u32,
    ld_shared_u64,
    shared_address,
    st_global_u64,
    st_shared_u32,
    st_shared_u64,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.cuda.sampling.exact import key_of
from ginfer.cuda.sampling.keys import NO_ID
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

K = 16
THREADS, HELD = 128, 32  # candidates of a thread
PIECE = THREADS * HELD
MOST_IDS = PIECE // K * PIECE


@kernel(*(int64,) * 3, *(uint32,) * 3)
def candidates_kernel(joins: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments best, source, ids (0: places themselves), V, bytes of a row of the source, pieces.

    best: [R][pieces][K] u64, 0 where there are fewer; of a piece in descending order. source:
    logits [R][>= V] FP32, or if it joins candidates [R][V] u64. ids: [V] u32 of the places,
    ascending.
    """
    start, room = follow(early), THREADS * 2 + K * HELD + 1

    @cuda.jit(device=True, inline="always")
    def candidate(source, ids, i):
        if joins:
            return ld_global_u64(source + int64(i) * 8)
        x = ld_global_f32(source + int64(i) * 4)
        bits = bits_from_f32(x)
        if bits & uint32(0x7F800000) == uint32(0x7F800000):
            return int64(0)
        name = i
        if ids != 0:
            name = uint32(ld_global_u32(row_of_32(ids, i)))
        return int64((int64(key_of(x)) << int64(32)) | int64(uint32(name ^ uint32(NO_ID))))

    @cuda.jit(device=True, inline="always")
    def above(a, b):
        """a > b of unsigned numbers."""
        return (a ^ int64(-0x8000000000000000)) > (b ^ int64(-0x8000000000000000))

    @cuda.jit(device=True, inline="always")
    def rank_of(list_at, count, mine):
        """How many of a list are above."""
        rank = uint32(0)
        i = uint32(0)
        while i < count:
            if above(ld_shared_u64(uint32(list_at + i * uint32(8))), mine):
                rank = uint32(rank + uint32(1))
            i = uint32(i + uint32(1))
        return rank

    @cuda.jit(launch_bounds=THREADS)
    def candidates(best, source, ids, V, row_nbytes, pieces):
        tops = shared_address(cuda.shared.array(room, int64))
        held = cuda.local.array(HELD, int64)
        start()
        thread = uint32(cuda.threadIdx.x)
        gathered = uint32(tops + uint32(THREADS * 8))
        notes = uint32(gathered + uint32(K * HELD * 8))
        row = div_u32(uint32(cuda.blockIdx.x), pieces)
        piece = uint32(uint32(cuda.blockIdx.x) - row * pieces)
        source += int64(row) * int64(row_nbytes)
        first = uint32(piece * uint32(PIECE) + thread)
        top = int64(0)
        for j in range(HELD):
            i = uint32(first + uint32(j * THREADS))
            held[j] = candidate(source, ids, i) if i < V else int64(0)
        for j in range(HELD):
            if above(held[j], top):
                top = held[j]
        st_shared_u64(uint32(tops + thread * uint32(8)), top)
        if thread == 0:
            st_shared_u64(notes, int64(0))
            st_shared_u32(uint32(notes + uint32(8)), uint32(0))
        cuda.syncthreads()
        if top != int64(0) and rank_of(tops, uint32(THREADS), top) == uint32(K - 1):
            st_shared_u64(notes, top)
        cuda.syncthreads()
        floor = ld_shared_u64(notes)
        for j in range(HELD):
            if held[j] != int64(0) and not above(floor, held[j]):
                at = atom_shared_add_u32(uint32(notes + uint32(8)), uint32(1))
                st_shared_u64(uint32(gathered + at * uint32(8)), held[j])
        cuda.syncthreads()
        count = ld_shared_u32(uint32(notes + uint32(8)))
        best += int64(cuda.blockIdx.x) * (K * 8)
        i = thread
        while i < count:
            mine = ld_shared_u64(uint32(gathered + i * uint32(8)))
            rank = rank_of(gathered, count, mine)
            if rank < uint32(K):
                st_global_u64(best + int64(rank) * 8, mine)
            i = uint32(i + uint32(THREADS))
        if thread < uint32(K) and thread >= count:
            st_global_u64(best + int64(thread) * 8, int64(0))

    return Build(candidates, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Both passes."""
    early = starts_early(capability)
    yield candidates_kernel(0, early)
    yield candidates_kernel(1, early)


@dataclass(frozen=True)
class CandidateShape:
    """R rows of V legal ids, `row_nbytes` apart."""

    R: int
    V: int
    row_nbytes: int

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return div_ceil(self.V, PIECE)


def pieces_nbytes(R: int, V: int) -> int:
    """Bytes of what the first pass leaves."""
    return R * div_ceil(V, PIECE) * K * 8


def candidates(
    queue: Queue, best: int, logits: int, *, pieces: int, ids: int, shape: CandidateShape
) -> None:
    """best [R][K] u64, best first, of rows of FP32 logits. pieces: scratch of `pieces_nbytes`; ids:
    address of [V] u32, the ascending ids of the places, or 0 where they are the places."""
    n, first, second = shape.pieces, *(candidates_kernel(j, queue.early) for j in (0, 1))
    assert K <= shape.V <= MOST_IDS
    queue.launch(first, (shape.R * n,), pieces, logits, ids, shape.V, shape.row_nbytes, n)
    queue.launch(second, (shape.R,), best, pieces, 0, n * K, n * K * 8, 1)
