"""Attention oracle: softmax over a full score row per query and head, in float64."""

from __future__ import annotations

import numpy as np


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Causal grouped attention of one sequence.

    q: [T, H, D], the columns start .. start + T - 1; k, v: [S, G, D], the whole sequence.
    Query head h reads K/V head h // (H / G). Returns [T, H, D].
    """
    T, H, D = q.shape
    G = k.shape[1]
    out = np.zeros((T, H, D))
    for t in range(T):
        n = start + t + 1
        for h in range(H):
            g = h // (H // G)
            scores = k[:n, g].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[:n, g].astype(np.float64) / weights.sum()
    return out


def round_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest BF16 of float32 values, ties to even, as float64."""
    x = x.astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    low = bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> 16) & 1 == 1))
    rounded = ((bits >> 16) + up.astype(np.uint64)) << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
