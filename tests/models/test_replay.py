"""Agent traffic: what can be reused is reused, with all the memory that it needs and with half."""

from __future__ import annotations

import pytest

from ginfer.engine import memory
from ginfer.engine.engine import Engine
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from tests.bench.replay import SIZES, EngineServer, engine_config, measure_cache, replay
from tests.engines import DEMO_PACKAGE

LEAST = {"full": 0.97, "half": 0.80}


@pytest.mark.parametrize(
    ("size", "spec"),
    [("demo", QWEN_DEMO.spec), pytest.param("full", QWEN_27B.spec, marks=pytest.mark.long)],
)
def test_the_cache_alone_reuses_what_it_can(size, spec):
    figures = measure_cache(SIZES[size], spec)
    for share, least in LEAST.items():
        assert figures[f"reuse.cache.{share}"][0] >= least, share


@pytest.mark.parametrize("name", ["short", pytest.param("demo", marks=pytest.mark.long)])
@pytest.mark.parametrize(("share", "least"), [(1.0, 0.97), (0.5, 0.80)])
def test_the_engine_reuses_what_it_can(monkeypatch, name, share, least):
    size = SIZES[name]
    per_lane = int(memory.SNAPSHOTS_PER_LANE * share)
    monkeypatch.setattr(memory, "SNAPSHOTS_PER_LANE", per_lane)
    with Engine.open(engine_config(size, DEMO_PACKAGE, share, backend="cpu")) as engine:
        score = replay(size, EngineServer(engine))
        engine.check_integrity()
        stats = engine.stats()
    assert score.reuse >= least
    assert stats["cached_tokens"] == score.cached
    assert stats["prefill_tokens"] == score.prompt - score.cached
