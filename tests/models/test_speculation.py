"""Speculation on the CPU image: the same answers as without it, whatever is drafted."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from ginfer.cpu.drafter import CpuDrafter
from ginfer.engine.request import FinishReason, StopString
from ginfer.errors import InternalError
from tests.drafted import drafted_demo
from tests.engines import complete, ids_prompt, make_request, open_demo, random_prompt, submit

GOLDEN = Path(__file__).parents[1] / "golden" / "chat_groupwise_int.json"
CASES = {c["name"]: c for c in json.loads(GOLDEN.read_text())["cases"]}
QUICK = [name for name, case in CASES.items() if len(case["prompt_ids"]) < 400][::4]
GREEDY = {"temperature": 0.0, "logprobs": 2}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 20, "seed": 3, "logprobs": 2}
PENALISED = {
    **SEEDED,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "min_p": 0.02,
    "logit_bias": ((260, 3.0), (300, -5.0)),
}
# What is evicted follows from times, and what is found changes the last bits of an answer.
ROOMY = {"max_context": 4096, "kv_capacity": 1 << 17}
REPORTED_TOKENS = 3.59  # per round, of the BF16 drafter on the golden prompts
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def force(engine, choose=lambda limit: limit):
    """Have every row draft `choose(limit)` tokens of what it is offered."""
    widths = engine._loop._drafting.widths
    widths.plan = lambda offers: {lane: choose(offer.limit) for lane, offer in offers.items()}
    widths.may_draft = lambda lane, num_rows: True  # whatever rounds cost on this machine


@pytest.fixture(scope="module")
def plain():
    with open_demo(**ROOMY, spec="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting():
    """The drafter's drafts, as many as there are."""
    with open_demo(**ROOMY, package=drafted_demo()) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def copying():
    """No drafter: copies of the context, as many as there are."""
    with open_demo(**ROOMY) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


def values(run):
    """What must be equal bit for bit."""
    return run.ids, run.logprobs, run.text(), run.finished.reason


def golden_runs(engines, names, **fields):
    for name in names:
        prompt = ids_prompt(CASES[name]["prompt_ids"])
        yield name, [values(complete(engine, prompt, 96, **fields)) for engine in engines]


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_golden_answers_are_those_of_plain_decode(plain, drafting, copying, sampling):
    engines = (plain, drafting, copying)
    for name, (wanted, *drafted) in golden_runs(engines, QUICK, sampling=sampling):
        for got in drafted:
            assert got == wanted, name
    stats = drafting.stats()
    assert stats["accepted"]["drafter"] > 0
    assert plain.stats()["spec_rounds"] == 0


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
def test_all_golden_answers_are_those_of_plain_decode(plain, drafting, copying, sampling):
    engines = (plain, drafting, copying)
    for name, (wanted, *drafted) in golden_runs(engines, CASES, sampling=sampling):
        for got in drafted:
            assert got == wanted, name


def check_random_prompts(plain, drafting, count, seed):
    """Requests of all kinds at once, of random widths, against plain decode."""
    rng, nrng = random.Random(seed), np.random.default_rng(seed)
    force(drafting, lambda limit: rng.randint(0, limit))
    requests = []
    for _ in range(count):
        ids = nrng.integers(0, 4096, rng.randrange(1, 40))
        prompt = ids_prompt([*ids, *ids[: rng.randrange(40)]] * rng.randrange(1, 4))
        fields = {"sampling": rng.choice((GREEDY, SEEDED, PENALISED)), "ignore_eos": True}
        if rng.random() < 0.3:
            fields["stop_strings"] = (StopString(text=rng.choice(("e", "the", " a"))),)
        requests.append((prompt, rng.randrange(1, 50), fields))
    runs = [submit(drafting, make_request(p, n, **fields)) for p, n, fields in requests]
    for run, (prompt, n, fields) in zip(runs, requests):
        assert values(run.wait()) == values(complete(plain, prompt, n, **fields))
    drafting.check_integrity()
    force(drafting)


def test_requests_of_all_kinds_together_are_those_of_plain_decode(plain, drafting):
    check_random_prompts(plain, drafting, 16, seed=1)


@pytest.mark.long
def test_two_hundred_requests_are_those_of_plain_decode(plain, drafting):
    for seed in range(10):
        check_random_prompts(plain, drafting, 20, seed)


def test_copies_of_the_context_are_accepted_and_change_nothing():
    """Questions that were answered before in the same conversation."""
    alone = {"max_context": 4096, "prefix_reuse": False}
    with open_demo(**alone, spec="none") as plain, open_demo(**alone) as copying:
        force(copying)
        before = copying.stats()
        for name in ("count", "code", "kv_cache", "tool_parallel"):
            question, answer = (CASES[name][key] for key in ("prompt_ids", "greedy_ids"))
            prompt = ids_prompt([*question, *answer, *question])
            runs = [complete(e, prompt, 96, sampling=GREEDY) for e in (plain, copying)]
            assert values(runs[0]) == values(runs[1])
        after = copying.stats()
        changed = {k: after[k]["copy"] - before[k].get("copy", 0) for k in ("drafted", "accepted")}
        assert changed["accepted"] >= 0.8 * changed["drafted"] > 0
        assert after["expanded_rounds"] > before["expanded_rounds"]
        rows = after["row_rounds"] - before["row_rounds"]
        assert changed["accepted"] > 2 * rows


