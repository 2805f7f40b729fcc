"""The ring of k tiles in shared memory that the decode linear on sm_90 streams weights through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, uint32


@dataclass(frozen=True)
class Ring:
    """Stages of k tiles in shared memory, in bytes: span tiles of weights, then of tokens; span,
    stages: how many."""

    span: int
    stages: int
    tile_bytes: int
    x_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Weights of a stage."""
        return self.span * self.tile_bytes

    @property
    def stage_bytes(self) -> int:
        """A stage."""
        return self.weight_bytes + self.span * self.x_bytes


def advance_stage(stages: int) -> Any:
    """Device function: the next stage of a ring and the phase of its barriers."""

    @cuda.jit(device=True, inline="always")
    def advance(s, phase):
        s = uint32(s + uint32(1))
        if s == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return s, phase

    return advance


LONG_RUN = 84  # k tiles
ALONE_NBYTES = 118 << 10  # shared memory of a block that shares a multiprocessor with none like it


def stage_tiles(span: int, wgmma: int) -> Any:
    """Device function: k tiles of the next stage of an item, by how many are left, and how many its
    run has before and after them. On mma the first and the last stages of long runs are short: work
    begins early, and little is left behind the last bytes. In short ones more stages cost more than
    that brings."""
    half, quarter = max(span // 2, 1), max(span // 4, 1)

    @cuda.jit(device=True, inline="always")
    def tapered(left, before, after):
        count, to_come = uint32(span), uint32(left + after)
        if uint32(before + to_come) >= uint32(LONG_RUN):
            if before < uint32(span) or to_come <= uint32(span):
                count = uint32(half)
            if before < uint32(half) or to_come <= uint32(half):
                count = uint32(quarter)
        return min(left, count)

    @cuda.jit(device=True, inline="always")
    def equal(left, before, after):
        return min(left, uint32(span))

    return equal if wgmma else tapered
