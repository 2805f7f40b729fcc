"""Speculation on the CPU image: the same answers as without it, whatever is drafted."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import numpy as np
import pytest

from ginfer.cpu.drafter import CpuDrafter
from ginfer.errors import InternalError
from tests.drafted import drafted_demo
from tests.engines import (
    complete,
    ids_prompt,
    make_request,
    on_the_cpu,
    open_demo,
    random_prompt,
    submit,
)
from tests.speculation_cases import (
    CASES,
    GREEDY,
    PENALISED,
    QUICK,
    REPORTED_TOKENS,
    ROOMY,
    SEEDED,
    check_acceptance_after_a_hit,
    check_copies,
    check_golden,
    check_json,
    check_next_turns,
    check_random_prompts,
    force,
    tokens_per_round,
    values,
)


@pytest.fixture(scope="module")
def plain():
    with open_demo(**ROOMY, max_concurrency=4, spec="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting():
    """The drafter's drafts, as many as there are."""
    with open_demo(**ROOMY, max_concurrency=4, package=drafted_demo()) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def copying():
    """No drafter: copies of the context, as many as there are."""
    with open_demo(**ROOMY, max_concurrency=4) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_golden_answers_are_those_of_plain_decode(plain, drafting, copying, sampling):
    check_golden(plain, (drafting, copying), QUICK, sampling)
    assert drafting.stats()["accepted"]["drafter"] > 0
    assert plain.stats()["spec_rounds"] == 0


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
def test_all_golden_answers_are_those_of_plain_decode(plain, drafting, copying, sampling):
    check_golden(plain, (drafting, copying), CASES, sampling)


def test_requests_of_all_kinds_together_are_those_of_plain_decode(plain, drafting):
    check_random_prompts(plain, drafting, 16, seed=1)


@pytest.mark.long
def test_two_hundred_requests_are_those_of_plain_decode(plain, drafting):
    for seed in range(10):
        check_random_prompts(plain, drafting, 20, seed)


def test_copies_of_the_context_are_accepted_and_change_nothing():
    check_copies(max_context=4096)


def test_a_next_turn_finds_the_state_of_a_round_that_was_cut_short(plain, drafting):
    check_next_turns(plain, drafting)


def test_acceptance_after_a_hit_is_that_without_one():
    check_acceptance_after_a_hit(max_context=4096)


def _seldom(rng, limit):
    return rng.choice((0,) * 9 + (limit,))


@on_the_cpu
def test_context_that_waits_for_company_makes_the_same_drafts(monkeypatch):
    """Rounds that draft nothing leave it to those that do."""
    follow, seen = CpuDrafter.follow, []
    prompts = [ids_prompt(CASES[name]["prompt_ids"]) for name in QUICK[:2]]

    def at_once(drafter, lanes, tokens):
        follow(drafter, lanes, tokens)
        drafter.catch_up()

    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(CpuDrafter, "follow", at_once)
        with open_demo(max_context=4096, package=drafted_demo(), max_concurrency=1) as engine:
            force(engine, partial(_seldom, random.Random(2)))
            runs = [complete(engine, prompt, 70, ignore_eos=True) for prompt in prompts]
            stats = engine.stats()
            seen.append(([run.ids for run in runs], stats["drafted"], stats["accepted_at"]))
    assert seen[0] == seen[1]
    assert sum(seen[0][2].values()) > 0


@pytest.mark.long
def test_tokens_per_round_are_near_those_of_the_bf16_drafter():
    assert tokens_per_round(max_context=4096) >= 0.95 * REPORTED_TOKENS


@pytest.mark.parametrize("opens_reasoning", [False, True])
def test_json_follows_its_schema_and_plain_decode(plain, drafting, copying, opens_reasoning):
    check_json(plain, (drafting, copying), opens_reasoning, QUICK[:2])


def test_a_reasoning_budget_is_kept_to_the_token(plain, drafting):
    for name in QUICK[:3]:
        prompt = ids_prompt(CASES[name]["prompt_ids"], opens_reasoning=True)
        for budget in (0, 1, 5, 13):
            runs = [
                complete(e, prompt, 40, reasoning_budget=budget, sampling=GREEDY)
                for e in (plain, drafting)
            ]
            assert values(runs[0]) == values(runs[1])
            usages = [run.finished.usage.reasoning_tokens for run in runs]
            assert usages[0] == usages[1]