def test_a_next_turn_finds_the_state_of_a_round_that_was_cut_short(plain, drafting):
    """Stop tokens, stop strings and limits end answers inside rounds; what the cache keeps then is
    what plain decode would have kept, drafter context included."""
    rng = np.random.default_rng(8)
    for i, name in enumerate(QUICK[:6]):
        ids = CASES[name]["prompt_ids"]
        limit = (96, 7, 12)[i % 3]
        longer, seen = None, []
        for engine in (plain, drafting):
            first = complete(engine, ids_prompt(ids), limit, sampling=GREEDY)
            if longer is None:
                longer = ids_prompt([*ids, *first.ids, *rng.integers(0, 4096, 9)])
            again = complete(engine, longer, 20, sampling=GREEDY, ignore_eos=True)
            seen.append((values(first), again.started.cached_tokens, values(again)))
        assert seen[0] == seen[1], name
        assert seen[0][1] >= len(ids)


def test_acceptance_after_a_hit_is_that_without_one(drafting):
    """The drafter's context comes back with a prefix."""
    ids = [*CASES[QUICK[0]]["prompt_ids"]]
    base = ids_prompt([*np.random.default_rng(5).integers(0, 4096, 266 - len(ids) % 64), *ids])
    cut = base.num_tokens // 64 * 64
    counts = []
    for warm in (False, True):
        with open_demo(max_context=4096, package=drafted_demo(), max_concurrency=2) as engine:
            force(engine)
            if warm:
                complete(engine, ids_prompt(base.token_ids[:cut]), 1)
            run = complete(engine, base, 60, sampling=GREEDY, ignore_eos=True)
            assert run.started.cached_tokens == (cut if warm else 0)
            stats = engine.stats()
            counts.append((values(run), stats["drafted"], stats["accepted_at"]))
    assert counts[0] == counts[1]
    assert sum(counts[0][2].values()) > 0


def test_context_that_waits_for_company_makes_the_same_drafts(monkeypatch):
    """Rounds that draft nothing leave it to those that do."""
    follow, seen = CpuDrafter.follow, []
    prompts = [ids_prompt(CASES[name]["prompt_ids"]) for name in QUICK[:3]]

    def at_once(drafter, lanes, tokens):
        follow(drafter, lanes, tokens)
        drafter.catch_up()

    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(CpuDrafter, "follow", at_once)
        with open_demo(max_context=4096, package=drafted_demo(), max_concurrency=2) as engine:
            rng = random.Random(2)
            force(engine, lambda limit: rng.choice((0,) * 9 + (limit,)))
            runs = [complete(engine, prompt, 96, ignore_eos=True) for prompt in prompts]
            stats = engine.stats()
            seen.append(([run.ids for run in runs], stats["drafted"], stats["accepted_at"]))
    assert seen[0] == seen[1]
    assert sum(seen[0][2].values()) > 0


@pytest.mark.long
def test_tokens_per_round_are_near_those_of_the_bf16_drafter():
    with open_demo(max_context=4096, package=drafted_demo(), max_concurrency=1) as engine:
        drafting = engine._loop._drafting
        drafting._copy = lambda job: []
        force(engine)
        for case in CASES.values():
            complete(engine, ids_prompt(case["prompt_ids"]), len(case["greedy_ids"]))
        stats = engine.stats()
    first = len(CASES)  # tokens that prompts draw
    tokens = (stats["completion_tokens"] - first) / stats["row_rounds"]
    assert tokens >= 0.95 * REPORTED_TOKENS


@pytest.mark.parametrize("opens_reasoning", [False, True])
def test_json_follows_its_schema_and_plain_decode(plain, drafting, copying, opens_reasoning):
    grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    assert not LLMatcher.validate_grammar(grammar)
    for name in QUICK[:4]:
        prompt = ids_prompt(CASES[name]["prompt_ids"], opens_reasoning=opens_reasoning)
        for sampling in (GREEDY, SEEDED):
            fields = {"sampling": sampling, "grammar": grammar}
            if opens_reasoning:
                fields["reasoning_budget"] = 11
            runs = [complete(e, prompt, 80, **fields) for e in (plain, drafting, copying)]
            for run in runs[1:]:
                assert values(run) == values(runs[0])
            if runs[0].finished.reason is FinishReason.STOP_TOKEN and runs[0].text():
                assert set(json.loads(runs[0].text())) == {"name", "n"}


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


def test_drafts_ordered_before_a_round_is_read_are_those_behind_it(drafting, plain):
    """What was accepted is not known to the host when they are ordered."""
    with open_demo(ahead=True, **ROOMY, package=drafted_demo()) as engine:
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
