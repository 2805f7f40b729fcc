"""The engine in a process of its own: starts it, supervises it, and is an EngineClient."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import wire_values
from appliance.engine_client import EnginePhase, EngineState, EventStream
from appliance.watchdog import Watchdog
from appliance.wire import PROTOCOL_VERSION, Frame, FrameDecoder, FrameType, WireError, encode
from ginfer.engine.request import Failed
from ginfer.errors import GInferError, InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.config import EngineConfig
    from ginfer.engine.request import EngineInfo, Request

logger = logging.getLogger(__name__)

RESTART_SECOND_S = 1.0  # the first restart is at once, the second after this, then ever later
RESTART_MAX_S = 30.0
STABLE_S = 60.0  # an engine that served so long starts the back-off anew
EXIT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 30.0
WATCHDOG_S = 60.0
_DELTAS = FrameType.DELTAS  # members of an enumeration are slow to find
CHILD_MODULE = "appliance.engine_process"


class EngineBridge:
    """An EngineClient over a socket pair, and the supervisor of the process behind it.

    The child ends when its socket closes, so it cannot outlive this process. When it dies, its
    requests end with Failed(engine_restarted), and it is started again: at once, later after a
    growing pause. Only a failure before the engine was ever ready is final: then the operator is
    looking. One that is frozen for watchdog_s is killed. log_format: of the lines that the child
    writes to stderr.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        *,
        watchdog_s: float = WATCHDOG_S,
        log_format: str = "text",
    ) -> None:
        self._config = config
        self._log_format = log_format
        self._watchdog = Watchdog(watchdog_s)
        self._on_progress = on_progress or (lambda _text: None)
        self._state = EngineState(EnginePhase.STARTING, "the engine is starting")
        self._settled = asyncio.Event()  # ready for the first time, failed or stopped
        self._failure: GInferError | None = None  # why it failed or what the child last reported
        self._info: EngineInfo | None = None
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, EventStream] = {}
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._stats_waiters: list[asyncio.Future[dict[str, Any]]] = []
        self._num_restarts = 0

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is; None until it was ready once."""
        return self._info

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def num_restarts(self) -> int:
        """How often the engine was lost and started again."""
        return self._num_restarts

    @property
    def pid(self) -> int | None:
        """Process id of the engine, if it runs."""
        return self._child.process.pid if self._child else None

    def start(self) -> None:
        """Begin to start the engine and to supervise it."""
        self._supervisor = asyncio.create_task(self._guard())

    async def wait_ready(self) -> EngineInfo:
        """Wait for the first READY. Raises the engine's own error when it cannot start."""
        await self._settled.wait()
        if self._info is None:
            raise self._failure or UnavailableError(self._state.reason)
        return self._info

    async def submit(self, request: Request) -> EventStream:
        """Hand a request over; see EngineClient."""
        child = self._ready_child()
        name = request.request_id
        if name in self._streams:
            raise UnavailableError(f"request id {name} is in use; repeat the request")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = self._streams[name] = EventStream(name, self._on_stream_closed)
        self._answers[name] = answer
        try:
            child.send(wire_values.encode_request(request))
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await answer
        except TimeoutError:
            stream.close()
            raise UnavailableError("the engine does not answer; try again later") from None
        except BaseException:
            stream.close()
            raise
        finally:
            self._answers.pop(name, None)
        return stream

    async def stats(self) -> dict[str, Any]:
        """The engine's counters; see EngineClient."""
        child = self._ready_child()
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        if len(self._stats_waiters) == 1:  # who asks meanwhile shares the answer
            child.send(Frame(FrameType.STATS, {}))
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                return await waiter
        except TimeoutError:
            raise UnavailableError("the engine does not answer; try again later") from None

    async def close(self) -> None:
        """Stop the engine process; running requests end with Failed."""
        self._set_state(EnginePhase.STOPPED, "the server is stopping")
        self._settled.set()
        self._fail_running(self._state.reason)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor

    def _ready_child(self) -> _Child:
        if not self._state.ready or self._child is None:
            raise UnavailableError(self._state.reason)
        return self._child

    def _set_state(self, phase: EnginePhase, reason: str = "") -> None:
        if self._state.phase is not EnginePhase.STOPPED:
            self._state = EngineState(phase, reason)

    def _on_stream_closed(self, request_id: str) -> None:
        """A reader is gone: forget the request, and cancel it unless it has ended."""
        if self._streams.pop(request_id, None) is not None and self._child is not None:
            self._child.send(Frame(FrameType.CANCEL, {"request_id": request_id}))

    async def _guard(self) -> None:
        """Supervise; a fault of ours in it is told, not waited for."""
        try:
            await self._supervise()
        except Exception as error:
            logger.exception("the engine cannot be supervised")
            self._failure = InternalError(f"the engine cannot be supervised: {error!r}")
            self._set_state(EnginePhase.FAILED, self._failure.message)
            self._settled.set()
            self._fail_running(self._failure.message)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            begun = loop.time()
            reason = await self._run_child()
            self._fail_running(reason)
            if self._info is None:
                self._set_state(EnginePhase.FAILED, reason)
                self._settled.set()
                return
            if loop.time() - begun > STABLE_S:
                pause = 0.0
            logger.error("%s; restarting in %.0f s", reason, pause)
            self._set_state(EnginePhase.RESTARTING, f"{reason}; the engine is restarting")
            self._num_restarts += 1
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, RESTART_SECOND_S), RESTART_MAX_S)

    async def _run_child(self) -> str:
        """One life of the engine process, from start to end; returns why it ended."""
        self._failure = None
        try:
            self._child = await _Child.spawn(self._log_format, self._dispatch)
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        try:
            config = wire_values.config_header(self._config)
            hello = {"version": PROTOCOL_VERSION, "config": config}
            self._child.send(Frame(FrameType.HELLO, hello))
            self._watchdog.reset()
            watch = asyncio.create_task(self._watch(self._child))
            try:
                await self._child.ended
            finally:
                watch.cancel()
        except WireError as error:
            self._failure = error
        finally:
            child, self._child = self._child, None
            if self._state.ready:
                reason = "the engine process has ended; the engine is restarting"
                self._set_state(EnginePhase.RESTARTING, reason)
            status = await child.stop()
        if self._failure is not None:
            return self._failure.message
        return f"the engine process {_describe(status)}"

    async def _watch(self, child: _Child) -> None:
        """Give up an engine that froze after it was ready: its requests need not wait for its
        end."""
        while True:
            await asyncio.sleep(self._watchdog.tick_s)
            if not self._state.ready:
                self._watchdog.reset()
            elif reason := self._watchdog.tick(has_work=bool(self._streams)):
                self._failure = UnavailableError(reason)
                self._set_state(EnginePhase.RESTARTING, f"{reason}; the engine is restarting")
                self._fail_running(reason)
                child.give_up()
                return

    def _dispatch(self, frame: Frame) -> None:
        if frame.type is _DELTAS:  # almost all are
            self._on_events(frame)
            return
        match frame.type:
            case FrameType.STARTED | FrameType.FINISHED | FrameType.FAILED:
                self._on_events(frame)
            case FrameType.ACCEPTED | FrameType.REFUSED:
                self._on_answer(frame)
            case FrameType.HELLO:
                _check_version(frame)
            case FrameType.PROGRESS:
                self._on_progress(str(frame.header.get("text", "")))
            case FrameType.READY:
                self._info = wire_values.decode_info(frame)
                self._set_state(EnginePhase.READY)
                self._settled.set()
            case FrameType.FAULT:
                self._failure = wire_values.decode_error(frame)
            case FrameType.STATS:
                self._on_stats(frame)
            case FrameType.ALIVE:
                self._watchdog.alive(wire_values.num_rounds(frame))
            case _:
                raise WireError(f"unexpected {frame.type.name} frame from the engine process")

    def _on_events(self, frame: Frame) -> None:
        for event in wire_values.decode_events(frame):
            stream = self._streams.get(event.request_id)
            if stream is None:  # cancelled a moment ago
                continue
            stream.push(event)
            if stream.ended:
                del self._streams[stream.request_id]

    def _on_answer(self, frame: Frame) -> None:
        name = wire_values.request_id(frame)
        answer = self._answers.get(name)
        if answer is None or answer.done():
            return
        if frame.type is FrameType.ACCEPTED:
            answer.set_result(None)
        else:
            self._streams.pop(name, None)
            answer.set_exception(wire_values.decode_error(frame))

    def _on_stats(self, frame: Frame) -> None:
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(frame.header)

    def _fail_running(self, reason: str) -> None:
        """End every running request and every waiting call."""
        error = UnavailableError(
            f"{reason}; the request was lost, repeat it", code="engine_restarted"
        )
        if self._state.phase is EnginePhase.STOPPED:
            error = UnavailableError("the server is stopping; the request was cancelled")
        waiters: list[asyncio.Future[Any]] = [*self._answers.values(), *self._stats_waiters]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._stats_waiters.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.push(Failed(request_id=stream.request_id, error=error))


