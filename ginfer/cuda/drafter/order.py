"""Eight columns of a token at a time, in either order of activations, and rotations of heads.

Legend: T tokens, K columns, D dims of a head, F = D / 2 pairs of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.fragment import GROUP, fragment_offset
from ginfer.cuda.lib.numeric import load_bf16x8, load_f32x8, pack_bf16
from ginfer.cuda.lib.ptx import fma_f32, mul_rn_f32, rsqrt_approx, shfl_xor_f32, st_global_u32x4

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_DIM = 128
NEAR = 256  # positions of the finer table of angles

_offset = cuda.jit(device=True, inline="always")(fragment_offset)


def octet_at(fragments: int) -> Any:
    """Device function at(x, t, k, K, first, rest): address of columns k .. k + 7 (k a multiple of
    8) of token t of activations [T, K]; arguments as of `lib.fragment.pair_store`."""

    @cuda.jit(device=True, inline="always")
    def in_fragments(x, t, k, K, first, rest):
        if t < uint32(GROUP):
            return x + int64(_offset(t, k, first))
        return x + int64(K) * (2 * GROUP) + int64(_offset(uint32(t - uint32(GROUP)), k, rest))

    @cuda.jit(device=True, inline="always")
    def in_row(x, t, k, K, first, rest):
        return x + (int64(t) * int64(K) + int64(k)) * 2

    return in_fragments if fragments else in_row


@cuda.jit(device=True, inline="always")
def store_octet(at, v):
    """Eight FP32 as BF16 to a global address, a multiple of 16."""
    st_global_u32x4(
        at,
        pack_bf16(v[0], v[1]),
        pack_bf16(v[2], v[3]),
        pack_bf16(v[4], v[5]),
        pack_bf16(v[6], v[7]),
    )


@cuda.jit(device=True, inline="always")
def sixteenth_sum(x):
    """Sum over the 16 lanes of half a warp, in each of them."""
    x = x + shfl_xor_f32(x, uint32(8))
    x = x + shfl_xor_f32(x, uint32(4))
    x = x + shfl_xor_f32(x, uint32(2))
    return x + shfl_xor_f32(x, uint32(1))


@cuda.jit(device=True, inline="always")
def prepare_head(v, at, w, angles, position, lane, eps):
    """v = rotate(norm(head) * w): lane 0 .. 15 has dims 8 lane .. 8 lane + 7 of the BF16 head at
    a global address. angles: (far, near) as `angle_tables`. All lanes of a warp take part."""
    f, g = cuda.local.array(8, float32), cuda.local.array(8, float32)
    c, s = cuda.local.array(8, float32), cuda.local.array(8, float32)
    load_bf16x8(v, at + int64(lane) * 16)
    load_f32x8(f, w + int64(lane) * 32)
    total = float32(0.0)
    for i in range(8):
        total = fma_f32(v[i], v[i], total)
    inv = rsqrt_approx(sixteenth_sum(total) / float32(HEAD_DIM) + eps)
    for i in range(8):
        v[i] = v[i] * inv * f[i]
    pairs = int64(lane & uint32(7)) * 32
    far = angles[0] + int64(position >> uint32(8)) * (4 * HEAD_DIM) + pairs
    near = angles[1] + int64(position & uint32(NEAR - 1)) * (4 * HEAD_DIM) + pairs
    load_f32x8(c, far)
    load_f32x8(s, far + 2 * HEAD_DIM)
    load_f32x8(f, near)
    load_f32x8(g, near + 2 * HEAD_DIM)
    for i in range(8):
        cosine = fma_f32(-s[i], g[i], mul_rn_f32(c[i], f[i]))
        sine = fma_f32(s[i], f[i], mul_rn_f32(c[i], g[i]))
        other = shfl_xor_f32(v[i], uint32(8))
        v[i] = fma_f32(other, -sine if lane < uint32(8) else sine, mul_rn_f32(v[i], cosine))


def angle_tables(theta: float, max_tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(far, near): cosines, then sines, [2 F] of the angles of positions NEAR i and of 0 .. NEAR -
    1; the angle of a position is their sum. Frequencies are FP32 numbers, angles float64."""
    F = HEAD_DIM // 2
    frequencies = (theta ** (-np.arange(F) / F)).astype(np.float32).astype(np.float64)
    steps = (np.arange(-(-max_tokens // NEAR)) * NEAR, np.arange(NEAR))
    far, near = (np.outer(positions, frequencies) for positions in steps)
    return _circle(far), _circle(near)


def _circle(angles: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)
