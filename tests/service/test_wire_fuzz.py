"""Bytes that clients and networks make of HTTP, and clients that leave: no 500 and no hang."""

from __future__ import annotations

import random
import re
import socket
from collections import Counter
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.service.chat import ANSWERS, MODEL, SseReader, ask, endless, head
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "Hello!"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ask("Hello!", max_tokens=16),
    RESPONSES: {"model": MODEL, "input": "Hello!", "max_output_tokens": 16, "temperature": 0},
    MESSAGES: {"model": MODEL, "messages": TURN, "max_tokens": 16, "temperature": 0},
}
LONG = {
    CHAT: endless(8000, stream=True),
    RESPONSES: BODIES[RESPONSES] | {"max_output_tokens": 8000, "stream": True, "input": "Count."},
    MESSAGES: BODIES[MESSAGES] | {"max_tokens": 8000, "stream": True},
}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
TIMEOUT_S = 60.0
SILENT_S = 0.2


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """Two at once; impatient with requests that do not arrive."""
    with Server.launch(
        engine={"max_concurrency": 2, "max_context": 8192}, max_request_mib=1, request_timeout_s=1.0
    ) as running:
        yield running
        running.check_log()


def _exchange(server: Server, pieces: list[bytes]) -> bytes:
    """Send pieces, read until the server is silent, say that no more comes, read to the end."""
    with server.connect() as sock:
        sock.settimeout(TIMEOUT_S)
        received = b""
        try:
            for piece in pieces:
                sock.sendall(piece)
            with suppress(TimeoutError):
                sock.settimeout(SILENT_S)
                while data := sock.recv(1 << 16):
                    received += data
            sock.settimeout(TIMEOUT_S)
            with suppress(OSError):  # reset already: what it closed on was not read to the end
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(1 << 16):
                received += data
        except ConnectionError:  # it had enough; a timeout is a hang
            pass
        return received


def _chunked(body: bytes, rng: random.Random) -> bytes:
    """A body in chunks of random sizes."""
    out = b""
    while body:
        size = rng.randint(1, len(body))
        out += b"%x\r\n%b\r\n" % (size, body[:size])
        body = body[size:]
    return out + b"0\r\n\r\n"


def _request(path: str, rng: random.Random, *, stream: bool) -> bytes:
    """A good request, plain or chunked."""
    body = orjson.dumps(BODIES[path] | {"stream": stream})
    if rng.random() < 0.5:
        return head(body, path=path) + body
    lines = f"POST {path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked", "", ""
    return "\r\n".join(lines).encode() + _chunked(body, rng)


def _spoilt(data: bytes, rng: random.Random) -> bytes:
    """The same with one thing wrong."""
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        case 2:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 3:
            end = rng.randint(at, len(data))
            return data[:at] + data[end:]
        case _:
            return data.replace(b"\r\n", b"\n", rng.randint(1, 4))


def _pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """The data in a few writes."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 3)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _statuses(received: bytes, sent: bytes) -> Iterator[int]:
    """The statuses in what was received; none says that the server failed."""
    for status in map(int, STATUS.findall(received)):
        assert status < 500, (status, received[:600], sent)
        yield status


def _fuzz(server: Server, count: int, seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[int] = Counter()
    for _ in range(count):
        path = rng.choice(list(BODIES))
        data = _spoilt(_request(path, rng, stream=rng.random() < 0.5), rng)
        if rng.random() < 0.3:  # what follows in the same connection
            data += _request(path, rng, stream=False)
        seen.update(_statuses(_exchange(server, _pieces(data, rng)), data))
    status, body = server.post(ask("Hello!"))
    assert (status, body["choices"][0]["message"]["content"]) == (200, ANSWERS["Hello!"])
    server.settle()
    assert {200, 400} <= set(seen), seen


def test_spoilt_requests(plain: Server) -> None:
    _fuzz(plain, 40, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 4))
def test_spoilt_requests_full(plain: Server, seed: int) -> None:
    _fuzz(plain, 300, seed)


@pytest.mark.parametrize("path", BODIES)
def test_pipelined_requests_are_answered_in_order(plain: Server, path: str) -> None:
    rng = random.Random(7)
    bad = head(b"{", path=path) + b"{"
    last = b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    kinds = [_request(path, rng, stream=stream) for stream in (False, True)]
    with plain.connect() as sock:
        sock.sendall(b"".join((kinds[0], bad, kinds[1], last)))
        received = b""
        while data := sock.recv(1 << 16):
            received += data
    assert STATUS.findall(received) == [b"200", b"400", b"200", b"200"]


@pytest.mark.parametrize("path", LONG)
def test_a_client_that_leaves_frees_its_lane(plain: Server, path: str) -> None:
    before = plain.settle()["ginfer_engine_cancel_to_free_seconds_count"]
    with plain.connect() as sock:
        body = orjson.dumps(LONG[path])
        sock.sendall(head(body, path=path) + body)
        with closing(SseReader(sock)) as reader:
            next(reader.blocks())
            plain.wait_metric("ginfer_engine_running", 1)
    after = plain.settle()
    assert after["ginfer_engine_cancel_to_free_seconds_count"] == before + 1


@pytest.mark.parametrize("method", [b"POST\xa9\xef", b"\xff", b"P\0ST", "PÖST".encode(), b"post"])
def test_a_method_of_any_bytes_is_refused(plain: Server, method: bytes) -> None:
    with plain.connect() as sock:
        sock.sendall(method + b" /v1/messages HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        received = b""
        while data := sock.recv(1 << 16):
            received += data
    assert STATUS.findall(received) == [b"405"]
    assert orjson.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_errors_have_the_form_of_the_protocol(plain: Server, path: str) -> None:
    for body in (b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", orjson.dumps({"x": 1})):
        status, headers, data = plain.request("POST", path, body)
        found = orjson.loads(data)
        assert status == 400, data
        assert headers["x-request-id"]
        assert found["error"]["message"]
        assert ("type" in found) == (path == MESSAGES)
