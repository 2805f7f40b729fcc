"""A bad value and a lost device, as clients of a live server see them."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from appliance import wire_values
from appliance.bridge import EngineBridge
from ginfer.config import EngineConfig
from ginfer.errors import InternalError
from tests.service.chat import ANSWERS, SseReader, ask, endless, send, text_of
from tests.service.launch import PACKAGE
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def frail(fault: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GINFER_FAULT_FILE", str(fault))
        with Server.launch(engine={"max_concurrency": 2}) as running:
            yield running


def _ask_for(fault: Path, text: str) -> None:
    """Ask for a fault. The file appears with all its text: the engine looks at every round."""
    whole = fault.with_suffix(".whole")
    whole.write_text(text)
    whole.rename(fault)


def _hello(server: Server) -> str:
    status, body = server.post(ask("Hello!"))
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def test_a_value_that_is_no_number_costs_its_request_alone(frail: Server, fault: Path) -> None:
    with frail.connect() as first, frail.connect() as second:
        readers = []
        for sock in (first, second):
            send(sock, endless(2000, stream=True))
            readers.append(SseReader(sock))
        with closing(readers[0]) as a, closing(readers[1]) as b:
            streams = [a.events(), b.events()]
            seen = [[next(events) for _ in range(4)] for events in streams]
            _ask_for(fault, "nan 1")
            for got, events in zip(seen, streams, strict=True):
                got += events
    ends = sorted((got[-1] for got in seen), key=str)
    assert ends[0] == "[DONE]"
    assert (ends[1]["error"]["code"], ends[1]["error"]["type"]) == (
        "nonfinite_logits",
        "server_error",
    )
    assert not fault.exists()
    assert frail.metrics()["ginfer_engine_restarts_total"] == 0
    assert _hello(frail) == ANSWERS["Hello!"]


def test_a_lost_device_costs_the_running_requests_and_a_restart(frail: Server, fault: Path) -> None:
    pid = frail.engine_pid
    with frail.connect() as sock:
        send(sock, endless(4000, stream=True))
        with closing(SseReader(sock)) as reader:
            events = reader.events()
            seen = [next(events) for _ in range(5)]
            _ask_for(fault, "trap")
            seen += events
    assert text_of(seen)
    error = seen[-1]["error"]
    assert (error["code"], error["type"]) == ("engine_restarted", "server_error")
    assert "the engine failed" in error["message"]
    assert frail.request("GET", "/health")[0] == 200
    deadline = time.monotonic() + 120
    while frail.ready()[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert frail.engine_pid != pid
    assert _hello(frail) == ANSWERS["Hello!"]


def test_a_fault_of_the_supervisor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: EngineConfig) -> None:
        raise ZeroDivisionError("no header")

    async def start() -> None:
        bridge = EngineBridge(EngineConfig(package=PACKAGE))
        bridge.start()
        try:
            with pytest.raises(InternalError, match="no header"):
                await asyncio.wait_for(bridge.wait_ready(), 60)
        finally:
            await bridge.close()

    monkeypatch.setattr(wire_values, "config_header", broken)
    asyncio.run(start())
