"""Linear operators of the CPU image: float64 oracle, and the equality of their columns."""

from __future__ import annotations

import numpy as np
import pytest

from ginfer.backend import PackedTensor
from ginfer.cpu.linear import embedding_rows, linear, linear_add, linear_silu_up, prepare
from ginfer.formats import BF16, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S, Layout, payload_nbytes
from tests.oracles.formats import decode

FORMATS = (BF16, Q4G64_F16S, Q4G64_BF16S, W8G32_F16S)
COLUMNS = (1, 2, 3, 7, 8, 9, 63, 64, 65, 300)
SHAPES = ((384, 384), (200, 72), (32, 8), (129, 1024))


def random_payload(fmt, layout, shape, seed=0):
    """A read-only payload of random codes and scales; padding is random too: it is never used."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, payload_nbytes(fmt, layout, shape), np.uint8)
    values = (rng.standard_normal(len(data) // 2) * 0.01).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    words = values.astype(np.float16).view(np.uint16) if fmt.scale == "F16" else bf16
    view, tile = data.view(np.uint16), {"Q4": (2176, 2048), "W8": (4352, 4096), "BF": (1, 0)}
    period, first = tile[fmt.name[:2]]
    if layout is Layout.ROWS and fmt is not BF16:
        period, first = (shape[1] + shape[1] // 16 + 15) // 16 * 8, shape[1] // 2
    scales = np.arange(len(view)) % period >= first
    view[scales] = words[scales]
    data.flags.writeable = False
    return PackedTensor(name="w", shape=shape, format=fmt, layout=layout, data=data)


def case(fmt, shape, T, seed=1):
    """A tensor, its represented values in float64, and T columns."""
    tensor = random_payload(fmt, Layout.TILE, shape)
    W = decode(fmt, Layout.TILE, shape, tensor.data).astype(np.float64)
    x = np.random.default_rng(seed).standard_normal((T, shape[1])).astype(np.float32)
    return tensor, W, x


def assert_close(got, want):
    """The criterion of a float32 sum, far inside the project's bound for linear operators."""
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def silu_up(z):
    """[T, N] float64 of a gate_up matrix to [T, N / 2]."""
    pairs = z.reshape(len(z), -1, 2, 16)
    gate, up = pairs[:, :, 0], pairs[:, :, 1]
    return (gate / (1 + np.exp(-gate)) * up).reshape(len(z), -1)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_matches_oracle_and_columns_are_independent(fmt, shape):
    tensor, W, x = case(fmt, shape, max(COLUMNS))
    weight, want = prepare(tensor), x @ W.T
    whole = np.full((len(x) + 1, shape[0]), np.nan, np.float32)
    linear(whole[:-1], x, weight)
    assert np.isnan(whole[-1]).all()
    assert_close(whole[:-1], want)
    for T in COLUMNS:
        y = np.full((T, shape[0]), np.nan, np.float32)
        linear(y, x[5 : 5 + T] if T < 290 else x[:T], weight)
        assert np.array_equal(y, whole[5 : 5 + T] if T < 290 else whole[:T]), T


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_linear_add_adds_the_finished_product(fmt):
    tensor, _, x = case(fmt, (384, 1024), 9)
    weight, y = prepare(tensor), np.empty((9, 384), np.float32)
    linear(y, x, weight)
    residual = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    got = residual.copy()
    linear_add(got, x, weight)
    assert np.array_equal(got, residual + y)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("N", [2048, 96])
def test_linear_silu_up_matches_oracle(fmt, N):
    tensor, W, x = case(fmt, (N, 384), 9)
    x *= 3
    y = np.full((9, N // 2), np.nan, np.float32)
    linear_silu_up(y, x, prepare(tensor))
    assert_close(y, silu_up(x @ W.T))
    one = np.full((1, N // 2), np.nan, np.float32)
    linear_silu_up(one, x[4:5], prepare(tensor))
    assert np.array_equal(one, y[4:5])


@pytest.mark.parametrize("fmt", [BF16, W8G32_F16S], ids=lambda f: f.name)
@pytest.mark.parametrize("C", [384, 32])
def test_embedding_rows_are_exact(fmt, C):
    tensor = random_payload(fmt, Layout.ROWS, (50, C))
    ids = np.array([0, 49, 7, 7], np.int32)
    out = np.full((4, C), np.nan, np.float32)
    embedding_rows(out, ids, prepare(tensor))
    assert np.array_equal(out, decode(fmt, Layout.ROWS, (50, C), tensor.data)[ids])


def test_prepare_refuses_a_format_without_kernel():
    tensor = random_payload(BF16, Layout.CONTIGUOUS, (4, 4))
    with pytest.raises(ValueError, match="w: "):
        prepare(tensor)
