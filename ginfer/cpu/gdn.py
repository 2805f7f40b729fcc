"""Gated DeltaNet: causal convolution, gates, delta rule in recurrent and chunked form, gated norm.

Per value head, state S [K, V]: S *= exp(g); d = beta (v - S^T k); S += k d^T; o = S^T q. The
recurrent form (decode) reads S once per column: S^T k and S^T q together, then
o = exp(g) S^T q + (k . q) d. The chunked form (prefill) works on chunks that end on absolute
multiples of 64, so that any cut of a prompt at such multiples gives the same bits:
  G = cumsum(g), A = strict_lower(beta K K^T exp(G_i - G_j)), R = beta (V - exp(G) K S),
  R = (I + A)^-1 R, O = exp(G) Q S + lower(Q K^T exp(G_i - G_j)) R,
  S = exp(G_last) S + (K exp(G_last - G))^T R.
The convolution history is the last taps - 1 raw rows in float32: raw inputs are float32 inside a
chunk, and a border must not round them.

Legend: T columns, HK key heads, HV value heads, K, V head widths, X = 2 HK K + HV V channels.
Columns of `mix`: q [HK, K], k [HK, K], v [HV, V], z [HV, V]; of `ab`: a [HV], b [HV].
Oracle: tests.oracles.gdn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.cpu.norm import gated_norm_row
from ginfer.cpu.product import dot, fma, multiply_add, multiply_add_lower
from ginfer.cpu.scalar import ONE, ZERO, exp, sigmoid, silu, softplus
from ginfer.spec import PAGE_TOKENS

CHUNK = PAGE_TOKENS
_L2_EPS = np.float32(1e-6)


class Shape(NamedTuple):
    """Numbers and widths of key and value heads."""

    HK: int
    HV: int
    K: int
    V: int


class Weights(NamedTuple):
    """taps: [taps, X]; decay: [HV] = -exp(A_log); dt_bias: [HV]; norm: [V]; all float32."""

    taps: np.ndarray
    decay: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray


class Rows(NamedTuple):
    """indptr: [B + 1]; starts, state_in, state_out: [B]; all int32."""

    indptr: np.ndarray
    starts: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray


@njit(cache=True)
def _convolve(y, yo, mix, t0, t, history, taps, x0, n):
    """y[yo : yo + n] = silu(conv) of channels x0 .. of column t, in a row that begins at t0."""
    for x in range(n):
        y[yo + x] = ZERO
    for k in range(taps.shape[0]):
        source = t - taps.shape[0] + 1 + k
        raw = mix[source] if source >= t0 else history[history.shape[0] + source - t0]
        for x in range(n):
            y[yo + x] = fma(taps[k, x0 + x], raw[x0 + x], y[yo + x])
    for x in range(n):
        y[yo + x] = silu(y[yo + x])


@njit(cache=True)
def _unit(x, xo, n, factor):
    """Scale n elements to length `factor`."""
    inv = ONE / np.sqrt(dot(x, xo, x, xo, n) + _L2_EPS) * factor
    for i in range(xo, xo + n):
        x[i] *= inv


@njit(cache=True)
def _shift_history(new, old, mix, t0, t1, x0, n):
    """new[:, x0 : x0 + n] = the last rows of old and the raw rows t0 .. t1 - 1; may be old."""
    depth = new.shape[0]
    for k in range(depth):
        source = t1 - depth + k
        for x in range(x0, x0 + n):
            new[k, x] = mix[source, x] if source >= t0 else old[depth + source - t0, x]


@njit(cache=True)
def _gates(ab, t, h, HV, w):
    """(g, beta) of column t and value head h."""
    g = w.decay[h] * softplus(ab[t, h] + w.dt_bias[h])
    return g, sigmoid(ab[t, HV + h])


@njit(cache=True)
def _step(S, o, q_k, v, vo, decay, beta, K, V):
    """One column: S [K V] in place, o [2 V] (the output in its first half); q_k = q [K], k [K]."""
    for i in range(2 * V):
        o[i] = ZERO
    multiply_add(o, 0, V, q_k, 0, K, 1, S, 0, V, 2, V, K)
    kq = dot(q_k, 0, q_k, K, K)
    for j in range(V):
        d = beta * (v[vo + j] - decay * o[V + j])
        o[V + j] = d
        o[j] = fma(kq, d, decay * o[j])
    for i in range(K):
        k = q_k[K + i]
        for j in range(V):
            S[i * V + j] = fma(k, o[V + j], decay * S[i * V + j])


@njit(cache=True)
def _decode_item(b, kh, out, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """All columns of row b for key head kh and its value heads."""
    HK, HV, K, V = shape
    q_k, v, o = scratch[: 2 * K], scratch[2 * K : 2 * K + V], scratch[2 * K + V : 2 * K + 3 * V]
    t0, t1 = rows.indptr[b], rows.indptr[b + 1]
    old, new = conv[rows.state_in[b]], conv[rows.state_out[b]]
    heads, flat, y = HV // HK, mix.reshape(-1), out.reshape(-1)
    v0, z0 = 2 * HK * K, 2 * HK * K + HV * V
    for vh in range(kh * heads, (kh + 1) * heads):
        if rows.state_in[b] != rows.state_out[b]:
            state[rows.state_out[b], vh] = state[rows.state_in[b], vh]
    for t in range(t0, t1):
        for part in range(2):
            _convolve(q_k, part * K, mix, t0, t, old, w.taps, (part * HK + kh) * K, K)
        _unit(q_k, 0, K, ONE / np.sqrt(np.float32(K)))
        _unit(q_k, K, K, ONE)
        for vh in range(kh * heads, (kh + 1) * heads):
            _convolve(v, 0, mix, t0, t, old, w.taps, v0 + vh * V, V)
            g, beta = _gates(ab, t, vh, HV, w)
            _step(state[rows.state_out[b], vh], o, q_k, v, 0, exp(g), beta, K, V)
            z = t * mix.shape[1] + z0 + vh * V
            gated_norm_row(y, (t * HV + vh) * V, o, 0, w.norm, flat, z, V, eps)
    for part in range(2):
        _shift_history(new, old, mix, t0, t1, (part * HK + kh) * K, K)
    _shift_history(new, old, mix, t0, t1, v0 + kh * heads * V, heads * V)


@njit(cache=True, nogil=True, parallel=True)
def gdn_decode(out, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """out = gated norm of the delta rule, column after column; parallel over (row, key head).

    out: [T, HV V]. mix: [T, X + HV V]. ab: [T, 2 HV]. state: [slots, HV, K V], conv: [slots,
    taps - 1, X], both float32, of one layer. scratch: [threads, gdn_scratch].
    """
    HK = shape.HK
    for i in prange(rows.starts.size * HK):
        mine = scratch[get_thread_id()]
        _decode_item(i // HK, i % HK, out, mix, ab, state, conv, rows, w, shape, eps, mine)


@njit(cache=True)
def _convolve_item(b, unit, y, mix, conv, rows, w, shape):
    """Convolution, SiLU and normalisation of all columns of row b for one head of q, k or v."""
    HK, _, K, V = shape
    t0, t1 = rows.indptr[b], rows.indptr[b + 1]
    n = K if unit < 2 * HK else V
    x0 = unit * K if unit < 2 * HK else 2 * HK * K + (unit - 2 * HK) * V
    old, flat = conv[rows.state_in[b]], y.reshape(-1)
    for t in range(t0, t1):
        at = t * y.shape[1] + x0
        _convolve(flat, at, mix, t0, t, old, w.taps, x0, n)
        if unit < HK:
            _unit(flat, at, K, ONE / np.sqrt(np.float32(K)))
        elif unit < 2 * HK:
            _unit(flat, at, K, ONE)
    _shift_history(conv[rows.state_out[b]], old, mix, t0, t1, x0, n)


@njit(cache=True)
def _chunk_products(t0, n, x, qo, ko, X, G, beta, scratch, K):
    """Fill kk = -strict_lower(beta K K^T decay) and qk = lower(Q K^T decay), [64, 64] each."""
    kk, qk = scratch[: CHUNK * CHUNK], scratch[CHUNK * CHUNK : 2 * CHUNK * CHUNK]
    k_t = scratch[2 * CHUNK * CHUNK : 2 * CHUNK * CHUNK + K * CHUNK]
    for j in range(CHUNK):
        for d in range(K):
            k_t[d * CHUNK + j] = x[(t0 + j) * X + ko + d] if j < n else ZERO
    for i in range(n * CHUNK):
        kk[i] = qk[i] = ZERO
    multiply_add(kk, 0, CHUNK, x, t0 * X + ko, X, 1, k_t, 0, CHUNK, n, CHUNK, K)
    multiply_add(qk, 0, CHUNK, x, t0 * X + qo, X, 1, k_t, 0, CHUNK, n, CHUNK, K)
    for i in range(n):
        for j in range(i * CHUNK, i * CHUNK + i + 1):
            decay = exp(G[i] - G[j - i * CHUNK])
            kk[j] *= -beta[i] * decay
            qk[j] *= decay
    return kk, qk


@njit(cache=True)
def _chunk(t0, n, vh, r, y, ab, S, w, shape, scratch):
    """One chunk of n columns: S [K V] in place; outputs to r [64, V]."""
    HK, HV, K, V = shape
    x, X = y.reshape(-1), y.shape[1]
    qo, ko, vo = vh // (HV // HK) * K, (HK + vh // (HV // HK)) * K, 2 * HK * K + vh * V
    G, E, beta = scratch[:CHUNK], scratch[CHUNK : 2 * CHUNK], scratch[2 * CHUNK : 3 * CHUNK]
    total = ZERO
    for i in range(n):
        g, beta[i] = _gates(ab, t0 + i, vh, HV, w)
        total += g
        G[i], E[i] = total, exp(total)
    kk, qk = _chunk_products(t0, n, x, qo, ko, X, G, beta, scratch[3 * CHUNK :], K)
    rest = scratch[3 * CHUNK + 2 * CHUNK * CHUNK + K * CHUNK :]
    u, k_decayed = rest[: CHUNK * V], rest[CHUNK * V : CHUNK * (V + K)]
    for i in range(n * V):
        u[i] = r[i] = ZERO
    multiply_add(u, 0, V, x, t0 * X + ko, X, 1, S, 0, V, n, V, K)
    multiply_add(r, 0, V, x, t0 * X + qo, X, 1, S, 0, V, n, V, K)
    for i in range(n):
        for j in range(V):
            u[i * V + j] = beta[i] * (x[(t0 + i) * X + vo + j] - E[i] * u[i * V + j])
            r[i * V + j] *= E[i]
    multiply_add_lower(u, 0, V, kk, 0, CHUNK, u, 0, V, n, V, 0, 1, n)
    multiply_add_lower(r, 0, V, qk, 0, CHUNK, u, 0, V, n, V, 1, 1, n)
    for i in range(n):
        decay = exp(total - G[i])
        for d in range(K):
            k_decayed[i * K + d] = x[(t0 + i) * X + ko + d] * decay
    for i in range(K * V):
        S[i] *= E[n - 1]
    multiply_add(S, 0, V, k_decayed, 0, 1, K, u, 0, V, K, V, n)


@njit(cache=True)
def _prefill_item(b, vh, out, y, mix, ab, state, rows, w, shape, eps, scratch):
    """All columns of row b for value head vh, chunk after chunk."""
    HK, HV, K, V = shape
    if rows.state_in[b] != rows.state_out[b]:
        state[rows.state_out[b], vh] = state[rows.state_in[b], vh]
    t, t1 = rows.indptr[b], rows.indptr[b + 1]
    end = rows.starts[b]
    to, z, z0 = out.reshape(-1), mix.reshape(-1), 2 * HK * K + HV * V
    r, rest = scratch[: CHUNK * V], scratch[CHUNK * V :]
    while t < t1:
        n = min(CHUNK - end % CHUNK, t1 - t)
        _chunk(t, n, vh, r, y, ab, state[rows.state_out[b], vh], w, shape, rest)
        for i in range(n):
            zo = (t + i) * mix.shape[1] + z0 + vh * V
            gated_norm_row(to, ((t + i) * HV + vh) * V, r, i * V, w.norm, z, zo, V, eps)
        t += n
        end += n


@njit(cache=True, nogil=True, parallel=True)
def gdn_prefill(out, y, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """`gdn_decode` in chunked form; y: [T, X] scratch for the convolved channels."""
    HK, HV, B = shape.HK, shape.HV, rows.starts.size
    units = 2 * HK + HV
    for i in prange(B * units):
        _convolve_item(i // units, i % units, y, mix, conv, rows, w, shape)
    for i in prange(B * HV):
        mine = scratch[get_thread_id()]
        _prefill_item(i // HV, i % HV, out, y, mix, ab, state, rows, w, shape, eps, mine)


def gdn_scratch(shape: Shape) -> int:
    """float32 of scratch per thread of both kernels."""
    K, V = shape.K, shape.V
    return 3 * CHUNK + 2 * CHUNK * CHUNK + 2 * CHUNK * (K + V)
