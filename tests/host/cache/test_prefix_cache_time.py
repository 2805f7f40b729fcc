"""Host work of the cache with 10,000 segments; `-s` prints it. The bar: 300 us on an idle core.

What a look-up does is counted too: it may grow with the segments of its own path alone.
"""

from __future__ import annotations

import sys
from time import thread_time

import numpy as np

from ginfer.cache.geometry import CacheGeometry
from ginfer.cache.prefix_cache import PrefixCache
from ginfer.prompt import PreparedPrompt

BAR_S = 300e-6
SLOW = 10  # machines that run tests
SYSTEM, TURN, ANSWER = 6000, 300, 200
GEOMETRY = CacheGeometry(
    num_units=900_000, page_nbytes=4 << 20, state_nbytes=147 << 20, num_slots=1
)


class NoMoves:
    """A device of no weight."""

    def __getattr__(self, name):
        return lambda *args: None


class Talk:
    """One long conversation; its turn t is a prompt of 500 t + 6300 tokens."""

    def __init__(self, rng, num_turns):
        self.ids = rng.integers(0, 50_000, SYSTEM + num_turns * (TURN + ANSWER)).astype(np.int32)
        self.ids[:SYSTEM] = np.arange(SYSTEM)

    def prompt(self, turn):
        end = SYSTEM + turn * (TURN + ANSWER) + TURN
        return PreparedPrompt(token_ids=self.ids[:end], turn_starts=(SYSTEM, end - 5))

    def serve(self, cache, turn, times):
        prompt = self.prompt(turn)
        n, end = prompt.num_tokens, prompt.num_tokens + ANSWER
        sequence = timed(times, cache.acquire, prompt, end // 64 + 1)
        start = sequence.cached_tokens
        while start < n:
            start = sequence.chunk_end(start, min((start + 1024) // 64 * 64, n))
            timed(times, cache.grow, sequence, start)
            timed(times, cache.commit, sequence, start)
        timed(times, cache.grow, sequence, end)
        timed(times, cache.release, sequence, self.ids[:end])


def timed(times, method, *args):
    began = thread_time()
    result = method(*args)
    times.setdefault(method.__name__, []).append(thread_time() - began)
    return result


def calls_of(work):
    """Python and C functions that `work` calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def look_up_calls(cache, talk, turn):
    prompt = talk.prompt(turn)
    data = prompt.token_ids.tobytes()
    return calls_of(lambda: cache._memory.tree.match(data, prompt.num_tokens - 1))


def test_host_work_with_ten_thousand_segments():
    rng = np.random.default_rng(5)
    cache = PrefixCache(GEOMETRY, NoMoves())
    times: dict[str, list[float]] = {}
    for _ in range(490):
        talk = Talk(rng, 10)
        for turn in range(10):
            talk.serve(cache, turn, times)
    deep = Talk(rng, 200)
    times.clear()
    for turn in range(200):
        timed(times, cache.match, deep.prompt(turn))
        deep.serve(cache, turn, times)
    assert cache.gauges()["segments"] >= 10_000
    assert cache.match(deep.prompt(399)).num_tokens > 100_000
    for name, spent in times.items():
        early, last = np.median(spent[:100]), np.median(spent[-20:])
        print(f"{name}: {early * 1e6:.0f} us early, {last * 1e6:.0f} us 400 segments deep")
        assert early < SLOW * BAR_S
    assert np.median(times["match"][-20:]) < SLOW * BAR_S
    alone = PrefixCache(GEOMETRY, NoMoves())
    for turn in range(200):
        deep.serve(alone, turn, {})
    assert alone.gauges()["segments"] < 500
    for turn in (50, 199):  # the root has one child there and many here, which is a call more
        among = look_up_calls(cache, deep, turn)
        assert among <= look_up_calls(alone, deep, turn) + 4
        assert among <= 2 * 2 * (turn + 1) + 50  # two segments a turn
