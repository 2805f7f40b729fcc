"""Engines over the demo package, and short hands to run requests on them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest

from ginfer.config import EngineConfig
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams, Started
from ginfer.prompt import Channel, PreparedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.engine.request import Event, TokenLogprob

DEMO_PACKAGE = Path(__file__).parents[1] / "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
BACKEND = os.environ.get("GINFER_TEST_BACKEND", "cpu")
GPU_KV_CAPACITY = 65_536  # engines share the GPU; automatic capacity would take it all
on_the_cpu = pytest.mark.skipif(BACKEND == "cuda", reason="a hook or an option of the CPU image")
_ids = count()


def open_demo(
    clock: Callable[[], float] = time.monotonic, *, ahead: bool = False, **options: Any
) -> Engine:
    """An engine on the image of --backend, two threads on the CPU. ahead: there its rounds run one
    ahead of what is read, as on a GPU."""
    options = {"backend": BACKEND, "threads": 2, "package": DEMO_PACKAGE, **options}
    if options["backend"] == "cuda":
        options = {"kv_capacity": GPU_KV_CAPACITY, **options}
    config = EngineConfig(**options)
    with patch.object(CpuBackend, "runs_ahead", ahead):
        return Engine.open(config, clock=clock)


def ids_prompt(ids: Any, **fields: Any) -> PreparedPrompt:
    """A prompt of plain token ids."""
    return PreparedPrompt(token_ids=np.array(ids, np.int32), **fields)


def random_prompt(rng: np.random.Generator, length: int) -> PreparedPrompt:
    """A prompt of random ordinary tokens."""
    return ids_prompt(rng.integers(0, 4096, length))


def make_request(prompt: PreparedPrompt, max_tokens: int = 16, **fields: Any) -> Request:
    """A greedy request with a fresh id; `sampling` may be a dictionary."""
    sampling = fields.pop("sampling", {"temperature": 0.0})
    if isinstance(sampling, dict):
        sampling = SamplingParams(**sampling)
    return Request(
        request_id=f"request-{next(_ids)}",
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        **fields,
    )


@dataclass
class Run:
    """A submitted request: its events as they come, put together."""

    request: Request
    on_event: Callable[[Run, Event], None] | None = None
    events: list[Event] = field(default_factory=list)
    _end: SimpleQueue[Finished | Failed] = field(default_factory=SimpleQueue)

    def __call__(self, event: Event) -> None:
        """The sink."""
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(self, event)
        if isinstance(event, Finished | Failed):
            self._end.put(event)

    def wait(self, timeout_s: float = 60) -> Run:
        """Wait for the end, any number of times; raises the request's error."""
        end = self._end.get(timeout=timeout_s)
        self._end.put(end)
        if isinstance(end, Failed):
            raise end.error
        return self

    @property
    def deltas(self) -> list[Delta]:
        return [e for e in self.events if isinstance(e, Delta)]

    @property
    def started(self) -> Started:
        return next(e for e in self.events if isinstance(e, Started))

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def ids(self) -> list[int]:
        return [i for d in self.deltas for i in d.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [p for d in self.deltas for p in d.logprobs]

    def text(self, channel: Channel = Channel.CONTENT) -> str:
        return "".join(d.text for d in self.deltas if d.channel is channel)


def submit(engine: Engine, request: Request, on_event: Any = None) -> Run:
    """Submit a request; `on_event(run, event)` is called in the loop thread."""
    run = Run(request, on_event)
    engine.submit(request, run)
    return run


def complete(engine: Engine, prompt: PreparedPrompt, max_tokens: int = 16, **fields: Any) -> Run:
    """Run one request to its end."""
    return submit(engine, make_request(prompt, max_tokens, **fields)).wait()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until it is true, for as long as a busy machine may need."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
