"""Rotations: cosines and sines of rotary positions, those of text computed once.

Legend: T columns, F = rotary_dim / 2 pairs of dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.spec import ModelSpec

RUN = 64  # positions that are computed together


def rope_frequencies(spec: ModelSpec) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Position axis and frequency of each pair of dims; frequencies are FP32 numbers."""
    a = spec.attention
    F = a.rotary_dim // 2
    axes = np.zeros(F, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * a.mrope_sections[axis] : 3] = axis
    frequencies = (a.rope_theta ** (-np.arange(F) / F)).astype(np.float32)
    return axes, frequencies.astype(np.float64)


class Rotations:
    """Rows of F cosines, then F sines, FP32, of angles in float64. Text, whose positions are equal
    on all axes, finds those of positions below `num_positions` in a table, which grows by runs as
    they are asked for."""

    def __init__(self, spec: ModelSpec, num_positions: int) -> None:
        self._axes, self._frequencies = rope_frequencies(spec)
        runs = div_ceil(num_positions, RUN)
        self._table = np.empty((runs * RUN, 2 * len(self._axes)), np.float32)
        self._known = bytearray(runs)  # whether a run is in the table

    def fill(self, rows: NDArray[np.float32], positions: NDArray[np.int32]) -> None:
        """rows: [T, 2 F], where they go. positions: [3, T], of the axes T, H, W."""
        time, raw = positions[0], positions.tobytes()
        size, places = len(raw) // 3, time.tolist()
        equal = raw[:size] == raw[size : 2 * size] == raw[2 * size :]
        if not equal or min(places) < 0 or max(places) >= len(self._table):
            self._compute(rows, positions.T[:, self._axes])
            return
        for place in places:
            if not self._known[place // RUN]:
                at = place // RUN * RUN
                column = np.arange(at, at + RUN)[:, None]
                self._compute(self._table[at : at + RUN], column)
                self._known[place // RUN] = True
        self._table.take(time, axis=0, out=rows, mode="clip")

    def _compute(self, rows: NDArray[np.float32], positions: NDArray[Any]) -> None:
        """positions: [T, F], or [T, 1] of all pairs."""
        angles = positions * self._frequencies
        F = len(self._frequencies)
        rows[:, :F] = np.cos(angles)
        rows[:, F:] = np.sin(angles)
