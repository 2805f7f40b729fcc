"""Faults of the backend: a bad value costs its request, a lost backend the running requests."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from ginfer.engine.request import Delta, Failed
from ginfer.errors import InternalError, UnavailableError
from tests.engines import complete, make_request, on_the_cpu, open_demo, random_prompt, submit


@pytest.fixture
def engine():
    with open_demo(max_context=512, max_concurrency=3) as engine:
        yield engine


@on_the_cpu
def test_a_logit_that_is_not_finite_fails_its_row_alone(engine, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, 50) for _ in range(2)]
    alone = complete(engine, prompts[0], 20, ignore_eos=True).ids
    select = engine._rank.backend.select

    def poisoned(hidden, batch):
        selection = select(hidden, batch)
        finite = selection.finite.copy()
        finite[(batch.selection.rows == 1) & (batch.selection.positions == 55)] = False
        return dataclasses.replace(selection, finite=finite)

    monkeypatch.setattr(engine._rank.backend, "select", poisoned)
    good = submit(engine, make_request(prompts[0], 20, ignore_eos=True))
    bad = submit(engine, make_request(prompts[1], 20, ignore_eos=True))
    with pytest.raises(InternalError) as caught:
        bad.wait()
    assert caught.value.code == "nonfinite_logits"
    assert len(bad.ids) == 5
    assert good.wait().ids == alone
    engine.check_integrity()
    stats = engine.stats()
    assert stats["failed"] == {"nonfinite_logits": 1}
    again = complete(engine, prompts[1], 1)
    assert again.started.cached_tokens == 0, "a history with a bad value must not be reused"


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_decoder_that_cannot_end_costs_its_request_alone(engine, monkeypatch, where):
    rng = np.random.default_rng(2)
    count = 2 if where == "running" else 4  # in three lanes
    requests = [make_request(random_prompt(rng, 50), 400, ignore_eos=True) for _ in range(count)]
    runs = [submit(engine, request) for request in requests]
    while not all(run.ids for run in runs[:3]):
        time.sleep(0.01)

    def fault(self):
        raise RuntimeError("no end")

    with monkeypatch.context() as patch:
        patch.setattr("ginfer.frontend.channels.QwenStreamDecoder.finish", fault)
        engine.cancel(requests[-1].request_id)
        with pytest.raises(InternalError, match="no end"):
            runs[-1].wait()
    for run in runs[:-1]:
        engine.cancel(run.request.request_id)
        run.wait()
    engine.check_integrity()
    assert engine.failed is None


def test_a_lost_backend_fails_what_runs_and_refuses_the_rest(engine, monkeypatch):
    rng = np.random.default_rng(1)
    lost = []
    engine.on_failure = lost.append

    def fault(hidden, batch):
        raise RuntimeError("device lost")

    def pull_the_plug(run, event):
        if isinstance(event, Delta) and len(run.ids) == 3:
            monkeypatch.setattr(engine._rank.backend, "select", fault)

    runs = []
    for i in range(5):
        request = make_request(random_prompt(rng, 50), 100, ignore_eos=True)
        runs.append(submit(engine, request, pull_the_plug if i == 0 else None))
    for run in runs:
        with pytest.raises(UnavailableError, match="device lost"):
            run.wait()
        assert isinstance(run.events[-1], Failed)
    assert engine.failed is not None
    assert lost == [engine.failed]
    with pytest.raises(UnavailableError, match="device lost"):
        complete(engine, random_prompt(rng, 10))
    assert engine.stats()["failed"] == {"service_unavailable": 5}
    assert engine.drain(1)
