"""Linear operators on packed weights: y[t, n] = sum_k x[t, k] * W[n, k], float32 activations.

Legend: T columns (tokens), N outputs, K inputs, I = N / 2 for the fused gate_up matrix; a unit is
64 rows of W over all K, half a row of tiles.

The order of a sum is one for every T, thread count and entry point. K is cut into slices of 64
(W8G32_F16S: 32, its scale group). A slice starts at zero and takes its terms in the fragment order
of `simd`, p = fma(code, x, p); slices are added in ascending order, acc = fma(scale, p, acc), with
scale 1 for BF16. Where K ends inside a tile, zeros stand for x.

A task is a unit times a chunk of columns. It unpacks a half tile to its stack and runs the columns
over it, so that a weight is unpacked once per chunk; a single column is multiplied in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit, prange

from ginfer.cpu import simd
from ginfer.formats import (
    BF16,
    Q4G64_BF16S,
    Q4G64_F16S,
    TILE_NBYTES,
    W8G32_F16S,
    Layout,
    row_nbytes,
)

if TYPE_CHECKING:
    from ginfer.backend import PackedTensor

ROWS = simd.ROWS
CHUNK = 96  # columns of a task
STORE, ADD, SILU_UP = 0, 1, 2  # what becomes of a finished sum

_BF16, _Q4_BF16S, _Q4, _W8 = (f.code for f in (BF16, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S))
_TILE_NBYTES = {f.code: TILE_NBYTES[f.name] for f in (BF16, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S)}
_ROW_NBYTES = 4 * ROWS

_slice_scratch = simd.scratch(64 * _ROW_NBYTES)
_scale_scratch = simd.scratch(2 * _ROW_NBYTES)
_tail_scratch = simd.scratch(CHUNK * 256)
_sum_scratch = simd.scratch(CHUNK * _ROW_NBYTES)


class LinearWeight(NamedTuple):
    """A matrix [N, K] as it lies in its payload.

    data: the payload view, never copied; it keeps `address` alive. kind: code of the storage
    format. stride: bytes of a tile, or of a row for `rows-v1`.
    """

    data: np.ndarray
    address: int
    kind: int
    stride: int
    N: int
    K: int


def prepare(tensor: PackedTensor) -> LinearWeight:
    """Views and numbers of a tensor. Raises ValueError for a format or layout without a kernel."""
    fmt = tensor.format
    if fmt.code not in _TILE_NBYTES or tensor.layout is Layout.CONTIGUOUS:
        raise ValueError(f"{tensor.name}: no CPU kernel for {fmt.name} in {tensor.layout}")
    N, K = tensor.shape
    rows = tensor.layout is Layout.ROWS
    stride = row_nbytes(fmt, K) if rows else _TILE_NBYTES[fmt.code]
    return LinearWeight(tensor.data, tensor.data.ctypes.data, fmt.code, stride, N, K)


@njit(nogil=True, cache=True)
def _scales(scale, tile, kind, first):
    """Scales of row tiles first..first + 3 of a tile to scale [slices of the tile][ROWS]."""
    for r in range(simd.ROW_TILES):
        target, source = scale + 64 * r, first + r
        if kind == _W8:
            simd.w8_scales_f16(tile + 8192 + 64 * source, target)
            simd.w8_scales_f16(tile + 8224 + 64 * source, target + _ROW_NBYTES)
        elif kind == _Q4:
            simd.q4_scales_f16(tile + 4096 + 32 * source, target)
        elif kind == _Q4_BF16S:
            simd.q4_scales_bf16(tile + 4096 + 32 * source, target)
        else:
            simd.one_rows(target)


@njit(nogil=True, cache=True)
def _dot(acc, scale, x, tile, kind, first):
    """acc [ROWS] += one column over the slices of a tile."""
    for r in range(0, simd.ROW_TILES, 2):
        rows, lanes = first + r, 64 * r
        if kind == _W8:
            for i in range(2):
                codes, scales = tile + 1024 * rows + 512 * i, scale + lanes + _ROW_NBYTES * i
                simd.dot_pair_w8(acc + lanes, codes, scales, x + 128 * i)
        elif kind == _BF16:
            simd.dot_pair_bf16(acc + lanes, tile + 2048 * rows, scale + lanes, x)
        else:
            simd.dot_pair_q4(acc + lanes, tile + 512 * rows, scale + lanes, x)


@njit(nogil=True, cache=True)
def _unpack(w, tile, kind, first):
    """Codes of row tiles first..first + 3 of a tile to w [64][ROWS]."""
    for r in range(simd.ROW_TILES):
        source, target = first + r, w + 64 * r
        if kind == _W8:
            for step in range(4):
                codes = tile + 1024 * source + 256 * step
                simd.unpack_w8(codes, target + 16 * step * _ROW_NBYTES)
        elif kind == _BF16:
            for step in range(4):
                codes = tile + 2048 * source + 512 * step
                simd.unpack_bf16(codes, target + 16 * step * _ROW_NBYTES)
        else:
            simd.unpack_q4(tile + 512 * source, target)


@njit(nogil=True, cache=True)
def _fma_columns(acc, w, scale, x, x_stride, T, count):
    """acc[t] += T columns over one slice of 4 * count of K, in blocks of 6, 4, 2, 1 columns."""
    t = 0
    while T - t >= 6:
        simd.fma_block_6(acc + t * _ROW_NBYTES, w, scale, x + t * x_stride, x_stride, count)
        t += 6
    if T - t >= 4:
        simd.fma_block_4(acc + t * _ROW_NBYTES, w, scale, x + t * x_stride, x_stride, count)
        t += 4
    if T - t >= 2:
        simd.fma_block_2(acc + t * _ROW_NBYTES, w, scale, x + t * x_stride, x_stride, count)
        t += 2
    if T - t >= 1:
        simd.fma_block_1(acc + t * _ROW_NBYTES, w, scale, x + t * x_stride, x_stride, count)


@njit(nogil=True, cache=True)
def _pad(padded, x, x_stride, T, count):
    """padded [T][64] = x [T][count], then zeros."""
    for t in range(T):
        row = padded + 256 * t
        for i in range(0, 256, 64):
            simd.zero_rows(row + i)
        for k in range(count):
            simd.store_row(row + 4 * k, x + t * x_stride + 4 * k)


@njit(nogil=True, cache=True)
def _finish(y, y_stride, acc, T, rows, mode):
    """Finished sums acc [T][ROWS] to T columns of y: stored, added or as silu(gate) * up."""
    for t in range(T):
        source, target = acc + t * _ROW_NBYTES, y + t * y_stride
        if mode == SILU_UP:
            for r in range(0, rows, 32):
                simd.silu_up_rows(target + 2 * r, source + 4 * r)
        elif mode == ADD:
            for r in range(0, rows - 15, 16):
                simd.add_rows(target + 4 * r, source + 4 * r)
            for r in range(rows // 16 * 16, rows):
                simd.add_row(target + 4 * r, source + 4 * r)
        else:
            for r in range(0, rows - 15, 16):
                simd.store_rows(target + 4 * r, source + 4 * r)
            for r in range(rows // 16 * 16, rows):
                simd.store_row(target + 4 * r, source + 4 * r)


@njit(nogil=True, cache=True)
def linear_unit(y, y_stride, x, x_stride, T, address, kind, stride, N, K, mode, unit):
    """One task: unit `unit` of a tiled matrix for T <= CHUNK columns.

    y, x: addresses of float32 [T, N] (SILU_UP: [T, N / 2]) and [T, K], rows `y_stride` and
    `x_stride` bytes apart; address, kind, stride, N, K: of the LinearWeight.
    """
    w, scale, acc = _slice_scratch(), _scale_scratch(), _sum_scratch()
    for i in range(T * simd.ROW_TILES):
        simd.zero_rows(acc + 64 * i)
    size = 32 if kind == _W8 else 64
    tiles, half = (K + 63) // 64, unit % 2 * simd.ROW_TILES
    tile = address + unit // 2 * tiles * stride
    for k in range(0, K, 64):
        column, column_stride = x + 4 * k, x_stride
        if K - k < 64:
            column, column_stride = _tail_scratch(), 256
            _pad(column, x + 4 * k, x_stride, T, K - k)
        _scales(scale, tile, kind, half)
        if T == 1:
            _dot(acc, scale, column, tile, kind, half)
        else:
            _unpack(w, tile, kind, half)
            for i in range(0, 64, size):
                w_slice, scale_slice = w + i * _ROW_NBYTES, scale + i // size * _ROW_NBYTES
                x_slice = column + 4 * i
                _fma_columns(acc, w_slice, scale_slice, x_slice, column_stride, T, size // 4)
        tile += stride
    rows = min(ROWS, N - unit * ROWS)
    first = unit * _ROW_NBYTES // (2 if mode == SILU_UP else 1)
    _finish(y + first, y_stride, acc, T, rows, mode)


@njit(nogil=True, parallel=True, cache=True)
def _linear(y, x, address, kind, stride, N, K, mode):
    T, y_stride, x_stride = x.shape[0], y.shape[1] * 4, K * 4
    y_address, x_address = y.ctypes.data, x.ctypes.data
    units, chunks = (N + ROWS - 1) // ROWS, (T + CHUNK - 1) // CHUNK
    for task in prange(units * chunks):
        unit, first = task % units, task // units * CHUNK
        y_first, x_first = y_address + first * y_stride, x_address + first * x_stride
        columns = min(CHUNK, T - first)
        linear_unit(
            y_first, y_stride, x_first, x_stride, columns, address, kind, stride, N, K, mode, unit
        )


def _run(y, x, weight, mode):
    assert x.flags.c_contiguous, "one compiled signature"
    assert y.flags.c_contiguous, "one compiled signature"
    assert x.shape[1] == weight.K
    _, address, kind, stride, N, K = weight
    _linear(y, x, address, kind, stride, N, K, mode)


def linear(y, x, weight):
    """y = x W^T. y: [T, N], x: [T, K], float32, contiguous; weight tiled."""
    _run(y, x, weight, STORE)


def linear_add(y, x, weight):
    """y += x W^T. y: [T, N], x: [T, K], float32, contiguous; weight tiled. The product is complete
    before it is added."""
    _run(y, x, weight, ADD)


def linear_silu_up(y, x, weight):
    """y = silu(gate) * up for a gate_up matrix whose 16-row tiles alternate gate and up.

    y: [T, N / 2], x: [T, K], float32, contiguous; N a multiple of 32.
    """
    assert weight.N % 32 == 0, "pairs of row tiles"
    _run(y, x, weight, SILU_UP)


@njit(nogil=True, cache=True)
def _f32(bits):
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def _f16(bits):
    magnitude = (bits & np.uint32(0x8000)) << np.uint32(16) | (
        bits & np.uint32(0x7FFF)
    ) << np.uint32(13)
    return _f32(magnitude) * np.float32(2.0**112)


@njit(nogil=True, cache=True)
def _u16(data, i):
    return np.uint32(data[i]) | np.uint32(data[i + 1]) << np.uint32(8)


@njit(nogil=True, cache=True)
def _embedding_rows(out, ids, data, kind, stride):
    C = out.shape[1]
    for t in range(ids.shape[0]):
        row = ids[t] * stride
        for c in range(C):
            if kind == _BF16:
                out[t, c] = _f32(_u16(data, row + 2 * c) << np.uint32(16))
            else:
                scale = _f16(_u16(data, row + C + c // 32 * 2))
                out[t, c] = np.float32(np.int8(data[row + c])) * scale


def embedding_rows(out, ids, weight):
    """out[t] = row ids[t] of a `rows-v1` matrix. out: [T, K] float32, ids: [T] int32, in range."""
    _embedding_rows(out, ids, weight.data, weight.kind, weight.stride)
