"""The exposition parses, and says what the counters say."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from appliance.metrics import HttpStats, render_engine
from ginfer.engine.stats import Stats


def _families(lines: list[str]) -> dict[str, Any]:
    return {f.name: f for f in text_string_to_metric_families("\n".join(lines) + "\n")}


def _samples(family: Any) -> dict[str, float]:
    return {f"{s.name}{sorted(s.labels.items())}": s.value for s in family.samples}


def test_every_counter_of_the_engine_is_exposed() -> None:
    stats = Stats()
    stats.prompt_tokens = 7
    stats.finished["stop_token"] += 2
    stats.failed["invalid_value"] += 1
    for seconds in (0.0005, 0.02, 1000.0):
        stats.queue_s.observe(seconds)
    families = _families(
        list(render_engine(stats.snapshot() | {"running": 3, "memory": {"kv": 9}}))
    )
    assert families["ginfer_engine_prompt_tokens"].type == "counter"
    assert families["ginfer_engine_prompt_tokens"].samples[0].value == 7
    assert families["ginfer_engine_running"].type == "gauge"
    assert families["ginfer_engine_forward_seconds"].type == "counter"
    assert families["ginfer_engine_wait_seconds"].type == "counter"
    assert _samples(families["ginfer_engine_finished"]) == {
        "ginfer_engine_finished_total[('reason', 'stop_token')]": 2
    }
    assert _samples(families["ginfer_engine_failed"]) == {
        "ginfer_engine_failed_total[('code', 'invalid_value')]": 1
    }
    assert _samples(families["ginfer_engine_memory_bytes"]) == {
        "ginfer_engine_memory_bytes[('use', 'kv')]": 9
    }
    queue = _samples(families["ginfer_engine_queue_seconds"])
    assert queue["ginfer_engine_queue_seconds_bucket[('le', '0.001')]"] == 1
    assert queue["ginfer_engine_queue_seconds_bucket[('le', '100')]"] == 2
    assert queue["ginfer_engine_queue_seconds_bucket[('le', '+Inf')]"] == 3
    assert queue["ginfer_engine_queue_seconds_count[]"] == 3
    assert len(families) == len(stats.snapshot()) + 2


def test_drafts_are_counted_by_origin_and_accepted_ones_by_place() -> None:
    stats = Stats()
    stats.drafts(["drafter", "copy"], [7, 5], [2, 5], wide=7)
    families = _families(list(render_engine(stats.snapshot())))
    assert families["ginfer_engine_spec_rounds"].samples[0].value == 1
    for name, counts in (("drafted", (7, 5)), ("accepted", (2, 5))):
        assert families[f"ginfer_engine_{name}"].type == "counter"
        assert _samples(families[f"ginfer_engine_{name}"]) == {
            f"ginfer_engine_{name}_total[('origin', '{origin}')]": count
            for origin, count in zip(("drafter", "copy"), counts, strict=True)
        }
    places = _samples(families["ginfer_engine_accepted_at"])
    assert sorted(places.values()) == [1, 1, 1, 2, 2]
    assert sum(places.values()) == 7


def test_the_numbers_of_a_group_carry_its_name() -> None:
    stats = {"grammar": {"mask_s": 0.5, "cached": 3}, "reuse": {"append": 2}}
    families = _families(list(render_engine(stats)))
    assert families["ginfer_engine_grammar_mask_seconds"].samples[0].value == 0.5
    assert families["ginfer_engine_grammar_cached"].type == "counter"
    assert _samples(families["ginfer_engine_reuse"]) == {
        "ginfer_engine_reuse_total[('path', 'append')]": 2
    }


def test_labels_are_escaped() -> None:
    stats = HttpStats()
    stats.requests["GET", 'a"b\\c\nd', 200] += 1
    (sample,) = _families(list(stats.render()))["ginfer_http_requests"].samples
    assert sample.labels["route"] == 'a"b\\c\nd'
