"""Norm oracles: rms_norm and its gated form, in float64."""

from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """y[t, c] = x[t, c] * w[c] / sqrt(mean_c x^2 + eps). x: [T, C], w: [C] (the factor itself)."""
    x = x.astype(np.float64)
    y = np.empty_like(x)
    for t in range(x.shape[0]):
        y[t] = x[t] / np.sqrt((x[t] ** 2).mean() + eps) * w.astype(np.float64)
    return y


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) in float64."""
    return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


def gated_rms_norm(x: np.ndarray, w: np.ndarray, z: np.ndarray, eps: float) -> np.ndarray:
    """rms_norm(x) * silu(z)."""
    return rms_norm(x, w, eps) * z.astype(np.float64) * sigmoid(z)
