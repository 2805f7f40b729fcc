"""Gated DeltaNet oracles: causal convolution, gates and the recurrent delta rule, in float64."""

from __future__ import annotations

import numpy as np

from tests.oracles.norm import sigmoid


def causal_conv(m: np.ndarray, taps: np.ndarray, history: np.ndarray) -> np.ndarray:
    """silu(sum_k taps[k] * m[t - 3 + k]). m: [T, X], taps: [4, X], history: [3, X] before m."""
    padded = np.concatenate([history, m]).astype(np.float64)
    out = np.zeros(m.shape)
    for t in range(m.shape[0]):
        for k in range(taps.shape[0]):
            out[t] += taps[k].astype(np.float64) * padded[t + k]
    return out * sigmoid(out)


def gates(
    a: np.ndarray, b: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(g, beta) [T, HV]: g = -e^A_log * log(1 + e^(a + dt_bias)), beta = sigmoid(b)."""
    step = np.logaddexp(0.0, a.astype(np.float64) + dt_bias.astype(np.float64))
    return -np.exp(a_log.astype(np.float64)) * step, sigmoid(b)


def unit(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One value head. q, k: [T, K] as used (unit, q scaled); v: [T, V]; g, beta: [T]; state [K, V].

    Returns ([T, V], new state).
    """
    S = state.astype(np.float64).copy()
    out = np.zeros(v.shape)
    for t in range(v.shape[0]):
        S *= np.exp(g[t])
        d = beta[t] * (v[t] - S.T @ k[t])
        S += np.outer(k[t], d)
        out[t] = S.T @ q[t]
    return out, S


def gated_deltanet(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """All value heads. q, k: [T, HK, K] raw; v: [T, HV, V]; g, beta: [T, HV]; state: [HV, K, V].

    Value head j reads key head j // (HV / HK). Returns ([T, HV, V], new state).
    """
    HK, K = q.shape[1:]
    q, k = unit(q) / np.sqrt(K), unit(k)
    out, new = np.zeros(v.shape), np.zeros(state.shape)
    for j in range(v.shape[1]):
        i = j // (v.shape[1] // HK)
        out[:, j], new[j] = delta_rule(q[:, i], k[:, i], v[:, j], g[:, j], beta[:, j], state[j])
    return out, new