class _Child(asyncio.Protocol):
    """The engine process and our end of its socket, whose frames go to `dispatch`. `ended` is done
    when the socket is closed, with WireError when what came is not to be read."""

    process: asyncio.subprocess.Process

    def __init__(self, dispatch: Callable[[Frame], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._dispatch = dispatch
        self._decoder = FrameDecoder()

    @classmethod
    async def spawn(cls, log_format: str, dispatch: Callable[[Frame], None]) -> _Child:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, child = await loop.create_connection(lambda: cls(dispatch), sock=ours)
            try:
                child.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", CHILD_MODULE, str(theirs.fileno()), log_format),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),  # stdout belongs to the command line
                    pass_fds=(theirs.fileno(),),
                    env=_environment(),
                )
            except BaseException:
                transport.close()
                raise
        return child

    def connection_made(self, transport: Any) -> None:
        """The socket is open."""
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        """Dispatch the frames that are complete."""
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except Exception as error:
            self._transport.abort()
            if not self.ended.done():
                self.ended.set_exception(error)

    def connection_lost(self, _error: Exception | None) -> None:
        """The child is gone."""
        self._closed.set()
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self, frame: Frame) -> None:
        """Queue a frame; to a dead child it is a no-op. Few and small: at most one per call."""
        if not self._transport.is_closing():
            self._transport.write(encode(frame))

    def give_up(self) -> None:
        """Kill the process and stop reading, whether or not it can end now."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self._transport.abort()

    async def stop(self) -> int:
        """Close the socket, which ends the child, and return its exit status; kill it when it
        lingers."""
        self._transport.close()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._closed.wait()
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


def _environment() -> dict[str, str]:
    """The child imports the same checkout as its parent, wherever either was started."""
    root = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}


def _check_version(frame: Frame) -> None:
    version = frame.header.get("version")
    if version != PROTOCOL_VERSION:
        raise WireError(f"the engine process speaks version {version}, not {PROTOCOL_VERSION}")


def _describe(status: int) -> str:
    """An exit status for people."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
