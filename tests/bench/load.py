"""Eight lanes under load with cancels: right answers, honest counters, and nothing taken.

python -m tests.bench.load PACKAGE [--seconds 300] [--context N] [--tokens N] [--out [PATH]]

Requests of every kind that selects its own kernels or graphs come as fast as lanes are free; half
of them are greedy and must answer as they did alone. Some of the others are cancelled. Meanwhile no
memory is taken, no kernel loaded and no graph captured.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.config import EngineConfig
from ginfer.cuda.runtime.driver import TAKEN
from ginfer.engine.engine import Engine
from ginfer.engine.request import Failed, Finished, FinishReason
from ginfer.errors import OverloadedError
from tests.bench.summary import SUMMARY, record
from tests.engines import complete, make_request, random_prompt, submit

if TYPE_CHECKING:
    from ginfer.prompt import PreparedPrompt
    from tests.engines import Run

LENGTHS = (5, 64, 200, 700, 1500, 3000)
CHECKED = 30  # tokens of an answer that must be the same
LIMIT_S = 120.0  # for what still runs at the end


def sampling(rng: random.Random) -> dict[str, Any]:
    """Of every kind that selects its own kernels or graphs."""
    seeded = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": rng.randrange(99)}
    penalised = {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": ((7, 2.0),)}
    return rng.choice(
        ({"temperature": 0.0}, seeded, {"temperature": 0.0, "logprobs": 4}, penalised)
    )


class Load:
    """Requests on their way, and what came of those that ended: `ends`, tokens, wrong answers."""

    def __init__(self, engine: Engine, prompts: list[PreparedPrompt], seed: int = 7) -> None:
        self.ends: Counter[FinishReason] = Counter()
        self.tokens = self.checked = 0
        self.wrong: list[int] = []
        self._engine, self._prompts, self._rng = engine, prompts, random.Random(seed)
        self._alone = [complete(engine, p, CHECKED, ignore_eos=True).ids for p in prompts]
        self._live: list[tuple[int | None, Run]] = []

    def run(self, seconds: float) -> None:
        """Keep lanes and queue full for so long, and wait for what is on its way. A request that
        fails raises its error."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end or self._live:
            assert now < end + LIMIT_S, f"{len(self._live)} requests do not end"
            if now < end:
                self._send()
            self._live = [(which, run) for which, run in self._live if not self._ended(which, run)]

    def _send(self) -> None:
        rng = self._rng
        which = rng.randrange(len(self._prompts))
        checked = rng.random() < 0.5
        how = {"temperature": 0.0} if checked else sampling(rng)
        tokens = CHECKED if checked else rng.randrange(1, 300)
        request = make_request(self._prompts[which], tokens, sampling=how, ignore_eos=True)
        try:
            self._live.append((which if checked else None, submit(self._engine, request)))
        except OverloadedError:
            time.sleep(0.002)

    def _ended(self, which: int | None, run: Run) -> bool:
        if which is None and self._rng.random() < 0.002:
            self._engine.cancel(run.request.request_id)
        last = run.events[-1] if run.events else None
        if isinstance(last, Failed):
            raise last.error
        if not isinstance(last, Finished):
            return False
        self.ends[last.reason] += 1
        self.tokens += last.usage.completion_tokens
        if which is not None:
            self.checked += 1
            if run.ids != self._alone[which]:
                self.wrong.append(which)
        return True


def check_load(engine: Engine, seconds: float, lengths: tuple[int, ...] = LENGTHS) -> Load:
    """Load an engine; AssertionError if anything was taken, lost or answered otherwise."""
    numbers = np.random.default_rng(7)
    load = Load(engine, [random_prompt(numbers, n) for n in lengths])
    first, taken = engine.stats(), TAKEN.copy()
    load.run(seconds)
    grown = engine.stats()["completion_tokens"] - first["completion_tokens"]
    assert grown == load.tokens, f"{grown} tokens by the counter, {load.tokens} came"
    assert not load.wrong, f"{len(load.wrong)} of {load.checked} answers differ from those alone"
    assert taken == TAKEN, f"taken under load: {TAKEN - taken}"
    assert load.ends[FinishReason.CANCELLED] > 5, load.ends
    assert load.ends[FinishReason.OUTPUT_LIMIT] > 20, load.ends
    engine.check_integrity()
    return load


def main() -> None:
    """Load, check, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=131_072, help="of K/V")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--device", default="", help="the name to record")
    parser.add_argument("--commit", default="", help="the commit to record")
    options = parser.parse_args()
    config = EngineConfig(
        package=options.package,
        backend="cuda",
        max_context=options.context,
        kv_capacity=options.tokens,
        max_pending=8,
    )
    with Engine.open(config) as engine:
        load = check_load(engine, options.seconds)
        stats = engine.stats()
    ends = {reason.name.lower(): n for reason, n in load.ends.items()}
    print(f"{ends}; {load.tokens} tokens; {load.checked} answers as alone")
    print({name: n for name, n in stats.items() if name in ("spec_rounds", "drafted", "accepted")})
    if options.out:
        figures = {
            "load.seconds": (options.seconds, "s"),
            "load.requests": (sum(load.ends.values()), "requests"),
            "load.tokens": (load.tokens, "tokens"),
        }
        record(figures, options.device, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
