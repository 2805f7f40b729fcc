"""Start the server with the demo model and stream one answer over HTTP; serve until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "appliance" / "demo" / "qwen3.8-demo-groupwise-int.ginfer"
HOST, PORT = "127.0.0.1", 8000
QUESTION = "Who are you?"
START_TIMEOUT_S = 600.0  # the first start on a machine compiles the kernels
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
DIM, PLAIN = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after one answer")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on, if it is free")
    parser.add_argument("--question", default=QUESTION)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    port = free_port(options.port)
    print(
        "Starting; the first start on a machine compiles the kernels, a minute or two.", flush=True
    )
    try:
        with server(port) as process:
            wait_ready(process, port)
            model = get(port, "/v1/models")["data"][0]["id"]
            greet(port, model, options.question)
            ask(port, model, options.question)
            if not options.once:
                print("\nServing; Ctrl-C ends.", flush=True)
                process.wait()
    except KeyboardInterrupt:
        return 0
    except RuntimeError as error:
        print(f"run_demo: {error}", file=sys.stderr)
        return 1
    return process.returncode or 0


def free_port(wanted: int) -> int:
    """The wanted port if it is free, else any free one."""
    for port in (wanted, 0):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((HOST, port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise RuntimeError(f"no port of {HOST} is free")


@contextmanager
def server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process, which is told to stop and awaited at the end. It gets a group of its
    own, so that Ctrl-C reaches it once, from here."""
    command = [sys.executable, "-m", "appliance.cli", "serve", str(PACKAGE), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"the server did not stop within {STOP_TIMEOUT_S:g} s") from None


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when /ready says so. Raises RuntimeError when the server ends or takes too long."""
    began = time.monotonic()
    while time.monotonic() < began + START_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError("the server did not start")
        try:
            get(port, "/ready")
        except (OSError, RuntimeError):
            time.sleep(POLL_S)
        else:
            return
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")


def get(port: int, path: str) -> Any:
    """The JSON of a route. Raises RuntimeError for any status but 200."""
    connection = HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"GET {path}: {response.status} {body.decode()}")
        return json.loads(body)
    finally:
        connection.close()


def greet(port: int, model: str, question: str) -> None:
    """Print the address, and a request to paste."""
    url = f"http://{HOST}:{port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    print(f"\n{url}/v1 speaks OpenAI Chat Completions. Try:\n")
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n")
    print(f"> {question}", flush=True)


def ask(port: int, model: str, question: str) -> None:
    """Stream one answer and print it, reasoning dimmed. Raises RuntimeError when it fails."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reasoning = False
    began = time.monotonic()
    for chunk in stream(port, request):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thought, text = delta.get("reasoning_content"), delta.get("content")
            if thought:
                print(("" if reasoning else DIM) + thought, end="", flush=True)
                reasoning = True
            if text:
                print((f"{PLAIN}\n\n" if reasoning else "") + text, end="", flush=True)
                reasoning = False
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
            print(f"{PLAIN}\n\n{tokens} tokens in {time.monotonic() - began:.2f} s", flush=True)
            return
    raise RuntimeError("the answer was not complete")


def stream(port: int, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed completion. Raises RuntimeError for an error of the server."""
    connection = HTTPConnection(HOST, port, timeout=START_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the request failed: {response.status} {response.read().decode()}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"the answer failed: {chunk['error']['message']}")
            yield chunk
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
