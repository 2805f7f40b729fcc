"""SequenceCache against a naive model: reuse, eviction and ownership after every random step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ginfer.cache import MadeBy, SequenceCache
from ginfer.prompt import PreparedPrompt


def prompt(ids, positions=None):
    return PreparedPrompt(token_ids=np.array(ids, np.int32), positions=positions)


def run(cache, ids, *, computed=None, made_by=None, pages=None):
    """One request from start to end; returns what it reused."""
    seq = cache.acquire(prompt(ids), pages or -(-len(ids) // 64))
    assert seq is not None
    if made_by:
        seq.made_by = made_by
    cache.release(seq, np.array(ids if computed is None else computed, np.int32))
    cache.check_integrity()
    return seq.cached_tokens


def test_append_takes_over_the_frontier_with_pages_and_slot():
    cache = SequenceCache(8, 2)
    first = cache.acquire(prompt(range(70)), 2)
    first.made_by = MadeBy.DECODE
    cache.release(first, np.arange(80, dtype=np.int32))
    again = cache.acquire(prompt(range(100)), 3)
    assert (again.cached_tokens, again.path, again.slot) == (80, "append", first.slot)
    assert again.pages[:2] == first.pages
    assert again.made_by is MadeBy.DECODE
    cache.check_integrity()


@pytest.mark.parametrize("ids", [range(80), [*range(79), 5, 6], range(40), [9, *range(1, 100)]])
def test_no_reuse_without_a_token_left_or_after_a_difference(ids):
    cache = SequenceCache(8, 2)
    run(cache, list(range(80)), made_by=MadeBy.DECODE)
    assert run(cache, list(ids)) == 0


def test_prefill_made_frontier_is_kept_on_block_borders_only():
    cache = SequenceCache(8, 4)
    run(cache, list(range(100)))
    assert cache.prefixes.num_prefixes == 0
    run(cache, list(range(100)), computed=list(range(64)))
    assert cache.prefixes.num_prefixes == 1
    assert run(cache, list(range(90))) == 64


def test_equal_histories_are_kept_once():
    cache = SequenceCache(8, 4)
    for _ in range(3):
        run(cache, list(range(80)), made_by=MadeBy.DECODE)
    assert cache.prefixes.num_prefixes == 1


def test_media_prompts_are_never_kept_nor_matched():
    cache = SequenceCache(8, 4)
    positions = np.zeros((3, 80), np.int32)
    seq = cache.acquire(prompt(range(80), positions), 2)
    seq.made_by = MadeBy.DECODE
    cache.release(seq, np.arange(80, dtype=np.int32))
    assert cache.prefixes.num_prefixes == 0
    run(cache, list(range(80)), made_by=MadeBy.DECODE)
    seq = cache.acquire(prompt(range(90), np.zeros((3, 90), np.int32)), 2)
    assert seq.cached_tokens == 0


def test_without_retention_nothing_is_kept():
    cache = SequenceCache(8, 4, retain=False)
    run(cache, list(range(80)), made_by=MadeBy.DECODE)
    assert cache.pages.num_free == 8
    assert run(cache, list(range(90))) == 0


def test_pressure_evicts_the_least_recently_used_but_never_the_hit():
    cache = SequenceCache(4, 4)
    old, new = list(range(64)), list(range(100, 164))
    run(cache, old)
    run(cache, new)
    seq = cache.acquire(prompt([*old, 1]), 3)
    assert seq.cached_tokens == 64
    assert cache.prefixes.num_prefixes == 1
    cache.release(seq, np.array(old, np.int32))
    seq = cache.acquire(prompt(range(200, 300)), 3)
    assert cache.prefixes.num_prefixes == 1
    assert cache.prefixes.match(prompt([*old, 1])) is not None
    cache.check_integrity()


def test_refused_acquisition_changes_nothing():
    cache = SequenceCache(4, 2)
    run(cache, list(range(64)))
    running = cache.acquire(prompt([7]), 2)
    assert cache.acquire(prompt([8]), 3) is None
    assert cache.prefixes.num_prefixes == 1
    assert cache.acquire(prompt([8]), 2) is not None
    assert cache.acquire(prompt([9]), 0) is None, "no slot is left"
    cache.release(running, np.array([], np.int32))
    cache.check_integrity()


class NaiveModel:
    """What must be idle: a list of (tokens, made_by), least recently used first."""

    def __init__(self, num_pages, num_slots):
        self.num_pages, self.num_slots = num_pages, num_slots
        self.idle, self.active_pages, self.active = [], 0, 0

    def free_pages(self):
        return self.num_pages - self.active_pages - sum(-(-len(t) // 64) for t, _ in self.idle)

    def acquire(self, ids, pages):
        hits = [i for i in self.idle if len(i[0]) < len(ids) and i[0] == ids[: len(i[0])]]
        best = max(len(t) for t, _ in hits) if hits else 0
        rank = [(len(t), m is MadeBy.PREFILL) for t, m in hits]
        hit = hits[rank.index(max(rank))] if hits else None
        if self.active_pages + pages > self.num_pages or self.active == self.num_slots:
            return None
        if hit:
            self.idle.remove(hit)
        self.active_pages += pages
        self.active += 1
        while self.free_pages() < 0 or self.active + len(self.idle) > self.num_slots:
            self.idle.pop(0)
        return best

    def release(self, tokens, made_by, pages):
        self.active_pages -= pages
        self.active -= 1
        if not tokens or (made_by is MadeBy.PREFILL and len(tokens) % 64):
            return
        if (tokens, made_by) in self.idle:
            self.idle.remove((tokens, made_by))
        self.idle.append((tokens, made_by))


def random_prompt(rng, model):
    """Histories from a tiny alphabet, often continued, so that equal prefixes are common."""
    if model.idle and rng.random() < 0.4:
        return rng.choice(model.idle)[0] + [rng.randrange(2)] * rng.randrange(40)
    blocks = [[rng.randrange(2)] * rng.choice((1, 30, 64)) for _ in range(rng.randrange(1, 5))]
    return [t for block in blocks for t in block]


def random_steps(seed, steps):
    rng = random.Random(seed)
    num_pages, num_slots = rng.randrange(4, 20), rng.randrange(1, 7)
    cache, model, running = (
        SequenceCache(num_pages, num_slots),
        NaiveModel(num_pages, num_slots),
        [],
    )
    hits = 0
    for _ in range(steps):
        if running and rng.random() < 0.5:
            seq, ids, generated, pages = running.pop(rng.randrange(len(running)))
            computed = [*ids, *generated]
            if rng.random() < 0.4:  # cancelled early, or prefill only
                computed = computed[: max(seq.cached_tokens, rng.randrange(len(ids) + 1))]
            elif generated:
                seq.made_by = MadeBy.DECODE
            cache.release(seq, np.array(computed, np.int32))
            model.release(computed, seq.made_by, pages)
        else:
            ids, generated = random_prompt(rng, model), [rng.randrange(2)] * rng.randrange(40)
            pages = -(-(len(ids) + len(generated)) // 64)
            if pages > num_pages:
                continue
            seq, expected = cache.acquire(prompt(ids), pages), model.acquire(ids, pages)
            assert (seq.cached_tokens if seq else None) == expected
            if seq:
                hits += expected > 0
                running.append((seq, ids, generated, pages))
        cache.check_integrity()
        assert cache.pages.num_free == model.free_pages()
        assert cache.prefixes.num_prefixes == len(model.idle)
    return hits


def test_random_steps_match_the_naive_model():
    assert sum(random_steps(seed, 500) for seed in range(20)) > 500


@pytest.mark.long
def test_many_random_steps_match_the_naive_model():
    assert sum(random_steps(seed, 2000) for seed in range(1000, 1250)) > 10_000
