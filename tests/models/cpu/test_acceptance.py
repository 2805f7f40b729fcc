"""Acceptance on the CPU image: lossless by enumeration and by chi-square, equal to plain decode."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from numba import get_num_threads

from ginfer.batch import Purpose
from ginfer.cpu import sampling
from ginfer.cpu.acceptance import ONE_Q, Drafts, accept_rows
from ginfer.cpu.selector import Anchors, Codebooks, Paths, select_paths
from tests.oracles import acceptance as oracle
from tests.oracles.sampling import Request, select, uniform

NEAR = 1e-6  # a decision nearer than this may fall either way in float32
N = 3
V, RANK, K = 8, 4, 5


def make_draws(R, lanes, **values):
    """Draws of R columns; what is not given does nothing."""
    zeros = dict.fromkeys(("min_p", "presence", "frequency"), np.zeros(R, np.float32))
    floats = {"temperature": np.ones(R, np.float32), "top_p": np.ones(R, np.float32), **zeros}
    ints = dict.fromkeys(("top_k", "positions"), np.zeros(R, np.int32))
    return sampling.Draws(
        **{
            "rows": lanes.astype(np.int32),
            **floats,
            **ints,
            "purposes": np.full(R, Purpose.DECODE, np.int32),
            "seeds": np.zeros(R, np.uint64),
            "forced": np.full(R, -1, np.int32),
            "bias_indptr": np.zeros(R + 1, np.int32),
            "bias_ids": np.zeros(0, np.int32),
            "bias_values": np.zeros(0, np.float32),
            "mask": np.zeros((0, 0), np.uint32),
            **values,
        }
    )


def make_chosen(R):
    return sampling.Chosen(
        np.full(R, -7, np.int32),
        np.full(R, np.nan, np.float32),
        np.zeros((R, 0), np.int32),
        np.zeros((R, 0), np.float32),
        np.zeros(R, np.bool_),
    )


def accept(logits, draws, drafts, counts):
    """(tokens [R], accepted [B]); logits rows end in padding that must not be read."""
    R, width = logits.shape
    padded = np.concatenate([logits, np.full((R, 3), np.nan)], axis=1).astype(np.float32)
    chosen, accepted = make_chosen(R), np.full(drafts.coupled.size, -7, np.int32)
    scratch = sampling.make_scratch(get_num_threads(), width)
    accept_rows(chosen, accepted, padded, draws, drafts, counts, scratch)
    return chosen, accepted


def point_drafts(tokens, coupled):
    """Drafts [B, n] that were not drawn."""
    B, n = tokens.shape
    following = np.concatenate([tokens, np.full((B, 1), -1)], axis=1).astype(np.int32).reshape(-1)
    return Drafts(
        np.arange(0, (n + 1) * B + 1, n + 1, dtype=np.int32),
        np.full(B, coupled),
        following,
        following[:, None].copy(),
        np.where(following[:, None] < 0, 0, ONE_Q).astype(np.uint32),
    )


def fractions(r, size, parts):
    """A law over some of `size` tokens, in random order of tokens."""
    tokens = r.permutation(size)[: r.integers(1, size + 1)].tolist()
    cuts = np.sort(r.choice(np.arange(1, parts), len(tokens) - 1, replace=False)).tolist()
    edges = [0, *cuts, parts]
    return {t: Fraction(b - a, parts) for t, a, b in zip(tokens, edges[:-1], edges[1:])}


@pytest.mark.parametrize(("size", "num_drafts"), [(2, 3), (3, 2), (4, 1)])
def test_rejection_rule_keeps_the_law_of_every_path_exactly(size, num_drafts):
    r = np.random.default_rng(size)
    for trial in range(20):
        paths = [p for n in range(num_drafts + 1) for p in itertools.product(range(size), repeat=n)]
        p = {path: fractions(r, size, 24) for path in paths}
        q = {path: fractions(r, size, 16 if trial % 4 else size + 1) for path in paths}
        got = oracle.round_law(p.__getitem__, q.__getitem__, num_drafts)
        want = {}
        for path in itertools.product(range(size), repeat=num_drafts + 1):
            laws = [p[path[:i]].get(token, Fraction(0)) for i, token in enumerate(path)]
            want[path] = np.prod(laws)
        assert got == {path: share for path, share in want.items() if share}


def rejection_cases(r, size):
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0), (0, 1, 2, 3), (0.5, 1.0), (0.0, 0.3)
    ):
        for drawn in (False, True, True):
            position = int(r.integers(1, 2**20))
            request = Request(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=int(r.integers(0, 2**63)),
                position=position,
            )
            yield request, r.standard_normal(size) * 2, fractions(r, size, 12) if drawn else None


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_small_vocabularies_follow_the_oracle_exhaustively(size):
    r = np.random.default_rng(size)
    cases = [c for _ in range(12) for c in rejection_cases(r, size)]
    R = len(cases)
    values = {
        name: np.array([getattr(request, name) for request, _, _ in cases], np.float32)
        for name in ("temperature", "top_p", "min_p")
    }
    values["top_k"] = np.array([request.top_k for request, _, _ in cases], np.int32)
    values["seeds"] = np.array([request.seed for request, _, _ in cases], np.uint64)
    values["positions"] = np.array([request.position for request, _, _ in cases], np.int32)
    ids, units = np.full((R, size), -1, np.int32), np.zeros((R, size), np.uint32)
    drafted = np.full(R, -1, np.int32)
    laws = [{t: Fraction(int(w * ONE_Q), ONE_Q) for t, w in (q or {}).items()} for *_, q in cases]
    for i, law in enumerate(laws):
        if law:
            drafted[i] = r.choice(list(law))
            ids[i, : len(law)] = list(law)
            units[i, : len(law)] = [int(w * ONE_Q) for w in law.values()]
    drafts = Drafts(np.arange(R + 1, dtype=np.int32), np.zeros(R, np.bool_), drafted, ids, units)
    logits = np.array([row for _, row, _ in cases], np.float32)
    counts = np.zeros((R, size), np.int32)
    chosen, accepted = accept(logits, make_draws(R, np.arange(R), **values), drafts, counts)
    compared = 0
    for i, (request, _, q) in enumerate(cases):
        shares = select(logits[i], request, np.zeros(size, np.int64)).probabilities
        p = {t: Fraction(w) for t, w in shares.items()}
        p = {t: w / sum(p.values()) for t, w in p.items()}
        law = laws[i] if q else None
        u = [Fraction(uniform(request.seed, request.position, n)) for n in (2, 3 if q else 4)]
        token = int(chosen.token_ids[i])
        assert accepted[i] == (q is not None and token == drafted[i])
        moved = [max(u[0] - Fraction(NEAR), Fraction(0)), u[0] + Fraction(NEAR)]
        turned = [max(u[1] - Fraction(NEAR), Fraction(0)), min(u[1] + Fraction(NEAR), 1 - NEAR)]
        near = {
            oracle.decide(p, law, int(drafted[i]), a, Fraction(b)) for a in moved for b in turned
        }
        compared += len(near) == 1
        assert token in near
    assert compared > 0.95 * R


def quantile(df):
    """99.9 % point of chi-square (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3


def softmax(x):
    w = np.exp(x - x.max(axis=-1, keepdims=True))
    return w / w.sum(axis=-1, keepdims=True)


def bf16(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def drafted_rounds(B, seed, temperature):
    """N drafts per row by the selector; target logits depend on the token before."""
    r = np.random.default_rng(seed)
    target = (r.standard_normal((V, V)) / 2).astype(np.float32)
    books = Codebooks(*(bf16(r.standard_normal((V, RANK)) / 2) for _ in range(2)))
    hidden = np.tile(r.standard_normal((N, RANK)).astype(np.float32), (B, 1))
    logits = np.tile(r.standard_normal((N, V)).astype(np.float32) / 2, (B, 1))
    paths = Paths(
        np.zeros((B, N), np.int32), np.zeros((B, N, K), np.int32), np.zeros((B, N, K), np.uint32)
    )
    anchors = Anchors(
        np.full(B, 2, np.int32),
        np.full(B, 40, np.int32),
        np.full(B, temperature, np.float32),
        np.arange(B).astype(np.uint64),
    )
    scores = np.zeros((get_num_threads(), K), np.float32)
    select_paths(paths, logits, hidden, anchors, books, V, scores)
    return target, anchors, paths


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_of_drafted_rounds_have_the_target_s_law(temperature):
    B, R = 100_000, 100_000 * (N + 1)
    target, anchors, paths = drafted_rounds(B, 3, temperature)
    before = np.concatenate([anchors.token_ids[:, None], paths.token_ids], axis=1)
    last = [(0, 0), (0, 1), (0, 0)]
    drafts = Drafts(
        np.arange(0, R + 1, N + 1, dtype=np.int32),
        np.zeros(B, np.bool_),
        np.pad(paths.token_ids, last[:2], constant_values=-1).reshape(-1),
        np.pad(paths.ids, last).reshape(R, K),
        np.pad(paths.units, last).reshape(R, K),
    )
    draws = make_draws(
        R,
        np.repeat(np.arange(B), N + 1),
        temperature=np.full(R, temperature, np.float32),
        seeds=np.repeat(anchors.seeds, N + 1),
        positions=np.tile(41 + np.arange(N + 1, dtype=np.int32), B),
    )
    logits = target[before.reshape(-1)]
    chosen, accepted = accept(logits, draws, drafts, np.zeros((B, V), np.int32))
    tokens = chosen.token_ids.reshape(B, N + 1)
    assert 0.2 < accepted.mean() < N - 0.2  # both branches are taken
    law = softmax(target / temperature)
    for column in range(N + 1):
        given = accepted >= column
        previous = before[given, column]
        seen = np.zeros((V, V))
        np.add.at(seen, (previous, tokens[given, column]), 1)
        rows = seen.sum(axis=1, keepdims=True)
        expected = rows * law
        enough = (expected.min(axis=1) >= 5)[:, None] & np.ones_like(law, bool)
        statistic = (((seen - expected) ** 2)[enough] / expected[enough]).sum()
        num_rows = int(enough[:, 0].sum())
        assert num_rows
        assert statistic < quantile(num_rows * (V - 1))


def test_units_are_the_law_that_drafts_are_drawn_from():
    B = 100_000
    _, _, paths = drafted_rounds(B, 4, 1.0)
    assert (paths.units.sum(axis=2, dtype=np.int64) == ONE_Q).all()
    q, ids = paths.units[0, 0] / ONE_Q, paths.ids[0, 0]
    seen = np.array([(paths.token_ids[:, 0] == i).sum() for i in ids])
    assert seen.sum() == B
    assert ((seen - B * q) ** 2 / (B * q)).sum() < quantile(K - 1)


def plain(target, anchor, draws, counts):
    """The tokens of plain decode for one row: column after column, counts kept."""
    tokens, previous = [], anchor
    for i in range(len(draws.positions)):
        values = {name: value[i : i + 1] for name, value in draws._asdict().items()}
        one = make_draws(
            1,
            np.zeros(1),
            **{
                n: values[n]
                for n in (
                    "temperature",
                    "top_k",
                    "top_p",
                    "presence",
                    "frequency",
                    "seeds",
                    "positions",
                )
            },
        )
        if draws.mask.size:
            one = one._replace(mask=values["mask"])
        chosen = make_chosen(1)
        scratch = sampling.make_scratch(get_num_threads(), V)
        sampling.select_rows(chosen, target[previous : previous + 1], one, counts, scratch)
        previous = int(chosen.token_ids[0])
        counts[0, previous] += 1
        tokens.append(previous)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_rows_give_the_tokens_of_plain_decode_at_every_width(temperature):
    r = np.random.default_rng(11)
    for trial in range(40):
        target = (r.standard_normal((V, V)) * 1.5).astype(np.float32)
        width = int(r.integers(0, N + 1))
        T = width + 1
        mask = np.full((T, 1), 0xFF, np.uint32)
        mask[r.integers(0, T)] = 0b01011101
        draws = make_draws(
            T,
            np.zeros(T),
            temperature=np.full(T, temperature, np.float32),
            top_k=np.full(T, r.integers(0, 5), np.int32),
            top_p=np.full(T, 0.9, np.float32),
            presence=np.full(T, 0.5, np.float32),
            frequency=np.full(T, 1.5, np.float32),
            seeds=np.full(T, trial, np.uint64),
            positions=np.arange(7, 7 + T, dtype=np.int32),
            mask=mask if trial % 2 else np.zeros((0, 0), np.uint32),
        )
        start = r.integers(0, 3, (1, V)).astype(np.int32)
        counts = start.copy()
        want = plain(target, 3, draws, counts)
        drafts = np.array([want[:width]], np.int32).reshape(1, width)
        wrong = int(r.integers(0, width + 1))
        drafts[:, wrong:] = (drafts[:, wrong:] + 1) % V
        before = [3, *drafts[0].tolist()]
        got_counts = start.copy()
        chosen, accepted = accept(target[before], draws, point_drafts(drafts, True), got_counts)
        assert accepted[0] == wrong
        assert chosen.token_ids[: wrong + 1].tolist() == want[: wrong + 1]
        assert (chosen.token_ids[wrong + 1 :] == -7).all()
        taken = start.copy()
        np.add.at(taken[0], want[: wrong + 1], 1)
        np.testing.assert_array_equal(got_counts, taken)


def test_a_column_without_a_sound_logit_ends_its_row():
    logits = np.zeros((3, V), np.float32)
    logits[:, 1], logits[1, 4] = 1, np.inf
    drafts = point_drafts(np.array([[1, 1]], np.int32), True)
    draws = make_draws(3, np.zeros(3), temperature=np.zeros(3, np.float32))
    chosen, accepted = accept(logits, draws, drafts, np.zeros((1, V), np.int32))
    assert accepted[0] == 1
    assert chosen.finite.tolist() == [True, False, False]


def test_a_forced_token_counts_as_the_target_s_choice():
    logits = np.zeros((3, V), np.float32)
    drafts = point_drafts(np.array([[5, 6]], np.int32), False)
    forced = np.array([5, 2, -1], np.int32)
    chosen, accepted = accept(
        logits, make_draws(3, np.zeros(3), forced=forced), drafts, np.zeros((1, V), np.int32)
    )
    assert (accepted[0], chosen.token_ids[:2].tolist()) == (1, [5, 2])


def test_greedy_paths_take_the_best_pair_score_and_ties_go_to_the_lower_id():
    logits = np.zeros((2, V), np.float32)
    books = Codebooks(*(np.zeros((V, 1), np.uint16) for _ in range(2)))
    books.predecessor[:, 0] = bf16(np.arange(V))
    books.successor[:, 0] = bf16(np.eye(V)[6])
    paths = Paths(
        np.zeros((1, 2), np.int32), np.zeros((1, 2, K), np.int32), np.zeros((1, 2, K), np.uint32)
    )
    logits[1, 6] = 1
    anchors = Anchors(*(np.array([v], t) for v, t in ((3, "i4"), (9, "i4"), (0, "f4"), (1, "u8"))))
    hidden = np.array([[1.0], [-1.0]], np.float32)
    select_paths(paths, logits, hidden, anchors, books, V, np.zeros((1, K), np.float32))
    # Position 0: id 6 is not among the best five of equal logits. Position 1: 1 + 0 * -1 wins.
    assert paths.token_ids[0].tolist() == [0, 6]
    assert paths.ids[0].tolist() == [[0, 1, 2, 3, 4], [6, 0, 1, 2, 3]]
    assert paths.units[0].max(axis=1).tolist() == [ONE_Q, ONE_Q]
