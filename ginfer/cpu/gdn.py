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
from ginfer.cpu.product import (
    add_outer,
    device,
    dot,
    fma,
    keep_apart,
    multiply_add,
    multiply_add_lower,
)
from ginfer.cpu.scalar import ONE, ZERO, exp, sigmoid, silu, softplus
from ginfer.spec import PAGE_TOKENS

CHUNK = PAGE_TOKENS
_L2_EPS = np.float32(1e-6)
_FORGOTTEN = np.float32(-60.0)


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
    """indptr: [B + 1], starts: [B], int64; state_in, state_out: [B] int32."""

    indptr: np.ndarray
    starts: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray


@device
def _decay(x):
    """e^x for x <= 0, 0 below e^-60: what is left of it would only make subnormal numbers, each of
    which costs a hundred ordinary operations."""
    return exp(x) if x > _FORGOTTEN else ZERO


@device
def _convolve(y, mix, t0, t, history, taps, x0):
    """y = silu(conv) of the channels from x0 of column t, in a row that begins at column t0."""
    keep_apart()
    n = y.size
    for x in range(n):
        y[x] = ZERO
    for k in range(taps.shape[0]):
        source = t - taps.shape[0] + 1 + k
        row = mix[source] if source >= t0 else history[history.shape[0] + source - t0]
        raw, tap = row[x0 : x0 + n], taps[k, x0 : x0 + n]
        for x in range(n):
            y[x] = fma(tap[x], raw[x], y[x])
    for x in range(n):
        y[x] = silu(y[x])


@device
def _unit(x, factor):
    """Scale a row to length `factor`."""
    keep_apart()
    inv = ONE / np.sqrt(dot(x, 0, x, 0, x.size) + _L2_EPS) * factor
    for i in range(x.size):
        x[i] *= inv


@device
def _shift_history(new, old, mix, t0, t1, x0, n):
    """new[:, x0 : x0 + n] = the last rows of old and the raw rows t0 .. t1 - 1; may be old."""
    depth = new.shape[0]
    for k in range(depth):
        source = t1 - depth + k
        row = mix[source] if source >= t0 else old[depth + source - t0]
        raw, kept = row[x0 : x0 + n], new[k, x0 : x0 + n]
        for x in range(n):
            kept[x] = raw[x]


@device
def _copy(target, source):
    for i in range(target.size):
        target[i] = source[i]


@device
def _gates(ab, t, h, HV, w):
    """(g, beta) of column t and value head h."""
    g = w.decay[h] * softplus(ab[t, h] + w.dt_bias[h])
    return g, sigmoid(ab[t, HV + h])


@device
def _step(S, o, q_k, v, decay, beta, K, V):
    """One column: S [K V] in place, o [2 V] (the output in its first half); q_k = q [K], k [K].

    64 columns of S at a time, so that what is read is still near when it is written.
    """
    keep_apart()
    for i in range(2 * V):
        o[i] = ZERO
    kq = dot(q_k, 0, q_k, K, K)
    for j0 in range(0, V, 64):
        n = min(64, V - j0)
        multiply_add(o, j0, V, q_k, 0, K, 1, S, j0, V, 2, n, K)
        y, d, value = o[j0 : j0 + n], o[V + j0 : V + j0 + n], v[j0 : j0 + n]
        for j in range(n):
            d[j] = beta * (value[j] - decay * d[j])
            y[j] = fma(kq, d[j], decay * y[j])
        if n == 64:
            add_outer(S, j0, V, q_k, K, o, V + j0, decay, K)
        else:
            for i in range(K):
                for j in range(n):
                    at = i * V + j0 + j
                    S[at] = fma(q_k[K + i], d[j], decay * S[at])


@device
def _load_state(b, kh, state, rows, shape):
    """state_out = state_in for the value heads of key head kh."""
    heads = shape.HV // shape.HK
    for vh in range(kh * heads, (kh + 1) * heads):
        if rows.state_in[b] != rows.state_out[b]:
            _copy(state[rows.state_out[b], vh], state[rows.state_in[b], vh])


@device
def _load_keys(q_k, kh, mix, t0, t, old, w, shape):
    """q_k [2 K] = query and key of head kh at column t."""
    HK, _, K, _ = shape
    for part in range(2):
        x = q_k[part * K : (part + 1) * K]
        _convolve(x, mix, t0, t, old, w.taps, (part * HK + kh) * K)
        _unit(x, ONE if part else ONE / np.sqrt(np.float32(K)))


@device
def _keep_history(new, old, mix, t0, t1, kh, shape):
    """Raw rows of key head kh and its value heads."""
    HK, HV, K, V = shape
    heads = HV // HK
    for part in range(2):
        _shift_history(new, old, mix, t0, t1, (part * HK + kh) * K, K)
    _shift_history(new, old, mix, t0, t1, 2 * HK * K + kh * heads * V, heads * V)


