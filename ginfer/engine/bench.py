"""Measured rounds of a running engine: decode and prefill throughput."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ginfer.config import CHUNK_MULTIPLE
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams
from ginfer.prompt import PreparedPrompt

if TYPE_CHECKING:
    from ginfer.engine.engine import Engine
    from ginfer.engine.request import Event

_SEED = 20_260_811  # of the prompts; their text does not matter to the speed


def measure_decode(engine: Engine, rows: int, context: int, tokens: int) -> float:
    """Tokens/s of `rows` requests together, about `tokens` each, after `context` prompt tokens;
    measured while all of them decode."""
    events: SimpleQueue[tuple[float, Event]] = SimpleQueue()
    longest = tokens + rows * (context // CHUNK_MULTIPLE + 2)  # the first ones start early
    for i in range(rows):
        request = _request(f"decode-{i}", _prompt(engine, i, context), longest)
        engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
    started: set[str] = set()
    times: list[float] = []
    while len(times) <= rows * tokens:
        at, event = events.get()
        if isinstance(event, Failed):
            raise event.error
        assert not isinstance(event, Finished), "a request ended before it was measured"
        if isinstance(event, Delta) and event.token_ids:
            started.add(event.request_id)
            if len(started) == rows:
                times.append(at)
    for i in range(rows):
        engine.cancel(f"bench-decode-{i}")
    while rows:
        rows -= isinstance(events.get()[1], Finished | Failed)
    return (len(times) - 1) / (times[-1] - times[0])


def measure_prefill(engine: Engine, tokens: int) -> float:
    """Prompt tokens/s of one request of `tokens`, first token included, alone in the engine."""
    request = _request("prefill", _prompt(engine, -1, tokens), 1)
    for event in engine.generate(request):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            return (tokens - event.usage.cached_tokens) / event.timings.prefill_s
    raise AssertionError("a generation ends with a terminal event")


def _prompt(engine: Engine, stream: int, length: int) -> PreparedPrompt:
    """`length` fresh ids of plain text, so that nothing is reused between measurements."""
    rng = np.random.default_rng((_SEED, stream + 1, time.perf_counter_ns()))
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
