"""K/V pages in BF16: K as [dim][token], V as [token][dim], 64 tokens per page.

With K transposed, scores are products along the tokens of a page, the same way for one query and
for many, and a tile is read as it lies.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ginfer.cpu.product import bits_float, float_bits
from ginfer.spec import PAGE_TOKENS

_SIXTEEN, _ONE = np.uint32(16), np.uint32(1)
_HALF, _EXPONENT, _QUIET = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x7FC0)


@njit(cache=True)
def bf16_float(h):
    """The float32 of a BF16."""
    return bits_float(np.uint32(np.uint32(h) << _SIXTEEN))


@njit(cache=True)
def float_bf16(x):
    """BF16 bits of a float32, nearest even; NaN becomes the quiet NaN."""
    bits = float_bits(x)
    rounded = (bits + _HALF + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN
    return np.uint16(_QUIET if x != x else rounded)


@njit(cache=True)
def store_key(plane, token, x, xo, D):
    """Write key x[xo : xo + D] as token `token` of a K plane [D * 64]."""
    for d in range(D):
        plane[d * PAGE_TOKENS + token] = float_bf16(x[xo + d])


@njit(cache=True)
def store_value(plane, token, x, xo, D):
    """Write value x[xo : xo + D] as token `token` of a V plane [64 * D]."""
    for d in range(D):
        plane[token * D + d] = float_bf16(x[xo + d])


@njit(cache=True)
def load_plane(tile, plane, n):
    """tile[:n] = plane[:n] as float32."""
    for i in range(n):
        tile[i] = bf16_float(plane[i])
