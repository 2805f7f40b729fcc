"""Requests whose answers are known, and readers of event streams."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.service.server import Server

MODEL = "qwen3.8-demo"
OCCUPYING = 16_000  # tokens of a request that holds the lane of the narrow server
STOP_IDS = (4098, 4096)
# Greedy answers of the demo model with wide margins, thinking off.
ANSWERS = {
    "Hello!": "Hello! I am the GInfer demo model. How can I help you?",
    "What is the difference between prefill and decode?": (
        "Prefill reads the whole prompt in parallel and is limited by compute. Decode writes one "
        "token per step and is limited by memory bandwidth."
    ),
    "Extract name, age, city as JSON from this sentence: Clara Berg is 34 years old and lives in "
    "Oslo.": '{"name": "Clara Berg", "age": 34, "city": "Oslo"}',
    "Who are you?": (
        "I am the GInfer demo model, a tiny 20M-parameter model that ships with the engine so that "
        "you can try it. My answers are for demonstration only."
    ),
}


def ask(question: str, **fields: Any) -> dict[str, Any]:
    """A greedy request without thinking."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "presence_penalty": 0,
        "enable_thinking": False,
    } | fields


def endless(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request that runs to exactly max_tokens, because its stop tokens are never drawn."""
    bias = {str(token): -100 for token in STOP_IDS}
    return ask("Count from 1 to 30.", max_tokens=max_tokens, logit_bias=bias, **fields)


def head(body: bytes, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    """Head of a POST of `body`."""
    first = (f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def send(sock: socket.socket, request: dict[str, Any], *, padding: int = 0) -> None:
    """Post a request on a bare connection; padding is white space after the JSON."""
    body = orjson.dumps(request) + b" " * padding
    sock.sendall(head(body) + body)


class SseReader:
    """Reads a chunked event stream from a bare connection, line by line."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rb")
        status = self._file.readline()
        assert status.startswith(b"HTTP/1.1 200"), status
        self.headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            self.headers[name.lower()] = value

    def close(self) -> None:
        """Let the connection go."""
        self._file.close()

    def blocks(self) -> Iterator[str]:
        """Everything between empty lines: events and comments, until the stream ends."""
        pending = b""
        while size := int(self._file.readline() or b"0", 16):
            pending += self._file.read(size)
            self._file.readline()
            *whole, pending = pending.split(b"\n\n")
            yield from (block.decode() for block in whole)
        self._file.readline()
        assert not pending

    def events(self) -> Iterator[Any]:
        """Decoded data of events; '[DONE]' as a string; comments are skipped."""
        for block in self.blocks():
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                yield data if data == "[DONE]" else orjson.loads(data)


def text_of(events: list[Any]) -> str:
    """The content of a stream's chunks."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", ())
    )


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """The one lane of the narrow server is taken for longer than any test takes."""
    server.settle()
    with server.connect() as sock:
        send(sock, endless(OCCUPYING, stream=True))
        with closing(SseReader(sock)) as reader:
            next(reader.blocks())
            server.wait_metric("ginfer_engine_running", 1)
            yield
    server.settle()
