"""PrefixCache against a world that knows the content of every place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ginfer.cache import snapshot
from ginfer.cache.geometry import CacheGeometry
from ginfer.cache.prefix_cache import PrefixCache
from ginfer.cache.segment import MadeBy
from ginfer.prompt import PreparedPrompt
from tests.host.cache.world import Conversations, World

GEOMETRIES = {
    "large-pages": {"unit_nbytes": 4, "page_nbytes": 8, "state_nbytes": 12, "num_units": 120},
    "unit-pages": {"unit_nbytes": 4, "page_nbytes": 4, "state_nbytes": 8, "num_units": 60},
    "small-pages": {"unit_nbytes": 8, "page_nbytes": 2, "state_nbytes": 10, "num_units": 20},
}
ROOMY = {
    "unit_nbytes": 1,
    "page_nbytes": 1,
    "state_nbytes": 2,
    "num_units": 200,
    "num_slots": 4,
}


def geometry(name, *, park=0):
    return CacheGeometry(**GEOMETRIES[name], num_slots=4, park_nbytes=park)


def random_walk(world: World, num_steps: int) -> None:
    """Steps of a server under load: a queue, admissions, chunks, rounds, ends, cancels, faults."""
    rng, talk = world.random, Conversations(world.random)
    turns_of, answers, waiting = {}, {}, []
    for step in range(num_steps):
        dice = rng.random()
        if not world.runs or (dice < 0.2 and len(world.runs) < 5):
            waiting.append((*talk.next(), talk.last))
            world.cache.expect(waiting[-1][0])
            prompt, answer, turns = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.2 and len(waiting) < 4:
                waiting.append((prompt, answer, turns))
                continue
            run = world.admit(prompt, min(len(answer), rng.choice((1, 10, 70, 200))))
            if run is not None:
                turns_of[run], answers[run] = turns, answer
                continue
            world.cache.dismiss(prompt)
        if world.runs:
            run = rng.choice(world.runs)
            done = run.n == run.stop - 1
            if done or dice > 0.97:
                if run.n > run.num_prompt:
                    talk.answered(turns_of[run], run, answers[run])
                world.release(run, sound=done or dice < 0.995)
                del turns_of[run], answers[run]
            elif run.n < run.num_prompt:
                world.prefill(run)
            else:
                said = run.n - run.num_prompt
                count = min(rng.choice((1, 7, 64, 90)), run.stop - 1 - run.n)
                world.decode(run, count, answers[run][said:])
        if dice > 0.9999:
            world.cache.clear()
        if step < 2000 or step % 4 == 0:
            world.cache.check_integrity()
        if step % 500 == 0:
            for run in world.runs:
                world.verify(run)
            world.forget()


@pytest.mark.parametrize("park", [0, 120])
@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_random_walk(name, park, monkeypatch):
    monkeypatch.setattr(snapshot, "INTERVAL_TOKENS", 256)
    world = World(geometry(name, park=park), seed=1)
    random_walk(world, 50_000 // 6)
    assert world.cache.gauges()["evicted_snapshots"] > 100
    assert world.reused > 0.05 * world.admitted
    assert bool(world.cache.gauges()["unparked_pages"]) == bool(park)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_two_million_random_steps(seed, monkeypatch):
    monkeypatch.setattr(snapshot, "INTERVAL_TOKENS", 256)
    rng = random.Random(seed)
    for part in range(20):
        facts = dict(rng.choice(list(GEOMETRIES.values())))
        facts["num_units"] = int(facts["num_units"] * rng.choice((0.8, 1, 1.5, 3)))
        facts["state_nbytes"] = rng.choice((4, 10, 30))
        facts["num_slots"] = rng.choice((1, 2, 4, 5))
        facts["park_nbytes"] = rng.choice((0, 20, 60, 200, 1000))
        world = World(CacheGeometry(**facts), seed=part, chunk=rng.choice((64, 192, 1024)))
        random_walk(world, 5000)


def roomy(**facts):
    return World(CacheGeometry(**{**ROOMY, **facts}))


def prompt(ids, turns=()):
    return PreparedPrompt(token_ids=np.array(ids, np.int32), turn_starts=tuple(turns))


def test_response_end_is_an_append_with_its_partial_page():
    world = roomy()
    world.serve(range(100), answer=range(100, 150))
    hit = world.cache.match(prompt(range(200)))
    assert (hit.num_tokens, hit.path) == (150, "append")
    assert world.serve(range(200)).sequence.cached_tokens == 150
    assert world.memory.num_copies == 1


def test_a_look_up_sees_what_has_changed_since_the_last_one():
    world, asked = roomy(), prompt(range(300), (290,))
    assert world.cache.match(asked).num_tokens == world.cache.known_tokens(asked) == 0
    world.serve(range(100), answer=range(100, 150))
    assert (world.cache.match(asked).num_tokens, world.cache.known_tokens(asked)) == (150, 128)
    run = world.admit(asked, 5)
    world.prefill(run)  # shares its own pages and takes a snapshot
    assert world.cache.match(asked).num_tokens == 256
    world.release(run)
    world.cache.clear()
    assert world.cache.match(asked).num_tokens == world.cache.known_tokens(asked) == 0


def test_one_token_is_left_to_compute():
    world = roomy()
    world.serve(range(100), turns=(5,), answer=range(100, 150))
    assert world.cache.match(prompt(range(150))).num_tokens == 0
    assert world.cache.match(prompt(range(151))).num_tokens == 150
    assert world.cache.match(prompt([*range(149), 7, 8])).num_tokens == 0


def test_rewritten_history_enters_at_its_last_equal_snapshot():
    world = roomy()
    world.serve(range(300), turns=(130, 200, 295), answer=range(300, 400))
    for ids, expected in (
        ([*range(300), *range(350, 500)], (256, "snapshot")),  # reasoning dropped: the frontier
        ([*range(200), 7, 7, 7], (128, "snapshot")),  # another first turn: end of system
        ([*range(100), 7, 7, 7], (0, "none")),
    ):
        hit = world.cache.match(prompt(ids))
        assert (hit.num_tokens, hit.path) == expected


def test_equal_depth_prefers_what_prefill_made():
    world = roomy()
    world.serve(range(158), turns=(130,))
    world.serve(range(100), turns=(5,), answer=range(100, 128))
    assert world.cache.gauges()["snapshots"] == 2
    run = world.serve(range(170), keep=False)
    assert run.sequence.cached_tokens == 128
    assert run.sequence.made_by is MadeBy.PREFILL


def test_equal_tokens_computed_otherwise_are_not_exchanged():
    world = roomy()
    world.serve(range(100), answer=range(100, 228))
    world.serve(range(100), answer=range(100, 128))
    run = world.serve(range(210), turns=(195,), answer=range(210, 228))  # verifies its pages
    assert run.sequence.cached_tokens == 128
    decoded, mixed = world.cache.match(prompt(range(229))), world.cache.match(prompt(range(200)))
    assert (decoded.num_tokens, mixed.num_tokens) == (228, 192)


def test_prefill_on_a_page_border_continues_as_any_chunk_does():
    world = roomy()
    world.serve(range(100), answer=range(100, 110))
    first = world.serve(range(210), turns=(195,))
    again = world.serve([*range(195), 7, 7])
    assert again.sequence.cached_tokens == 192
    assert again.sequence.seams == first.sequence.seams


def test_cancelled_prefill_leaves_its_chunks():
    world = roomy()
    run = world.admit(prompt(range(1000)), 5)
    world.prefill(run)
    world.release(run)
    assert world.cache.match(prompt(range(900))).num_tokens == world.chunk


def test_prefill_made_frontier_inside_a_block_is_not_kept():
    world = roomy()
    world.serve(range(70))
    assert world.cache.gauges()["snapshots"] == 1
    assert world.cache.match(prompt(range(100))).num_tokens == 64


def test_equal_prompts_side_by_side_share_pages():
    world = roomy()
    runs = [world.admit(prompt(range(400), (321,)), 5) for _ in range(2)]
    promised = world.cache.promised_pages
    for run in (*runs, *runs):
        world.prefill(run)
    assert runs[0].sequence.pages[:5] == runs[1].sequence.pages[:5]
    assert world.cache.promised_pages == promised - 5
    assert world.cache.freed_by([runs[0].sequence]) == 2
    assert world.cache.freed_by(run.sequence for run in runs) == promised - 5
    world.cache.check_integrity()


def test_unsound_history_is_never_reused():
    world = roomy()
    world.serve(range(200), turns=(70, 130))
    run = world.serve(range(500), turns=(70, 130, 450), answer=range(20), keep=False)
    world.release(run, sound=False)
    assert world.cache.match(prompt(range(500))).num_tokens == 128
    world.cache.check_integrity()


def test_explicit_positions_and_no_retention_share_nothing():
    world = roomy()
    ids = np.arange(200, dtype=np.int32)
    media = PreparedPrompt(token_ids=ids, positions=np.zeros((3, 200), np.int32))
    world.serve(ids)
    assert world.cache.match(media).num_tokens == 0
    sequence = world.cache.acquire(media, 4)
    world.cache.grow(sequence, 200)
    world.cache.release(sequence, ids)
    assert world.cache.gauges()["snapshots"] == 1
    alone = PrefixCache(world.memory.geometry, world.memory, retain=False)
    for _ in range(2):
        sequence = alone.acquire(prompt(ids), 4)
        assert (sequence.cached_tokens, sequence.points) == (0, {})
        alone.grow(sequence, 200)
        alone.release(sequence, ids)
    assert alone.gauges()["free_pages"] == alone.num_pages


def test_refused_admission_changes_nothing():
    world = roomy(num_units=20)
    world.serve(range(100), answer=range(100, 150))
    before = world.cache.gauges()
    assert world.admit(prompt(range(200)), 20 * 64) is None
    assert world.cache.gauges() == before
    run = world.admit(prompt(range(200)), 16 * 64)
    assert world.admit(prompt(range(200)), 64) is None
    world.release(run)


def test_when_all_is_promised_the_page_of_a_hit_changes_hands():
    world = roomy(num_units=20)
    world.serve(range(100), turns=(5,), answer=range(100, 150))
    other = world.admit(prompt([9] * 70, (5,)), 15 * 64 - 70)
    world.cache.grow(other.sequence, 15 * 64)
    assert world.cache.gauges()["free_pages"] == 0
    run = world.admit(prompt(range(200)), 5 * 64 - 200)  # verifies pages and state
    assert run.sequence.cached_tokens == 150
    world.cache.check_integrity()
    world.cache.grow(run.sequence, 5 * 64)
    assert world.cache.gauges()["snapshots"] == 0
    world.cache.check_integrity()


def test_parked_conversation_returns():
    world = roomy(num_units=20, park_nbytes=20)
    world.serve(range(400), answer=range(400, 450))
    world.serve(range(1000, 2000))
    gauges = world.cache.gauges()
    assert gauges["parked_snapshots"] > 0
    run = world.serve(range(500))  # verifies pages and state
    assert run.sequence.cached_tokens == 450
    assert world.cache.gauges()["unparked_pages"] > 0


def test_clear_keeps_what_runs():
    world = roomy()
    world.serve(range(200), answer=range(200, 220))
    run = world.admit(prompt(range(300)), 5)
    world.cache.clear()
    world.cache.check_integrity()
    world.verify(run)
    assert world.cache.gauges()["snapshots"] == 0
    world.release(run)
    assert world.cache.gauges()["segments"] == 0 or world.cache.gauges()["snapshots"]
