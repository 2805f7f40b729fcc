"""Selection of the CPU image: oracle on small vocabularies, RNG, distribution, logprobs, edges."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba import get_num_threads, njit

from ginfer.batch import SelectionBatch
from ginfer.cpu import sampling
from ginfer.cpu.stage import stage_draws
from tests.oracles.sampling import Request, log_softmax, select, uniform

NEAR = 2e-6  # a decision nearer than this may fall either way in float32


def _selection(requests: list[Request], V: int, **changes: Any) -> SelectionBatch:
    R = len(requests)
    column = np.arange(R, dtype=np.int32)
    bias = [sorted(r.bias.items()) for r in requests]
    mask = None
    if any(r.forbidden for r in requests):
        mask = np.zeros((R, (V + 31) // 32), np.uint32)
        for row, request in zip(mask, requests):
            for i in set(range(V)) - request.forbidden:
                row[i // 32] |= np.uint32(1 << i % 32)
    values: dict[str, Any] = {
        "columns": column,
        "rows": column,
        "purposes": np.array([r.purpose for r in requests], np.int32),
        "forced": np.full(R, -1, np.int32),
        "bias_indptr": np.cumsum([0, *map(len, bias)]).astype(np.int32),
        "bias_ids": np.array([i for b in bias for i, _ in b], np.int32),
        "bias_values": np.array([v for b in bias for _, v in b], np.float32),
        "mask": mask,
    }
    for name in ("temperature", "top_p", "min_p", "presence", "frequency"):
        values[name] = np.array([getattr(r, name) for r in requests], np.float32)
    for name, dtype in (("top_k", np.int32), ("seed", np.uint64), ("position", np.int32)):
        key = name if name == "top_k" else name + "s"
        values[key] = np.array([getattr(r, name) for r in requests], dtype)
    return SelectionBatch(**{**values, **changes})


def _choose(
    logits: np.ndarray,
    requests: list[Request],
    counts: np.ndarray | None = None,
    num_top: int = 0,
    **changes: Any,
) -> sampling.Chosen:
    """One token per row of logits [R, V]; the rows end in padding that must not be read."""
    R, V = logits.shape
    padded = np.concatenate([logits, np.full((R, 5), np.nan)], axis=1).astype(np.float32)
    chosen = sampling.Chosen(
        np.full(R, -7, np.int32),
        np.full(R, np.nan, np.float32),
        np.full((R, num_top), -7, np.int32),
        np.full((R, num_top), np.nan, np.float32),
        np.zeros(R, np.bool_),
    )
    counts = np.zeros((R, V), np.int32) if counts is None else counts.astype(np.int32)
    scratch = sampling.make_scratch(get_num_threads(), V)
    draws = stage_draws(_selection(requests, V, **changes))
    sampling.select_rows(chosen, padded, draws, counts, scratch)
    return chosen


@njit
def _uniform_bits(out, seeds, positions, purpose, sub):
    for i in range(out.size):
        out[i] = sampling.uniform_bits(seeds[i], positions[i], purpose, sub)


def test_rng_is_the_oracle_s() -> None:
    r = np.random.default_rng(0)
    seeds = r.integers(0, 2**64, 500, dtype=np.uint64)
    positions = r.integers(0, 2**31, 500).astype(np.int32)
    out = np.zeros(500, np.uint64)
    for purpose, sub in ((0, 0), (1, 0), (5, 3)):
        _uniform_bits(out, seeds, positions, purpose, sub)
        want = [uniform(int(s), int(p), purpose, sub) for s, p in zip(seeds, positions)]
        np.testing.assert_array_equal(out / 2.0**24, want)


def _grid() -> list[Request]:
    axes = {
        "temperature": (0.0, 0.5, 1.0, 2.0),
        "top_k": (0, 1, 2, 3, 5, 100),
        "top_p": (0.0, 0.25, 0.5, 0.75, 1.0),
        "min_p": (0.0, 0.25, 1.0),
        "presence": (0.0, 1.0, -1.0),
        "frequency": (0.0, 0.5),
    }
    names = list(axes)
    return [Request(**dict(zip(names, values))) for values in itertools.product(*axes.values())]


@pytest.mark.parametrize("V", [1, 2, 5, 6])
def test_small_vocabularies_follow_the_oracle_exhaustively(V: int) -> None:
    r = np.random.default_rng(V)
    requests = [
        replace(
            request,
            seed=int(r.integers(0, 2**63)),
            position=i,
            bias={int(r.integers(V)): float(r.integers(-2, 3))} if i % 3 == 0 else {},
            forbidden=frozenset({int(r.integers(V))}) if V > 1 and i % 4 == 0 else frozenset(),
        )
        for i, request in enumerate(_grid())
    ]
    logits = r.integers(-4, 4, (len(requests), V)) / 2.0  # many ties
    counts = r.integers(0, 3, (len(requests), V))
    chosen, checked = _choose(logits, requests, counts), 0
    assert chosen.finite.all()
    for i, request in enumerate(requests):
        choice = select(logits[i], request, counts[i])
        assert chosen.token_ids[i] in choice.probabilities, request
        if choice.margin > NEAR:
            assert chosen.token_ids[i] == choice.token, request
            checked += 1
    assert checked > 0.99 * len(requests)


@pytest.mark.parametrize("top_k", [0, 1, 20, 127, 128, 129, 1000, 4111])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 1.0])
def test_large_vocabularies_follow_the_oracle(top_k: int, top_p: float) -> None:
    r = np.random.default_rng(top_k)
    logits = (r.standard_normal((6, 4111)) * 3).astype(np.float32)
    logits[3:] = np.round(logits[3:])  # hundreds of ties
    requests = [
        Request(temperature=t, top_k=top_k, top_p=top_p, seed=9, position=p)
        for p, t in enumerate((0.7, 1.0, 1.5) * 2)
    ]
    chosen, checked = _choose(logits, requests), 0
    for i, request in enumerate(requests):
        choice = select(logits[i], request, np.zeros(4111))
        if choice.margin > NEAR / 10:
            assert chosen.token_ids[i] == choice.token
            checked += 1
    assert checked >= 3


def test_draws_follow_their_distribution() -> None:
    V, n = 12, 24_000
    logits = np.random.default_rng(1).standard_normal(V).astype(np.float32)
    request = Request(temperature=0.8, top_k=9, top_p=0.95, seed=2026)
    requests = [replace(request, position=p) for p in range(n)]
    tokens = _choose(np.tile(logits, (n, 1)), requests).token_ids
    shares = select(logits, request, np.zeros(V)).probabilities
    observed = np.bincount(tokens, minlength=V)
    assert observed[[i for i in range(V) if i not in shares]].sum() == 0
    chi = sum((observed[i] - n * p) ** 2 / (n * p) for i, p in shares.items())
    assert chi < 27.9  # 99.9 % of chi-square with at most 9 degrees of freedom


def test_logprobs_are_the_log_softmax_of_raw_logits_over_legal_ids() -> None:
    r = np.random.default_rng(2)
    logits = (r.standard_normal((4, 300)) * 5).astype(np.float32)
    logits[:, 7] = logits[:, 3]  # a tie in the ranking
    forbidden = frozenset(range(100, 200))
    requests = [
        Request(temperature=t, seed=3, position=i, presence=1.5, forbidden=forbidden, bias={2: 9.0})
        for i, t in enumerate((0.0, 0.5, 1.0, 2.0))
    ]
    chosen = _choose(logits, requests, np.ones((4, 300)), num_top=20)
    for i in range(4):
        want = log_softmax(logits[i], forbidden)
        best = sorted(want, key=lambda t: (-want[t], t))[:20]
        assert chosen.top_ids[i].tolist() == best
        np.testing.assert_allclose(chosen.top_logprobs[i], [want[t] for t in best], atol=2e-6)
        assert chosen.logprobs[i] == pytest.approx(want[int(chosen.token_ids[i])], abs=2e-6)


def test_top_logprobs_beyond_the_legal_ids_are_marked() -> None:
    chosen = _choose(np.zeros((1, 6)), [Request(forbidden=frozenset({0, 1, 2}))], num_top=5)
    assert chosen.top_ids[0].tolist() == [3, 4, 5, -1, -1]
    np.testing.assert_allclose(chosen.top_logprobs[0, :3], -math.log(3), rtol=1e-6)
    assert np.isneginf(chosen.top_logprobs[0, 3:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_logit_is_reported_for_its_row_only(bad: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 40))
    logits[1, 39] = bad
    chosen = _choose(logits, [Request(temperature=0.0)] * 3, num_top=2)
    assert chosen.finite.tolist() == [True, False, True]
    assert chosen.token_ids[0] == logits[0].argmax()


def test_a_row_without_a_legal_id_is_reported() -> None:
    chosen = _choose(np.zeros((2, 3)), [Request(forbidden=frozenset({0, 1, 2})), Request()])
    assert chosen.finite.tolist() == [False, True]


def test_forced_ids_win_over_everything() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    requests = [Request(temperature=0.0, forbidden=frozenset({9})), Request(seed=1)]
    chosen = _choose(logits, requests, forced=np.array([9, -1], np.int32))
    assert chosen.token_ids[0] == 9
    legal = np.delete(logits[0].astype(np.float64), 9)
    want = float(logits[0, 9]) - math.log(np.exp(legal).sum())
    assert chosen.logprobs[0] == pytest.approx(want, abs=2e-6)


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    r = np.random.default_rng(5)
    logits = r.standard_normal((8, 500)).astype(np.float32)
    requests = [
        Request(top_k=k, top_p=0.9, seed=k, position=3) for k in (0, 1, 5, 20, 0, 7, 300, 2)
    ]
    together = _choose(logits, requests).token_ids
    alone = [_choose(logits[i : i + 1], [requests[i]]).token_ids[0] for i in range(8)]
    assert together.tolist() == alone


def test_extreme_temperatures_stay_finite() -> None:
    logits = np.array([[3.0, 2.0, -3e38, 3.0]] * 2)
    chosen = _choose(logits, [Request(temperature=1e-6, seed=4), Request(temperature=2.0, seed=4)])
    assert set(chosen.token_ids.tolist()) <= {0, 1, 3}
    assert chosen.token_ids[0] in (0, 3)
