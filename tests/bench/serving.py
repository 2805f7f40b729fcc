"""What the server adds to the engine: 200 streams that wait, 8 that run; `--write` records it.

python -m tests.bench.serving [--seconds S] [--write]

serving.loop_us_per_token: CPU time of the event loop's thread per streamed token, answers of 256
tokens (a file edit or a few tool calls with their reasoning); _short: answers of 24 tokens.
serving.loop_us_per_request: the part of both that does not depend on the length of the answer.
serving.first_byte_p50_ms, _p99_ms: from the engine's first token of a request to its first byte at
the client, measured from above, with the short answers: what the client waits, less the server's
preparation and the engine's own time to the first token; so it holds the way of the request to the
engine too.
"""

from __future__ import annotations

import argparse
import platform
import re
import selectors
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from tests.bench.summary import record
from tests.service.chat import endless, head
from tests.service.server import Server

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

NUM_IDLE, NUM_ACTIVE = 200, 8
NUM_TOKENS_SHORT, NUM_TOKENS = 24, 256
CONTENT = re.compile(rb'"content":"[^"]')
END = b"data: [DONE]"


@dataclass
class Stream:
    """One request of the load."""

    name: str
    sock: socket.socket
    sent: float
    first: float | None = None
    tail: bytes = b""

    def take(self, data: bytes, now: float) -> bool:
        """Bytes of the answer; whether it is over."""
        self.tail = (self.tail + data)[-4096:]
        if self.first is None and CONTENT.search(self.tail):
            self.first = now
        return END in self.tail or not data


class Load:
    """Keeps NUM_IDLE + NUM_ACTIVE streams open: one that ends is followed by another."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        self._server = server
        self._body = orjson.dumps(endless(num_tokens, stream=True))
        self._selector = selectors.DefaultSelector()
        self._names = count()
        self.finished: list[Stream] = []
        for _ in range(NUM_IDLE + NUM_ACTIVE):
            self._open()

    def run(self, seconds: float) -> None:
        """Read for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                stream: Stream = key.data
                if stream.take(stream.sock.recv(65536), time.monotonic()):
                    self._selector.unregister(stream.sock)
                    stream.sock.close()
                    self.finished.append(stream)
                    self._open()

    def close(self) -> None:
        """Leave."""
        for key in list(self._selector.get_map().values()):
            key.data.sock.close()
        self._selector.close()

    def _open(self) -> None:
        sock = self._server.connect()
        name = f"stream-{next(self._names)}"
        stream = Stream(name, sock, time.monotonic())
        sock.sendall(head(self._body, f"x-request-id: {name}") + self._body)
        self._selector.register(sock, selectors.EVENT_READ, stream)


def loop_seconds(pid: int) -> float:
    """CPU seconds of a process's main thread, where its event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def own_seconds(log: Path) -> Iterator[tuple[str, float]]:
    """Request id and seconds that preparation and engine took to the first token."""
    for line in log.read_bytes().splitlines():
        event = orjson.loads(line)
        if event["event"] == "request_done":
            seconds = event["timings_seconds"]
            yield event["request"]["request_id"], seconds["prepare"] + seconds["ttft"]


@dataclass(frozen=True)
class Usage:
    """What a time of steady load took: CPU seconds of the loop, and the milliseconds that each
    first byte waited, in order."""

    cpu_s: float
    tokens: float
    requests: float
    waits_ms: list[float]


def load(num_tokens: int, num_before: int, seconds: float) -> Usage:
    """Measure for so long, once the first `num_before` answers are over: those that came in one
    burst."""
    engine = {"max_concurrency": NUM_ACTIVE, "max_pending": NUM_IDLE + NUM_ACTIVE}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Server.launch(
            engine={**engine, "max_context": 1024}, request_log=str(log), log_stats_interval_s=0
        ) as server:
            streams = Load(server, num_tokens)
            while len(streams.finished) < num_before:
                streams.run(0.5)
            steady, answered = time.monotonic(), len(streams.finished)
            tokens, cpu_s = _tokens(server), loop_seconds(server.process.pid)
            streams.run(seconds)
            cpu_s = loop_seconds(server.process.pid) - cpu_s
            tokens = _tokens(server) - tokens
            streams.close()
            server.stop()
        own = dict(own_seconds(log))
    waits = sorted(
        1e3 * (stream.first - stream.sent - own[stream.name])
        for stream in streams.finished
        if stream.first is not None and stream.sent > steady and stream.name in own
    )
    requests = len(streams.finished) - answered
    print(f"{requests} answers of {num_tokens}, {tokens:.0f} tokens in {seconds:g} s")
    return Usage(cpu_s, tokens, requests, waits)


def measure(seconds: float) -> dict[str, tuple[float, str]]:
    """All figures by name: (value, unit)."""
    short = load(NUM_TOKENS_SHORT, NUM_IDLE, seconds)
    long = load(NUM_TOKENS, 2 * NUM_ACTIVE, seconds)
    short_s, long_s = short.cpu_s / short.tokens, long.cpu_s / long.tokens
    more_requests = short.requests / short.tokens - long.requests / long.tokens
    return {
        "serving.loop_us_per_token": (1e6 * long_s, "us"),
        "serving.loop_us_per_token_short": (1e6 * short_s, "us"),
        "serving.loop_us_per_request": (1e6 * (short_s - long_s) / more_requests, "us"),
        "serving.first_byte_p50_ms": (statistics.median(short.waits_ms), "ms"),
        "serving.first_byte_p99_ms": (short.waits_ms[int(0.99 * (len(short.waits_ms) - 1))], "ms"),
    }


def _tokens(server: Server) -> float:
    return server.metrics()["ginfer_engine_completion_tokens_total"]


def main() -> None:
    """Print the figures; --write records them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = measure(options.seconds)
    for name, (value, unit) in figures.items():
        print(f"{name:<32} {value:10.4g} {unit}")
    if options.write:
        record(figures, platform.processor() or platform.machine())


if __name__ == "__main__":
    main()
