"""The engine process: `python -m appliance.engine_process FD [FORM]`, started by the bridge."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from appliance import wire_values
from appliance.engine_client import EventBuffer
from appliance.log_lines import EventFormatter
from appliance.stages import describe
from appliance.wire import PROTOCOL_VERSION, Frame, FrameDecoder, FrameType, WireError, encode
from ginfer import Engine
from ginfer.engine.request import Failed
from ginfer.errors import GInferError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ginfer.config import EngineConfig
    from ginfer.engine.request import Event

logger = logging.getLogger(__name__)

READ_NBYTES = 1 << 18
FLUSH_S = 2.0
PROGRESS_S = 2.0
ALIVE_S = 0.5
COMPILERS = 4
SWITCH_INTERVAL_S = 0.0005  # the loop gives way to requests that arrive within this time


class Outbox:
    """Frames on their way to the server. Whoever queues them sends them, as far as the socket takes
    them at once; the rest is left to `run`, a thread of its own, so that nobody waits for a slow
    server. Unsent deltas of one request merge: what is held is bounded by the output of the running
    requests."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._buffers: dict[str, EventBuffer] = {}
        self._rest: memoryview | None = None  # of what was encoded; only `run` sends it
        self._gone = False

    def put(self, frame: Frame) -> None:
        """Send a frame that is no event, after what waits."""
        with self._changed:
            self._frames.append(frame)
            self._send()

    def beat(self, frame: Frame) -> None:
        """Send a sign of life, unless something waits for a reader that is slow."""
        with self._changed:
            if self._rest is None:
                self._frames.append(frame)
                self._send()

    def push(self, event: Event) -> None:
        """Take an event, to be sent by the next `put` or `end_round`; the engine's sink."""
        with self._changed:
            buffer = self._buffers.get(event.request_id)
            if buffer is None:
                buffer = self._buffers[event.request_id] = EventBuffer()
            buffer.push(event)

    def end_round(self) -> None:
        """Send the events of a round together."""
        if self._buffers:
            with self._changed:
                self._send()

    def run(self) -> None:
        """Send for ever what did not go at once; returns when the server is gone, which the reader
        sees too."""
        while not self._gone:
            with self._changed:
                self._changed.wait_for(lambda: self._rest is not None or self._gone)
                rest = self._rest
            try:
                if rest is not None:
                    self._sock.sendall(rest)
            except OSError:
                self._gone = True
            with self._changed:
                self._rest = None
                self._send()
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._rest is None, timeout_s)

    def _send(self) -> None:
        """Send what is queued unless something before it still waits; needs the lock."""
        if self._rest is not None or self._gone or not (self._frames or self._buffers):
            return
        frames, self._frames = self._frames, deque()
        buffers, self._buffers = self._buffers, {}
        events = wire_values.encode_events(e for buffer in buffers.values() for e in buffer)
        data = b"".join(map(encode, chain(frames, events)))
        try:
            num_sent = self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._gone = True
            self._changed.notify_all()
            return
        if num_sent < len(data):
            self._rest = memoryview(data)[num_sent:]
            self._changed.notify_all()


class Compiling:
    """Submissions that compile a grammar first: their own threads, so that nothing waits for them.

    A request that is cancelled meanwhile is submitted and then cancelled.
    """

    def __init__(self, submit: Callable[[Engine, Frame], None]) -> None:
        self._submit = submit
        self._threads = ThreadPoolExecutor(COMPILERS, "submit")
        self._lock = threading.Lock()
        self._cancelled: dict[str, bool] = {}  # of requests that are being submitted

    def submit(self, engine: Engine, frame: Frame) -> None:
        """Have a SUBMIT frame answered."""
        request_id = wire_values.request_id(frame)
        with self._lock:
            self._cancelled[request_id] = False
        self._threads.submit(self._run, engine, frame, request_id)

    def cancel(self, request_id: str) -> None:
        """Note a cancellation."""
        with self._lock:
            if request_id in self._cancelled:
                self._cancelled[request_id] = True

    def _run(self, engine: Engine, frame: Frame, request_id: str) -> None:
        self._submit(engine, frame)
        with self._lock:
            cancelled = self._cancelled.pop(request_id, False)
        if cancelled:
            engine.cancel(request_id)


