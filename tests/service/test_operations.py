"""What operators rely on: ids, logs, keys, draining, and engines and servers that are killed."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import closing
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from appliance.auth import HashedKey
from tests.service.chat import ANSWERS, SseReader, ask, endless, send
from tests.service.server import Server, kill9

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "hunter2 is the password"
CHAT = "/v1/chat/completions"
DEADLINE_S = 120.0
EFFORT = {"effort": "low"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _events(path: Path) -> list[dict[str, Any]]:
    """Every line of a request log and of what it was before, but for one being written."""
    files = sorted(path.parent.glob(f"{path.name}*"), reverse=True)
    data = b"".join(file.read_bytes() for file in files)
    return [orjson.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _wait_events(path: Path, name: str, count: int, word: str = "") -> list[dict[str, Any]]:
    """The events of one name that hold a word, once there are so many."""
    deadline = time.monotonic() + DEADLINE_S

    def find() -> list[dict[str, Any]]:
        return [e for e in _events(path) if e["event"] == name and word in str(e)]

    while len(found := find()) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} {name}"
        time.sleep(0.02)
    return found


def _wait_ready(server: Server, status: int = 200) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while (found := server.ready())[0] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[Server]:
    """Logs in JSON, gives a frozen engine 1.5 s, knows two keys, one of them by its hash."""
    keys = folder / "keys"
    keys.write_text(HashedKey.of("laptop", "sk-first").line + "\n")
    with Server.launch(
        request_log=str(folder / "log"),
        api_keys=["given"],
        api_keys_file=str(keys),
        log_format="json",
        log_stats_interval_s=0.2,
        watchdog_s=1.5,
    ) as running:
        yield running
        running.check_log()


def _post(server: Server, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    given = {"authorization": "Bearer sk-first"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    status, found, data = server.request("POST", CHAT, orjson.dumps(body), given)
    return status, found, orjson.loads(data)


def test_a_request_is_told_from_its_id_to_its_end(watched: Server, folder: Path) -> None:
    body = ask("Hello!", user=SECRET, stop=[SECRET])
    body["messages"].insert(0, {"role": "system", "content": SECRET})
    status, headers, answer = _post(watched, body, x_request_id="turn-7.b")
    assert (status, headers["x-request-id"]) == (200, "turn-7.b")
    text = answer["choices"][0]["message"]["content"]
    done = _wait_events(folder / "log", "request_done", 1)[-1]
    assert done["request"]["request_id"] == "turn-7.b"
    assert done["request"]["response_id"] == answer["id"]
    assert done["request"]["key"] == "laptop"
    assert done["request"]["protocol"] == "openai_chat_completions"
    assert done["request"]["message_count"] == 2
    assert done["request"]["sampling"]["temperature"] == 0
    assert done["result"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert done["result"]["finish_reason"] == "stop_token"
    assert 0 < done["timings_seconds"]["ttft"] <= done["timings_seconds"]["total"]
    (started,) = _wait_events(folder / "log", "request_start", 1)
    assert started["request"] == done["request"]
    assert {e["server_instance_id"] for e in _events(folder / "log")} == {
        done["server_instance_id"]
    }
    raw = (folder / "log").read_text() + "\n".join(watched.lines)
    for word in (SECRET, text, "Bearer", "sk-first"):
        assert word not in raw, word


def test_a_start_names_what_runs(watched: Server, folder: Path) -> None:
    (start,) = _wait_events(folder / "log", "server_start", 1)
    assert start["artifact"]["model_id"] == "qwen3.8-demo"
    assert start["engine"]["max_context"] == 8192
    assert start["server"]["num_keys"] == 2
    assert sum(start["memory"].values()) > 1 << 20
    assert {"environment", "argv", "sampling_defaults"} <= set(start)


def test_what_a_request_reuses_is_told(watched: Server, folder: Path) -> None:
    body = ask("What do you see? " * 20)
    _, _, answer = _post(watched, body, x_request_id="first")
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    body["messages"] += [said, {"role": "user", "content": "And now?"}]
    _, _, answer = _post(watched, body, x_request_id="second")
    log = folder / "log"
    first, second = (
        _wait_events(log, "request_done", 1, f"'request_id': '{name}'")[0]["result"]
        for name in ("first", "second")
    )
    assert (first["prefix_reuse_path"], first["prefix_snapshot_depth"]) == ("none", 0)
    depth = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert depth >= 64
    assert second["prefix_reuse_path"] in ("append", "snapshot")
    assert second["prefix_snapshot_depth"] == second["prefix_cache_hit_tokens"] == depth
    assert second["prefix_recomputed_tokens"] >= 0


def test_refused_requests_and_lost_clients_are_told(watched: Server, folder: Path) -> None:
    status, headers, _ = _post(watched, ask(SECRET, n=2), x_request_id="no spaces, please")
    assert status == 400
    assert headers["x-request-id"].startswith("req_")
    rejected = _wait_events(folder / "log", "request_rejected", 1)[-1]
    assert rejected["phase"] == "prepare"
    assert rejected["request"]["request_id"] == headers["x-request-id"]
    assert rejected["error"] == {"code": "n_not_supported", "status": 400, "param": "n"}
    with watched.connect() as sock:
        body = orjson.dumps(endless(8000, stream=True))
        lines = f"POST {CHAT} HTTP/1.1", "Host: x", "x-api-key: given", "x-request-id: gone"
        sock.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
        with closing(SseReader(sock)) as reader:
            assert reader.headers["x-request-id"] == "gone"
            next(reader.events())
    lost = _wait_events(folder / "log", "request_error", 1)[-1]
    assert lost["request"]["request_id"] == "gone"
    assert lost["request"]["key"] == "key-1"
    assert lost["error"]["code"] == "client_disconnected"


def test_throughput_is_told_while_there_is_work(watched: Server, folder: Path) -> None:
    assert _post(watched, endless(400))[0] == 200
    line = _wait_events(folder / "log", "throughput", 1)[-1]
    assert line["interval_seconds"] > 0
    assert set(line["scheduler"]) == {"running", "prefilling", "decode_ready", "waiting"}
    assert sum(line["tokens"].values()) > 0


def test_every_line_on_stderr_is_json(watched: Server) -> None:
    _post(watched, ask("Hello!"), x_request_id="line-1")
    deadline = time.monotonic() + DEADLINE_S
    while not any('"line-1"' in line for line in watched.lines):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lines = [orjson.loads(line) for line in list(watched.lines)]
    assert all({"time", "level", "source", "event"} <= set(line) for line in lines)
    access = next(line for line in lines if line.get("request_id") == "line-1")
    assert access["event"] == "access"
    assert (access["status"], access["key"]) == (200, "laptop")
    assert access["duration_ms"] > 0


def test_keys_are_read_again_on_sighup(watched: Server, folder: Path) -> None:
    keys = folder / "keys"

    def reload(text: str, event: str) -> None:
        num_before = len(watched.lines)
        keys.write_text(text)
        watched.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + DEADLINE_S
        while not any(event in line for line in list(watched.lines)[num_before:]):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def status(key: str) -> int:
        return watched.request("GET", "/v1/models", headers={"x-api-key": key})[0]

    assert [status(k) for k in ("sk-first", "second", "given", "")] == [200, 401, 200, 401]
    reload(HashedKey.of("desk", "second").line, "2 API keys")
    assert [status(k) for k in ("sk-first", "second", "given")] == [401, 200, 200]
    reload("broken", "stay as they are")
    assert [status(k) for k in ("sk-first", "second", "given")] == [401, 200, 200]
    reload(HashedKey.of("laptop", "sk-first").line, "2 API keys")


def test_a_frozen_engine_is_killed_and_started_anew(watched: Server, folder: Path) -> None:
    pid = watched.engine_pid
    headers = {"x-api-key": "given"}
    with watched.connect() as sock:
        body = orjson.dumps(endless(8000, stream=True))
        lines = f"POST {CHAT} HTTP/1.1", "Host: x", "x-api-key: given", "x-request-id: frozen"
        sock.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
        with closing(SseReader(sock)) as reader:
            events = reader.events()
            seen = [next(events) for _ in range(3)]
            os.kill(pid, signal.SIGSTOP)
            seen += events
    error = seen[-1]["error"]
    assert error["code"] == "engine_restarted"
    assert "froze" in error["message"]
    assert watched.ready()[1]["status"] == "restarting" or watched.engine_pid != pid
    lost = _wait_events(folder / "log", "request_error", 1, "froze")
    assert lost[-1]["request"]["request_id"] == "frozen"
    _wait_ready(watched)
    assert watched.engine_pid != pid
    assert watched.metrics(headers)["ginfer_engine_restarts_total"] == 1
    answer = _post(watched, ask("Hello!"))[2]
    assert answer["choices"][0]["message"]["content"] == ANSWERS["Hello!"]


@pytest.mark.long
def test_an_engine_that_freezes_while_idle_is_noticed(watched: Server) -> None:
    _wait_ready(watched)
    pid = watched.engine_pid
    os.kill(pid, signal.SIGSTOP)
    assert "froze" in _wait_ready(watched, 503)["reason"]
    _wait_ready(watched)
    assert watched.engine_pid != pid


class Load:
    """Clients that ask for ever, streamed and whole, until the server refuses."""

    def __init__(self, server: Server, num_clients: int) -> None:
        self._server = server
        self.wrong: list[Any] = []
        self.num_done = 0
        self._threads = [
            threading.Thread(target=self._run, args=(i % 2 == 0,)) for i in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for the clients' ends."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _run(self, stream: bool) -> None:
        while True:
            try:
                complete = self._stream() if stream else self._whole()
            except (OSError, HTTPException):  # the server is gone
                return
            if not complete:
                return
            self.num_done += 1

    def _whole(self) -> bool:
        """Whether it was answered; false when it was refused in good order."""
        status, body = self._server.post(endless(60))
        if status != 200 and (status, body["error"]["code"]) != (503, "service_unavailable"):
            self.wrong.append((status, body))
        return status == 200

    def _stream(self) -> bool:
        with self._server.connect() as sock:
            send(sock, endless(60, stream=True))
            if sock.recv(12, socket.MSG_PEEK) != b"HTTP/1.1 200":
                return False
            with closing(SseReader(sock)) as reader:
                events = list(reader.events())
        if events[-1:] != ["[DONE]"]:
            self.wrong.append(events[-2:])
        return True


def test_kill_9_leaves_what_is_stored_whole_or_says_that_it_is_gone(tmp_path: Path) -> None:
    options = {"engine": {"max_concurrency": 2}, "state_dir": str(tmp_path)}
    fields: dict[str, Any] = {"model": "qwen3.8-demo", "temperature": 0}
    sealed: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "reasoning": EFFORT}
    question: Any = {"role": "user", "content": "Who are you?"}
    with Server.launch(**options) as server, server.openai() as client:
        first = client.responses.create(input=[question], **fields, **sealed)
        kill9(server.engine_pid)
        _wait_ready(server, 503)
        _wait_ready(server)
        follow_up = {"input": "Hello!", "previous_response_id": first.id, **fields}
        before = client.responses.create(**follow_up, reasoning=EFFORT)
        assert before.output_text  # the engine's caches are gone, the server's store is not
        server.kill()
    with Server.launch(**options) as server, server.openai() as client:
        with pytest.raises(openai.NotFoundError, match=first.id) as caught:
            client.responses.create(**follow_up)
        assert (caught.value.code, caught.value.param) == (
            "response_not_found",
            "previous_response_id",
        )
        with pytest.raises(openai.NotFoundError, match=first.id):
            client.responses.retrieve(first.id)
        history = [question, *(item.to_dict() for item in first.output)]
        history.append({"role": "user", "content": "Hello!"})
        after = client.responses.create(input=history, **fields, **sealed)
        assert after.output_text == before.output_text  # what was sealed still opens
        server.check_log()


def test_a_call_that_is_cut_is_counted_and_logged(watched: Server, folder: Path) -> None:
    headers = {"authorization": "Bearer sk-first"}
    before = watched.metrics(headers)["ginfer_tool_calls_malformed_total"]
    tool = {"name": "get_weather", "parameters": WEATHER}
    call = ask("What is the weather in Bergen?", tools=[{"type": "function", "function": tool}])
    body = _post(watched, call | {"max_tokens": 12}, x_request_id="cut")[2]
    assert body["choices"][0]["finish_reason"] == "length"
    assert watched.metrics(headers)["ginfer_tool_calls_malformed_total"] == before + 1
    (done,) = _wait_events(folder / "log", "request_done", 1, "'request_id': 'cut'")
    assert done["result"]["malformed_tool_call_count"] == 1
    assert done["result"]["tool_call_count"] == 0


def test_kill_9_leaves_the_log_whole_and_sigterm_loses_no_accepted_request(tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine = {"max_concurrency": 4, "max_pending": 16}
    with Server.launch(engine=engine, request_log=str(log)) as server:
        load = Load(server, 4)
        _wait_events(log, "request_done", 8)
        server.kill()
        load.join()
    with Server.launch(engine=engine, request_log=str(log)) as server:
        _wait_events(log, "server_start", 2)
        num_done = len(_wait_events(log, "request_done", 8))
        load = Load(server, 10)
        _wait_events(log, "request_done", num_done + 10)
        assert server.stop() == 0
        load.join()
        server.check_log()
    assert not load.wrong
    assert log.read_bytes().endswith(b"\n")
    events = _events(log)
    last = events[-1]["server_instance_id"]
    assert {e["server_instance_id"] for e in events} - {last}
    names = [e["event"] for e in events if e["server_instance_id"] == last]
    assert names.count("request_start") == names.count("request_done") >= 10
    assert "request_error" not in names
