"""Linear operators of the CPU image: float64 oracle, and the equality of their columns."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys

import numba
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


def test_values_do_not_depend_on_the_number_of_threads():
    tensor, _, x = case(Q4G64_F16S, (384, 1024), 130)
    weight, results = prepare(tensor), []
    before = numba.get_num_threads()
    for threads in sorted({1, before}):
        numba.set_num_threads(threads)
        results.append(np.full((130, 384), np.nan, np.float32))
        linear(results[-1], x, weight)
    numba.set_num_threads(before)
    assert np.array_equal(results[0], results[-1])


@pytest.mark.parametrize("fmt", [Q4G64_F16S, W8G32_F16S], ids=lambda f: f.name)
def test_every_half_precision_scale_is_exact(fmt):
    halves = np.arange(0x7C00, dtype=np.uint16)  # zero, subnormals and normals
    halves = np.concatenate([halves, halves | 0x8000])
    shape = (len(halves), fmt.group_size)
    tensor = random_payload(fmt, Layout.TILE, shape)
    data = tensor.data.copy().reshape(-1, {4: 4352, 8: 8704}[fmt.bits])
    codes = 128 * 64 * fmt.bits // 8
    data[:, :codes] = {4: 0x99, 8: 1}[fmt.bits]  # every code is 1
    words = halves.reshape(-1, 8, 2, 8).swapaxes(2, 3)  # tile, row tile, pair
    scales = data[:, codes:].view(np.uint16).reshape(len(data), 8, -1, 8, 2)
    scales[:] = words[:, :, None]
    x = np.zeros((1, fmt.group_size), np.float32)
    x[0, 3] = 1
    y = np.full((1, len(halves)), np.nan, np.float32)
    linear(y, x, prepare(dataclasses.replace(tensor, data=data.reshape(-1))))
    assert np.array_equal(y[0], halves.view(np.float16).astype(np.float32))


AVX2 = "avx,avx2,bmi,bmi2,cmov,cx16,cx8,f16c,fma,lzcnt,movbe,popcnt,sse3,sse4.1,sse4.2,ssse3"
DIGEST = """
import hashlib
from tests.host.cpu.test_linear import *
digest = hashlib.sha256()
for fmt in FORMATS:
    for T in (1, 2, 3, 4, 13):
        tensor, _, x = case(fmt, (416, 456), T)
        for operator, width in ((linear, 416), (linear_silu_up, 208)):
            y = np.zeros((T, width), np.float32)
            operator(y, x, prepare(tensor))
            digest.update(y.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 features")
def test_values_do_not_depend_on_the_vector_width_of_the_processor(tmp_path):
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+" + AVX2.replace(",", ",+")}
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "GINFER_CACHE_DIR": str(tmp_path), **features},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for features in ({}, narrow)
    ]
    assert digests[0] == digests[1] != ""


def test_prepare_refuses_a_format_without_kernel():
    tensor = random_payload(BF16, Layout.CONTIGUOUS, (4, 4))
    with pytest.raises(ValueError, match="w: "):
        prepare(tensor)
