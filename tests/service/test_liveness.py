"""Silence, slow readers and vanished clients: what each costs, and what the others notice."""

from __future__ import annotations

import socket
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.service.chat import (
    ANSWERS,
    OCCUPYING,
    SseReader,
    ask,
    endless,
    head,
    send,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.service.server import Server

KEEPALIVE_S = 0.2  # of the narrow server
SLACK_S = 1.0  # this machine is shared
RUNNING, WAITING = "ginfer_engine_running", "ginfer_engine_waiting"


@contextmanager
def _streaming(server: Server, request: dict[str, Any], **options: int) -> Iterator[SseReader]:
    with server.connect() as sock:
        send(sock, request | {"stream": True}, **options)
        with closing(SseReader(sock)) as reader:
            yield reader


@contextmanager
def _occupied(server: Server) -> Iterator[SseReader]:
    """The one lane of the narrow server is taken for longer than any test takes."""
    server.settle()
    with _streaming(server, endless(OCCUPYING)) as reader:
        blocks = reader.blocks()
        next(blocks)
        server.wait_metric(RUNNING, 1)
        yield reader
    server.settle()


def test_headers_and_comments_come_while_a_request_waits(narrow: Server) -> None:
    with _occupied(narrow), _streaming(narrow, ask("Hello!")) as reader:
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-cache"
        assert reader.headers["x-accel-buffering"] == "no"
        last = time.monotonic()
        comments = 0
        for block in reader.blocks():
            now = time.monotonic()
            assert now - last < KEEPALIVE_S + SLACK_S
            last = now
            comments += block == ": keep-alive"
            if '"error"' in block:
                break
    assert comments >= 4
    assert "request_queue_timeout" in block


def test_a_queue_timeout_ends_a_stream_with_an_error_event(narrow: Server) -> None:
    with _occupied(narrow), _streaming(narrow, ask("Hello!")) as reader:
        events = list(reader.events())
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (error,) = [event["error"] for event in events[1:]]
    assert (error["code"], error["type"]) == ("request_queue_timeout", "server_error")


def test_a_queue_timeout_of_a_whole_answer_is_503(narrow: Server) -> None:
    with _occupied(narrow):
        status, body = narrow.post(ask("Hello!"))
    assert (status, body["error"]["code"]) == (503, "request_queue_timeout")


def test_a_full_queue_is_429_and_drains(narrow: Server) -> None:
    with _occupied(narrow), _streaming(narrow, ask("Hello!")) as first:
        with _streaming(narrow, ask("Hello!")):
            narrow.wait_metric(WAITING, 2)
            payload = orjson.dumps(ask("Hello!"))
            status, headers, body = narrow.request("POST", "/v1/chat/completions", payload)
            error = orjson.loads(body)["error"]
            assert (status, error["code"], error["type"]) == (
                429,
                "server_overloaded",
                "rate_limit_error",
            )
            assert headers["retry-after"] == "1"
        narrow.wait_metric(WAITING, 1)
        assert next(first.events())
    status, body = narrow.post(ask("Hello!"))
    assert body["choices"][0]["message"]["content"] == ANSWERS["Hello!"]


def test_a_client_that_leaves_its_stream_frees_the_lane(narrow: Server) -> None:
    before = narrow.settle()["ginfer_engine_cancel_to_free_seconds_count"]
    with _streaming(narrow, endless(8000)) as reader:
        next(reader.events())
        narrow.wait_metric(RUNNING, 1)
    started = time.monotonic()
    narrow.wait_metric(RUNNING, 0)
    assert time.monotonic() - started < SLACK_S
    assert narrow.metrics()["ginfer_engine_cancel_to_free_seconds_count"] == before + 1


@pytest.mark.parametrize("padding", [0, 300_000])
def test_a_client_that_leaves_before_a_whole_answer_frees_the_lane(
    narrow: Server, padding: int
) -> None:
    narrow.settle()
    with narrow.connect() as sock:
        send(sock, endless(8000), padding=padding)
        narrow.wait_metric(RUNNING, 1)
    narrow.wait_metric(RUNNING, 0, timeout_s=SLACK_S)


def test_a_client_that_leaves_the_queue_frees_its_place(narrow: Server) -> None:
    with _occupied(narrow):
        with narrow.connect() as sock:
            send(sock, ask("Hello!"))
            narrow.wait_metric(WAITING, 1)
        narrow.wait_metric(WAITING, 0, timeout_s=SLACK_S)


def _talkative(max_tokens: int) -> dict[str, Any]:
    """About two kilobytes of events per token."""
    return endless(max_tokens, stream=True, logprobs=True, top_logprobs=20)


def _connect_slowly(server: Server) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    return sock


def test_a_slow_reader_delays_nobody_and_loses_nothing(server: Server) -> None:
    server.settle()
    num_tokens = 1500
    with _connect_slowly(server) as sock:
        send(sock, _talkative(num_tokens))
        server.wait_metric(RUNNING, 1)
        _status, body = server.post(ask("Hello!"))
        assert body["choices"][0]["message"]["content"] == ANSWERS["Hello!"]
        server.wait_metric(RUNNING, 0, timeout_s=120)  # done, though nothing was read
        assert server.metrics()["ginfer_http_requests_active"] == 1
        with closing(SseReader(sock)) as reader:
            events = list(reader.events())
    assert events[-1] == "[DONE]"
    chunks = [event["choices"][0] for event in events[:-1]]
    entries = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == num_tokens
    assert len(chunks) < num_tokens  # deltas merged while the reader slept
    joined = "".join(entry["token"] for entry in entries)
    assert text_of(events) == joined


def test_a_reader_that_takes_nothing_is_dropped(narrow: Server) -> None:
    narrow.settle()
    with _connect_slowly(narrow) as sock:
        send(sock, _talkative(8000))
        narrow.wait_metric(RUNNING, 1)
        narrow.wait_metric(RUNNING, 0, timeout_s=120)
        narrow.wait_metric("ginfer_http_requests_active", 0)
        assert narrow.metrics()["ginfer_engine_completion_tokens_total"] > 0
        with pytest.raises((ConnectionError, AssertionError, ValueError)):
            list(SseReader(sock).events())
    assert narrow.post(ask("Hello!"))[0] == 200


def test_half_a_request_and_a_vanished_client_leave_nothing(narrow: Server) -> None:
    before = narrow.settle()
    for cut in (1, 40, 200):
        with narrow.connect() as sock:
            body = orjson.dumps(ask("Hello!"))
            sock.sendall((head(body) + body)[:cut])
    after = narrow.settle()
    assert after["ginfer_tasks"] <= before["ginfer_tasks"] + 1
