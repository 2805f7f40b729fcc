"""The engine on the demo model: limits, stops, budgets, logprobs, cancellation, overload."""

from __future__ import annotations

import math
import time
from threading import Event

import numpy as np
import pytest

from ginfer.engine.request import Delta, Finished, FinishReason, Started, StopString
from ginfer.errors import (
    ContextLengthError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    UnavailableError,
)
from ginfer.prompt import Channel, PromptOptions
from tests.engines import complete, ids_prompt, make_request, open_demo, random_prompt, submit
from tests.frontends import message


@pytest.fixture(scope="module")
def engine():
    """Eight lanes, defaults."""
    with open_demo(max_context=4096) as engine:
        yield engine
        engine.check_integrity()


class Clock:
    """The real clock, which a test may put forward."""

    ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead_s


CLOCK = Clock()


@pytest.fixture(scope="module")
def narrow():
    """One lane, two places in the queue, a short context, a clock to play with."""
    with open_demo(CLOCK, max_concurrency=1, max_pending=2, max_context=1024) as engine:
        yield engine
        engine.check_integrity()


def chat(engine, text, thinking=False):
    return engine.frontend.prepare([message("user", text)], (), PromptOptions(thinking=thinking))


def answer(engine, text, max_tokens=200, thinking=False, **fields):
    return complete(engine, chat(engine, text, thinking), max_tokens, **fields)


QUESTION = "Write a list of five animals."
THOUGHT = "What is 17 + 25?"


def test_events_of_a_response_add_up(engine):
    run = answer(engine, THOUGHT, thinking=True)
    assert isinstance(run.events[0], Started)
    assert run.finished.reason is FinishReason.STOP_TOKEN
    assert run.finished.stop_token_id == engine.frontend.stop_token_ids[0]
    assert run.finished.stop == "<|im_end|>"
    usage = run.finished.usage
    assert usage.prompt_tokens == run.request.prompt.num_tokens
    assert usage.completion_tokens == len(run.ids) + 1
    reasoning = [i for d in run.deltas if d.channel is Channel.REASONING for i in d.token_ids]
    assert usage.reasoning_tokens == len(reasoning) > 0
    assert "42" in run.text()
    assert "think>" not in run.text() + run.text(Channel.REASONING)
    timings = run.finished.timings
    parts = timings.queue_s + timings.prefill_s + timings.decode_s
    assert math.isclose(timings.total_s, parts)
    assert math.isclose(timings.first_token_s, timings.queue_s + timings.prefill_s)
    assert min(timings.prefill_s, timings.decode_s) > 0


def test_at_most_one_delta_per_round_and_channel(engine):
    run = answer(engine, QUESTION)
    assert all(len(d.token_ids) <= 1 for d in run.deltas)
    assert len(run.deltas) <= run.finished.usage.completion_tokens + 1


def test_output_limits(engine, narrow):
    run = answer(engine, QUESTION, max_tokens=5)
    assert (run.finished.reason, len(run.ids)) == (FinishReason.OUTPUT_LIMIT, 5)
    run = answer(engine, QUESTION, max_tokens=1)
    assert (run.finished.reason, len(run.ids)) == (FinishReason.OUTPUT_LIMIT, 1)
    run = answer(engine, QUESTION, max_tokens=0)
    assert [type(e) for e in run.events] == [Finished]
    assert run.finished.reason is FinishReason.OUTPUT_LIMIT
    for length, expected in ((1024, 1), (1020, 5)):
        run = complete(narrow, ids_prompt([7] * length), 50, ignore_eos=True, raw=True)
        assert (run.finished.reason, len(run.ids)) == (FinishReason.CONTEXT_LIMIT, expected)
        run = complete(narrow, ids_prompt([7] * length), expected, ignore_eos=True, raw=True)
        assert (run.finished.reason, len(run.ids)) == (FinishReason.OUTPUT_LIMIT, expected)
    with pytest.raises(ContextLengthError, match=r"1025.*1024"):
        complete(narrow, ids_prompt([7] * 1025))


def test_requests_are_checked_before_they_take_a_place(engine):
    with pytest.raises(RequestError, match="4111"):
        complete(engine, ids_prompt([4111]))
    request = make_request(chat(engine, QUESTION))
    run = submit(engine, request)
    with pytest.raises(RequestError, match="running already"):
        submit(engine, request)
    run.wait()
    submit(engine, request).wait()  # the id is free again


def test_stop_tokens(engine):
    whole = answer(engine, QUESTION)
    stop_id = next(i for n, i in enumerate(whole.ids) if n > 5 and i not in whole.ids[:n])
    cut = whole.ids.index(stop_id)
    run = answer(engine, QUESTION, stop_token_ids=(stop_id,))
    assert run.finished.reason is FinishReason.STOP_TOKEN
    assert run.finished.stop_token_id == stop_id
    assert run.ids == whole.ids[:cut]
    assert run.finished.usage.completion_tokens == cut + 1
    assert whole.text().startswith(run.text())
    run = answer(engine, QUESTION, max_tokens=len(whole.ids) + 20, ignore_eos=True)
    assert run.ids[: len(whole.ids)] == whole.ids
    assert run.finished.reason is FinishReason.OUTPUT_LIMIT


