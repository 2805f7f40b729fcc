"""Measured rounds of a running engine: decode and prefill throughput, after prompts or histories.

A history is a long context that nobody computed: pages and state of a real prompt, copied over and
over, so that values are as in service and a decode round after 256K tokens can be had in no time.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ginfer.config import CHUNK_MULTIPLE
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams
from ginfer.errors import ConfigError
from ginfer.prompt import PreparedPrompt
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ginfer.backend import Backend
    from ginfer.cache import PrefixCache
    from ginfer.engine.engine import Engine
    from ginfer.engine.request import Event

_SEED = 20_260_811  # of the prompts; their text does not matter to the speed
_SOURCE_TOKENS = 1024  # of the prompt that histories are copied from


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """Steady decode. tokens_per_s: of all rows. tokens_per_round: of a row, accepted drafts among
    them. round_s: wall time of a round. host_s: what of it the loop thread works, waiting for
    values apart."""

    tokens_per_s: float
    tokens_per_round: float
    round_s: float
    host_s: float


def measure_decode(engine: Engine, rows: int, context: int, tokens: int) -> float:
    """Tokens/s of `rows` requests together, about `tokens` each, after `context` prompt tokens;
    measured while all of them decode."""
    prompts = [_prompt(engine, i, context) for i in range(rows)]
    with decoding(engine, prompts, tokens) as figures:
        return figures.tokens_per_s


@contextmanager
def decoding(engine: Engine, prompts: list[PreparedPrompt], tokens: int) -> Iterator[DecodeFigures]:
    """Measure requests of these prompts together, about `tokens` each, while all of them decode;
    they go on until the context is left."""
    window = _Window(engine, len(prompts), tokens)
    known = engine.between_rounds(lambda cache, _: [cache.match(p).num_tokens for p in prompts])
    longest = _most_tokens([p.num_tokens - n for p, n in zip(prompts, known)], tokens)
    names = [f"decode-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        left = engine.info.max_context - prompt.num_tokens
        request = _request(name, prompt, min(longest, left))
        engine.submit(request, window)
    try:
        yield window.figures()
    finally:
        for name in names:
            engine.cancel(f"bench-{name}")
        window.wait_ends()


class _Window:
    """Sink of requests that decode together: times and counters from the first round of all of them
    until `tokens` of each have come on the mean, or until one has ended: drafts of some hold better
    than those of others."""

    def __init__(self, engine: Engine, rows: int, tokens: int) -> None:
        self._engine, self._rows, self._wanted = engine, rows, rows * tokens
        self._started: set[str] = set()
        self._num_tokens = -1  # since the window began
        self._marks: SimpleQueue[tuple[float, dict[str, Any]]] = SimpleQueue()
        self._ends: SimpleQueue[Finished | Failed] = SimpleQueue()
        self._failure: Failed | Finished | None = None

    def __call__(self, event: Event) -> None:
        """Take an event, in the loop thread."""
        if isinstance(event, Delta):
            if not event.token_ids:
                return
            if len(self._started) < self._rows:
                self._started.add(event.request_id)
            elif self._num_tokens < 0:  # the first token of the first round of all
                self._num_tokens = 0
                self._mark()
            else:
                before = self._num_tokens
                self._num_tokens += len(event.token_ids)
                if before < self._wanted <= self._num_tokens:
                    self._mark()
        elif isinstance(event, Failed | Finished):
            if isinstance(event, Failed) or self._num_tokens < self._rows:
                self._failure = self._failure or event
            self._ends.put(event)
            self._mark()  # wakes who waits for figures

    def _mark(self) -> None:
        self._marks.put((time.perf_counter(), self._engine.stats() | {"seen": self._num_tokens}))

    def figures(self) -> DecodeFigures:
        """Wait for the end of the window. Raises the error of a request that failed, ConfigError
        when one has ended before there was anything to measure."""
        (start, a), (stop, b) = self._marks.get(), self._marks.get()
        if isinstance(self._failure, Failed):
            raise self._failure.error
        if self._failure is not None:
            raise ConfigError(
                "a request ended before all of them decoded together; raise tokens or lower rows",
                param="tokens",
            )
        rounds = b["decode_rounds"] - a["decode_rounds"]
        accepted = sum(b["accepted"].values()) - sum(a["accepted"].values())
        busy, waiting = b["busy_s"] - a["busy_s"], b["wait_s"] - a["wait_s"]
        return DecodeFigures(
            tokens_per_s=b["seen"] / (stop - start),
            tokens_per_round=1 + accepted / (b["row_rounds"] - a["row_rounds"]),
            round_s=(stop - start) / rounds,
            host_s=(busy - waiting) / rounds,
        )

    def wait_ends(self) -> None:
        """Wait until all requests have ended."""
        for _ in range(self._rows):
            self._ends.get()


def measure_prefill(engine: Engine, tokens: int) -> float:
    """Prompt tokens/s of one request of `tokens`, first token included, alone in the engine."""
    request = _request("prefill", _prompt(engine, -1, tokens), 1)
    for event in engine.generate(request):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            return (tokens - event.usage.cached_tokens) / event.timings.prefill_s
    raise AssertionError("a generation ends with a terminal event")


def histories(engine: Engine, rows: int, context: int, tokens: int) -> list[PreparedPrompt]:
    """Prompts of `context` tokens each, all but the last few of which are in the prefix cache when
    this returns, with room for measuring `tokens` more of each. Raises ConfigError when there is
    none. The engine keeps prefixes."""
    _check_room(engine, rows, context, tokens)
    source = _prompt(engine, -2, min(_SOURCE_TOKENS, context))
    for event in engine.generate(_request("source", source, 1)):
        if isinstance(event, Failed):
            raise event.error
    prompts = [_prompt(engine, i, context) for i in range(rows)]

    def copy(cache: PrefixCache, backend: Backend) -> None:
        longer = np.append(source.token_ids, source.token_ids[:1])
        known = cache.acquire(PreparedPrompt(token_ids=longer), len(longer) // PAGE_TOKENS + 1)
        assert known is not None, "there is no room for a source"
        count = known.cached_tokens // PAGE_TOKENS
        assert count, "the source was not kept"
        for prompt in prompts:
            num_tokens = (context - 1) // PAGE_TOKENS * PAGE_TOKENS
            sequence = cache.acquire(prompt, num_tokens // PAGE_TOKENS)
            assert sequence is not None, "there is no room for a history"
            cache.grow(sequence, num_tokens)
            for i, page in enumerate(sequence.pages):
                backend.copy_page(known.pages[i % count], page)
            backend.copy_slots([(sequence.slot, known.slot)])
            cache.release(sequence, prompt.token_ids[:num_tokens])
        cache.release(known, longer[: known.cached_tokens])

    engine.between_rounds(copy)
    return prompts


def _check_room(engine: Engine, rows: int, context: int, tokens: int) -> None:
    """Refuse what exceeds the context or the K/V capacity."""
    most, least = _most_tokens([0] * rows, tokens), context + tokens + 1
    if least > engine.info.max_context:
        raise ConfigError(
            f"{context} tokens and {tokens} measured ones exceed the context of "
            f"{engine.info.max_context}; lower context or raise max_context",
            param="max_context",
        )
    pages = rows * div_ceil(min(context + most, engine.info.max_context), PAGE_TOKENS)
    if pages * PAGE_TOKENS > engine.info.kv_capacity:
        raise ConfigError(
            f"{rows} requests of {context} tokens need {pages * PAGE_TOKENS} tokens of K/V; there "
            f"is room for {engine.info.kv_capacity}; lower rows or raise kv_capacity",
            param="kv_capacity",
        )


def _most_tokens(uncomputed: list[int], tokens: int) -> int:
    """Tokens that a request may generate: what it does while others are prefilled, those that are
    measured, and some for who looks on afterwards."""
    return 3 * tokens + sum(n // CHUNK_MULTIPLE + 2 for n in uncomputed)


def _prompt(engine: Engine, stream: int, length: int) -> PreparedPrompt:
    """`length` fresh ids of plain text, so that nothing is reused between measurements."""
    rng = np.random.default_rng((_SEED, stream + 2, time.perf_counter_ns()))
    special = min(engine.frontend.stop_token_ids)
    return PreparedPrompt(token_ids=rng.integers(0, special, length, dtype=np.int32))


def _request(request_id: str, prompt: PreparedPrompt, tokens: int) -> Request:
    return Request(
        request_id=f"bench-{request_id}",
        prompt=prompt,
        max_tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        raw=True,
        ignore_eos=True,
    )
