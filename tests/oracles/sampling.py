"""Selection oracle: the steps in float64, one after the other; the counter RNG on Python ints."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_64 = (1 << 64) - 1


def splitmix_finaliser(z: int) -> int:
    """SplitMix64: add the golden gamma, then two multiply-xorshift rounds."""
    z = (z + 0x9E3779B97F4A7C15) & _64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64
    return z ^ (z >> 31)


def uniform(seed: int, position: int, purpose: int, sub: int = 0) -> float:
    """A number in [0, 1) with 24 bits, from the key of a draw."""
    k1 = splitmix_finaliser(seed ^ ((position & 0xFFFFFFFF) * 0xD1B54A32D192ED03 & _64))
    k2 = splitmix_finaliser(k1 ^ ((purpose & 0xFFFFFFFF) << 21) ^ (sub * 0x2545F4914F6CDD1D & _64))
    return (k2 >> 40) / 2.0**24


@dataclass(frozen=True, kw_only=True)
class Request:
    """How one token is chosen."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 0
    purpose: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    forbidden: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Choice:
    """The chosen id, the final distribution, and how near a decision was to the other side: the
    least non-zero distance of a running sum to its threshold. A distance of zero is a tie, decided
    by the rule."""

    token: int
    probabilities: dict[int, float]
    margin: float


def adjusted(logits: np.ndarray, request: Request, counts: np.ndarray) -> dict[int, float]:
    """Logits of legal ids after bias and penalties."""
    return {
        i: float(logits[i])
        + request.bias.get(i, 0.0)
        - (request.presence if counts[i] > 0 else 0.0)
        - request.frequency * int(counts[i])
        for i in range(len(logits))
        if i not in request.forbidden
    }


def select(logits: np.ndarray, request: Request, counts: np.ndarray) -> Choice:
    """Choose one of the legal ids of `logits` [V]; counts: [V] times generated so far."""
    values = adjusted(logits, request, counts)
    order = sorted(values, key=lambda i: (-values[i], i))
    if request.temperature == 0:
        return Choice(order[0], {order[0]: 1.0}, 1.0)
    if request.top_k > 0:
        order = order[: request.top_k]
    best = values[order[0]]
    weights = [np.exp((values[i] - best) / np.float64(request.temperature)) for i in order]
    total, running, kept = sum(weights), 0.0, 0
    distances = []
    for w in weights:
        if kept > 0 and w < request.min_p:
            break
        running += w
        kept += 1
        if request.top_p < 1:
            distances.append(abs(running / total - request.top_p))
            if running >= request.top_p * total:
                break
        if request.min_p > 0:
            distances.append(abs(w - request.min_p))
    u, cumulative, token = uniform(request.seed, request.position, request.purpose), 0.0, None
    for i, w in zip(order[:kept], weights):
        cumulative += w
        distances.append(abs(cumulative / running - u))
        if token is None and u < cumulative / running:
            token = i
    chosen = order[kept - 1] if token is None else token
    near = [d for d in distances if d > 0]
    shares = {i: float(w / running) for i, w in zip(order[:kept], weights)}
    return Choice(chosen, shares, min(near, default=1.0))


def log_softmax(logits: np.ndarray, forbidden: frozenset[int] = frozenset()) -> dict[int, float]:
    """Log probabilities of the raw logits over legal ids."""
    legal = [i for i in range(len(logits)) if i not in forbidden]
    values = np.array([float(logits[i]) for i in legal])
    lse = values.max() + np.log(np.exp(values - values.max()).sum())
    return {i: float(v - lse) for i, v in zip(legal, values)}
