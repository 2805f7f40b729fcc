"""Numbers of selection that are equal on every backend: keys, weights in fixed point, the RNG.

A key orders FP32 values as unsigned integers; 0 stands for an id that is not legal. A weight is
exp((value - best) / temperature) in units of 2^-40, so that sums do not depend on their order. exp
is the polynomial of `ginfer.cpu.scalar`, operation by operation: nothing here may be contracted or
approximated, so kernels that use it are compiled without fast-math and spell their roundings out.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32, uint64

from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    bits_from_f32,
    div_rn_f32,
    f32_from_bits,
    fma_f32,
    mul_high_u64,
    mul_rn_f32,
)


@cuda.jit(device=True, inline="always")
def key_of(x):
    """The key of a finite value; both zeros have one."""
    bits = bits_from_f32(add_rn_f32(x, float32(0.0)))
    if bits >> uint32(31):
        return uint32(bits ^ uint32(0xFFFFFFFF))
    return uint32(bits ^ uint32(0x80000000))


@cuda.jit(device=True, inline="always")
def value_of(key):
    """The value of a key."""
    if key >> uint32(31):
        return f32_from_bits(uint32(key ^ uint32(0x80000000)))
    return f32_from_bits(uint32(key ^ uint32(0xFFFFFFFF)))


@cuda.jit(device=True, inline="always")
def exp_exact(x):
    """e^x for x <= 0; 0 below -87.3."""
    if x < float32(-87.3):
        return float32(0.0)
    shifted = fma_f32(x, float32(1.44269504088896341), float32(12582912.0))
    n = add_rn_f32(shifted, float32(-12582912.0))
    r = fma_f32(n, float32(2.12194440e-4), fma_f32(n, float32(-0.693359375), x))
    p = fma_f32(float32(1.9875691500e-4), r, float32(1.3981999507e-3))
    p = fma_f32(p, r, float32(8.3334519073e-3))
    p = fma_f32(p, r, float32(4.1665795894e-2))
    p = fma_f32(p, r, float32(1.6666665459e-1))
    p = fma_f32(p, r, float32(5.0000001201e-1))
    scale = uint32(uint32(bits_from_f32(shifted) << uint32(23)) + uint32(0x3F800000))
    y = add_rn_f32(fma_f32(p, mul_rn_f32(r, r), r), float32(1.0))
    return mul_rn_f32(y, f32_from_bits(scale))


@cuda.jit(device=True, inline="always")
def weight_of(key, best, temperature):
    """The weight of a legal id: exp((value - best) / temperature) * 2^40, rounded down."""
    x = div_rn_f32(add_rn_f32(value_of(key), -best), temperature)
    bits = bits_from_f32(exp_exact(x))
    mantissa = int64(uint32(bits & uint32(0x7FFFFF)) | uint32(0x800000))
    exponent = uint32(bits >> uint32(23))
    if exponent >= uint32(110):
        return int64(mantissa << int64(exponent - uint32(110)))
    if exponent >= uint32(86):
        return int64(mantissa >> int64(uint32(110) - exponent))
    return int64(0)


@cuda.jit(device=True, inline="always")
def mul_shift(a, b, c, shift):
    """(a * b + c) >> shift in 128 bits, the low 64 bits of it; 0 < shift < 64."""
    low = uint64(uint64(a) * uint64(b))
    total = uint64(low + uint64(c))
    high = uint64(mul_high_u64(a, b))
    if total < low:
        high = uint64(high + uint64(1))
    return int64(uint64(high << uint64(64 - shift)) | uint64(total >> uint64(shift)))


@cuda.jit(device=True, inline="always")
def _mix(z):
    """The finaliser of SplitMix64."""
    z = uint64(z + uint64(0x9E3779B97F4A7C15))
    z = uint64((z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9))
    z = uint64((z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB))
    return uint64(z ^ (z >> uint64(31)))


@cuda.jit(device=True, inline="always")
def uniform_bits(seed, position, purpose):
    """24 random bits, a pure function of the draw's key: u = bits / 2^24."""
    key = _mix(uint64(uint64(seed) ^ uint64(uint64(position) * uint64(0xD1B54A32D192ED03))))
    key = uint64(key ^ uint64(uint64(purpose) << uint64(21)))
    return int64(_mix(key) >> uint64(40))
