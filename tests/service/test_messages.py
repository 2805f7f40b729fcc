"""Messages on the wire: signs of life in the queue, and how errors look."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from tests.service.chat import SseReader, head, occupied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.service.server import Server

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "any",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello!"}],
    "thinking": {"type": "disabled"},
    "temperature": 0,
}


@contextmanager
def streaming(server: Server) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, data) of the events of a stream."""
    with server.connect() as sock:
        body = orjson.dumps(HELLO | {"stream": True})
        sock.sendall(head(body, path=PATH) + body)
        with closing(SseReader(sock)) as reader:
            yield (_event(block) for block in reader.blocks())


def _event(block: str) -> tuple[str, Any]:
    name, data = block.split("\n")
    return name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))


def test_pings_come_at_once_and_while_a_request_waits(narrow: Server) -> None:
    with occupied(narrow), streaming(narrow) as events:
        found = list(events)
    *pings, (name, data) = found
    assert len(pings) >= 4  # 2 s in the queue, one every 0.2 s
    assert pings == [("ping", {"type": "ping"})] * len(pings)
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "overloaded_error")
    assert data["error"]["code"] == "request_queue_timeout"


def test_a_stream_starts_with_a_ping_and_knows_its_input(narrow: Server) -> None:
    narrow.settle()
    with streaming(narrow) as events:
        found = [event for event in events if event != ("ping", {"type": "ping"})]
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    first, last = found[0][1], found[-2][1]
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    start = {name: first["message"]["usage"][name] for name in counts}
    assert sum(start.values()) == 14
    assert start == {name: last["usage"][name] for name in counts}


def test_a_whole_answer_that_waits_too_long_is_overloaded(narrow: Server) -> None:
    with occupied(narrow):
        status, headers, data = narrow.request("POST", PATH, orjson.dumps(HELLO))
    body = orjson.loads(data)
    assert (status, body["type"], body["error"]["type"]) == (503, "error", "overloaded_error")
    assert headers["retry-after"] == "1"


def test_count_tokens_needs_no_place_in_the_queue(narrow: Server) -> None:
    with occupied(narrow), streaming(narrow), streaming(narrow):
        narrow.wait_metric("ginfer_engine_waiting", 2)
        status, _, data = narrow.request("POST", f"{PATH}/count_tokens", orjson.dumps(HELLO))
        assert (status, orjson.loads(data)) == (200, {"input_tokens": 14})
        status, _, data = narrow.request("POST", PATH, orjson.dumps(HELLO))
        assert (status, orjson.loads(data)["error"]["type"]) == (429, "rate_limit_error")
