"""Payload sizes of every legal format and layout; illegal pairs and ranks are refused."""

import pytest

from ginfer.formats import (
    BF16,
    FORMATS,
    FP8_ROW,
    FP32,
    NVFP4,
    Q4G64_F16S,
    W8G32_F16S,
    Layout,
    payload_nbytes,
)
from ginfer.sizes import align_up, div_ceil, human_bytes


@pytest.mark.parametrize(
    ("fmt", "layout", "shape", "nbytes"),
    [
        (BF16, Layout.CONTIGUOUS, (), 2),
        (FP32, Layout.CONTIGUOUS, (3, 5), 60),
        (BF16, Layout.TILE, (128, 64), 16_384),
        (BF16, Layout.TILE, (129, 65), 4 * 16_384),
        (Q4G64_F16S, Layout.TILE, (34816, 5120), 34816 * 5120 * 17 // 32),
        (W8G32_F16S, Layout.TILE, (128, 128), 2 * 8_704),
        (FP8_ROW, Layout.TILE, (100, 64), 8_192 + 256),
        (W8G32_F16S, Layout.ROWS, (3, 384), 3 * 416),
        (W8G32_F16S, Layout.ROWS, (3, 32), 3 * 48),
        (BF16, Layout.ROWS, (7, 384), 7 * 768),
    ],
)
def test_payload_sizes(fmt, layout, shape, nbytes):
    assert payload_nbytes(fmt, layout, shape) == nbytes


@pytest.mark.parametrize(
    ("fmt", "layout", "shape", "word"),
    [
        (FP32, Layout.TILE, (128, 64), "no layout"),
        (NVFP4, Layout.TILE, (128, 64), "no layout"),
        (BF16, Layout.TILE, (128,), "matrices"),
        (BF16, Layout.CONTIGUOUS, (1,) * 17, "rank"),
        (W8G32_F16S, Layout.ROWS, (4, 33), "multiple"),
    ],
)
def test_illegal_combinations_are_refused(fmt, layout, shape, word):
    with pytest.raises(ValueError, match=word):
        payload_nbytes(fmt, layout, shape)


def test_codes_of_formats_are_unique_and_frozen():
    assert {f.name: f.code for f in FORMATS.values()} == {
        "BF16": 1, "FP32": 2, "I32": 3, "Q4G64_BF16S": 4, "Q4G64_F16S": 5, "W8G32_F16S": 6,
        "FP8_E4M3FN_ROW_BF16S": 7, "NVFP4": 8,
    }  # fmt: skip


def test_sizes():
    assert (div_ceil(0, 4), div_ceil(1, 4), div_ceil(8, 4)) == (0, 1, 2)
    assert align_up(4097, 4096) == 8192
    assert [human_bytes(n) for n in (512, 1536, 3 << 20, 5 << 30)] == [
        "512 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
