"""EngineClient: how the server sees an engine, in this process or behind the bridge."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from ginfer.engine.request import Delta, Failed, Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ginfer.engine.request import EngineInfo, Event, Request

MERGED_TOKENS = 256  # bounds the copying of one merge and the size of one frame
MERGED_CHARS = 1 << 18


class EnginePhase(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # it will not come back
    STOPPED = "stopped"


@dataclass(frozen=True)
class EngineState:
    """Phase of the engine; `reason` says for people why it is not ready, and what happens next."""

    phase: EnginePhase
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.phase is EnginePhase.READY


class EventBuffer:
    """Unread events of one request, oldest first; neighbouring deltas of a channel merge, so its
    size is bounded by the output of the request, whoever reads how slowly."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: Event) -> None:
        """Append, merging with the last event if both are deltas of one channel."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(last, Delta) and _mergeable(last, event):
            self._events[-1] = last._replace(
                text=last.text + event.text,
                token_ids=last.token_ids + event.token_ids,
                logprobs=last.logprobs + event.logprobs,
            )
        else:
            self._events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def pop(self) -> Event:
        """Remove and return the oldest event; the buffer must not be empty."""
        return self._events.popleft()


def _mergeable(last: Delta, event: Delta) -> bool:
    return (
        last.channel is event.channel
        and len(last.token_ids) + len(event.token_ids) <= MERGED_TOKENS
        and len(last.text) + len(event.text) <= MERGED_CHARS
    )


class EventStream:
    """Events of one accepted request, ending after Finished or Failed; for one reader.

    Unlike an async generator it survives a cancelled `__anext__` or `wait`. `close` before the end
    cancels the request in the engine.
    """

    def __init__(self, request_id: str, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._buffer = EventBuffer()
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self.ended = False  # the terminal event is in the buffer or was read

    def push(self, event: Event) -> None:
        """Hand over an event, on the event loop's thread; events after the terminal one are
        dropped."""
        if self.ended or self._closed:
            return
        self.ended = isinstance(event, Finished | Failed)
        self._buffer.push(event)
        self.wake()

    def close(self) -> None:
        """Stop reading; cancels the request unless it has ended. May be called twice."""
        if not self._closed:
            self._closed = True
            self.wake()
            self._on_close(self.request_id)

    def wake(self) -> None:
        """Let a `wait` return, whether or not there is an event."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Return when there is an event to `pop`, at the end, or when woken."""
        if self._buffer or self.ended or self._closed:
            return
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def pop(self) -> Event | None:
        """The oldest unread event, None if there is none."""
        return self._buffer.pop() if self._buffer and not self._closed else None

    @property
    def over(self) -> bool:
        """Whether there is and will be nothing to pop."""
        return self._closed or (self.ended and not self._buffer)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while (event := self.pop()) is None:
            if self.over:
                raise StopAsyncIteration
            await self.wait()
        return event


class EngineClient(Protocol):
    """One engine. `info` is None until the engine was ready once."""

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is."""

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""

    @property
    def num_restarts(self) -> int:
        """How often the engine was lost and started again."""

    async def submit(self, request: Request) -> EventStream:
        """Hand a request over; returns once the engine has put it into its queue.

        Raises OverloadedError, RequestError, or UnavailableError when the engine is not ready.
        """

    async def stats(self) -> dict[str, Any]:
        """The engine's counters. Raises UnavailableError when it is not ready."""

    async def close(self) -> None:
        """Stop the engine; running requests end with Failed."""
