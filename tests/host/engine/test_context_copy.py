"""Context copy: the longest match, then the most recent, against a search of every place."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.engine.context_copy import LONGEST, MAX_DRAFTS, SHORTEST, ContextCopy


def searched(tokens, limit):
    """Every earlier end: the one with the longest match up to LONGEST, of equals the last."""
    best, best_length = None, 0
    for end in range(SHORTEST, len(tokens)):
        length = 0
        while length < min(LONGEST, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= SHORTEST and length >= best_length:
            best, best_length = end, length
    if best is None:
        return []
    extended = list(tokens)
    for i in range(limit):
        extended.append(extended[best + i])
    return extended[len(tokens) :]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=80),
    cut=st.integers(0, 80),
    step=st.integers(1, 9),
    limit=st.integers(0, MAX_DRAFTS),
)
def test_proposals_are_those_of_a_full_search(tokens, cut, step, limit):
    copy = ContextCopy(tokens[:cut], capacity=100)
    for i in range(cut, len(tokens), step):
        copy.follow(tokens[cut : i + step])
    assert copy.propose(limit) == searched(tokens, limit)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), max_size=60), cut=st.integers(0, 60))
def test_what_is_not_likely_is_not_found(tokens, cut):
    copy = ContextCopy(tokens[:cut], capacity=60)
    for n in range(cut + 1, len(tokens) + 1):
        likely, found = copy.follow(tokens[cut:n]), searched(tokens[:n], 4)
        assert copy.propose(4) == found
        assert likely or not found


def test_new_text_is_not_likely_to_be_found():
    r = random.Random(2)
    text = [r.randrange(4000) for _ in range(800)]
    copy, answer = ContextCopy(text[:500], capacity=900), text[500:]
    likely = [copy.follow(answer[:n]) for n in range(1, 301)]
    assert sum(likely) < 60  # by chance of hashes, one in eight


def test_an_edited_copy_of_the_prompt_is_found_again_after_the_edit():
    r = random.Random(1)
    text = [r.randrange(4000) for _ in range(300)]
    copy = ContextCopy([*text, 4001, 4002], capacity=700)
    answer = [*text[:100], 4003, *text[100:]]
    accepted = drafted = at = 0
    while at < len(answer):
        drafts = copy.propose()
        drafted += len(drafts)
        good = 0
        while good < len(drafts) and at + good < len(answer) and drafts[good] == answer[at + good]:
            good += 1
        accepted += good
        copy.follow(answer[: at + good + 1])
        at += good + 1
    assert accepted >= 0.8 * drafted
    assert accepted > 0.85 * len(answer)


def test_a_period_goes_on_from_its_own_tokens():
    copy = ContextCopy([7, 8, 9] * 4, capacity=40)
    assert copy.propose(8) == [7, 8, 9, 7, 8, 9, 7, 8]


@pytest.mark.parametrize("vocabulary", [1, 50_000])
def test_work_of_a_round_does_not_grow_with_the_prompt(vocabulary):
    def best_of(size):
        prompt = np.random.default_rng(0).integers(0, vocabulary, size).astype(np.int32)
        prompt[-SHORTEST:] = prompt[:SHORTEST]
        copy, times = ContextCopy(prompt, capacity=size + 8), []
        for _ in range(30):
            start = time.perf_counter()
            assert len(copy.propose()) == MAX_DRAFTS
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_of(1 << 17) < 10 * best_of(1 << 12) + 1e-3
