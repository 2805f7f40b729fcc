"""Record what agent clients send: python -m tests.clients.record FOLDER [CLIENT ...].

FOLDER is where npm has put the clients. Each client is run twice: as it comes, to see its first
requests, which are refused, and through its round trip with the demo model. The requests become
tests/golden/clients/CLIENT.json: without paths, ids, dates and most of the length of texts; of the
tools, those that bring a member, a type or a keyword that none before them has.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.clients.agents import AGENTS, Space, cline
from tests.clients.replay import GOLDEN, outlines
from tests.service.launch import PACKAGE
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSIONS = json.loads(Path(__file__).with_name("package.json").read_text())["dependencies"]
PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"} | {
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cline": "cline",
}
HEADERS = ("accept", "content-type", "user-agent", "anthropic-version", "anthropic-beta")
REFUSAL = b'{"type": "error", "error": {"type": "invalid_request_error", "message": "recorded"}}'
CALLED = ("exec_command", "bash", "read_file", "mcp__fs__read_file")
FEW = 3  # tools of a narrow run
LONGEST, SHORT = 160, 32  # a longer text is cut to the second
KEPT_WHOLE = (
    "user-agent",
    "anthropic-beta",
    "arguments",
    "encrypted_content",
    "signature",
    "name",
    "id",
    "call_id",
)
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
REPLACED = (
    (r"\b[0-9a-f]{40,}\b", "0" * 64),
    (r"\b1[0-9]{12}\b", "1767225600000"),
    (r"\b20\d\d-\d\d-\d\d\b", "2026-01-01"),
    (r"\b\w{6,9}, \w+ \d+, 20\d\d", "Thursday, January 1, 2026"),
    (r"\b\w{3} \w{3} \d\d 20\d\d", "Thu Jan 01 2026"),
    # what the demo model answers by a wide margin, so that every machine sees the same events
    (r"Call mcp__fs__read_file with path = notes\.txt\.", "Show me the file notes.txt."),
    (r"mcp__fs__read_file", "read_file"),
    (r"\bcc_version=[^;]*;", "cc_version=2.1.0.000;"),
)


@dataclass
class Recorder:
    """What came in. upstream: port that answers, None = every request is refused."""

    upstream: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)

    def take(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Keep one request."""
        kept = {k.lower(): v for k, v in headers.items() if k.lower() in HEADERS}
        request = {"method": method, "path": path, "headers": kept}
        self.requests.append(request | ({"body": json.loads(body)} if body else {}))


def handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    """A handler that keeps requests and passes them on."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            recorder.take(self.command, self.path, dict(self.headers), body)
            if recorder.upstream is None:
                self._answer(400, REFUSAL)
                return
            connection = http.client.HTTPConnection("127.0.0.1", recorder.upstream, timeout=300)
            connection.request(self.command, self.path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            kind = response.getheader("content-type") or "application/json"
            self._answer(response.status, response.read(), kind)

        def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def listening(recorder: Recorder) -> Iterator[str]:
    """The address of a server that records."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(recorder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def record(name: str, tools: Path, upstream: int) -> list[dict[str, Any]]:
    """The requests of one client: as it comes, then in its round trip."""
    found: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    for whole in (True, False):
        if name == "cline" and not whole:
            continue
        root = Path(tempfile.gettempdir()) / "agents"
        shutil.rmtree(root, ignore_errors=True)
        space = Space(tools=tools, home=root / "home", work=root / name)
        for folder in (space.home, space.work):
            folder.mkdir(parents=True)
        (space.work / "notes.txt").write_text("The secret word is heron.\nSECRET_NUMBER=413887\n")
        recorder = Recorder(upstream=None if whole else upstream)
        with listening(recorder) as url:
            agent = (AGENTS | {"cline": cline})[name](url, space, whole=whole)
            try:
                space.run(agent)
            except subprocess.CalledProcessError:
                assert whole, "the client failed"
        shutil.rmtree(root)
        requests = _distinct(recorder.requests) if whole else recorder.requests
        found += [_sanitised(request, space, ids) for request in requests]
    return found


def _distinct(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a client sends again because it was refused."""
    seen: dict[str, dict[str, Any]] = {}
    for request in requests:
        body = request.get("body", {})
        turns = body.get("messages") or body.get("input")
        seen.setdefault(f"{request['method']} {request['path']} {json.dumps(turns)[:400]}", request)
    return list(seen.values())


def _sanitised(request: dict[str, Any], space: Space, ids: dict[str, str]) -> dict[str, Any]:
    """A copy that tells nothing of its machine and day. ids: stand-ins of ids, kept and added."""
    if "body" not in request:
        return request
    text = json.dumps(request["body"], ensure_ascii=False)
    for path, stand_in in ((space.work, "/home/user/project"), (space.home, "/home/user")):
        text = text.replace(str(path), stand_in)
    for found in re.findall(UUID, text):
        text = text.replace(found, ids.setdefault(found, f"{len(ids):08d}-0000-4000-8000-{0:012d}"))
    for pattern, stand_in in REPLACED:
        text = re.sub(pattern, stand_in, text)
    body: dict[str, Any] = json.loads(text)
    if "tools" in body:
        body["tools"] = _telling(body["tools"])
    return request | {"body": _cut(body, "")}


def _telling(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tool of the round trip, if it is there alone or among few; else, shortest first, each
    that brings a kind of member."""
    called = [tool for tool in tools if tool.get("function", tool).get("name") in CALLED]
    if len(tools) <= FEW and called:
        return called
    seen: set[str] = set()
    kept = []
    for tool in sorted(tools, key=lambda tool: len(json.dumps(tool))):
        kinds = set(_kinds(tool))
        if kinds - seen:
            kept.append(tool)
        seen |= kinds
    return [tool for tool in tools if tool in kept]


def _kinds(value: Any, names: bool = False) -> Iterator[str]:
    """Keywords and types anywhere in it; `names`: its keys are names of properties."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from () if names else (f"{key} {type(inner).__name__}",)
            yield from _kinds(inner, key == "properties")
    elif isinstance(value, list):
        for inner in value:
            yield from _kinds(inner)


def _cut(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {k: _cut(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_cut(v, key) for v in value]
    longest = SHORT if key == "description" else LONGEST
    if isinstance(value, str) and len(value) > longest and key not in KEPT_WHOLE:
        return value[:SHORT] + "…"
    return value


def main(folder: str, *names: str) -> None:
    """Record, replay to see the outline of each answer, and write."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with Server("-m", "appliance.cli", "serve", str(PACKAGE), "--port", "0", "--greedy") as server:
        for name in names or PACKAGES:
            requests = record(name, Path(folder), server.port)
            answers = outlines(server, requests)
            exchanges = [r | a for r, a in zip(requests, answers)]
            about = {"client": PACKAGES[name], "version": VERSIONS[PACKAGES[name]]}
            text = json.dumps(about | {"exchanges": exchanges}, ensure_ascii=False, indent=1)
            (GOLDEN / f"{name}.json").write_text(text + "\n")
            print(name, [(a["status"], len(a.get("events", ()))) for a in answers])


if __name__ == "__main__":
    main(*sys.argv[1:])