def test_every_stop_string_of_an_answer_cuts_it_there(engine):
    whole = answer(engine, QUESTION).text()
    for start in range(3, len(whole) - 6, max(1, len(whole) // 4)):
        for include in (False, True):
            stop = StopString(text=whole[start : start + 5], include=include)
            run = answer(engine, QUESTION, stop_strings=(stop,))
            expected = whole[: whole.index(stop.text) + len(stop.text) * include]
            assert (run.text(), run.finished.reason) == (expected, FinishReason.STOP_STRING)
            assert run.finished.stop == stop.text
            assert run.finished.stop_token_id is None


def test_stop_strings_belong_to_a_channel(engine):
    whole = answer(engine, THOUGHT, thinking=True)
    reasoning = whole.text(Channel.REASONING)
    text = reasoning[4:9]
    run = answer(
        engine,
        THOUGHT,
        thinking=True,
        stop_strings=(StopString(text=text, channel=Channel.REASONING),),
    )
    assert run.finished.reason is FinishReason.STOP_STRING
    assert run.text(Channel.REASONING) == reasoning[: reasoning.index(text)]
    assert run.text() == ""
    assert text not in whole.text()
    run = answer(engine, THOUGHT, thinking=True, stop_strings=(StopString(text=text),))
    assert run.finished.reason is FinishReason.STOP_TOKEN
    assert run.text(Channel.REASONING) == reasoning


def test_a_stop_string_that_never_comes_changes_nothing(engine):
    whole = answer(engine, QUESTION).text()
    stops = tuple(StopString(text=whole[i : i + 3] + "\x00") for i in range(0, len(whole), 2))
    assert answer(engine, QUESTION, stop_strings=stops).text() == whole


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_budget_is_enforced_by_forced_tokens(engine, budget):
    close = list(engine.frontend.reasoning_close_ids)
    free = answer(engine, THOUGHT, thinking=True)
    run = answer(engine, THOUGHT, thinking=True, reasoning_budget=budget)
    assert free.finished.usage.reasoning_tokens > budget + len(close)
    assert run.ids[: budget + len(close)] == free.ids[:budget] + close
    assert budget < run.finished.usage.reasoning_tokens <= budget + len(close)
    assert free.text(Channel.REASONING).startswith(run.text(Channel.REASONING))
    assert "think>" not in run.text() + run.text(Channel.REASONING)
    assert run.text().strip()
    assert run.finished.reason is FinishReason.STOP_TOKEN


def test_an_unspent_reasoning_budget_changes_nothing(engine):
    free = answer(engine, THOUGHT, thinking=True)
    budget = free.finished.usage.reasoning_tokens
    assert answer(engine, THOUGHT, thinking=True, reasoning_budget=budget).ids == free.ids


def test_raw_output_is_one_channel_with_markup(engine):
    run = answer(engine, THOUGHT, thinking=True, raw=True)
    assert {d.channel for d in run.deltas} == {Channel.CONTENT}
    assert "</think>" in run.text()
    assert run.finished.usage.reasoning_tokens == 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_logprobs_are_a_distribution(engine, sampling):
    run = answer(engine, THOUGHT, thinking=True, sampling={**sampling, "logprobs": 20})
    assert [p.token_id for p in run.logprobs] == run.ids
    for p in run.logprobs:
        ids, values = zip(*p.top)
        assert len(set(ids)) == 20
        assert list(values) == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert p.logprob <= values[0] <= 0
        assert dict(p.top).get(p.token_id, p.logprob) == p.logprob
        if sampling["temperature"] == 0:
            assert p.token_id == ids[0]
    plain = answer(engine, THOUGHT, thinking=True, sampling=sampling)
    assert (plain.ids, plain.logprobs) == (run.ids, [])
    few = answer(engine, THOUGHT, thinking=True, sampling={**sampling, "logprobs": 2})
    assert [p.top for p in few.logprobs] == [p.top[:2] for p in run.logprobs]


def test_bias_and_penalties_reach_the_draw(engine):
    first = answer(engine, QUESTION, max_tokens=1).ids[0]
    banned = answer(
        engine, QUESTION, 1, sampling={"temperature": 0.0, "logit_bias": ((first, -100.0),)}
    )
    assert banned.ids[0] != first
    wanted = answer(
        engine, QUESTION, 3, sampling={"temperature": 0.0, "logit_bias": ((77, 100.0),)}
    )
    assert wanted.ids == [77, 77, 77]
    once = answer(
        engine,
        QUESTION,
        3,
        sampling={"temperature": 0.0, "logit_bias": ((77, 60.0),), "frequency_penalty": 2.0},
    )
    assert once.ids == [77, 77, 77]


def test_cancel_during_decode_ends_before_the_next_token(engine):
    def cancel(run, event):
        if isinstance(event, Delta) and len(run.ids) == 4:
            engine.cancel(run.request.request_id)

    run = submit(engine, make_request(chat(engine, QUESTION), 100, ignore_eos=True), cancel)
    run.wait()
    assert run.finished.reason is FinishReason.CANCELLED
    assert len(run.ids) == run.finished.usage.completion_tokens == 4
    assert engine.stats()["running"] == 0


def test_cancel_during_prefill_ends_after_at_most_one_chunk(engine):
    before = engine.stats()["prefill_rounds"]

    def cancel(run, event):
        if isinstance(event, Started):
            engine.cancel(run.request.request_id)

    rng = np.random.default_rng(1)
    run = submit(engine, make_request(random_prompt(rng, 4000), 100), cancel)
    run.wait()
    assert run.finished.reason is FinishReason.CANCELLED
    assert run.ids == []
    assert engine.stats()["prefill_rounds"] - before <= 1
    engine.check_integrity()


def test_cancel_in_the_queue_and_of_unknown_requests(narrow):
    rng = np.random.default_rng(2)
    running = submit(narrow, make_request(random_prompt(rng, 64), 400, ignore_eos=True))
    waiting = submit(narrow, make_request(random_prompt(rng, 64), 400))
    narrow.cancel(waiting.request.request_id)
    assert waiting.wait().finished.reason is FinishReason.CANCELLED
    narrow.cancel("nobody")
    narrow.cancel(running.request.request_id)
    assert running.wait().finished.reason is FinishReason.CANCELLED


def test_closing_the_iterator_cancels(engine):
    events = engine.generate(make_request(chat(engine, QUESTION), 2000, ignore_eos=True))
    assert isinstance(next(events), Started)
    next(events)
    events.close()
    engine.check_integrity()  # answered after the cancellation, which is before the next round
    assert engine.stats()["running"] == 0


def test_a_full_queue_refuses_and_recovers(narrow):
    rng = np.random.default_rng(3)
    runs = [
        submit(narrow, make_request(random_prompt(rng, 32), 30, ignore_eos=True)) for _ in range(3)
    ]
    with pytest.raises(OverloadedError, match="3 places"):
        submit(narrow, make_request(random_prompt(rng, 32)))
    for run in runs:
        run.wait()
    complete(narrow, random_prompt(rng, 32))


def test_waiting_too_long_fails_and_costs_nobody_else(narrow):
    rng = np.random.default_rng(4)
    decoding = Event()
    running = submit(
        narrow,
        make_request(random_prompt(rng, 32), 900, ignore_eos=True, raw=True),
        lambda run, event: decoding.set(),
    )
    assert decoding.wait(60)
    early = submit(narrow, make_request(random_prompt(rng, 32), 8))
    CLOCK.ahead_s += 300
    late = submit(narrow, make_request(random_prompt(rng, 32), 8))
    CLOCK.ahead_s += 301
    with pytest.raises(QueueTimeoutError, match="600 s"):
        early.wait()
    narrow.cancel(running.request.request_id)
    assert running.wait().finished.reason is FinishReason.CANCELLED
    assert len(late.wait().ids) == 8
    assert narrow.stats()["failed"] == {"request_queue_timeout": 1}


def test_a_faulty_sink_costs_its_request_alone(engine):
    def fault(run, event):
        if isinstance(event, Delta) and len(run.ids) == 3:
            raise RuntimeError("the sink is broken")

    good = submit(engine, make_request(chat(engine, QUESTION), 60))
    bad = submit(engine, make_request(chat(engine, THOUGHT), 60, ignore_eos=True), fault)
    with pytest.raises(Exception, match="the sink is broken"):
        bad.wait()
    assert len(bad.ids) == 3
    assert good.wait().ids == answer(engine, QUESTION, max_tokens=60).ids
    engine.check_integrity()


def test_stats_add_up():
    with open_demo(max_context=1024, prefix_reuse=False) as engine:
        rng = np.random.default_rng(5)
        runs = [
            submit(engine, make_request(random_prompt(rng, 100), 10, ignore_eos=True))
            for _ in range(4)
        ]
        for run in runs:
            run.wait()
        stats = engine.stats()
        assert stats["submitted"] == 4
        assert stats["finished"] == {"output_limit": 4}
        assert stats["prompt_tokens"] == stats["prefill_tokens"] == 400
        assert stats["completion_tokens"] == 40
        assert stats["row_rounds"] == 36
        assert 9 <= stats["decode_rounds"] < 36
        for name in ("queue_s", "first_token_s", "token_s", "total_s"):
            assert stats[name]["count"] == 4, name
        assert 0 < stats["token_s"]["sum"] < stats["total_s"]["sum"]
        assert stats["reuse"] == {"none": 4}
        assert 0 < stats["forward_s"] < stats["busy_s"]
        assert stats["running"] == stats["waiting"] == 0
        assert stats["memory"]["arena"] > 0
        assert engine.drain(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            complete(engine, random_prompt(rng, 10))


def test_a_request_is_counted_from_its_acceptance_on(engine):
    gate = Event()
    engine._command(gate.wait)  # the loop stands between two rounds
    run = submit(engine, make_request(ids_prompt([5]), 2))
    stats = engine.stats()
    gate.set()
    assert (stats["waiting"], stats["running"]) == (1, 0)
    run.wait()
    assert engine.stats()["waiting"] == 0
