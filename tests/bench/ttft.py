"""Time to first token of a turn on a long resident history, and its parts.

python -m tests.bench.ttft PACKAGE [--history N] [--new N ...] [--backend cuda|cpu] [--out FILE]

A conversation of about `history` tokens is answered once; every measured turn adds an answer and
about `new` tokens to it. The time runs from the messages to the first token: `prepare` (template
and ids, turns before it cached), `match` (look-up on the host) and `restore` (state and pages, the
device idle behind it) by themselves, `prefill` from admission to the first token, draw included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ginfer.config import EngineConfig
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams
from ginfer.engine.scheduler import entitled_pages
from ginfer.prompt import ContentPart, Message, PromptOptions
from ginfer.spec import PAGE_TOKENS
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from ginfer.backend import Backend
    from ginfer.cache import PrefixCache
    from ginfer.engine.request import Event
    from ginfer.prompt import PreparedPrompt

HISTORY, NEW = 65_536, (500, 2000)
TURN = 1500  # tokens of a turn of the history
WORDS = (
    "the",
    "file",
    "has",
    "a",
    "test",
    "that",
    "fails",
    "when",
    "we",
    "run",
    "it",
    "with",
    "no",
)
OPTIONS = PromptOptions(thinking=False)
LIMIT_S = 120.0


class Conversation:
    """Messages of plain words, as long as asked for."""

    def __init__(self, engine: Engine, seed: int = 1) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self._per_word = len(engine.frontend.encode(self._words(1000))) / 1000
        self.messages: list[Message] = []

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(count))

    def say(self, role: str, tokens: int) -> None:
        """Add a message of about so many tokens."""
        text = self._words(max(int(tokens / self._per_word), 1))
        self.messages.append(Message(role=role, content=(ContentPart(kind="text", text=text),)))

    def prepare(self) -> PreparedPrompt:
        """The prompt of what was said so far."""
        return self._engine.frontend.prepare(self.messages, (), OPTIONS)


class Turns:
    """Requests of one engine, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._count = engine, 0

    def run(self, prompt: PreparedPrompt, tokens: int) -> tuple[float, Finished]:
        """(seconds from the submission to the first token, end) of a request."""
        self._count += 1
        request = Request(
            request_id=f"ttft-{self._count}",
            prompt=prompt,
            max_tokens=tokens,
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        events: SimpleQueue[tuple[float, Event]] = SimpleQueue()
        began, first = time.perf_counter(), 0.0
        self._engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
        while True:
            at, event = events.get(timeout=LIMIT_S)
            if isinstance(event, Delta):
                first = first or at - began
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                return first, event

    def parts(self, prompt: PreparedPrompt) -> dict[str, float]:
        """Milliseconds of the look-up and of what a hit restores, nothing else running."""

        def look(cache: PrefixCache, backend: Backend) -> dict[str, float]:
            times = [time.perf_counter()]
            found = cache.match(prompt)
            times.append(time.perf_counter())
            sequence = cache.acquire(prompt, entitled_pages(prompt.num_tokens, 1))
            assert sequence is not None, "there is no room for the turn"
            _wait(backend)
            times.append(time.perf_counter())
            cache.release(sequence, prompt.token_ids[: found.num_tokens])
            match, restore = (1e3 * (b - a) for a, b in pairwise(times))
            return {"match": match, "restore": restore}

        return self._engine.between_rounds(look)


def _wait(backend: Any) -> None:
    """Have the device do what it was told; other images have done it."""
    if backend.name == "cuda":
        backend._queue.stream.synchronize()


def measure(engine: Engine, history: int, new: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of turns of `new` tokens on a history, and of their parts."""
    turns, talk = Turns(engine), Conversation(engine)
    while (length := talk.prepare().num_tokens if talk.messages else 0) < history:
        if talk.messages:
            talk.say("assistant", 20)
        talk.say("user", min(TURN, max(history - length, 1)))
    turns.run(talk.prepare(), 8)
    resident, found = list(talk.messages), []
    for _ in range(repeats):
        talk.messages = list(resident)
        talk.say("assistant", 8)
        talk.say("user", new)
        began = time.perf_counter()
        prompt = talk.prepare()
        prepare = 1e3 * (time.perf_counter() - began)
        parts = turns.parts(prompt)
        first, end = turns.run(prompt, 4)
        assert end.usage.cached_tokens >= history - TURN, "the history is not resident"
        found.append(
            {
                "total": prepare + 1e3 * first,
                "prepare": prepare,
                **parts,
                "prefill": 1e3 * end.timings.prefill_s,
                "computed tokens": prompt.num_tokens - end.usage.cached_tokens,
            }
        )
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def figures_of(name: str, times: dict[str, float]) -> dict[str, tuple[float, str]]:
    """As they are recorded."""
    return {
        f"ttft.{name}_ms": (times["total"], "ms"),
        f"ttft.{name}.restore_ms": (times["restore"], "ms"),
        f"ttft.{name}.prepare_ms": (times["prepare"], "ms"),
    }


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--history", type=int, default=HISTORY, help="tokens")
    parser.add_argument("--new", type=int, nargs="*", default=NEW, help="tokens of a turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--device", default="", help="the name to record")
    options = parser.parse_args()
    room = options.history + sum(options.new) + 8 * TURN
    room += -room % PAGE_TOKENS
    config = EngineConfig(
        package=options.package,
        backend=options.backend,
        max_context=room,
        kv_capacity=2 * room,
        max_concurrency=1,
    )
    with Engine.open(config) as engine:
        for new in options.new:
            times = measure(engine, options.history, new, options.repeats)
            print(f"{options.history} + {new}:", {k: round(v, 2) for k, v in times.items()})
            name = f"{options.history // 1024}k_plus_{new}"
            if options.out:
                record(figures_of(name, times), options.device, path=options.out)


if __name__ == "__main__":
    main()
