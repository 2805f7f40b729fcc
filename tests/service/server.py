"""A live server in a process of its own, as tests see it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

if TYPE_CHECKING:
    import anthropic
    import openai

START_TIMEOUT_S = 280.0  # the kernels may have to be compiled first
STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).parents[2]


class Server:
    """A running server; the constructor returns when it is ready. A context manager."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.lines: list[str] = []
        self.url = ""
        self._served = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        served = self._served.wait(START_TIMEOUT_S)
        if not (served and self.url):
            self.kill()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))

    @classmethod
    def launch(cls, **options: Any) -> Self:
        """Start one with options of ApplianceConfig; `engine` holds those of EngineConfig."""
        return cls("-m", "tests.service.launch", orjson.dumps(options).decode())

    @property
    def port(self) -> int:
        """Port of `url`."""
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if b"appliance.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        raise LookupError("no engine process")

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client, without its own retries."""
        return self._client("openai", "OpenAI", "/v1", options)

    def openai_async(self, **options: Any) -> openai.AsyncOpenAI:
        """The official asynchronous client, without its own retries."""
        return self._client("openai", "AsyncOpenAI", "/v1", options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        """The official client of Anthropic's protocol, without its own retries."""
        return self._client("anthropic", "Anthropic", "", options)

    def anthropic_async(self, **options: Any) -> anthropic.AsyncAnthropic:
        """The official asynchronous client of Anthropic's protocol, without its own retries."""
        return self._client("anthropic", "AsyncAnthropic", "", options)

    def _client(self, library: str, name: str, path: str, options: dict[str, Any]) -> Any:
        """A client of a library that most tests do without."""
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
        client = getattr(import_module(library), name)
        return client(base_url=f"{self.url}{path}", **defaults | options)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request: status, headers by lower-case name, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        """A chat request: status and decoded body."""
        payload = body if isinstance(body, bytes) else orjson.dumps(body)
        status, _, data = self.request("POST", "/v1/chat/completions", payload, headers)
        return status, orjson.loads(data)

    def metrics(self, headers: dict[str, str] | None = None) -> dict[str, float]:
        """Samples of /metrics by name with labels."""
        _, _, body = self.request("GET", "/metrics", headers=headers)
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (s.rpartition(" ") for s in lines)}

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /ready."""
        status, _, body = self.request("GET", "/ready")
        return status, orjson.loads(body)

    def wait_metric(self, name: str, value: float, timeout_s: float = 30.0) -> None:
        """Wait until a sample has a value."""
        deadline = time.monotonic() + timeout_s
        while (found := self.metrics().get(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            time.sleep(0.01)

    def settle(self) -> dict[str, float]:
        """Wait until nothing runs or waits; the metrics of that moment."""
        for name in ("ginfer_engine_running", "ginfer_engine_waiting"):
            self.wait_metric(name, 0)
        self.wait_metric("ginfer_http_requests_active", 0)
        return self.metrics()

    def check_log(self) -> None:
        """Assert that nothing unforeseen was logged."""
        found = [i for i, line in enumerate(self.lines) if "Traceback" in line]
        assert not found, "\n".join(self.lines[found[0] - 2 : found[0] + 30])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status."""
        status = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def kill(self) -> None:
        """End it the hard way."""
        self.process.kill()
        self.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with suppress(ValueError):  # closed by kill
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                if match := re.search(r"serving .* at (http://\S+)", line):
                    self.url = match[1]
                    self._served.set()
        self._served.set()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int, timeout_s: float = 10.0) -> None:
    """Wait until a process has ended."""
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def kill9(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)
