"""Rotation oracle: partial interleaved M-RoPE as complex multiplication, in float64."""

from __future__ import annotations

import numpy as np


def axis_of(frequency: int, sections: tuple[int, int, int]) -> int:
    """Position axis of a frequency: T, H, W in turn; H and W stop when their section is used up."""
    for axis in (1, 2):
        if frequency % 3 == axis and frequency // 3 < sections[axis]:
            return axis
    return 0


def rotate(
    x: np.ndarray, positions: np.ndarray, theta: float, sections: tuple[int, int, int]
) -> np.ndarray:
    """x: [T, H, D]; positions: [3, T]. Element f and f + F of a head are real and imaginary part of
    a number turned by position * theta^(-f / F), where the model defines the frequency as a
    float32; elements from 2 F on stay."""
    F = sum(sections)
    y = x.astype(np.float64).copy()
    for t in range(x.shape[0]):
        for f in range(F):
            angle = float(positions[axis_of(f, sections), t]) * float(np.float32(theta ** (-f / F)))
            turned = (y[t, :, f] + 1j * y[t, :, F + f]) * np.exp(1j * angle)
            y[t, :, f], y[t, :, F + f] = turned.real, turned.imag
    return y
