"""Which snapshot goes first."""

from __future__ import annotations

import numpy as np

from ginfer.cache import snapshot
from ginfer.cache.geometry import CacheGeometry
from ginfer.prompt import PreparedPrompt
from tests.host.cache.world import World


def world(num_units, **facts):
    return World(
        CacheGeometry(
            unit_nbytes=1, page_nbytes=1, state_nbytes=8, num_units=num_units, num_slots=2, **facts
        )
    )


def test_side_requests_do_not_evict_a_big_conversation():
    w = world(74)
    w.serve(range(2000), turns=(1000, 1990), answer=range(2000, 2300))
    for title in range(30):
        w.serve([5000 + title] * 150, turns=(5, 145), answer=range(30))
    run = w.serve(range(2400), turns=(1000, 1990, 2300, 2390))
    assert run.sequence.cached_tokens == 2300


def test_forgotten_conversation_goes_in_the_end():
    w = world(70)
    w.serve(range(2000), turns=(1000, 1990), answer=range(2000, 2100))
    for title in range(400):
        w.serve([5000 + title] * 640, turns=(5, 635), answer=range(30))
    assert w.serve(range(2200), turns=(1000, 1990, 2100)).sequence.cached_tokens == 0


def test_shared_root_outlives_its_conversations():
    w = world(90)
    for n in range(20):
        ids = [*range(1000), *[2000 + n] * 500]
        w.serve(ids, turns=(1000, 1490), answer=range(3000, 3200))
    run = w.serve([*range(1000), 7, 7, 7], turns=(1000,))
    assert run.sequence.cached_tokens == 960


def test_intervals_go_before_turns(monkeypatch):
    monkeypatch.setattr(snapshot, "INTERVAL_TOKENS", 512)
    w = world(60)
    run = w.serve(range(1100), turns=(64, 1090), answer=range(30))
    wanted = list(run.sequence.points.values())
    kept = [s.kind for s in w.cache._memory.resident]
    assert wanted == ["system", *["interval"] * 4, "turn"]
    assert sorted(kept) == ["interval"] * 2 + ["response", "system", "turn"]


def test_passed_snapshots_go_before_the_frontier():
    w = world(68)
    ids, turns = list(range(300)), [64]
    for turn in range(8):
        turns.append(len(ids) - 5)
        answer = range(1000 * turn, 1000 * turn + 40)
        run = w.serve(ids, turns=turns, answer=answer)
        assert turn == 0 or run.sequence.path == "append"
        ids += [*answer, *range(1000 * turn + 500, 1000 * turn + 560)]
        turns.append(len(ids) - 60)
    assert w.cache.gauges()["evicted_snapshots"] > 0
    assert w.cache.match(prompt([*range(64), 7, 7])).num_tokens == 64


def test_what_a_request_waits_for_goes_after_what_was_used_last():
    kept = []
    for waits in (False, True):
        w = world(70)
        w.serve(range(1000), turns=(5, 990), answer=range(1000, 1100))
        again = prompt(range(1200))
        if waits:
            w.cache.expect(again)
        for other in range(2):
            w.serve([5000 + other] * 1500, turns=(5, 1490), answer=range(100))
        kept.append(w.cache.match(again).num_tokens)
    assert kept == [0, 1100]
    run = w.admit(again, 1)
    assert run.sequence.cached_tokens == 1100
    w.prefill(run)
    w.release(run)
    for other in range(3):
        w.serve([6000 + other] * 1500, turns=(5, 1490), answer=range(100))
    assert w.cache.match(again).num_tokens == 0


def test_what_a_dismissed_request_waited_for_goes_like_all_else():
    w = world(70)
    w.serve(range(1000), turns=(5, 990), answer=range(1000, 1100))
    again = prompt(range(1200))
    w.cache.expect(again)
    w.cache.dismiss(again)
    w.cache.dismiss(again)
    for other in range(2):
        w.serve([5000 + other] * 1500, turns=(5, 1490), answer=range(100))
    assert w.cache.match(again).num_tokens == 0


def test_loss_of_a_neighbour_makes_a_snapshot_dear():
    w = world(200)
    w.serve(range(700), turns=(5, 645), answer=range(60))
    w.serve([7] * 200, turns=(5,), answer=range(60))
    memory = w.cache._memory
    turn, response, other = memory.resident
    assert memory.resident.cheapest()[1] is response
    memory.discard(turn)
    assert memory.resident.cheapest()[1] is other


def test_parked_snapshots_make_room_in_the_same_order():
    w = world(40, park_nbytes=45)
    w.serve(range(1200), turns=(5,), answer=range(2000, 2050))
    for n in range(6):
        w.serve([5000 + n] * 700, turns=(5,), answer=range(30))
    assert w.cache.gauges()["parked_snapshots"] > 0
    assert w.cache.match(prompt([*range(1200), *range(2000, 2060)])).num_tokens == 1250


def prompt(ids):
    return PreparedPrompt(token_ids=np.array(ids, np.int32))
