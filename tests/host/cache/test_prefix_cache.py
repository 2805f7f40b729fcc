"""PrefixCache against a world that knows the content of every place."""

from __future__ import annotations

import pytest

from ginfer.cache import snapshot
from ginfer.cache.geometry import CacheGeometry
from tests.host.cache.world import Conversations, World

GEOMETRIES = {
    "large-pages": {"unit_nbytes": 4, "page_nbytes": 8, "state_nbytes": 12, "num_units": 120},
    "unit-pages": {"unit_nbytes": 4, "page_nbytes": 4, "state_nbytes": 8, "num_units": 60},
    "small-pages": {"unit_nbytes": 8, "page_nbytes": 2, "state_nbytes": 10, "num_units": 20},
}


def geometry(name, *, park=0):
    return CacheGeometry(**GEOMETRIES[name], num_slots=4, park_nbytes=park)


def random_walk(world: World, num_steps: int) -> None:
    """Steps of a server under load: admissions, chunks, rounds, ends, cancels, faults."""
    rng, talk = world.random, Conversations(world.random)
    turns_of, answers = {}, {}
    for step in range(num_steps):
        dice = rng.random()
        if not world.runs or (dice < 0.2 and len(world.runs) < 5):
            prompt, answer = talk.next()
            run = world.admit(prompt, min(len(answer), rng.choice((1, 10, 70, 200))))
            if run is not None:
                turns_of[run], answers[run] = talk.last, answer
                continue
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
