"""Partial interleaved M-RoPE: pairs (f, f + F) of the first 2 F dims of a head, one angle each.

Frequency f turns by position[axis(f)] * inv_freq(f): float32 frequencies, as the reference has
them, and the angle in float64, so that large positions lose nothing.
Legend: T columns, F frequencies. Oracle: tests.oracles.rope.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ginfer.cpu.product import device, fma


def frequency_axes(sections: tuple[int, int, int]) -> np.ndarray:
    """Axis (0 T, 1 H, 2 W) of each frequency, [F] int32: axes alternate while a section lasts."""
    axes = np.zeros(sum(sections), np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def inverse_frequencies(theta: float, F: int) -> np.ndarray:
    """theta^(-f / F), [F] float32."""
    return (theta ** (-np.arange(F, dtype=np.float64) / F)).astype(np.float32)


@njit(cache=True, nogil=True)
def rope_table(cos, sin, positions, axes, inv_freq):
    """Fill cos, sin [T, F] float32 for positions [3, T] int32."""
    for t in range(positions.shape[1]):
        for f in range(axes.size):
            angle = np.float64(positions[axes[f], t]) * np.float64(inv_freq[f])
            cos[t, f] = np.float32(math.cos(angle))
            sin[t, f] = np.float32(math.sin(angle))


@device
def rotate(x, cos, sin):
    """Turn the first 2 F elements of a head x [D] by the angles of its column; cos, sin: [F]."""
    F = cos.size
    low, high = x[:F], x[F : 2 * F]
    for f in range(F):
        a, b = low[f], high[f]
        low[f] = fma(a, cos[f], -(b * sin[f]))
        high[f] = fma(b, cos[f], a * sin[f])
