"""K/V pages of 64 tokens: K as [dim][token], V as [token][dim], in BF16 or INT8-G64.

With K transposed, scores are products along the tokens of a page, the same way for one query and
for many. BF16 is read as it lies; INT8 codes, with a scale per token and 64 dims, become BF16 for
every use: a value is code * scale, rounded to BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ginfer.cpu.product import bits_float, device, float_bits, keep_apart
from ginfer.spec import KV_GROUP, PAGE_TOKENS

KEYS, VALUES = 0, 1
_SIXTEEN, _ONE = np.uint32(16), np.uint32(1)
_HALF, _EXPONENT, _QUIET = np.uint32(0x7FFF), np.uint32(0x7F800000), np.uint32(0x7FC0)
_LIMIT, _STEPS = np.float32(127), np.float32(1.5 * 2**23)  # adding _STEPS rounds to integers
_F16_LEAST, _F16_STEPS = np.float32(2**-14), np.float32(0.5)  # to multiples of 2^-24
_F16_LOW, _F16_HALF, _F16_NAN = np.uint32(0x1FFF), np.uint32(0xFFF), np.uint16(0x7E00)
_THIRTEEN, _F16_ONE = np.uint32(13), np.float32(2.0**112)  # a float of F16's bits, times _F16_ONE


class Pages(NamedTuple):
    """bits: [pages, L, 2, G, 64 D] uint16, or empty: codes: the same, int8, and scales: [pages, L,
    2, G, D / 64 rounded up, 64] uint16, F16 bits. L attention layers, G heads."""

    bits: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


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
def f16_float(h):
    """The float32 of an F16 that is not negative."""
    x = bits_float(np.uint32(np.uint32(h) << _THIRTEEN)) * _F16_ONE
    return np.float32(np.nan) if h == _F16_NAN else x


@device
def float_f16(x):
    """F16 bits of a float32 from 0 to 65,504, nearest even; the quiet NaN of NaN."""
    keep_apart()
    if x != x:
        return _F16_NAN
    if x < _F16_LEAST:
        rounded = (x + _F16_STEPS) - _F16_STEPS
    else:
        bits = float_bits(x)
        odd = (bits >> _THIRTEEN) & _ONE
        rounded = bits_float(np.uint32((bits + _F16_HALF + odd) & ~_F16_LOW))
    return np.uint16(float_bits(rounded * (np.float32(1) / _F16_ONE)) >> _THIRTEEN)


@device
def _group_scale(x, d0, d1):
    """F16 bits of the scale of the BF16 values of x[d0:d1]; NaN if one of them is."""
    top = np.float32(0)
    for d in range(d0, d1):
        v = abs(bf16_float(float_bf16(x[d])))
        if v > top or v != v:
            top = v
    return float_f16(top / _LIMIT)


@device
def _code(x, inverse):
    keep_apart()
    v = min(max(bf16_float(float_bf16(x)) * inverse, -_LIMIT), _LIMIT)
    return np.int8((v + _STEPS) - _STEPS)


@device
def store(pages, page, layer, which, g, token, x):
    """Write key or value x [D] as token `token` of a page."""
    D = x.size
    step, at = (PAGE_TOKENS, token) if which == KEYS else (1, token * D)
    if pages.codes.size == 0:
        plane = pages.bits[page, layer, which, g]
        for d in range(D):
            plane[at + d * step] = float_bf16(x[d])
        return
    codes, scales = pages.codes[page, layer, which, g], pages.scales[page, layer, which, g]
    for i in range(scales.shape[0]):
        d0, d1 = i * KV_GROUP, min((i + 1) * KV_GROUP, D)
        bits = _group_scale(x, d0, d1)
        scales[i, token] = bits
        scale = f16_float(bits)
        inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        for d in range(d0, d1):
            codes[at + d * step] = _code(x[d], inverse)


@device
def plane_bits(pages, page, layer, which, g, room):
    """A plane [64 D] in BF16: as it lies, or decoded into `room`."""
    if pages.codes.size == 0:
        return pages.bits[page, layer, which, g]
    keep_apart()
    codes, scales = pages.codes[page, layer, which, g], pages.scales[page, layer, which, g]
    D = codes.size // PAGE_TOKENS
    for d in range(D):
        factors = scales[d // KV_GROUP]
        for token in range(PAGE_TOKENS):
            at = d * PAGE_TOKENS + token if which == KEYS else token * D + d
            room[at] = float_bf16(np.float32(codes[at]) * f16_float(factors[token]))
    return room[: codes.size]


@device
def load_plane(tile, plane, n):
    """tile[:n] = plane[:n] as float32."""
    for i in range(n):
        tile[i] = bf16_float(plane[i])
