"""The engine process dies, the server stops, the address is taken: who sees what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.chat import ANSWERS, SseReader, ask, endless, send, text_of
from tests.service.launch import PACKAGE
from tests.service.server import ROOT, Server, kill9, wait_gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVE = "from appliance.cli.main import serve_main; serve_main()"


@pytest.fixture(scope="module")
def doomed() -> Iterator[Server]:
    with Server.launch(engine={"max_concurrency": 2}) as running:
        yield running


def _hello(server: Server) -> str:
    status, body = server.post(ask("Hello!"))
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + 120
    while server.ready()[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_server_says_what_it_runs_on(doomed: Server, pytestconfig: pytest.Config) -> None:
    (line,) = [line for line in doomed.lines if f" at {doomed.url}" in line]
    wanted = pytestconfig.getoption("--backend")
    assert f"({wanted}, context" in line or wanted == "auto"


def test_kill_9_of_the_engine_costs_only_the_running_requests(doomed: Server) -> None:
    pid = doomed.engine_pid
    with doomed.connect() as streamed, doomed.connect() as whole:
        send(streamed, endless(4000, stream=True))
        send(whole, endless(4000))
        with closing(SseReader(streamed)) as reader:
            blocks = reader.events()
            seen = [next(blocks) for _ in range(5)]
            doomed.wait_metric("ginfer_engine_running", 2)
            kill9(pid)
            seen += blocks
        with whole.makefile("rb") as answer:
            status_line = answer.readline()
    error = seen[-1]["error"]
    assert (error["code"], error["type"]) == ("engine_restarted", "server_error")
    assert "SIGKILL" in error["message"]
    assert text_of(seen)
    assert status_line.split()[1] == b"503"

    status_now, ready = doomed.ready()
    assert (status_now, ready["status"]) == (503, "restarting")
    assert "SIGKILL" in ready["reason"]
    refused, refusal = doomed.post(ask("Hello!"))
    assert (refused, refusal["error"]["code"]) == (503, "service_unavailable")
    assert doomed.request("GET", "/health")[0] == 200
    assert doomed.metrics()["ginfer_ready"] == 0

    _wait_ready(doomed)
    assert doomed.engine_pid != pid
    assert doomed.metrics()["ginfer_engine_restarts_total"] == 1
    assert _hello(doomed) == ANSWERS["Hello!"]
    assert any("SIGKILL" in line for line in doomed.lines)


def test_an_engine_that_dies_while_idle_comes_back(doomed: Server) -> None:
    _wait_ready(doomed)
    kill9(doomed.engine_pid)
    while doomed.ready()[0] == 200:
        time.sleep(0.01)
    _wait_ready(doomed)
    assert _hello(doomed) == ANSWERS["Hello!"]


def test_the_engine_process_leaves_signals_to_the_server(doomed: Server) -> None:
    _wait_ready(doomed)
    pid = doomed.engine_pid
    for number in (signal.SIGINT, signal.SIGTERM):
        subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)
    time.sleep(0.2)
    assert _hello(doomed) == ANSWERS["Hello!"]
    assert doomed.engine_pid == pid
    assert os.getpgid(pid) == pid  # a Ctrl-C passes it by
    assert os.getsid(pid) == os.getsid(doomed.process.pid)  # cores are shared within a session


def test_the_engine_ends_with_a_killed_server(doomed: Server) -> None:
    _wait_ready(doomed)
    pid = doomed.engine_pid
    kill9(doomed.process.pid)
    wait_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(number: signal.Signals) -> None:
    with Server.launch() as server, server.connect() as sock:
        engine = server.engine_pid
        send(sock, endless(200, stream=True))
        with closing(SseReader(sock)) as reader:
            events = reader.events()
            seen = [next(events)]
            server.process.send_signal(number)
            seen += events
        assert seen[-1] == "[DONE]"
        assert seen[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        wait_gone(engine)
        with pytest.raises(ConnectionRefusedError):
            server.connect()


def test_a_second_signal_does_not_wait() -> None:
    with Server.launch() as server, server.connect() as sock:
        send(sock, endless(8000, stream=True))
        with closing(SseReader(sock)) as reader:
            events = reader.events()
            seen = [next(events)]
            server.process.send_signal(signal.SIGTERM)
            while not any("stopping" in line for line in server.lines):
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            seen += events
        assert seen[-1]["error"]["code"] == "service_unavailable"
        assert server.wait() == 0


def test_the_command_serves_and_refuses_a_busy_port() -> None:
    options = (str(PACKAGE), "--port", "0", "--max-context", "2048", "--max-concurrency", "1")
    with Server("-c", SERVE, *options) as server:
        assert _hello(server) == ANSWERS["Hello!"]
        done = _serve(PACKAGE, "--port", str(server.port))
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"127.0.0.1:{server.port}" in line
        assert "--port" in line
        assert server.stop() == 0


def test_an_unusable_package_is_one_line_and_exit_1(tmp_path: Path) -> None:
    broken = tmp_path / "broken.ginfer"
    broken.write_bytes(PACKAGE.read_bytes()[:5000])
    done = _serve(broken, "--port", "0")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "broken.ginfer" in done.stderr


def test_an_engine_that_cannot_start_is_one_line_and_exit_1() -> None:
    done = _serve(PACKAGE, "--port", "0", "--kv-capacity", str(1 << 29))
    assert done.returncode == 1
    assert "kv_capacity" in done.stderr.splitlines()[-1] or "kv-capacity" in done.stderr
    assert "Traceback" not in done.stderr


def _serve(package: Path, *options: str) -> Any:
    command = [sys.executable, "-c", SERVE, str(package), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
