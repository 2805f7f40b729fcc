"""Every HTTP failure is JSON with a code, and none of them costs the server anything."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.service.chat import ANSWERS, ask, endless, head
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"


def _exchange(server: Server, data: bytes, *, num: int = 1) -> list[tuple[int, Any]]:
    """Send bytes, read `num` whole responses with a content length."""
    with server.connect() as sock:
        sock.sendall(data)
        with sock.makefile("rb") as file:
            return [_response(file) for _ in range(num)]


def _response(file: Any) -> tuple[int, Any]:
    status = int(file.readline().split()[1])
    length = 0
    while line := file.readline().strip():
        name, _, value = line.partition(b": ")
        if name.lower() == b"content-length":
            length = int(value)
    return status, orjson.loads(file.read(length))


def _code(body: Any) -> str:
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return str(body["error"]["code"])


def test_health_and_readiness(server: Server) -> None:
    status, _, body = server.request("GET", "/health")
    assert (status, orjson.loads(body)) == (200, {"status": "ok"})
    assert server.ready() == (200, {"status": "ready"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"tools": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_body_that_is_not_json_is_400(server: Server, body: bytes) -> None:
    status, error = server.post(body)
    assert (status, _code(error)) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"model": 7}, "invalid_type", "model"),
        ({"n": 2}, "n_not_supported", "n"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"seed": -1}, "invalid_value", "seed"),
        ({"temperature": 1e400}, "invalid_json", None),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
        ({"logit_bias": {str(10**8 + i): 1 for i in range(40_000)}}, "invalid_value", "logit_bias"),
    ],
)
def test_bad_values_are_400_by_name(
    server: Server, change: dict[str, Any], code: str, param: str | None
) -> None:
    body = orjson.dumps(ask("Hello!") | change)
    if change.get("temperature"):
        body = orjson.dumps(ask("Hello!")).replace(b'"temperature":0', b'"temperature":1e400')
    status, error = server.post(body)
    assert (status, _code(error)) == (400, code)
    if param is not None:
        assert error["error"]["param"] == param


@pytest.mark.parametrize("body", [b"[]", b"7", b'"text"', b"null"])
def test_json_that_is_no_object_is_400(server: Server, body: bytes) -> None:
    assert server.post(body)[0] == 400


@pytest.mark.parametrize("field", ["temperature", "user", "messages", "stop", "x"])
def test_a_field_of_any_depth_costs_no_500(server: Server, field: str) -> None:
    value = f'"{field}": '.encode() + b"[" * 1000 + b"]" * 1000
    whole = orjson.dumps(ask("Hello!", max_tokens=1) | {"stop": None}).replace(b'"stop":null,', b"")
    status, error = server.post(b"{" + value + b"," + whole.removeprefix(b"{"))
    assert status == 400
    assert _code(error) in ("invalid_json", "invalid_type", "duplicate_member", "unknown_parameter")


@pytest.mark.parametrize("depth", [100, 330, 480])
def test_deeply_nested_schemas_cost_no_500(server: Server, depth: int) -> None:
    schema = b'{"type": "object", "properties": {"x": ' * depth + b"{}" + b"}}" * depth
    function = b'{"name": "f", "parameters": ' + schema + b"}"
    tools = b'"tools": [{"type": "function", "function": ' + function + b"}]"
    body = orjson.dumps(ask("Hello!", max_tokens=1)).removesuffix(b"}") + b"," + tools + b"}"
    status, answer = server.post(body)
    assert status == 200 or (status, _code(answer)[:8]) == (400, "invalid_"), answer


def test_unknown_paths_and_methods(server: Server) -> None:
    status, _, body = server.request("GET", "/v1/nothing")
    assert (status, _code(orjson.loads(body))) == (404, "not_found")
    status, headers, body = server.request("GET", CHAT)
    assert (status, _code(orjson.loads(body))) == (405, "method_not_allowed")
    assert headers["allow"] == "POST"
    assert server.request("POST", "/health", b"{}")[0] == 405
    assert server.request("HEAD", "/health")[0] in (200, 405)


def test_too_large_bodies_are_413_whatever_announces_them(server: Server) -> None:
    large = b'{"x": "' + b"x" * (2 << 20) + b'"}'
    assert _code(_exchange(server, head(large) + large)[0][1]) == "request_too_large"
    first = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked = first + b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)
    assert _exchange(server, chunked)[0][0] == 413


def test_a_client_that_asks_first_is_refused_before_it_sends(server: Server) -> None:
    large = bytes(2 << 20)
    status, body = _exchange(server, head(large, "Expect: 100-continue"))[0]
    assert (status, _code(body)) == (413, "request_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xc3\xbc HTTP/1.1\r\n\r\n",
        b"\xe4(\x87 \xff\x01\x0e( x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
def test_malformed_http_is_4xx_json(server: Server, data: bytes) -> None:
    status, body = _exchange(server, data)[0]
    assert 400 <= status < 500
    assert _code(body)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    body = orjson.dumps(ask("Hello!"))
    models = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
    data = models + head(body) + body + models + head(b"{") + b"{" + models
    found = _exchange(server, data, num=5)
    assert [status for status, _ in found] == [200, 200, 200, 400, 200]
    assert found[1][1]["choices"][0]["message"]["content"] == ANSWERS["Hello!"]


def test_a_chunked_request_body_is_read(server: Server) -> None:
    body = orjson.dumps(ask("Hello!"))
    first = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:10], body[10:]))
    status, answer = _exchange(server, first + pieces + b"0\r\n\r\n")[0]
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == ANSWERS["Hello!"]


def test_an_encoded_body_is_refused_by_name(server: Server) -> None:
    status, error = server.post(ask("Hello!"), **{"Content-Encoding": "gzip"})
    assert (status, _code(error)) == (415, "encoding_not_supported")
    assert error["error"]["param"] == "content-encoding"
    assert server.post(ask("Hello!", max_tokens=1), **{"Content-Encoding": "identity"})[0] == 200


def test_a_body_that_never_comes_is_408(narrow: Server) -> None:
    with narrow.connect() as sock:
        sock.sendall(head(b"x" * 100) + b"{")
        with sock.makefile("rb") as file:
            status, body = _response(file)
    assert (status, _code(body)) == (408, "request_timeout")


def test_metrics_are_prometheus_text(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.post(ask("Hello!"))
    server.post(b"{")
    _, headers, body = server.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    requests = {
        (s.labels["route"], s.labels["status"]): s.value
        for s in families["ginfer_http_requests"].samples
    }
    assert requests["/v1/chat/completions", "400"] >= 1
    assert families["ginfer_engine_first_token_seconds"].type == "histogram"
    assert families["ginfer_engine_completion_tokens"].type == "counter"
    assert families["ginfer_ready"].samples[0].value == 1


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with two keys and CORS, which gives whole answers one second."""
    with Server.launch(
        api_keys=["first key", "second"], cors=True, response_timeout_s=1.0
    ) as running:
        yield running
        running.check_log()


