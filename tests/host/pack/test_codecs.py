"""Every encoder against the independent decoder, and its numbers against the encoder's rule."""

from __future__ import annotations

import numpy as np
import pytest

from ginfer.formats import (
    BF16,
    FP32,
    I32,
    NVFP4,
    Q4G64_F16S,
    W8G32_F16S,
    Layout,
    payload_nbytes,
)
from ginfer.sizes import align_up
from scripts.pack.codecs import FITTED_STEPS, absmax_codes, bf16_bits, encode, fitted_codes
from tests.oracles.formats import bf16_to_f32, decode

SHAPES = [(1, 64), (16, 32), (128, 64), (130, 96), (257, 384), (96, 1536), (300, 160)]


def _blocks(x):
    return [x[i : i + 128] for i in range(0, len(x), 128)]


def _payload(fmt, layout, x):
    return np.concatenate([encode(fmt, layout, block) for block in _blocks(x)])


def _quantised(x, group, qmax):
    """The represented weights by the rule of the format, one group at a time in Python floats."""
    out = np.zeros_like(x)
    for n in range(x.shape[0]):
        for k in range(0, x.shape[1], group):
            values = x[n, k : k + group]
            amax = np.float32(max(abs(float(v)) for v in values))
            scale = np.float16(amax / np.float32(qmax))
            if amax > 0 and scale == 0:
                scale = np.float16(2.0**-24)
            if scale == 0:
                continue
            inverse = np.float32(1) / np.float32(scale)
            for i, v in enumerate(values):
                code = min(max(round(float(np.float32(v * inverse))), -qmax), qmax)
                out[n, k + i] = code * np.float32(scale)
    return out


def _random(shape, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * np.exp(rng.normal(0, 2, (shape[0], 1)))
    x[rng.random(shape) < 0.05] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [Layout.TILE, Layout.ROWS, Layout.CONTIGUOUS])
def test_bf16_round_trip_is_exact(shape, layout):
    x = bf16_to_f32(bf16_bits(_random(shape)))
    payload = _payload(BF16, layout, x)
    assert payload.size == payload_nbytes(BF16, layout, shape)
    np.testing.assert_array_equal(decode(BF16, layout, shape, payload), x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("fmt", "layout", "group", "qmax"),
    [
        (Q4G64_F16S, Layout.TILE, 64, 7),
        (W8G32_F16S, Layout.TILE, 32, 127),
        (W8G32_F16S, Layout.ROWS, 32, 127),
    ],
)
def test_quantised_round_trip_gives_the_represented_weights(shape, fmt, layout, group, qmax):
    x = _random(shape)
    payload = _payload(fmt, layout, x)
    assert payload.size == payload_nbytes(fmt, layout, shape)
    np.testing.assert_array_equal(decode(fmt, layout, shape, payload), _quantised(x, group, qmax))


@pytest.mark.parametrize("fmt", [BF16, Q4G64_F16S, W8G32_F16S])
def test_padding_is_value_zero_and_scale_zero(fmt):
    shape = (130, 96)
    payload = _payload(fmt, Layout.TILE, _random(shape))
    padded = decode(fmt, Layout.TILE, (align_up(130, 128), align_up(96, 64)), payload)
    assert not padded[130:].any()
    assert not padded[:, 96:].any()
    if fmt is Q4G64_F16S:
        tile = payload[-4352:]  # rows 128.., columns 64..: all but two rows are padding
        assert (tile[512:4096] == 0x88).all()
        assert not tile[4096 + 32 :].any()


def test_a_tile_lies_as_the_fragment_formula_says():
    # lane 4 g + t, step j: a1 of lane 13 (g 3, t 1), step 2 is row 11, columns 34 and 35.
    x = np.zeros((128, 64), np.float32)
    x[16 * 5 + 11, 34], x[16 * 5 + 11, 35] = 7, -3
    tile = encode(Q4G64_F16S, Layout.TILE, x)
    word = int(tile[:4096].view("<u4")[(5 * 32 + 13) * 4 + 2])
    assert word == 0x88888888 ^ ((8 ^ 15) << 4) ^ ((8 ^ 5) << 20)
    scales = tile[4096:].view("<f2")
    assert scales[5 * 16 + 2 * 3 + 1] == 1.0
    assert np.count_nonzero(scales) == 1
    wide = encode(W8G32_F16S, Layout.TILE, x * np.float32(127 / 7))
    at = ((5 * 4 + 2) * 32 + 13) * 8 + 2
    assert wide[at : at + 2].view("i1").tolist() == [127, -54]
    assert wide[8192:].view("<f2")[(5 * 2 + 1) * 16 + 2 * 3 + 1] == 1.0