@device
def _fold_item(b, kh, mix, ab, state, conv, rows, columns, w, shape, scratch):
    """`_decode_item` of the first columns[b] columns, without outputs."""
    if columns[b] < 0:
        return
    HK, HV, K, V = shape
    q_k, v, o = scratch[: 2 * K], scratch[2 * K : 2 * K + V], scratch[2 * K + V : 2 * K + 3 * V]
    t0 = rows.indptr[b]
    t1 = t0 + columns[b]
    old, heads = conv[rows.state_in[b]], HV // HK
    _load_state(b, kh, state, rows, shape)
    for t in range(t0, t1):
        _load_keys(q_k, kh, mix, t0, t, old, w, shape)
        for vh in range(kh * heads, (kh + 1) * heads):
            _convolve(v, mix, t0, t, old, w.taps, 2 * HK * K + vh * V)
            g, beta = _gates(ab, t, vh, HV, w)
            _step(state[rows.state_out[b], vh], o, q_k, v, _decay(g), beta, K, V)
    _keep_history(conv[rows.state_out[b]], old, mix, t0, t1, kh, shape)


@njit(cache=True, nogil=True, parallel=True)
def gdn_fold(mix, ab, state, conv, rows, columns, w, shape, scratch):
    """State and history after the first columns[b] columns of each row, as `gdn_decode` leaves
    them; parallel over (row, key head).

    mix: [T, X], ab: [T, 2 HV], what `gdn_decode` was given. columns: [B] int32, 0 copies, -1
    leaves the row alone.
    """
    HK = shape.HK
    for i in prange(rows.starts.size * HK):
        mine, at = scratch[get_thread_id()], np.int64(i)
        _fold_item(at // HK, at % HK, mix, ab, state, conv, rows, columns, w, shape, mine)


@device
def _decode_item(b, kh, out, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """All columns of row b for key head kh and its value heads."""
    HK, HV, K, V = shape
    q_k, v, o = scratch[: 2 * K], scratch[2 * K : 2 * K + V], scratch[2 * K + V : 2 * K + 3 * V]
    t0, t1 = rows.indptr[b], rows.indptr[b + 1]
    old, new = conv[rows.state_in[b]], conv[rows.state_out[b]]
    heads, v0, z0 = HV // HK, 2 * HK * K, 2 * HK * K + HV * V
    _load_state(b, kh, state, rows, shape)
    for t in range(t0, t1):
        _load_keys(q_k, kh, mix, t0, t, old, w, shape)
        for vh in range(kh * heads, (kh + 1) * heads):
            _convolve(v, mix, t0, t, old, w.taps, v0 + vh * V)
            g, beta = _gates(ab, t, vh, HV, w)
            _step(state[rows.state_out[b], vh], o, q_k, v, _decay(g), beta, K, V)
            at, z = vh * V, z0 + vh * V
            gated_norm_row(out[t, at : at + V], o[:V], w.norm, mix[t, z : z + V], eps)
    _keep_history(new, old, mix, t0, t1, kh, shape)


@njit(cache=True, nogil=True, parallel=True)
def gdn_decode(out, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """out = gated norm of the delta rule, column after column; parallel over (row, key head).

    out: [T, HV V]. mix: [T, X + HV V]. ab: [T, 2 HV]. state: [slots, HV, K V], conv: [slots,
    taps - 1, X], both float32, of one layer. scratch: [threads, gdn_scratch].
    """
    HK = shape.HK
    for i in prange(rows.starts.size * HK):
        mine, at = scratch[get_thread_id()], np.int64(i)
        _decode_item(at // HK, at % HK, out, mix, ab, state, conv, rows, w, shape, eps, mine)


@device
def _convolve_item(b, unit, y, mix, conv, rows, w, shape):
    """Convolution, SiLU and normalisation of all columns of row b for one head of q, k or v."""
    HK, _, K, V = shape
    t0, t1 = rows.indptr[b], rows.indptr[b + 1]
    n = K if unit < 2 * HK else V
    x0 = unit * K if unit < 2 * HK else 2 * HK * K + (unit - 2 * HK) * V
    old = conv[rows.state_in[b]]
    for t in range(t0, t1):
        x = y[t, x0 : x0 + n]
        _convolve(x, mix, t0, t, old, w.taps, x0)
        if unit < 2 * HK:
            _unit(x, ONE if unit >= HK else ONE / np.sqrt(np.float32(K)))
    _shift_history(conv[rows.state_out[b]], old, mix, t0, t1, x0, n)


@device
def _chunk_products(t0, n, x, qo, ko, X, G, beta, scratch, K):
    """Fill kk = -strict_lower(beta K K^T decay) and qk = lower(Q K^T decay), [64, 64] each."""
    keep_apart()
    kk, qk = scratch[: CHUNK * CHUNK], scratch[CHUNK * CHUNK : 2 * CHUNK * CHUNK]
    k_t = scratch[2 * CHUNK * CHUNK : 2 * CHUNK * CHUNK + K * CHUNK]
    for j in range(n):
        key = x[(t0 + j) * X + ko : (t0 + j) * X + ko + K]
        for d in range(K):
            k_t[d * CHUNK + j] = key[d]
    for j in range(n, CHUNK):
        for d in range(K):
            k_t[d * CHUNK + j] = ZERO
    for i in range(n * CHUNK):
        kk[i] = qk[i] = ZERO
    multiply_add(kk, 0, CHUNK, x, t0 * X + ko, X, 1, k_t, 0, CHUNK, n, CHUNK, K)
    multiply_add(qk, 0, CHUNK, x, t0 * X + qo, X, 1, k_t, 0, CHUNK, n, CHUNK, K)
    for i in range(n):
        left, right = kk[i * CHUNK : (i + 1) * CHUNK], qk[i * CHUNK : (i + 1) * CHUNK]
        for j in range(i + 1):
            decay = _decay(G[i] - G[j])
            left[j] *= -beta[i] * decay
            right[j] *= decay
    return kk, qk


@device
def _chunk(t0, n, vh, r, y, ab, S, w, shape, scratch):
    """One chunk of n columns: S [K V] in place; outputs to r [64, V]."""
    keep_apart()
    HK, HV, K, V = shape
    x, X = y.reshape(-1), y.shape[1]
    qo, ko, vo = vh // (HV // HK) * K, (HK + vh // (HV // HK)) * K, 2 * HK * K + vh * V
    G, E, beta = scratch[:CHUNK], scratch[CHUNK : 2 * CHUNK], scratch[2 * CHUNK : 3 * CHUNK]
    total = ZERO
    for i in range(n):
        g, beta[i] = _gates(ab, t0 + i, vh, HV, w)
        total += g
        G[i], E[i] = total, _decay(total)
    kk, qk = _chunk_products(t0, n, x, qo, ko, X, G, beta, scratch[3 * CHUNK :], K)
    rest = scratch[3 * CHUNK + 2 * CHUNK * CHUNK + K * CHUNK :]
    u, k_decayed = rest[: CHUNK * V], rest[CHUNK * V : CHUNK * (V + K)]
    for i in range(n * V):
        u[i] = r[i] = ZERO
    multiply_add(u, 0, V, x, t0 * X + ko, X, 1, S, 0, V, n, V, K)
    multiply_add(r, 0, V, x, t0 * X + qo, X, 1, S, 0, V, n, V, K)
    for i in range(n):
        value, d, o = y[t0 + i, vo : vo + V], u[i * V : (i + 1) * V], r[i * V : (i + 1) * V]
        for j in range(V):
            d[j] = beta[i] * (value[j] - E[i] * d[j])
            o[j] *= E[i]
    multiply_add_lower(u, 0, V, kk, 0, CHUNK, u, 0, V, n, V, 0, 1, n)
    multiply_add_lower(r, 0, V, qk, 0, CHUNK, u, 0, V, n, V, 1, 1, n)
    for i in range(n):
        decay, key, kept = (
            _decay(total - G[i]),
            y[t0 + i, ko : ko + K],
            k_decayed[i * K : (i + 1) * K],
        )
        for d in range(K):
            kept[d] = key[d] * decay
    for i in range(K * V):
        S[i] *= E[n - 1]
    multiply_add(S, 0, V, k_decayed, 0, 1, K, u, 0, V, K, V, n)


@device
def _prefill_item(b, vh, out, y, mix, ab, state, rows, w, shape, eps, scratch):
    """All columns of row b for value head vh, chunk after chunk."""
    HK, HV, K, V = shape
    if rows.state_in[b] != rows.state_out[b]:
        _copy(state[rows.state_out[b], vh], state[rows.state_in[b], vh])
    t, t1 = rows.indptr[b], rows.indptr[b + 1]
    end = rows.starts[b]
    z0 = 2 * HK * K + HV * V
    r, rest = scratch[: CHUNK * V], scratch[CHUNK * V :]
    while t < t1:
        n = min(CHUNK - end % CHUNK, t1 - t)
        _chunk(t, n, vh, r, y, ab, state[rows.state_out[b], vh], w, shape, rest)
        for i in range(n):
            to, z = out[t + i, vh * V : (vh + 1) * V], mix[t + i, z0 + vh * V : z0 + (vh + 1) * V]
            gated_norm_row(to, r[i * V : (i + 1) * V], w.norm, z, eps)
        t += n
        end += n


@njit(cache=True, nogil=True, parallel=True)
def gdn_prefill(out, y, mix, ab, state, conv, rows, w, shape, eps, scratch):
    """`gdn_decode` in chunked form; y: [T, X] scratch for the convolved channels."""
    HK, HV, B = shape.HK, shape.HV, rows.starts.size
    units = 2 * HK + HV
    for i in prange(B * units):
        at = np.int64(i)
        _convolve_item(at // units, at % units, y, mix, conv, rows, w, shape)
    for i in prange(B * HV):
        mine, at = scratch[get_thread_id()], np.int64(i)
        _prefill_item(at // HV, at % HV, out, y, mix, ab, state, rows, w, shape, eps, mine)


def gdn_scratch(shape: Shape) -> int:
    """float32 of scratch per thread of both kernels."""
    K, V = shape.K, shape.V
    return 3 * CHUNK + 2 * CHUNK * CHUNK + 2 * CHUNK * (K + V)
