"""Whatever our OpenAPI document lets through: an answer in the protocol's form, never 500."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from appliance.openapi import STREAMS, TABLES
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 120.0
LEGAL = {200, 400, 404, 413, 429}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A context so short that no request that happens to be legal takes long."""
    engine = {"max_concurrency": 2, "max_context": 256}
    with Server.launch(engine=engine, max_request_mib=1) as running:
        yield running
        running.check_log()


@pytest.fixture(scope="module")
def document(small: Server) -> dict[str, Any]:
    status, headers, body = small.request("GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = orjson.loads(body)
    return found


def test_the_document_lists_every_route(document: dict[str, Any], small: Server) -> None:
    paths = document["paths"]
    assert set(TABLES) <= set(paths)
    assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/models/{name}"} <= set(paths)
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation["summary"], (path, method)
            status, _, _ = small.request(method.upper(), path.replace("{", "x").replace("}", ""))
            assert status != 405, (path, method)


def check_answer(path: str, status: int, headers: Any, body: bytes) -> None:
    """An answer that the protocol of `path` allows."""
    assert status in LEGAL, (status, body[:500])
    if status == 200:
        return
    found = orjson.loads(body)
    error = found["error"]
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert found["type"] == "error"
        assert error["type"].endswith("_error")
    else:
        assert {"message", "type", "param", "code"} <= set(error)
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]


def _fuzz(server: Server, document: dict[str, Any], path: str, count: int) -> None:
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        body = json.dumps(case.body) if isinstance(case.body, dict | list) else "{}"
        headers = {"content-type": "application/json"}
        status, found, data = server.request("POST", path, body, headers)
        check_answer(path, status, found, data)

    run()


@pytest.mark.parametrize("path", TABLES)
def test_generated_bodies(small: Server, document: dict[str, Any], path: str) -> None:
    _fuzz(small, document, path, 15)


@pytest.mark.long
@pytest.mark.parametrize("path", STREAMS)
def test_generated_bodies_full(small: Server, document: dict[str, Any], path: str) -> None:
    _fuzz(small, document, path, 1000)