def test_codes_round_half_to_even_and_never_use_the_lowest_code():
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [7, 0.5, 1.5, 2.5, -7, -2.5]
    codes, scales = absmax_codes(x, 64, 7)
    assert scales.tolist() == [[1.0]]
    assert codes[0, :6].tolist() == [7, 0, 2, 2, -7, -2]


def test_scale_that_underflows_becomes_the_smallest_and_zero_group_has_scale_zero():
    x = np.zeros((2, 64), np.float32)
    x[1, 5] = 1e-9
    codes, scales = absmax_codes(x, 64, 7)
    assert scales.view(np.uint16).tolist() == [[0], [1]]
    assert not codes.any()


def _squared_error(x, codes, scales):
    groups = codes.reshape(*scales.shape, -1) * scales.astype(np.float64)[..., None]
    return np.square(groups - x.reshape(groups.shape)).sum(-1)


def test_fitted_scales_have_the_smallest_error_of_all_that_are_tried():
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((40, 128)) * rng.choice([1e-6, 0.03, 20], (40, 1))).astype(np.float32)
    x[0, :64] = np.abs(x[0, :64])  # one sign alone
    codes, scales = fitted_codes(x, 64)
    assert (codes.min(), codes.max()) == (-8, 7)
    got = _squared_error(x, codes, scales)
    for n, group in np.ndindex(40, 2):
        values = x[n, 64 * group : 64 * group + 64].astype(np.float64)
        far = max(values, key=abs)
        tried = [float(np.float16(-far / step)) for step in FITTED_STEPS]
        fits = [np.clip(np.rint(values / s), -8, 7) * s - values for s in tried]
        assert got[n, group] <= min(np.square(fit).sum() for fit in fits) * 1.0001
    assert got.sum() < 0.8 * _squared_error(x, *absmax_codes(x, 64, 7)).sum()


def test_fitted_scales_at_the_ends_of_fp16():
    x = np.zeros((3, 64), np.float32)
    x[1, 5], x[2, :2] = 1e-9, (4e5, -1e5)  # below the smallest scale; above the largest at 6 steps
    codes, scales = fitted_codes(x, 64)
    assert scales[:2].view(np.uint16).tolist() == [[0], [1]]
    assert not codes[:2].any()
    assert np.isfinite(scales).all()
    assert (codes[2, :2] * scales.astype(np.float32)[2]).tolist() == pytest.approx([4e5, -1e5], 0.2)
    x[2, 0] = 1e6
    with pytest.raises(ValueError, match="overflows"):
        fitted_codes(x, 64)


def test_bf16_rounds_to_nearest_even():
    x = np.array([1.00390625, 1.01171875, 1.0039064], np.float32)  # two ties and one above a tie
    assert bf16_to_f32(bf16_bits(x)).tolist() == [1.0, 1.015625, 1.0078125]


def test_whole_numbers_and_floats_are_stored_contiguously():
    x = np.array([[-(2**24), 3.0]], np.float32)
    for fmt in (I32, FP32):
        payload = encode(fmt, Layout.CONTIGUOUS, x)
        np.testing.assert_array_equal(decode(fmt, Layout.CONTIGUOUS, x.shape, payload), x)
    with pytest.raises(ValueError, match="whole"):
        encode(I32, Layout.CONTIGUOUS, np.array([[0.5]], np.float32))


def test_bad_values_are_refused():
    x = np.ones((4, 64), np.float32)
    for value in (np.nan, np.inf):
        x[2, 3] = value
        with pytest.raises(ValueError, match="not finite"):
            encode(Q4G64_F16S, Layout.TILE, x)
    x[2, 3] = 1e6
    with pytest.raises(ValueError, match="overflows"):
        encode(Q4G64_F16S, Layout.TILE, x)
    with pytest.raises(ValueError, match="no encoder"):
        encode(NVFP4, Layout.TILE, x)


def test_decoder_refuses_a_payload_of_the_wrong_length():
    with pytest.raises(ValueError, match="expected"):
        decode(BF16, Layout.CONTIGUOUS, (4,), np.zeros(6, np.uint8))
