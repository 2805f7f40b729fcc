"""RMS norms of rows: y[t, c] = x[t, c] * w[c] / sqrt(mean_c(x[t, c]^2) + eps).

The model stores the norms of the residual stream and of q and k as w - 1; `w` here is the factor.
The sum of squares is `product.dot`. Legend: T columns, C width. Oracle: tests.oracles.norm.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ginfer.cpu.product import device, dot, keep_apart
from ginfer.cpu.scalar import ONE, silu

_FEW = 16  # columns below which starting threads costs more than it saves


@device
def inverse_rms(x, eps):
    """1 / sqrt(mean(x^2) + eps) of a row."""
    return ONE / np.sqrt(dot(x, 0, x, 0, x.size) / np.float32(x.size) + eps)


@device
def norm_row(y, x, w, eps):
    """Normalise one row; y may be x."""
    keep_apart()
    inv = inverse_rms(x, eps)
    for c in range(w.size):
        y[c] = x[c] * inv * w[c]


@device
def gated_norm_row(y, x, w, z, eps):
    """Normalise one row and multiply by silu(z)."""
    keep_apart()
    inv = inverse_rms(x, eps)
    for c in range(w.size):
        y[c] = x[c] * inv * w[c] * silu(z[c])


@njit(cache=True, nogil=True)
def _norm_few(y, x, w, eps):
    for t in range(x.shape[0]):
        norm_row(y[t], x[t], w, eps)


@njit(cache=True, nogil=True, parallel=True)
def _norm_many(y, x, w, eps):
    for t in prange(x.shape[0]):
        norm_row(y[t], x[t], w, eps)


def rms_norm(y, x, w, eps):
    """Normalise rows of x. y, x: [T, C] float32, contiguous, may alias; w: [C] float32."""
    kernel = _norm_few if len(x) < _FEW else _norm_many
    kernel(y, x, w, np.float32(eps))
