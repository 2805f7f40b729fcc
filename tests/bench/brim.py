"""An engine filled beyond the brim: more histories than its K/V holds, for as long as one likes.

python -m tests.bench.brim PACKAGE [--seconds 300] [--tokens N] [--context N] [--backend cuda|cpu]

Talkers go on with conversations of their own, begin new ones, or leave a response early, so that
lanes and queue are always full and all their histories are several times what K/V holds. At the end
no request is lost: each was answered in full or cancelled by its talker; memory is intact, and the
ledger equals the device memory that is gone (CUDA).
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.config import EngineConfig
from ginfer.cuda.runtime.device import Device
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, FinishReason, Request, SamplingParams
from ginfer.prompt import PreparedPrompt
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from ginfer.engine.request import Event

LANES, TALKERS = 8, 14  # the rest waits
LIMIT_S = 120.0  # without an event of anyone
SYSTEM = 640  # tokens that all conversations begin with


class Talker:
    """One client: its conversation, and what came of its requests."""

    def __init__(self, engine: Engine, idx: int, context: int, outcomes: Counter[str]) -> None:
        self._engine, self._idx, self._context = engine, idx, context
        self._rng = random.Random(idx)
        self._outcomes, self._count = outcomes, 0
        self._ids: list[int] = []
        self._wanted = self._leaves_after = 0
        self._drawn: list[int] = []

    def ask(self, events: SimpleQueue[tuple[Talker, Event]]) -> None:
        """Send the next request."""
        rng = self._rng
        self._ids += self._drawn
        if not self._ids or len(self._ids) > 0.6 * self._context or rng.random() < 0.1:
            self._ids = list(range(100, 100 + SYSTEM))
        self._ids += [rng.randrange(10, 4000) for _ in range(rng.randrange(50, self._context // 5))]
        self._wanted, self._drawn = rng.randrange(8, 96), []
        self._leaves_after = rng.randrange(1, 8) if rng.random() < 0.15 else self._wanted + 1
        self._count += 1
        self._outcomes["sent"] += 1
        request = Request(
            request_id=self._name,
            prompt=PreparedPrompt(token_ids=np.array(self._ids, np.int32)),
            max_tokens=self._wanted,
            sampling=SamplingParams(temperature=0.0),
            raw=True,
            ignore_eos=True,
        )
        self._engine.submit(request, lambda event: events.put((self, event)))

    @property
    def _name(self) -> str:
        return f"brim-{self._idx}-{self._count}"

    def hear(self, event: Event) -> bool:
        """Take an event; whether it was the last of its request."""
        if isinstance(event, Delta):
            before, self._drawn = len(self._drawn), [*self._drawn, *event.token_ids]
            if before < self._leaves_after <= len(self._drawn):
                self._engine.cancel(self._name)
        elif isinstance(event, Failed):
            self._outcomes[f"failed: {event.error.code}"] += 1
        elif isinstance(event, Finished):
            left = event.reason is FinishReason.CANCELLED and self._leaves_after <= self._wanted
            whole = len(self._drawn) == self._wanted
            self._outcomes["whole" if whole else "left" if left else f"cut: {event.reason}"] += 1
        return isinstance(event, Failed | Finished)


def fill(engine: Engine, context: int, seconds: float) -> Counter[str]:
    """Have talkers talk for so long; what came of their requests, by outcome."""
    outcomes: Counter[str] = Counter()
    events: SimpleQueue[tuple[Talker, Event]] = SimpleQueue()
    talking = [Talker(engine, i, context, outcomes) for i in range(TALKERS)]
    for talker in talking:
        talker.ask(events)
    end, running = time.monotonic() + seconds, len(talking)
    while running:
        talker, event = events.get(timeout=LIMIT_S)
        if talker.hear(event):
            if time.monotonic() < end:
                talker.ask(events)
            else:
                running -= 1
    return outcomes


def ledger_error(engine: Engine, free_before: int, free_after: int) -> float:
    """By what part the ledger differs from the device memory that is gone."""
    ledger = engine.stats()["memory"]
    counted: int = sum(nbytes for use, nbytes in ledger.items() if use != "parking")
    return abs(counted / (free_before - free_after) - 1)


def figures_of(
    outcomes: Counter[str], stats: dict[str, Any], seconds: float, tokens: int
) -> dict[str, tuple[float, str]]:
    """What came of it, as it is recorded; `tokens` of K/V were there."""
    lost = outcomes["sent"] - outcomes["whole"] - outcomes["left"]
    written = stats["prefill_tokens"] + stats["completion_tokens"]
    return {
        "brim.seconds": (seconds, "s"),
        "brim.requests": (float(outcomes["sent"]), "requests"),
        "brim.whole": (float(outcomes["whole"]), "answered in full"),
        "brim.left": (float(outcomes["left"]), "left by their talkers"),
        "brim.lost": (float(lost), "requests"),
        "brim.written": (written / tokens, "x the K/V that is there"),
        "brim.reused": (stats["cached_tokens"] / stats["prompt_tokens"], "of prompt tokens"),
        "brim.evicted": (float(stats["evicted_snapshots"]), "snapshots"),
    }


def main() -> None:
    """Fill, check, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=98_304, help="of K/V")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--device", default="", help="the name to record")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    config = EngineConfig(
        package=options.package,
        backend=options.backend,
        max_context=options.context,
        kv_capacity=options.tokens,
        max_concurrency=LANES,
    )
    device = Device() if options.backend == "cuda" else None
    free = device.free_nbytes() if device else 0
    with Engine.open(config) as engine:
        outcomes = fill(engine, options.context, options.seconds)
        engine.check_integrity()
        stats = engine.stats()
        figures = figures_of(outcomes, stats, options.seconds, engine.info.kv_capacity)
        if device:
            error = ledger_error(engine, free, device.free_nbytes())
            figures["brim.ledger_error"] = (error, "of device memory")
    for name, (value, unit) in figures.items():
        print(f"{name:20} {value:10.4g} {unit}")
    print("outcomes:", dict(outcomes), "| memory is intact")
    lost = int(figures["brim.lost"][0])
    assert stats["evicted_snapshots"], "nothing was evicted; the engine was not full"
    if options.out and not lost:
        record(figures, options.device, path=options.out, commit=options.commit)
    raise SystemExit(f"{lost} requests are lost" if lost else None)


if __name__ == "__main__":
    main()
