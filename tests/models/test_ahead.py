"""Rounds that run one ahead of what is read: the same responses, and nothing twice or lost.

The CPU image computes at once; told that its rounds run ahead, it is read one round later, as a GPU
is. Rows that end are dropped from the round that was ordered meanwhile.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ginfer.engine.request import Delta, Failed, FinishReason, StopString
from ginfer.errors import InternalError, UnavailableError
from ginfer.frontend.grammar import json_grammar
from ginfer.prompt import Channel, PromptOptions
from tests.engines import complete, ids_prompt, make_request, open_demo, random_prompt, submit
from tests.frontends import message
from tests.models.test_engine_equalities import random_load

SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
LIST = {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 1, "maxItems": 2}


@pytest.fixture(scope="module")
def pair():
    """(read at once, one ahead), the same options."""
    with open_demo(max_context=1024) as plain, open_demo(max_context=1024, ahead=True) as ahead:
        yield plain, ahead
        for engine in (plain, ahead):
            engine.check_integrity()


@pytest.fixture
def ahead():
    with open_demo(max_context=512, max_concurrency=3, ahead=True) as engine:
        yield engine


def values(run):
    """What must be equal: all that its caller sees but times, and drafts, whose number follows from
    times."""
    end = run.finished
    usage = dataclasses.replace(end.usage, draft_tokens=0, accepted_tokens=0)
    seen = (run.ids, run.logprobs, run.text(), run.text(Channel.REASONING))
    return (*seen, end.reason, end.stop, usage, run.started.cached_tokens)


def chat(engine, text, thinking):
    return engine.frontend.prepare([message("user", text)], (), PromptOptions(thinking=thinking))


KINDS = {
    "stop token": {},
    "stop token of the request": {"stop_token_ids": tuple(range(300, 900))},
    "stop string": {"stop_strings": (StopString(text="a"), StopString(text="the", include=True))},
    "stop string in reasoning": {
        "thinking": True,
        "stop_strings": (StopString(text="e ", channel=Channel.REASONING),),
    },
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "context": {"raw": True, "ignore_eos": True, "max_tokens": 2000},
    "budget of none": {"thinking": True, "reasoning_budget": 0},
    "budget": {"thinking": True, "reasoning_budget": 6},
    "seed": {"sampling": SEEDED},
    "logprobs": {"sampling": {**SEEDED, "logprobs": 3}},
    "penalties": {"sampling": {"temperature": 0.0, "presence_penalty": 2.0, "logprobs": 0}},
    "grammar": {"grammar": json_grammar(LIST), "sampling": SEEDED},
    "grammar after reasoning": {"grammar": json_grammar(LIST), "thinking": True},
}


def kind_request(engine, kind):
    fields = dict(KINDS[kind])
    prompt = chat(engine, f"What is 17 + 25? {kind}", fields.pop("thinking", False))
    if kind == "context":
        prompt = random_prompt(np.random.default_rng(1), 1024 - 20)
    return make_request(prompt, fields.pop("max_tokens", 100), **fields)


def test_every_kind_of_end_is_the_same_alone_and_together(pair):
    plain, ahead = pair
    wanted = {kind: values(submit(plain, kind_request(plain, kind)).wait()) for kind in KINDS}
    reasons = {seen[4] for seen in wanted.values()}
    assert reasons == set(FinishReason) - {FinishReason.CANCELLED}
    for kind, want in wanted.items():
        assert values(submit(ahead, kind_request(ahead, kind)).wait()) == want, kind
        ahead.check_integrity()
    runs = {kind: submit(ahead, kind_request(ahead, kind)) for kind in KINDS}
    for kind, run in runs.items():
        ids, logprobs, *rest, usage, _ = values(run.wait())
        assert [ids, logprobs, *rest] == list(wanted[kind][:-2]), kind
        assert usage.completion_tokens == wanted[kind][-2].completion_tokens


@pytest.mark.parametrize("count", [12, 13])
@pytest.mark.parametrize("how", ["limit", "stop token", "cancel"])
def test_a_conversation_goes_on_from_the_state_before_a_dropped_round(pair, count, how):
    """The end is kept from whichever slot held it, without the row that was on its way."""
    rng = np.random.default_rng(count)
    first, more = rng.integers(0, 4096, 70).tolist(), rng.integers(0, 4096, 9).tolist()
    seen = []
    for engine in pair:
        whole = complete(engine, ids_prompt([*first, len(how)]), 40, ignore_eos=True).ids
        prompt = ids_prompt([*first, 5 + len(how)])

        def cancel(run, event, engine=engine):
            if how == "cancel" and len(run.ids) == count:
                engine.cancel(run.request.request_id)

        fields = {"stop_token_ids": (whole[count],)} if how == "stop token" else {}
        limit = count if how == "limit" else 40
        run = submit(engine, make_request(prompt, limit, ignore_eos=True, **fields), cancel).wait()
        history = [*prompt.token_ids.tolist(), *run.ids]
        sampling = {"temperature": 0.0, "logprobs": 2}
        again = complete(engine, ids_prompt([*history, *more]), 6, sampling=sampling)
        assert again.started.reuse_path == "append"
        seen.append((values(run), values(again)))
        engine.check_integrity()
    assert seen[0] == seen[1]


def test_only_what_is_delivered_counts(ahead):
    def cancel(run, event):
        if isinstance(event, Delta) and len(run.ids) == 7:
            ahead.cancel(run.request.request_id)

    rng = np.random.default_rng(4)
    runs = [
        submit(ahead, make_request(random_prompt(rng, 40), 30, ignore_eos=True), on_event)
        for on_event in (cancel, None)
    ]
    ends = [run.wait().finished for run in runs]
    assert [end.reason for end in ends] == [FinishReason.CANCELLED, FinishReason.OUTPUT_LIMIT]
    assert [len(run.ids) for run in runs] == [7, 30]
    assert [end.usage.completion_tokens for end in ends] == [7, 30]
    stats = ahead.stats()
    assert stats["completion_tokens"] == 37
    assert stats["row_rounds"] == 6 + 29
    ahead.check_integrity()


def test_a_logit_that_is_not_finite_fails_its_row_alone(ahead, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, 50) for _ in range(2)]
    alone = complete(ahead, prompts[0], 20, ignore_eos=True).ids
    select = ahead._rank.backend.select

    def poisoned(hidden, batch):
        selection = select(hidden, batch).read()
        finite = selection.finite.copy()
        finite[(batch.selection.rows == 1) & (batch.selection.positions == 55)] = False
        return dataclasses.replace(selection, finite=finite)

    monkeypatch.setattr(ahead._rank.backend, "select", poisoned)
    good, bad = (submit(ahead, make_request(p, 20, ignore_eos=True)) for p in prompts)
    with pytest.raises(InternalError, match="not a number"):
        bad.wait()
    assert len(bad.ids) == 5
    assert good.wait().ids == alone
    ahead.check_integrity()
    assert complete(ahead, prompts[1], 1).started.cached_tokens == 0


def test_a_backend_that_is_lost_while_it_is_read_fails_what_runs(ahead, monkeypatch):
    class Lost:
        def read(self):
            raise RuntimeError("device lost")

    def pull_the_plug(run, event):
        if isinstance(event, Delta) and len(run.ids) == 3:
            monkeypatch.setattr(ahead._rank.backend, "select", lambda hidden, batch: Lost())

    rng = np.random.default_rng(1)
    requests = [make_request(random_prompt(rng, 50), 100, ignore_eos=True) for _ in range(4)]
    runs = [submit(ahead, request, pull_the_plug) for request in requests]
    for run in runs:
        with pytest.raises(UnavailableError, match="device lost"):
            run.wait()
        assert isinstance(run.events[-1], Failed)


def test_nothing_leaks_under_random_load_with_random_cancels(pair):
    _, ahead = pair
    ends = random_load(ahead, 80, seed=6)
    assert {e.reason for e in ends} >= {FinishReason.CANCELLED, FinishReason.OUTPUT_LIMIT}
    ahead.check_integrity()
    stats = ahead.stats()
    assert stats["running"] == stats["waiting"] == stats["promised_pages"] == 0
    assert stats["free_slots"] == 8


@pytest.mark.long
def test_nothing_leaks_under_long_random_load(pair):
    for seed in range(20, 23):
        assert len(random_load(pair[1], 1000, seed)) == 1000
        pair[1].check_integrity()
