"""Memory filled beyond the brim: every request is answered in full, and nothing leaks."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from ginfer.engine import memory
from ginfer.engine.request import FinishReason
from tests.engines import ids_prompt, make_request, open_demo, submit


@pytest.mark.parametrize(
    ("least", "seconds"), [(40, 0.0), pytest.param(40, 300.0, marks=pytest.mark.long)]
)
def test_no_request_is_lost_beyond_the_brim(monkeypatch, least, seconds):
    """Eight lanes and sixteen places in the queue, all taken, over memory for one long request."""
    monkeypatch.setattr(memory, "SNAPSHOTS_PER_LANE", 1)
    rng, nrng = random.Random(7), np.random.default_rng(7)
    options = {"max_context": 1024, "kv_capacity": 1024, "max_pending": 16, "park_mib": 48}
    systems = [nrng.integers(0, 4096, n) for n in (130, 200)]
    conversations = [list(rng.choice(systems)) for _ in range(12)]
    running, count = [], 0

    def ask(engine):
        history = rng.choice(conversations)
        if len(history) > 700:
            history[:] = rng.choice(systems)
        history += nrng.integers(0, 4096, rng.choice((3, 30, 90))).tolist()
        room = 1024 - len(history)
        tokens = min(rng.choice((1, 6, 6, 16, 60)), room)
        prompt = ids_prompt(history, turn_starts=(len(history) - 1,))
        running.append(
            (history, tokens, submit(engine, make_request(prompt, tokens, ignore_eos=True)))
        )

    with open_demo(**options) as engine:
        end = time.monotonic() + seconds
        more = True
        while running or more:
            more = count < least or time.monotonic() < end
            while more and len(running) < 24:
                ask(engine)
            history, tokens, run = running.pop(0)
            run.wait(timeout_s=600)
            assert run.finished.reason is FinishReason.OUTPUT_LIMIT
            assert len(run.ids) == tokens
            if rng.random() < 0.5:
                history += run.ids
            count += 1
            if count % 16 == 0:
                engine.check_integrity()
        engine.check_integrity()
        stats = engine.stats()
    assert stats["finished"] == {"output_limit": count}
    assert not stats["failed"]
    assert stats["promised_pages"] == stats["running"] == 0
    assert stats["cached_tokens"] > 0
    assert min(stats["passed"], stats["evicted_snapshots"]) > 0, stats
