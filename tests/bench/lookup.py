"""Host work of the prefix cache with 10,000 segments: what a request and a round ask of it.

python -m tests.bench.lookup [--write]

490 conversations of ten turns over one system prompt, then one of 200 turns (400 segments and 106K
tokens deep), whose calls are timed in the thread's own time. A decode round calls `grow` alone, for
a row that enters a page, every 64 tokens of it.
"""

from __future__ import annotations

import argparse

import numpy as np

from ginfer.cache.prefix_cache import PrefixCache
from tests.bench.cpu_engine import device
from tests.bench.summary import record
from tests.host.cache.test_prefix_cache_time import (
    GEOMETRY,
    NoMoves,
    Talk,
    look_up_calls,
    timed,
)

TALKS, TURNS, DEEP_TURNS = 490, 10, 200
LAST = 20  # turns of the deep conversation that count as its end


def measure() -> dict[str, tuple[float, str]]:
    """Medians by name: of the first half of the deep conversation, and of its end."""
    rng = np.random.default_rng(5)
    cache, times = PrefixCache(GEOMETRY, NoMoves()), dict[str, list[float]]()
    for _ in range(TALKS):
        talk = Talk(rng, TURNS)
        for turn in range(TURNS):
            talk.serve(cache, turn, times)
    deep = Talk(rng, DEEP_TURNS)
    times.clear()
    for turn in range(DEEP_TURNS):
        timed(times, cache.match, deep.prompt(turn))
        deep.serve(cache, turn, times)
    segments = cache.gauges()["segments"]
    figures = {"cache.10k.segments": (float(segments), "segments")}
    for name, spent in times.items():
        early, end = np.median(spent[: len(spent) // 2]), np.median(spent[-LAST:])
        figures[f"cache.10k.{name}_us"] = (float(early) * 1e6, "us")
        figures[f"cache.10k.deep.{name}_us"] = (float(end) * 1e6, "us")
    calls = look_up_calls(cache, deep, DEEP_TURNS - 1)
    return {**figures, "cache.10k.deep.match_calls": (float(calls), "calls")}


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = measure()
    for name, (value, unit) in figures.items():
        print(f"{name:28} {value:10.1f} {unit}")
    if options.write:
        record(figures, device())


if __name__ == "__main__":
    main()