def test_keys_are_demanded_everywhere_but_for_probes(guarded: Server) -> None:
    for path in ("/health", "/ready"):
        assert guarded.request("GET", path)[0] == 200
    for path in ("/v1/models", "/metrics", "/nothing"):
        status, headers, body = guarded.request("GET", path)
        assert (status, _code(orjson.loads(body))) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic second"},
        {"x-api-key": "secon"},
        {"x-api-key": "\xff"},
    ):
        assert guarded.request("GET", "/v1/models", headers=headers)[0] == 401
    for headers in (
        {"Authorization": "Bearer first key"},
        {"Authorization": "bearer second"},
        {"x-api-key": "second"},
    ):
        assert guarded.request("GET", "/v1/models", headers=headers)[0] == 200
    assert guarded.post(ask("Hello!"))[0] == 401
    status, headers, body = guarded.request("POST", "/v1/messages", b"{}")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert orjson.loads(body)["error"]["type"] == "authentication_error"


def test_cors_answers_preflights_without_a_key(guarded: Server) -> None:
    status, headers, body = guarded.request("OPTIONS", CHAT)
    assert (status, body) == (204, b"")
    assert headers["access-control-allow-origin"] == "*"
    assert "POST" in headers["access-control-allow-methods"]
    assert guarded.request("GET", "/v1/models")[1]["access-control-allow-origin"] == "*"


def test_a_whole_answer_that_takes_too_long_is_503_and_frees_its_lane(guarded: Server) -> None:
    key = {"x-api-key": "second"}
    status, body = guarded.post(endless(8000, temperature=2.0), **key)  # nothing to copy
    assert (status, _code(body)) == (503, "service_unavailable")
    deadline = time.monotonic() + 2
    while guarded.metrics(key)["ginfer_engine_running"]:
        assert time.monotonic() < deadline


def test_without_cors_no_origin_is_allowed(server: Server) -> None:
    assert "access-control-allow-origin" not in server.request("GET", "/v1/models")[1]
    assert server.request("OPTIONS", CHAT)[0] == 405


CRAMPED = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96));"
    "from tests.service.launch import main; main('{}')"
)


def test_more_connections_than_files_are_refused_and_cost_nothing() -> None:
    """96 files, 64 of them reserved: 32 connections."""
    with Server("-c", CRAMPED) as server, ExitStack() as held:
        socks = [held.enter_context(server.connect()) for _ in range(100)]
        for sock in socks[32:]:  # all of them: one accepted late would take a freed place
            with sock.makefile("rb") as file:
                assert file.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
                assert b"too_many_connections" in file.read()
        for sock in socks[:16]:
            sock.close()
        deadline, status = time.monotonic() + 30, 0
        while status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            with suppress(ConnectionError):  # refused before the request was read
                status = server.request("GET", "/health")[0]
        assert server.metrics()["ginfer_http_connections_refused_total"] > 30
        assert server.post(ask("Hello!", max_tokens=1))[0] == 200
        server.check_log()
        assert len(server.lines) < 10


def test_connections_that_say_nothing_cost_nothing(narrow: Server) -> None:
    silent = [narrow.connect() for _ in range(50)]
    try:
        started = time.monotonic()
        assert narrow.request("GET", "/health")[0] == 200
        assert time.monotonic() - started < 2
    finally:
        for sock in silent:
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()
