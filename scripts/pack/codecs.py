"""Encoders: float32 matrices, 128 rows at a time, to the payload bytes of a storage format.

Legend: N rows, K columns, Kp = K padded to 64. Every encoder takes one block of at most 128 rows,
so that a matrix of any size streams; a block is one row of tiles. The axes of a block are
r (row tile 0..7), h (row half), g, k (K tile), j (k16 step), c (column half), t, e (odd column):
row = 16 r + 8 h + g, column = 64 k + 16 j + 8 c + 2 t + e.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ginfer.formats import (
    BF16,
    FP32,
    I32,
    Q4G64_F16S,
    ROW_TILE,
    TILE_K,
    TILE_N,
    W8G32_F16S,
    Layout,
    StorageFormat,
    row_nbytes,
)
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

Element = TypeVar("Element", bound=np.generic)

CODECS_VERSION = 1  # raised whenever an encoder's bytes change; part of a recipe's digest
QMAX = {Q4G64_F16S.name: 7, W8G32_F16S.name: 127}
SMALLEST_SCALE = np.float16(2.0**-24)
# Between zero and a group's largest magnitude.
FITTED_STEPS = np.arange(6, 9.75, 0.25, dtype=np.float32)
FITTED_GROUPS = 4096  # at once, in cache


def bf16_bits(x: F32) -> NDArray[np.uint16]:
    """Round float32 to BF16, nearest even; same shape, the bits as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def absmax_codes(x: F32, group: int, qmax: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantise [N, K] (K a multiple of `group`) to codes [N, K] and one scale per group.

    s = fp16(amax / qmax), 2^-24 where that rounds to zero; code = clamp(rne(x * fp32(1 / s))).
    A group of zeros has scale 0 and codes 0. Raises ValueError when a scale overflows FP16.
    """
    groups = x.reshape(len(x), -1, group)
    amax = np.abs(groups).max(2)
    with np.errstate(over="ignore"):
        scales = (amax / np.float32(qmax)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError(f"magnitude {amax.max():g} overflows an FP16 scale; rescale the tensor")
    scales[(scales == 0) & (amax > 0)] = SMALLEST_SCALE
    inverse = np.zeros(scales.shape, np.float32)
    np.divide(np.float32(1), scales.astype(np.float32), out=inverse, where=scales != 0)
    codes = np.clip(np.rint(groups * inverse[:, :, None]), -qmax, qmax)
    return codes.astype(np.int8).reshape(x.shape), scales


def fitted_codes(x: F32, group: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantise [N, K] (K a multiple of `group`) to codes -8 .. 7, [N, K], and one scale per group.

    Of scales that put a group's largest magnitude FITTED_STEPS below zero, the one with the
    smallest squared error; nothing below -8 fits. A group of zeros has scale 0 and codes 0. Raises
    ValueError when a scale overflows FP16.
    """
    groups = x.reshape(-1, group)
    codes, scales = np.zeros(groups.shape, np.int8), np.zeros(len(groups), np.float16)
    for first in range(0, len(groups), FITTED_GROUPS):
        part = slice(first, first + FITTED_GROUPS)
        _fit(codes[part], scales[part], groups[part])
    if not np.isfinite(scales).all():
        raise ValueError(f"magnitude {np.abs(x).max():g} overflows an FP16 scale; rescale it")
    return codes.reshape(x.shape), scales.reshape(len(x), -1)


def _fit(codes: NDArray[np.int8], scales: NDArray[np.float16], groups: F32) -> None:
    """Fill codes [n, group] and scales [n]; infinite where none fits FP16."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    least = np.full(len(groups), np.inf, np.float32)
    scales[:] = np.inf
    for step in FITTED_STEPS:
        with np.errstate(over="ignore", invalid="ignore"):
            scale = (-largest / step).astype(np.float16)
            scale[(scale == 0) & (largest != 0)] = SMALLEST_SCALE
            wide = scale.astype(np.float32)
            inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
            fitted = np.clip(np.rint(groups * inverse), -8, 7)
            error = np.square(fitted * wide - groups).sum(1)
        better = error < least
        least[better], scales[better], codes[better] = (
            error[better],
            scale[better, 0],
            fitted[better],
        )
    scales[largest[:, 0] == 0] = 0


def encode(fmt: StorageFormat, layout: Layout, block: F32, *, fitted: bool = False) -> Bytes:
    """Payload bytes of one block [N <= 128, K]; only the last block of a matrix may be shorter.
    fitted: 4-bit codes with the scales of `fitted_codes`, others as ever.

    Raises ValueError for non-finite values, an FP16 overflow or a pair that has no encoder.
    """
    encoder = _ENCODERS.get((fmt.name, layout))
    if fitted and encoder is _tile_q4:
        encoder = _tile_fitted_q4
    if encoder is None:
        raise ValueError(f"no encoder for format {fmt.name} in layout {layout}")
    if not np.isfinite(block).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(block))} values are not finite")
    return np.ascontiguousarray(encoder(block)).view(np.uint8).reshape(-1)


def _padded(block: F32) -> F32:
    """The block as [128, Kp], zeros where it has no values."""
    N, K = block.shape
    if N == TILE_N and K % TILE_K == 0:
        return block
    out = np.zeros((TILE_N, align_up(K, TILE_K)), np.float32)
    out[:N, :K] = block
    return out


def _fragments(elements: NDArray[Element], order: str) -> NDArray[Element]:
    """[128, Kp] to [k, r, ...] with the axes in `order` (letters of the module legend)."""
    split = elements.reshape(TILE_N // ROW_TILE, 2, 8, -1, 4, 2, 4, 2)
    return split.transpose(["rhgkjcte".index(axis) for axis in "kr" + order])


def _scale_pairs(scales: NDArray[np.float16], groups_per_tile: int) -> Bytes:
    """[128, groups] to bytes [k, r * group * g * 4]: scales of rows g and g + 8 side by side."""
    split = scales.reshape(TILE_N // ROW_TILE, 2, 8, -1, groups_per_tile)  # r h g k group
    pairs = np.ascontiguousarray(split.transpose(3, 0, 4, 2, 1))
    return pairs.reshape(len(pairs), -1).view(np.uint8)


def _tile_bf16(block: F32) -> NDArray[np.generic]:
    return _fragments(bf16_bits(_padded(block)), "jgtche")


def _tile_q4(block: F32) -> Bytes:
    return _q4(absmax_codes(_padded(block), Q4G64_F16S.group_size, QMAX[Q4G64_F16S.name]))


def _tile_fitted_q4(block: F32) -> Bytes:
    return _q4(fitted_codes(_padded(block), Q4G64_F16S.group_size))


def _q4(quantised: tuple[NDArray[np.int8], NDArray[np.float16]]) -> Bytes:
    codes, scales = quantised
    nibbles = _fragments((codes + 8).view(np.uint8), "gtjech")
    packed = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return np.concatenate([packed.reshape(len(packed), -1), _scale_pairs(scales, 1)], axis=1)


def _tile_w8(block: F32) -> Bytes:
    codes, scales = absmax_codes(_padded(block), W8G32_F16S.group_size, QMAX[W8G32_F16S.name])
    ordered = np.ascontiguousarray(_fragments(codes.view(np.uint8), "jgtche"))
    return np.concatenate([ordered.reshape(len(ordered), -1), _scale_pairs(scales, 2)], axis=1)


def _rows(fmt: StorageFormat, K: int, *parts: NDArray[np.generic]) -> Bytes:
    out = np.zeros((len(parts[0]), row_nbytes(fmt, K)), np.uint8)
    joined = np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1)
    out[:, : joined.shape[1]] = joined
    return out


def _rows_bf16(block: F32) -> Bytes:
    return _rows(BF16, block.shape[1], bf16_bits(block))


def _rows_w8(block: F32) -> Bytes:
    codes, scales = absmax_codes(block, W8G32_F16S.group_size, QMAX[W8G32_F16S.name])
    return _rows(W8G32_F16S, block.shape[1], codes, scales)


def _contiguous_i32(block: F32) -> NDArray[np.generic]:
    whole = block.astype("<i4")
    if not np.array_equal(whole, block):
        raise ValueError("values are not whole numbers of 32 bits")
    return whole


_ENCODERS: dict[tuple[str, Layout], Callable[[F32], NDArray[np.generic]]] = {
    (BF16.name, Layout.TILE): _tile_bf16,
    (Q4G64_F16S.name, Layout.TILE): _tile_q4,
    (W8G32_F16S.name, Layout.TILE): _tile_w8,
    (BF16.name, Layout.ROWS): _rows_bf16,
    (W8G32_F16S.name, Layout.ROWS): _rows_w8,
    (BF16.name, Layout.CONTIGUOUS): bf16_bits,
    (FP32.name, Layout.CONTIGUOUS): lambda block: block.astype("<f4"),
    (I32.name, Layout.CONTIGUOUS): _contiguous_i32,
}
