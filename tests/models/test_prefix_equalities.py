"""Bit for bit: what is shared, evicted, parked or rewritten answers as if nothing had been kept."""

from __future__ import annotations

import numpy as np
import pytest

from ginfer.prompt import PromptOptions
from tests.engines import (
    complete,
    ids_prompt,
    make_request,
    open_demo,
    random_prompt,
    submit,
    wait_until,
)
from tests.frontends import message

GREEDY = {"temperature": 0.0, "logprobs": 3}
SEEDED = {"temperature": 1.0, "seed": 5, "logprobs": 0}
PLAIN = PromptOptions(thinking=False)
RULES = "Answer briefly and kindly. " * 12


@pytest.fixture(scope="module")
def cold():
    """Nothing is reused."""
    with open_demo(max_context=2048, prefix_reuse=False) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def warm():
    """Memory suffices."""
    with open_demo(max_context=2048, prefill_chunk=256) as engine:
        yield engine
        engine.check_integrity()


def values(run):
    """What must be equal bit for bit."""
    return run.ids, run.logprobs, run.text(), run.finished.reason


def forget(engine):
    """Have an engine drop everything that nobody uses."""
    engine._command(engine._loop.cache.clear)
    engine.check_integrity()
    assert engine.stats()["segments"] == 0


def test_concurrent_rows_over_one_prefix_answer_as_each_alone(cold, warm):
    rng = np.random.default_rng(1)
    system = rng.integers(0, 4096, 700)
    prompts = [
        ids_prompt([*system, *rng.integers(0, 4096, n)], turn_starts=(700,))
        for n in (1, 30, 64, 100, 200, 333)
    ]
    complete(warm, prompts[0], 1)
    requests = [make_request(p, 24, sampling=SEEDED, ignore_eos=True) for p in prompts]
    runs = [submit(warm, request) for request in requests]
    for run, prompt in zip([run.wait() for run in runs], prompts, strict=True):
        assert run.started.cached_tokens == 640
        assert run.started.reuse_path == "snapshot"
        alone = complete(cold, prompt, 24, sampling=SEEDED, ignore_eos=True)
        assert values(run) == values(alone)
    warm.check_integrity()


def test_evicted_and_computed_again_equals_kept(warm):
    rng = np.random.default_rng(2)
    start = rng.integers(0, 4096, 300)
    longer = ids_prompt([*start, *rng.integers(0, 4096, 150)])
    kept = []
    for _ in range(2):
        complete(warm, ids_prompt(start), 1)
        run = complete(warm, longer, 12, sampling=GREEDY, ignore_eos=True)
        assert run.started.cached_tokens == 256
        kept.append(values(run))
        forget(warm)
    assert kept[0] == kept[1]
    again = complete(warm, longer, 12, sampling=GREEDY, ignore_eos=True)
    assert again.started.cached_tokens == 0
    assert values(again) == kept[0]


def converse(engine, first, news, between):
    """A conversation of token ids, every answer appended to as it was; `between` comes after each
    turn. Values and reuse of its turns."""
    history, seen = list(first), []
    for new in (*news, []):
        run = complete(engine, ids_prompt(history), 20, sampling=GREEDY, ignore_eos=True)
        seen.append((run.started.cached_tokens, values(run)))
        history += [*run.ids, *new]
        between()
    return seen


def test_parked_and_returned_equals_kept(warm):
    """Decode-made histories, which cannot be computed again: they must come back as they were."""
    rng = np.random.default_rng(3)
    first, news = rng.integers(0, 4096, 200), [rng.integers(0, 4096, n) for n in (90, 1, 64)]
    kept = converse(warm, first, news, lambda: None)
    options = {"max_context": 1024, "max_concurrency": 1, "kv_capacity": 1024, "park_mib": 256}
    with open_demo(**options) as small:

        def crowd():
            for _ in range(6):
                complete(small, random_prompt(rng, 200), 2, ignore_eos=True)
            small.check_integrity()

        parked = converse(small, first, news, crowd)
        stats = small.stats()
        assert stats["unparked_pages"] > 0
    assert parked == kept
    assert all(cached >= 200 for cached, _ in kept[1:])


def frontier(prompt):
    """Where the snapshot of a prompt lies: before the header of the answer."""
    return prompt.turn_starts[-1] // 64 * 64


@pytest.mark.parametrize("change", ["reasoning dropped", "white space", "last turn edited"])
def test_a_rewritten_history_enters_at_its_last_equal_snapshot(cold, warm, change):
    thinking = change == "reasoning dropped"
    options = PromptOptions(thinking=thinking, preserve_thinking=False)
    turns = [message("system", f"{RULES} {change}"), message("user", "What is 2 + 3? " * 8)]
    prompts = [warm.frontend.prepare(turns, (), options)]
    runs = [complete(warm, prompts[0], 60)]
    answer = "Five." if thinking else f"  {runs[0].text()} \n"
    turns += [message("assistant", answer), message("user", "And 4 + 4? " * 9)]
    prompts.append(warm.frontend.prepare(turns, (), options))
    runs.append(complete(warm, prompts[1], 12, sampling=GREEDY))
    expected = prompts[0]
    if change == "last turn edited":
        turns[-1] = message("user", "Never mind. " * 9)
        prompts.append(warm.frontend.prepare(turns, (), options))
        runs.append(complete(warm, prompts[2], 12, sampling=GREEDY))
    run, prompt = runs[-1], prompts[-1]
    assert run.started.cached_tokens >= frontier(expected) > 64
    assert run.started.cached_tokens < prompt.num_tokens
    assert values(run) == values(complete(cold, prompt, 12, sampling=GREEDY))


def test_agents_share_their_system_and_tools(warm):
    forget(warm)
    turns = [message("system", RULES)]
    prompts = [
        warm.frontend.prepare([*turns, message("user", f"Task {i}: begin.")], (), PLAIN)
        for i in range(4)
    ]
    shared = prompts[0].turn_starts[0] // 64 * 64
    runs = [complete(warm, prompt, 4) for prompt in prompts]
    assert [run.started.cached_tokens for run in runs] == [0, shared, shared, shared]
    assert [run.started.reuse_path for run in runs] == ["none", *["snapshot"] * 3]
    stats = warm.stats()
    assert stats["reuse"]["snapshot"] >= 3


def test_what_is_computed_again_is_reported(warm):
    forget(warm)
    rng = np.random.default_rng(8)
    ids = rng.integers(0, 4096, 400)
    complete(warm, ids_prompt(ids, turn_starts=(70, 390)), 1)
    assert complete(warm, ids_prompt(ids[:330]), 1).started.recomputed_tokens == 320 - 64
    hit = complete(warm, ids_prompt([*ids[:330], 1]), 1).started
    assert (hit.cached_tokens, hit.recomputed_tokens) == (320, 0)


def test_an_idle_elastic_engine_gives_memory_back_and_serves_on(cold):
    prompt = random_prompt(np.random.default_rng(4), 300)
    want = values(complete(cold, prompt, 8, sampling=GREEDY, ignore_eos=True))
    with open_demo(max_context=2048, kv_elastic=True) as engine:
        whole = engine.stats()["memory"]["arena"]
        for _ in range(2):
            run = complete(engine, prompt, 8, sampling=GREEDY, ignore_eos=True)
            assert values(run) == want
            wait_until(lambda: engine.stats()["memory"]["arena"] < whole // 2)
        assert run.started.cached_tokens == 256