@on_the_cpu
def test_a_bad_column_costs_its_request_alone(drafting, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, 50) for _ in range(2)]
    alone = complete(drafting, prompts[0], 20, ignore_eos=True).ids
    speculation = drafting._rank.backend.speculation
    accept = speculation.accept

    def poisoned(hidden, batch, limits):
        done = accept(hidden, batch, limits)
        hit = (batch.selection.rows == 1) & (batch.selection.positions == 55)
        row = np.searchsorted(batch.row_indptr, np.flatnonzero(hit), "right") - 1
        finite, accepted = done.selection.finite.copy(), done.accepted.copy()
        for r, b in zip(np.flatnonzero(hit), row):
            finite[r] = False
            accepted[b] = min(accepted[b], r - batch.row_indptr[b])
        selection = dataclasses.replace(done.selection, finite=finite)
        return dataclasses.replace(done, accepted=accepted, selection=selection)

    monkeypatch.setattr(speculation, "accept", poisoned)
    good = submit(drafting, make_request(prompts[0], 20, ignore_eos=True))
    bad = submit(drafting, make_request(prompts[1], 20, ignore_eos=True))
    with pytest.raises(InternalError) as caught:
        bad.wait()
    assert caught.value.code == "nonfinite_logits"
    assert good.wait().ids == alone
    drafting.check_integrity()
    again = complete(drafting, prompts[1], 1)
    assert again.started.cached_tokens == 0, "a history with a bad value must not be reused"


@on_the_cpu
def test_counters_add_up(drafting):
    before = drafting.stats()
    run = complete(drafting, ids_prompt(CASES[QUICK[1]]["prompt_ids"]), 60, ignore_eos=True)
    after = drafting.stats()
    tokens = after["completion_tokens"] - before["completion_tokens"]
    rows = after["row_rounds"] - before["row_rounds"]
    accepted = sum(after["accepted"].values()) - sum(before["accepted"].values())
    assert tokens == len(run.ids) == 60
    assert tokens - 1 == rows + accepted, "a round gives its accepted drafts and one token more"
    assert sum(after["accepted_at"].values()) == sum(after["accepted"].values())


def test_rounds_that_run_ahead_give_way_to_drafts(plain):
    with open_demo(ahead=True, max_context=2048, package=drafted_demo()) as engine:
        rng = random.Random(6)
        force(engine, lambda limit: rng.choice((0, 0, limit)))
        for name in QUICK[:4]:
            prompt = ids_prompt(CASES[name]["prompt_ids"])
            got, wanted = (complete(e, prompt, 60, sampling=SEEDED) for e in (engine, plain))
            assert values(got) == values(wanted)
        stats = engine.stats()
        assert 0 < stats["spec_rounds"] < stats["decode_rounds"]
        engine.check_integrity()


def test_rounds_that_are_cut_short_leave_drafts_that_nobody_takes():
    alone = {**ROOMY, "max_concurrency": 1}
    drafted = {**alone, "ahead": True, "package": drafted_demo()}
    with open_demo(**alone, spec="none") as plain, open_demo(**drafted) as engine:
        force(engine)
        check_next_turns(plain, engine)
        engine.check_integrity()


@on_the_cpu
def test_drafts_ordered_before_a_round_is_read_are_those_behind_it(drafting, plain):
    """What was accepted is not known to the host when they are ordered."""
    with open_demo(ahead=True, **ROOMY, max_concurrency=4, package=drafted_demo()) as engine:
        force(engine)
        speculation, orders = engine._rank.backend.speculation, []
        draft = speculation.draft
        speculation.draft = lambda batch: orders.append(batch.rows) or draft(batch)
        names = QUICK[:3]
        before = [e.stats() for e in (engine, drafting)]
        runs = [
            [submit(e, make_request(ids_prompt(CASES[n]["prompt_ids"]), 60)) for n in names]
            for e in (engine, drafting, plain)
        ]
        for got, same, wanted in zip(*runs):
            assert values(got.wait()) == values(same.wait()) == values(wanted.wait())
        after = [e.stats() for e in (engine, drafting)]
        accepted = [
            sum(b["accepted"].values()) - sum(a["accepted"].values()) for a, b in zip(before, after)
        ]
        assert sum(rows is not None for rows in orders) > 0.8 * len(orders)
        assert accepted[0] >= 0.9 * accepted[1] > 0, "blocks are only wider where an answer ends"
        engine.check_integrity()
