"""Linear operators on packed weights: y[t, n] = sum_k x[t, k] * W[n, k], float32 activations.

Legend: T columns (tokens), N outputs, K inputs, I = N / 2 for the fused gate_up matrix.

The order of the sum is one for every T, thread count and entry point. K is cut into slices of 64
(W8G32_F16S: 32, its scale group). A slice starts at zero and takes its terms in ascending k,
p = fma(code, x, p); slices are added in ascending order, acc = fma(scale, p, acc), with scale 1
for BF16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit, prange

from ginfer.formats import BF16, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S, Layout, row_nbytes

if TYPE_CHECKING:
    from ginfer.backend import PackedTensor


class LinearWeight(NamedTuple):
    """A matrix [N, K] as it lies in its payload; `data` is the payload view, never copied.

    kind: code of the storage format. row_nbytes: bytes of a `rows-v1` row, 0 for tiles.
    """

    data: np.ndarray
    kind: int
    N: int
    K: int
    row_nbytes: int


def prepare(tensor: PackedTensor) -> LinearWeight:
    """Views and numbers of a PackedTensor. Raises ValueError for a format without a kernel."""
    formats = (BF16, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S)
    if tensor.format not in formats or tensor.layout is Layout.CONTIGUOUS:
        raise ValueError(
            f"{tensor.name}: format {tensor.format.name} has no CPU kernel for its layout"
        )
    N, K = tensor.shape
    row = row_nbytes(tensor.format, K) if tensor.layout is Layout.ROWS else 0
    return LinearWeight(tensor.data, tensor.format.code, N, K, row)


@njit(cache=True)
def _f32(bits):
    return np.uint32(bits).view(np.float32)


@njit(cache=True)
def _half(h):
    bits = ((h & np.uint32(0x8000)) << np.uint32(16)) | ((h & np.uint32(0x7FFF)) << np.uint32(13))
    return np.uint32(bits).view(np.float32) * np.float32(2.0**112)


@njit(cache=True)
def _u16(data, i):
    return np.uint32(data[i]) | (np.uint32(data[i + 1]) << np.uint32(8))


@njit(cache=True)
def _code(data, kind, tiles_k, n, k):
    row = n % 16
    lane = (row % 8) * 4 + (k % 8) // 2
    s = row // 8 + 2 * ((k % 16) // 8)
    tile = (n // 128) * tiles_k + k // 64
    rt, j = n % 128 // 16, k % 64 // 16
    if kind == 1:
        return _f32(
            _u16(data, tile * 16384 + rt * 2048 + j * 512 + lane * 16 + s * 4 + (k & 1) * 2)
            << np.uint32(16)
        )
    if kind == 6:
        q = data[tile * 8704 + rt * 1024 + j * 256 + lane * 8 + s * 2 + (k & 1)]
        return np.float32(np.int8(q))
    i = tile * 4352 + rt * 512 + (lane * 4 + j) * 4 + (k & 1) * 2 + s // 2
    return np.float32(np.int64(data[i] >> np.uint8(4 * (s & 1))) % 16 - 8)


@njit(cache=True)
def _scale(data, kind, tiles_k, n, k):
    tile = (n // 128) * tiles_k + k // 64
    rt, pair = n % 128 // 16, (n % 8) * 2 + n % 16 // 8
    if kind == 1:
        return np.float32(1)
    if kind == 6:
        return _half(_u16(data, tile * 8704 + 8192 + rt * 64 + k % 64 // 32 * 32 + pair * 2))
    bits = _u16(data, tile * 4352 + 4096 + rt * 32 + pair * 2)
    return _half(bits) if kind == 5 else _f32(bits << np.uint32(16))


@njit(cache=True, nogil=True)
def _dot(x, t, data, kind, n, K):
    acc = np.float32(0)
    size = 32 if kind == 6 else 64
    for k0 in range(0, K, size):
        p = np.float32(0)
        for k in range(k0, min(K, k0 + size)):
            p += _code(data, kind, (K + 63) // 64, n, k) * x[t, k]
        acc += _scale(data, kind, (K + 63) // 64, n, k0) * p
    return acc


@njit(cache=True, nogil=True, parallel=True)
def _linear(y, x, data, kind, N, K, mode):
    T = x.shape[0]
    if mode == 2:
        for i in prange(N // 2):
            gate = i // 16 * 32 + i % 16
            for t in range(T):
                g = _dot(x, t, data, kind, gate, K)
                u = _dot(x, t, data, kind, gate + 16, K)
                y[t, i] = g / (np.float32(1) + np.exp(-g)) * u
    else:
        for n in prange(N):
            for t in range(T):
                v = _dot(x, t, data, kind, n, K)
                y[t, n] = y[t, n] + v if mode == 1 else v


def linear(y, x, weight):
    """y = x W^T. y: [T, N], x: [T, K], float32."""
    _linear(y, x, weight.data, weight.kind, weight.N, weight.K, 0)


def linear_add(y, x, weight):
    """y += x W^T. y: [T, N], x: [T, K], float32; the product is complete before it is added."""
    _linear(y, x, weight.data, weight.kind, weight.N, weight.K, 1)


def linear_silu_up(y, x, weight):
    """y = silu(gate) * up for a gate_up matrix whose 16-row tiles alternate gate and up.

    y: [T, N / 2], x: [T, K], float32.
    """
    _linear(y, x, weight.data, weight.kind, weight.N, weight.K, 2)


@njit(cache=True, nogil=True)
def _embedding_rows(out, ids, data, kind, row_nbytes):
    C = out.shape[1]
    for t in range(ids.shape[0]):
        base = ids[t] * row_nbytes
        for c in range(C):
            if kind == 1:
                out[t, c] = _f32(_u16(data, base + 2 * c) << np.uint32(16))
            else:
                scale = _half(_u16(data, base + C + c // 32 * 2))
                out[t, c] = np.float32(np.int8(data[base + c])) * scale


def embedding_rows(out, ids, weight):
    """out[t] = row ids[t] of a `rows-v1` matrix. out: [T, C] float32, ids: [T] int32, in range."""
    _embedding_rows(out, ids, weight.data, weight.kind, weight.row_nbytes)
