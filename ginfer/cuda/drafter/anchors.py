"""Anchors: the positions where the blocks of a draft begin, behind an acceptance too.

p[b] = starts[b] + used[rows[b]], without the second term for a row of -1: how many columns were
accepted only the device knows when the draft is ordered. Legend: B rows, at most a warp of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, int32, int64, uint32

from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import ld_global_u32, st_global_u32
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 32


@kernel(*(int64,) * 4, uint32)
def anchors_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments p, starts [B] u32, rows [B] i32, used i32, B."""
    start = follow(early)

    @cuda.jit(launch_bounds=THREADS)
    def anchors(p, starts, rows, used, B):
        start()
        b = uint32(cuda.threadIdx.x)
        if b < B:
            at = uint32(ld_global_u32(row_of_32(starts, b)))
            row = int32(ld_global_u32(row_of_32(rows, b)))
            if row >= int32(0):
                at = uint32(at + uint32(ld_global_u32(row_of_32(used, uint32(row)))))
            st_global_u32(row_of_32(p, b), at)

    return Build(anchors, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The one step."""
    yield anchors_kernel(starts_early(capability))


def anchors(queue: Queue, p: int, starts: int, rows: int, used: int, *, B: int) -> None:
    """Put the positions of B rows at p; all addresses of 32-bit words."""
    assert B <= THREADS
    queue.launch(anchors_kernel(queue.early), (1,), p, starts, rows, used, B)
