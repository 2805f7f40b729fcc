"""Norms, rotation and scalar functions of the CPU image against their oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

from ginfer.cpu import kv_codec, scalar
from ginfer.cpu.norm import rms_norm
from ginfer.cpu.rope import frequency_axes, inverse_frequencies, rope_table, rotate
from tests.oracles import norm as norm_oracle
from tests.oracles import rope as rope_oracle
from tests.oracles.attention import round_bf16
from tests.tolerances import NORM_F32, ROPE_F32

rng = np.random.default_rng(11)


@njit
def _map(out, x, which):
    for i in range(x.size):
        if which == 0:
            out[i] = scalar.exp(x[i])
        elif which == 1:
            out[i] = scalar.sigmoid(x[i])
        elif which == 2:
            out[i] = scalar.softplus(x[i])
        else:
            out[i] = kv_codec.bf16_float(kv_codec.float_bf16(x[i]))


def _apply(x: np.ndarray, which: int) -> np.ndarray:
    out = np.empty_like(x)
    _map(out, x, which)
    return out


@pytest.mark.parametrize("C", [1, 15, 16, 17, 128, 384, 5120])
@pytest.mark.parametrize("T", [1, 15, 16, 37])
def test_rms_norm_follows_its_oracle(T: int, C: int) -> None:
    x = (rng.standard_normal((T, C)) * rng.uniform(0.01, 100, (T, 1))).astype(np.float32)
    w = rng.uniform(-1, 2, C).astype(np.float32)
    y = np.full_like(x, np.nan)
    rms_norm(y, x, w, 1e-6)
    NORM_F32.check(y, norm_oracle.rms_norm(x, w, 1e-6))


def test_rms_norm_of_a_row_is_the_same_alone_among_few_and_among_many() -> None:
    x, w = rng.standard_normal((40, 384)).astype(np.float32), np.ones(384, np.float32)
    many, few, alone = np.empty_like(x), np.empty_like(x[:9]), np.empty_like(x[:1])
    rms_norm(many, x, w, 1e-6)
    rms_norm(few, x[:9].copy(), w, 1e-6)
    rms_norm(alone, x[:1].copy(), w, 1e-6)
    np.testing.assert_array_equal(few, many[:9])
    np.testing.assert_array_equal(alone, many[:1])


def test_rms_norm_keeps_nan_in_its_row() -> None:
    x = rng.standard_normal((3, 64)).astype(np.float32)
    x[1, 5] = np.nan
    y = np.empty_like(x)
    rms_norm(y, x, np.ones(64, np.float32), 1e-6)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_exp_is_accurate_over_its_range_and_ends_well() -> None:
    x = np.linspace(-87.2, 88.3, 200_001, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.abs(_apply(x, 0) / want - 1).max() < 1.6e-7
    edges = np.array([-np.inf, -1000, 89, 1000, np.inf, np.nan, 0], np.float32)
    np.testing.assert_array_equal(_apply(edges, 0), [0, 0, np.inf, np.inf, np.inf, np.nan, 1])


def test_sigmoid_and_softplus_follow_float64() -> None:
    x = np.linspace(-120, 120, 100_001, dtype=np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(_apply(x, 1), norm_oracle.sigmoid(x), rtol=4e-7, atol=1e-37)
    np.testing.assert_allclose(_apply(x, 2), np.logaddexp(0, wide), rtol=4e-7, atol=1e-37)


def test_bf16_store_rounds_to_nearest_even() -> None:
    bits = rng.integers(0, 0x7F000000, 100_000, dtype=np.uint32)
    bits[:1000] = (bits[:1000] & 0xFFFF0000) | 0x8000  # ties
    x = bits.view(np.float32) * rng.choice(np.array([-1, 1], np.float32), bits.size)
    np.testing.assert_array_equal(_apply(x, 3), round_bf16(x))
    assert np.isnan(_apply(np.array([0x7FFFFFFF], np.uint32).view(np.float32), 3)).all()


@njit
def _rotate(x, cos, sin):
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            rotate(x[t, h], cos[t], sin[t])


@pytest.mark.parametrize("sections", [(11, 11, 10), (4, 2, 2), (1, 0, 0)])
def test_rotation_follows_its_oracle_at_large_and_unequal_positions(
    sections: tuple[int, int, int],
) -> None:
    T, F = 9, sum(sections)
    positions = rng.integers(0, 262_144, (3, T)).astype(np.int32)
    x = rng.standard_normal((T, 2, 2 * F + 8)).astype(np.float32)
    cos, sin = np.empty((T, F), np.float32), np.empty((T, F), np.float32)
    rope_table(cos, sin, positions, frequency_axes(sections), inverse_frequencies(1e7, F))
    y = x.copy()
    _rotate(y, cos, sin)
    ROPE_F32.check(y, rope_oracle.rotate(x, positions, 1e7, sections))
    np.testing.assert_array_equal(y[:, :, 2 * F :], x[:, :, 2 * F :])


def test_table_is_exact_for_the_float32_frequencies() -> None:
    positions = np.array([[262_143]] * 3, np.int32)
    inv_freq = inverse_frequencies(1e7, 32)
    cos, sin = np.empty((1, 32), np.float32), np.empty((1, 32), np.float32)
    rope_table(cos, sin, positions, frequency_axes((11, 11, 10)), inv_freq)
    want = [math.cos(262_143 * float(f)) for f in inv_freq]
    np.testing.assert_allclose(cos[0], want, atol=6e-8)
