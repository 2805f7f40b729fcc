"""Several prompts in one chunk: each answers as alone, and the end of one costs no other."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ginfer.engine.request import Started
from ginfer.errors import ConfigError, InternalError
from tests.engines import ids_prompt, make_request, open_demo, random_prompt, submit

LENGTHS = (100, 64, 5, 200, 130, 1, 63, 500)


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """A file whose text the engine takes for a fault that is asked for."""
    path = tmp_path_factory.mktemp("faults") / "fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GINFER_FAULT_FILE", str(path))
        yield path


@pytest.fixture(scope="module", params=[False, True], ids=["at-once", "ahead"])
def engine(request, fault):
    options = {"max_context": 2048, "prefix_reuse": False, "ahead": request.param}
    options["prefill_chunk"] = 1024
    with open_demo(**options, decode_gap_ms=60_000) as engine:
        yield engine
        engine.check_integrity()


def together(engine, requests, on_event=None):
    """Submit requests between two rounds; (their runs, prefill chunks that they took)."""
    before = engine.stats()["prefill_rounds"]
    runs = engine.between_rounds(lambda *_: [submit(engine, r, on_event) for r in requests])
    for run in runs:
        run.wait()
    return runs, engine.stats()["prefill_rounds"] - before


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def values(run):
    return run.ids, run.logprobs, run.text(), run.finished.reason, run.finished.usage


def some(seed, **fields):
    rng = np.random.default_rng(seed)
    sampling = {"temperature": 1.0, "seed": seed, "logprobs": 2}
    return [make_request(random_prompt(rng, n), 12, sampling=sampling, **fields) for n in LENGTHS]


def test_packed_prompts_answer_as_each_alone(engine):
    alone = [values(together(engine, [request])[0][0]) for request in some(3)]
    runs, chunks = together(engine, some(3))
    assert chunks == 2  # 1,063 tokens
    assert [values(run) for run in runs] == alone


def test_a_cancel_in_a_packed_chunk_costs_its_request_alone(engine):
    alone = [values(together(engine, [request])[0][0]) for request in some(4)]
    requests = some(4)
    victim = requests[3].request_id

    def cancel(run, event):
        if run.request.request_id == victim and isinstance(event, Started):
            engine.cancel(victim)

    runs, _ = together(engine, requests, cancel)
    for i, run in enumerate(runs):
        assert i == 3 or values(run) == alone[i]
    assert runs[3].finished.reason == "cancelled"
    engine.check_integrity()


def test_a_prompt_that_fails_in_a_packed_chunk_fails_alone(engine, fault):
    alone = [values(together(engine, [request])[0][0]) for request in some(5)]
    fault.write_text("nan 2")
    runs = engine.between_rounds(lambda *_: [submit(engine, r) for r in some(5)])
    for i, run in enumerate(runs):
        if i == 2:
            with pytest.raises(InternalError, match="not a number"):
                run.wait()
        else:
            assert values(run.wait()) == alone[i]
    engine.check_integrity()


def test_a_prompt_waits_for_the_state_that_another_leaves():
    rng = np.random.default_rng(6)
    system = rng.integers(0, 4096, 256)
    with open_demo(max_context=1024) as engine:
        requests = [
            make_request(ids_prompt([*system, *rng.integers(0, 4096, 40)], turn_starts=(256,)))
            for _ in range(4)
        ]
        runs, _ = together(engine, requests)
        assert [run.started.cached_tokens for run in runs] == [0, 256, 256, 256]
        others = [make_request(random_prompt(rng, 100)) for _ in range(4)]
        _, chunks = together(engine, others)
        assert chunks == 1  # over the snapshots of all to their ends


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
def test_what_is_left_behind_a_snapshot_goes_on_in_the_same_chunk(ahead):
    rng = np.random.default_rng(8)
    starts = [rng.integers(0, 4096, n) for n in (100, 645, 64, 129, 30)]
    sampling = {"temperature": 1.0, "seed": 8, "logprobs": 2}

    def turns(*more):
        prompts = (ids_prompt([*start, *more]) for start in starts)
        return [make_request(prompt, 6, sampling=sampling) for prompt in prompts]

    with open_demo(max_context=2048, ahead=ahead, decode_gap_ms=60_000) as engine:
        prefill, found, counts = engine._loop._prefill, [], []
        assert prefill._goes_on
        for goes_on in (False, True):
            prefill._goes_on = goes_on
            prefill._limits.clear()
            engine.between_rounds(lambda cache, _: cache.clear())
            first, chunks = together(engine, turns())
            second, _ = together(engine, turns(1, 2, 3))
            hits = [run.started.cached_tokens for run in second]
            found.append([values(run) for run in (*first, *second)])
            assert hits == [64, 640, 0, 128, 0]
            counts.append(chunks)
            engine.check_integrity()
        assert found[0] == found[1]
        assert counts == [2, 1]


def test_decode_goes_on_beside_a_long_prompt_in_small_chunks():
    rng = np.random.default_rng(7)
    with open_demo(max_context=4096, decode_gap_ms=1, prefix_reuse=False) as engine:
        running = submit(engine, make_request(random_prompt(rng, 64), 400, ignore_eos=True))
        wait_until(lambda: running.ids)
        long = submit(engine, make_request(random_prompt(rng, 2048), 1)).wait()
        engine.cancel(running.request.request_id)
        assert long.finished.usage.completion_tokens == 1
        assert len(running.wait().ids) >= 30
        assert engine.stats()["prefill_rounds"] >= 32


@pytest.mark.parametrize("gap", [0, -1, 60_001])
def test_a_gap_is_bounded(gap):
    with pytest.raises(ConfigError, match=f"decode_gap_ms is {gap}; legal: 1 to 60000"):
        open_demo(decode_gap_ms=gap)
