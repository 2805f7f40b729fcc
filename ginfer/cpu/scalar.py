"""Scalar functions of the kernels: exp, sigmoid, SiLU, softplus in float32, without branches.

exp is the degree-6 minimax form of Cephes after reduction by ln 2 in two parts: at most 1.5 units
in the last place, NaN stays NaN.
"""

from __future__ import annotations

import math

import numpy as np

from ginfer.cpu.product import bits_float, device, float_bits, fma

F32 = np.float32
ZERO, ONE = F32(0.0), F32(1.0)
_LOG2E = F32(1.44269504088896341)
_ROUND = F32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, kept in the low bits
_LN2_HI, _LN2_LO = F32(-0.693359375), F32(2.12194440e-4)
_LOW, _HIGH, _INF = F32(-87.3), F32(88.7), F32(np.inf)
_C6, _C5, _C4 = F32(1.9875691500e-4), F32(1.3981999507e-3), F32(8.3334519073e-3)
_C3, _C2, _C1 = F32(4.1665795894e-2), F32(1.6666665459e-1), F32(5.0000001201e-1)
_BIAS, _MANTISSA = np.uint32(0x3F800000), np.uint32(23)
_LINEAR = F32(20.0)


@device
def exp(x):
    """e^x in float32; 0 below -87.3, infinite above 88.7."""
    shifted = fma(x, _LOG2E, _ROUND)
    n = shifted - _ROUND
    r = fma(n, _LN2_LO, fma(n, _LN2_HI, x))
    p = fma(fma(fma(fma(fma(_C6, r, _C5), r, _C4), r, _C3), r, _C2), r, _C1)
    scale = bits_float(np.uint32((float_bits(shifted) << _MANTISSA) + _BIAS))
    y = (fma(p, r * r, r) + ONE) * scale
    y = ZERO if x < _LOW else y
    return _INF if x > _HIGH else y


@device
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


@device
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@device
def softplus(x):
    """log(1 + e^x); x itself above 20."""
    return x if x > _LINEAR else F32(math.log1p(exp(x)))
