"""Blocks of a DFlash2 drafter: dynamic convolution, context ring, attention of a masked block.

conv(u)[t, c] = sum over taps 0, 1 of (base[side, tap, c] + coef[t, side, tap, c / group]) times
u[t - tap, c]; nothing precedes a block. Every query of a block sees all of its block, and the
context keys less than `window` before it. A ring holds the last positions of a row, at least
`window` of them: token p lies at p % its length, BF16.

Legend: T columns, B rows, S columns of a block, C hidden, H query heads, G K/V heads, D head width,
W window, L tokens of a ring. Oracle: tests.oracles.drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.cpu.kv_codec import bf16_float, float_bf16
from ginfer.cpu.norm import norm_row
from ginfer.cpu.product import device, dot, fma, keep_apart
from ginfer.cpu.rope import rotate
from ginfer.cpu.scalar import ONE, ZERO, exp, silu

BEFORE, AFTER = 0, 1  # sides of a sublayer


class Heads(NamedTuple):
    """Numbers of heads, their width, and the factor of the scores."""

    H: int
    G: int
    D: int
    scale: np.float32


@njit(cache=True, nogil=True)
def convolve(y, u, coef, base, side, S, add):
    """y = (y if add else 0) + conv(u) for blocks of S columns. y, u: [T, C] float32, apart; coef:
    [T, 4 groups]; base: [2, 2, C]."""
    T, C = u.shape
    groups = coef.shape[1] // 4
    width, first = C // groups, 2 * side * groups
    for t in range(T):
        for c in range(C):
            g = first + c // width
            value = (base[side, 0, c] + coef[t, g]) * u[t, c]
            if t % S:
                value = fma(base[side, 1, c] + coef[t, g + groups], u[t - 1, c], value)
            y[t, c] = y[t, c] + value if add else value


@njit(cache=True, nogil=True)
def silu_times(gate, up):
    """gate = silu(gate) * up, [T, I] float32."""
    for t in range(gate.shape[0]):
        for i in range(gate.shape[1]):
            gate[t, i] = silu(gate[t, i]) * up[t, i]


@njit(cache=True, nogil=True)
def prepare_heads(x, w, cos, sin, D, eps):
    """Norm and rotate every head of x [T, heads * D] in place. cos, sin: [T, D / 2]."""
    for t in range(x.shape[0]):
        for h in range(0, x.shape[1], D):
            head = x[t, h : h + D]
            norm_row(head, head, w, eps)
            rotate(head, cos[t], sin[t])


@njit(cache=True, nogil=True)
def append_context(ring, k, v, lanes, tokens):
    """Keys and values of context columns to the rings. ring: [lanes, 2, L, G * D] uint16; k, v:
    [T, G * D] float32; of a row in ascending order of tokens."""
    L = ring.shape[2]
    for t in range(tokens.size):
        slot = ring[lanes[t], :, tokens[t] % L]
        for i in range(k.shape[1]):
            slot[0, i], slot[1, i] = float_bf16(k[t, i]), float_bf16(v[t, i])


@device
def _load_context(keys, values, ring, lane, g, first, length):
    """Context tokens first .. length - 1 of K/V head g as float32, to rows 0 .. of keys, values."""
    keep_apart()
    L, D = ring.shape[2], keys.shape[1]
    for token in range(first, length):
        slot = ring[lane, :, token % L]
        for d in range(D):
            keys[token - first, d] = bf16_float(slot[0, g * D + d])
            values[token - first, d] = bf16_float(slot[1, g * D + d])


@device
def _attend(out, q, keys, values, scores, first, n, scale):
    """out [D] = softmax(q . keys * scale) values over rows first .. n - 1."""
    keep_apart()
    top = np.float32(-np.inf)
    for j in range(first, n):
        scores[j] = dot(q, 0, keys[j], 0, q.size) * scale
        top = scores[j] if scores[j] > top else top
    total = ZERO
    for d in range(out.size):
        out[d] = ZERO
    for j in range(first, n):
        w = exp(scores[j] - top)
        total += w
        for d in range(out.size):
            out[d] = fma(w, values[j, d], out[d])
    inverse = ONE / total
    for d in range(out.size):
        out[d] *= inverse


@njit(cache=True, nogil=True, parallel=True)
def attend_blocks(out, q, k, v, ring, lanes, lengths, heads, W, spaces, scores):
    """Attention of B blocks of S columns over their context and themselves.

    out, q: [B * S, H * D]; k, v: [B * S, G * D], normed and rotated, float32. ring: [lanes, 2, L,
    G * D] uint16. lengths: [B] tokens of context. spaces: [threads, 2, >= W + S, D] float32;
    scores: [threads, >= W + S] float32.
    """
    H, G, D, scale = heads
    S, M = q.shape[0] // lanes.size, H // G
    for task in prange(lanes.size * G):
        b, g = task // G, task % G
        worker = get_thread_id()
        keys, values, row = spaces[worker, 0], spaces[worker, 1], scores[worker]
        length = lengths[b]
        first = max(0, length - W + 1)
        n = length - first
        _load_context(keys, values, ring, lanes[b], g, first, length)
        for i in range(S):
            for d in range(D):
                keys[n + i, d] = k[b * S + i, g * D + d]
                values[n + i, d] = v[b * S + i, g * D + d]
        for i in range(S):
            seen = max(0, length + i - W + 1) - first
            for h in range(g * M, (g + 1) * M):
                part = slice(h * D, (h + 1) * D)
                query, target = q[b * S + i, part], out[b * S + i, part]
                _attend(target, query, keys, values, row, seen, n + S, scale)
