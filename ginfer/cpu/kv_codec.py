"""K/V pages in BF16: K as [dim][token], V as [token][dim], 64 tokens per page.

With K transposed, scores are products along the tokens of a page, the same way for one query and
for many, and a tile is read as it lies.
"""

from __future__ import annotations

import numpy as np

from ginfer.cpu.product import bits_float, device, float_bits
from ginfer.spec import PAGE_TOKENS

_SIXTEEN, _ONE = np.uint32(16), np.uint32(1)
_HALF, _EXPONENT, _QUIET = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x7FC0)


@device
def bf16_float(h):
    """The float32 of a BF16."""
    return bits_float(np.uint32(np.uint32(h) << _SIXTEEN))


@device
def float_bf16(x):
    """BF16 bits of a float32, nearest even; NaN becomes the quiet NaN."""
    bits = float_bits(x)
    rounded = (bits + _HALF + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN
    return np.uint16(_QUIET if x != x else rounded)


@device
def store_key(plane, token, x):
    """Write key x [D] as token `token` of a K plane [D * 64]."""
    for d in range(x.size):
        plane[d * PAGE_TOKENS + token] = float_bf16(x[d])


@device
def store_value(plane, token, x):
    """Write value x [D] as token `token` of a V plane [64 * D]."""
    row = plane[token * x.size : (token + 1) * x.size]
    for d in range(x.size):
        row[d] = float_bf16(x[d])


@device
def load_plane(tile, plane, n):
    """tile[:n] = plane[:n] as float32."""
    for i in range(n):
        tile[i] = bf16_float(plane[i])