class EngineProcess:
    """Serves one engine to the other end of `sock`, and ends with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox = Outbox(sock)
        self._engine: Engine | None = None
        self._compiling = Compiling(self._submit)
        self._fault: queue.SimpleQueue[GInferError] = queue.SimpleQueue()
        self._stage = ("load", 0, 0)  # of the start, how much is done, of how much

    def run(self) -> int:
        """Open the engine and serve; returns only after a fault, with the exit status."""
        threading.Thread(target=self._outbox.run, name="outbox", daemon=True).start()
        frames = self._frames()
        try:
            config = _greeted(next(frames))
            threading.Thread(target=self._read, args=(frames,), name="inbox", daemon=True).start()
            self._open(config)
        except StopIteration:
            return 0
        except GInferError as error:
            self._fault.put(error)
        except Exception as error:
            logger.exception("the engine cannot be opened")
            self._fault.put(InternalError(f"the engine cannot be opened: {error!r}"))
        fault = wire_values.error_header(self._fault.get())
        self._outbox.put(Frame(FrameType.FAULT, {"error": fault}))
        self._outbox.flush(FLUSH_S)
        return 1

    def _open(self, config: EngineConfig) -> None:
        self._outbox.put(Frame(FrameType.HELLO, {"version": PROTOCOL_VERSION}))
        over = threading.Event()
        threading.Thread(target=self._report, args=(over,), name="progress", daemon=True).start()
        try:
            engine = Engine.open(config, self._on_progress)
        finally:
            over.set()
        engine.on_failure = self._fault.put
        engine.on_told = self._outbox.end_round
        self._engine = engine
        gc.collect()
        gc.freeze()  # a full collection would halt a round for as long as it takes to walk all this
        self._outbox.put(Frame(FrameType.READY, {"info": engine.info}))
        threading.Thread(target=self._beat, args=(engine,), name="alive", daemon=True).start()

    def _beat(self, engine: Engine) -> None:
        """Tell for ever that this process lives, and whether its engine moves."""
        while True:
            self._outbox.beat(Frame(FrameType.ALIVE, {"rounds": engine.num_rounds}))
            time.sleep(ALIVE_S)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self._stage = (stage, done, total)

    def _report(self, over: threading.Event) -> None:
        """Tell now and then where a start stands, whether or not it moves."""
        began = time.monotonic()
        while not over.wait(PROGRESS_S):
            text = describe(*self._stage, time.monotonic() - began)
            self._outbox.put(Frame(FrameType.PROGRESS, {"text": text}))

    def _frames(self) -> Iterator[Frame]:
        """Frames until the server is gone. Raises WireError."""
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := self._sock.recv(READ_NBYTES):
                yield from decoder.feed(data)

    def _read(self, frames: Iterator[Frame]) -> None:
        """Obey frames until the server is gone; then nothing here is worth an orderly end."""
        try:
            for frame in frames:
                self._obey(frame)
        except WireError as error:
            self._fault.put(error)
            return
        os._exit(0)

    def _obey(self, frame: Frame) -> None:
        engine = self._engine
        if engine is None:
            raise WireError(f"a {frame.type.name} frame before the engine is ready")
        if frame.type is FrameType.SUBMIT and frame.header.get("grammar") is None:
            self._submit(engine, frame)
        elif frame.type is FrameType.SUBMIT:
            self._compiling.submit(engine, frame)
        elif frame.type is FrameType.CANCEL:
            self._compiling.cancel(wire_values.request_id(frame))
            engine.cancel(wire_values.request_id(frame))
        elif frame.type is FrameType.STATS:
            self._outbox.put(Frame(FrameType.STATS, engine.stats()))
        else:
            raise WireError(f"unexpected {frame.type.name} frame from the server")

    def _submit(self, engine: Engine, frame: Frame) -> None:
        """Answer ACCEPTED or REFUSED; a fault here costs this request alone."""
        header = {"request_id": wire_values.request_id(frame)}
        try:
            engine.submit(wire_values.decode_request(frame), self._sink)
        except GInferError as error:
            refusal = wire_values.error_header(error)
        except Exception as error:
            logger.exception("request %s cannot be submitted", header["request_id"])
            refusal = wire_values.error_header(InternalError(f"cannot be submitted: {error!r}"))
        else:
            self._outbox.put(Frame(FrameType.ACCEPTED, header))
            return
        self._outbox.put(Frame(FrameType.REFUSED, header | {"error": refusal}))

    def _sink(self, event: Event) -> None:
        """Take an event of the engine. When the engine fails, the bridge ends its requests."""
        engine = self._engine
        if not (isinstance(event, Failed) and engine is not None and engine.failed is not None):
            self._outbox.push(event)


def _greeted(frame: Frame) -> EngineConfig:
    """The configuration of HELLO, the first frame. Raises WireError, or ConfigError."""
    version = frame.header.get("version")
    if frame.type is not FrameType.HELLO or version != PROTOCOL_VERSION:
        raise WireError(f"the server speaks version {version}, not {PROTOCOL_VERSION}")
    return wire_values.decode_config(frame)


def main() -> int:
    """Run on the inherited socket FD. Terminal and service signals are the server's to handle.

    A Ctrl-C of the terminal goes to process groups, so this is one of its own; not a session, for
    Linux shares cores between sessions first, and the server's few microseconds would then wait for
    a hundred milliseconds behind an engine that is always busy."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter(sys.argv[2] if len(sys.argv) > 2 else "text", "engine"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    return EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    status = main()
    os._exit(status)  # the inbox thread never ends by itself
