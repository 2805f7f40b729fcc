"""Server-sent events: keep-alive frames, readers that stall."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sanic import Request
    from sanic.response import HTTPResponse

    from appliance.engine_client import EventStream

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class SseStream:
    """One response as a stream of events. Open it with `SseStream.open`."""

    def __init__(
        self,
        request: Request[Any, Any],
        response: HTTPResponse,
        *,
        keepalive: bytes,
        keepalive_s: float,
        send_timeout_s: float,
    ) -> None:
        self._request = request
        self._response = response
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._send_timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._is_due = False  # the keep-alive frame
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        request: Request[Any, Any],
        *,
        keepalive: bytes,
        keepalive_s: float,
        send_timeout_s: float,
    ) -> SseStream:
        """Answer `request` with a stream; the headers go out with the first `send`. keepalive: the
        frame that shows life."""
        response = await request.respond(content_type=CONTENT_TYPE, headers=HEADERS)
        assert response is not None
        return cls(
            request,
            response,
            keepalive=keepalive,
            keepalive_s=keepalive_s,
            send_timeout_s=send_timeout_s,
        )

    async def send(self, frames: Iterable[bytes], *, end: bool = False) -> None:
        """Write frames; nothing when there are none. end: they are the last. A reader that takes
        nothing for send_timeout_s loses its connection, which cancels this handler."""
        payload = b"".join(frames)
        if not payload:
            return
        transport: Any = self._request.transport
        try:
            if transport.get_write_buffer_size() == 0:  # no wait, and no timer for each token
                await self._response.send(payload, end)
            else:
                async with asyncio.timeout(self._send_timeout_s):
                    await self._response.send(payload, end)
        except TimeoutError:
            transport.abort()
            raise asyncio.CancelledError("the reader stalled") from None
        self._last_sent = self._loop.time()
        self._is_due = False

    async def wait(self, events: EventStream) -> None:
        """Until there may be an event; the keep-alive frame goes out whenever nothing was sent for
        keepalive_s, also when events arrive that show nothing yet."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._keepalive_s, self._tick, events)
        if not self._is_due:
            await events.wait()
        if self._is_due:
            await self.send([self._keepalive])

    def close(self) -> None:
        """Show no more life."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, events: EventStream) -> None:
        """One timer for the stream, not one for each event: it looks whether a frame is due."""
        now = self._loop.time()
        due = self._last_sent + self._keepalive_s
        if due <= now:
            self._is_due = True
            events.wake()
            due = now + self._keepalive_s
        self._timer = self._loop.call_at(due, self._tick, events)
