"""Decoders of every layout: payload bytes to represented float32 weights, by the lane formula.

Written from the definition of the fragments (`ginfer.formats`), element by element into an index
map of one tile; the packer's encoders reshape and transpose instead, so the two share no index
arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ginfer.formats import TILE_NBYTES, Layout, StorageFormat, payload_nbytes, row_nbytes
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SCALE_TYPES = {"F16": "<f2", "BF16": "<u2"}


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """BF16 bits to float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode(
    fmt: StorageFormat, layout: Layout, shape: tuple[int, ...], data: NDArray[np.uint8] | bytes
) -> NDArray[np.float32]:
    """Represented values of a payload, float32 of `shape` (padding dropped). FP8 and NVFP4 are not
    covered. Raises ValueError when the payload has the wrong length."""
    raw = np.frombuffer(data, np.uint8)
    if raw.size != payload_nbytes(fmt, layout, shape):
        raise ValueError(f"{raw.size} bytes, {payload_nbytes(fmt, layout, shape)} expected")
    if layout is Layout.TILE:
        return _decode_tiles(fmt, shape, raw)
    if layout is Layout.ROWS:
        return _decode_rows(fmt, shape, raw)
    return _elements(fmt, raw).reshape(shape)


def _elements(fmt: StorageFormat, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    if fmt.name == "BF16":
        return bf16_to_f32(raw.view("<u2"))
    return raw.view({"FP32": "<f4", "I32": "<i4", "W8G32_F16S": "i1"}[fmt.name]).astype(np.float32)


def _scales(fmt: StorageFormat, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    words = raw.view(SCALE_TYPES[fmt.scale])
    return words.astype(np.float32) if fmt.scale == "F16" else bf16_to_f32(words)


def _decode_rows(
    fmt: StorageFormat, shape: tuple[int, ...], raw: NDArray[np.uint8]
) -> NDArray[np.float32]:
    N, K = shape
    out = np.empty((N, K), np.float32)
    width, codes_nbytes = row_nbytes(fmt, K), K * fmt.bits // 8
    for n in range(N):
        row = raw[n * width : (n + 1) * width]
        out[n] = _elements(fmt, row[:codes_nbytes])
        if fmt.group_size:
            groups = K // fmt.group_size
            scales = _scales(fmt, row[codes_nbytes : codes_nbytes + 2 * groups])
            for group in range(groups):
                out[n, group * fmt.group_size : (group + 1) * fmt.group_size] *= scales[group]
    return out


def _fragment() -> Iterator[tuple[int, int, int, int, int, int]]:
    """Every element of 16 rows x 64 columns: (lane, k16 step, s, half, row, column)."""
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for step in range(4):
            for s in range(4):
                for half in range(2):
                    row = g + (8 if s in (1, 3) else 0)
                    column = 16 * step + 2 * t + (8 if s in (2, 3) else 0) + half
                    yield lane, step, s, half, row, column


@cache
def _element_map(bits: int) -> NDArray[np.int64]:
    """[128, 64]: where an element lies in its tile, in units of the element (nibbles for Q4)."""
    where = np.full((128, 64), -1, np.int64)
    for row_tile in range(8):
        for lane, step, s, half, row, column in _fragment():
            if bits == 4:
                word = row_tile * 128 + lane * 4 + step
                at = word * 8 + s + 4 * half  # bits 4 s + 16 half of a little-endian word
            else:
                at = ((row_tile * 4 + step) * 32 + lane) * 8 + 2 * s + half
            where[16 * row_tile + row, column] = at
    return where


@cache
def _scale_map(groups: int) -> NDArray[np.int64]:
    """[128, groups of a tile]: index of a row's scale among the scales of its tile."""
    where = np.full((128, groups), -1, np.int64)
    for n in range(128):
        row_tile, row = divmod(n, 16)
        for group in range(groups):
            pair, second = (row, 0) if row < 8 else (row - 8, 1)
            where[n, group] = row_tile * 16 * groups + group * 16 + 2 * pair + second
    return where


def _tile(fmt: StorageFormat, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """One tile, [128, 64] float32."""
    codes_nbytes = 128 * 64 * fmt.bits // 8
    if fmt.bits == 4:
        units = np.empty(128 * 64, np.float32)
        units[0::2] = raw[:codes_nbytes] & 15
        units[1::2] = raw[:codes_nbytes] >> 4
        units -= 8
    else:
        units = _elements(fmt, raw[:codes_nbytes])
    values = units[_element_map(fmt.bits)]
    if fmt.group_size:
        scales = _scales(fmt, raw[codes_nbytes:])[_scale_map(64 // fmt.group_size)]
        values *= np.repeat(scales, fmt.group_size, axis=1)
    return values


def _decode_tiles(
    fmt: StorageFormat, shape: tuple[int, ...], raw: NDArray[np.uint8]
) -> NDArray[np.float32]:
    N, K = shape
    out = np.empty((align_up(N, 128), align_up(K, 64)), np.float32)
    nbytes, tiles_k = TILE_NBYTES[fmt.name], out.shape[1] // 64
    for tile in range(len(raw) // nbytes):
        n, k = divmod(tile, tiles_k)
        values = _tile(fmt, raw[tile * nbytes : (tile + 1) * nbytes])
        out[128 * n : 128 * (n + 1), 64 * k : 64 * (k + 1)] = values
    return np.ascontiguousarray(out[:N, :K])
