"""RMS norms of rows: y[t, c] = x[t, c] * w[c] / sqrt(mean_c(x[t, c]^2) + eps).

The model stores the norms of the residual stream and of q and k as w - 1; `w` here is the factor.
The sum of squares is `product.dot`. Legend: T columns, C width. Oracle: tests.oracles.norm.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ginfer.cpu.product import dot
from ginfer.cpu.scalar import ONE, silu

_FEW = 16  # columns below which starting threads costs more than it saves


@njit(cache=True)
def inverse_rms(x, xo, C, eps):
    """1 / sqrt(mean(x[xo : xo + C]^2) + eps)."""
    return ONE / np.sqrt(dot(x, xo, x, xo, C) / np.float32(C) + eps)


@njit(cache=True)
def norm_row(y, yo, x, xo, w, C, eps):
    """Normalise C elements; y may be x."""
    inv = inverse_rms(x, xo, C, eps)
    for c in range(C):
        y[yo + c] = x[xo + c] * inv * w[c]


@njit(cache=True)
def gated_norm_row(y, yo, x, xo, w, z, zo, C, eps):
    """Normalise C elements and multiply by silu(z)."""
    inv = inverse_rms(x, xo, C, eps)
    for c in range(C):
        y[yo + c] = x[xo + c] * inv * w[c] * silu(z[zo + c])


@njit(cache=True, nogil=True)
def _norm_few(y, x, w, C, eps):
    for t in range(x.size // C):
        norm_row(y, t * C, x, t * C, w, C, eps)


@njit(cache=True, nogil=True, parallel=True)
def _norm_many(y, x, w, C, eps):
    for t in prange(x.size // C):
        norm_row(y, t * C, x, t * C, w, C, eps)


def rms_norm(y, x, w, eps):
    """Normalise rows of x. y, x: [T, C] float32, contiguous, may alias; w: [C] float32."""
    T, C = x.shape
    kernel = _norm_few if T < _FEW else _norm_many
    kernel(y.reshape(-1), x.reshape(-1), w, C, np.float32(eps))
