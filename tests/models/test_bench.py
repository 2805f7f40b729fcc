"""Measured rounds: steady decode of real prompts and of copied histories."""

import time
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from ginfer.engine.bench import _Window, decoding, histories, measure_decode, measure_prefill
from ginfer.engine.request import Failed, Finished
from ginfer.errors import ConfigError, InternalError, UnavailableError
from tests.engines import make_request, open_demo, random_prompt


@pytest.fixture(scope="module")
def engine():
    with open_demo(max_context=4096, max_concurrency=3, kv_capacity=12_288) as engine:
        yield engine


def test_decode_and_prefill_have_a_speed(engine):
    assert measure_decode(engine, 2, 70, 6) > 0
    assert measure_prefill(engine, 200) > 0
    engine.check_integrity()


@pytest.mark.parametrize("context", [900, 4000])
def test_histories_are_hits_that_nobody_computed(engine, context):
    prompts = histories(engine, 3, context, 5)
    before = engine.stats()
    with decoding(engine, prompts, 5) as steady:
        assert steady.tokens_per_s > 0
        assert steady.tokens_per_round >= 1
        assert 0 < steady.host_s < 2 * steady.round_s
    after = engine.stats()
    hits = after["cached_tokens"] - before["cached_tokens"]
    assert hits == 3 * ((context - 1) // 64 * 64)
    engine.check_integrity()


@pytest.mark.parametrize("first", [12, 1])
def test_a_window_ends_with_the_first_request(engine, first):
    window, rng = _Window(engine, 2, 15), np.random.default_rng(7)
    for i, tokens in enumerate((first, 60)):
        request = make_request(random_prompt(rng, 70), tokens, ignore_eos=True)
        engine.submit(replace(request, request_id=f"row {i}"), window)
    if first > 1:
        assert window.figures().tokens_per_s > 0
    else:
        with pytest.raises(ConfigError, match="raise tokens"):
            window.figures()
    window.wait_ends()
    engine.check_integrity()


def test_a_request_that_fails_ends_the_measurement(engine, monkeypatch):
    def fault(self, token_id):
        raise RuntimeError("no bytes")

    monkeypatch.setattr("ginfer.frontend.detokenizer.Detokenizer.feed", fault)
    with pytest.raises(InternalError, match="no bytes"):
        measure_decode(engine, 2, 70, 6)
    engine.check_integrity()


def test_a_wait_counts_with_the_time_of_its_round(engine, monkeypatch):
    """Who looks while values are handed out, as figures of a window do, finds both."""
    rank, before, seen = engine._loop._rank, engine.stats(), SimpleQueue()
    read = rank.read

    def late(flight):
        time.sleep(0.05)
        return read(flight)

    monkeypatch.setattr(rank, "read", late)
    request = make_request(random_prompt(np.random.default_rng(6), 70), 4, ignore_eos=True)
    engine.submit(request, lambda event: seen.put((event, engine.stats())))
    waited = 0.0
    while not isinstance((told := seen.get())[0], Failed | Finished):
        busy_s, wait_s = (told[1][name] - before[name] for name in ("busy_s", "wait_s"))
        assert busy_s >= wait_s >= waited
        waited = wait_s
    assert isinstance(told[0], Finished)
    assert waited >= 0.05


def test_work_between_rounds_may_raise(engine):
    def work(cache, backend):
        raise ZeroDivisionError(backend.name)

    with pytest.raises(ZeroDivisionError, match=engine.info.backend):
        engine.between_rounds(work)
    assert engine.between_rounds(lambda cache, backend: cache.num_pages) > 0


def test_what_does_not_fit_is_refused_with_both_numbers(engine):
    with pytest.raises(ConfigError, match=r"4090 tokens and 6 .* 4096; lower context"):
        histories(engine, 1, 4090, 6)
    with pytest.raises(ConfigError, match=r"4 requests of 4000 .* 16128 .* room for 12288"):
        histories(engine, 4, 4000, 6)


def test_work_for_an_engine_that_has_failed_is_refused(monkeypatch):
    with open_demo(max_context=512, max_concurrency=1) as broken:

        def fault(batch):
            raise RuntimeError("no device")

        monkeypatch.setattr(broken._rank.backend, "embed", fault)
        with pytest.raises(UnavailableError, match="no device"):
            measure_prefill(broken, 70)
        with pytest.raises(UnavailableError, match="no device"):
            broken.between_rounds(lambda cache, backend: None)
