"""Configurations of agent clients: in their formats, over what was there, with a way back."""

import json
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from appliance.auth import KeyRing, read_keys
from appliance.cli.main import group, invoke
from appliance.clients import CLIENTS

KNOWN = ("--model", "demo/x", "--context", "4096")
JSON_CLIENTS = ("claude", "opencode", "qwen")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def launch(capsys, *args):
    status = invoke(group, ["launch", *args], "ginfer")
    return status, *capsys.readouterr()


def files(home):
    return {str(p.relative_to(home)): p.read_text() for p in sorted(home.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("client", CLIENTS)
def test_printing_writes_nothing_and_is_the_file(capsys, home, client):
    status, out, err = launch(capsys, client, *KNOWN, "--url", "http://h:1/v1/")
    assert status == 0
    assert not files(home)
    content = tomllib.loads(out) if client == "codex" else json.loads(out)
    assert "http://h:1" in out
    assert "v1/v1" not in out
    assert "demo/x" in str(content)
    assert client in err


@pytest.mark.parametrize("client", CLIENTS)
def test_writing_twice_is_writing_once(capsys, home, client):
    assert launch(capsys, client, *KNOWN, "--write")[0] == 0
    first = files(home)
    assert len(first) == 1
    status, out, _ = launch(capsys, client, *KNOWN, "--write")
    assert (status, files(home)) == (0, first)
    assert "already" in out
    (path,) = (p for p in home.rglob("*") if p.is_file())
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("client", JSON_CLIENTS)
def test_what_the_user_had_stays_and_is_kept_as_a_backup(capsys, home, client):
    launch(capsys, client, *KNOWN, "--write")
    ((name, _),) = files(home).items()
    mine = '{"env": {"MINE": "1"}, "theme": "dark", "provider": {"other": {}}}'
    (home / name).write_text(mine)
    assert launch(capsys, client, *KNOWN, "--write")[0] == 0
    found = files(home)
    assert found[f"{name}.backup-1"] == mine
    merged = json.loads(found[name])
    assert merged["env"]["MINE"] == "1"
    assert merged["theme"] == "dark"
    assert "other" in merged["provider"]
    assert launch(capsys, client, "--model", "m2", "--context", "9", "--write")[0] == 0
    assert files(home)[f"{name}.backup-2"] == found[name]
    assert "m2" in files(home)[name]


@pytest.mark.parametrize("bad", ["{// comment\n}", "[]", "{"])
def test_a_file_that_cannot_be_merged_stays(capsys, home, bad):
    path = home / ".config/opencode/opencode.json"
    path.parent.mkdir(parents=True)
    path.write_text(bad)
    status, _, err = launch(capsys, "opencode", *KNOWN, "--write")
    assert status == 1
    assert len(err.splitlines()) == 1
    assert path.read_text() == bad
    assert len(files(home)) == 1


def test_claude_sends_no_header_that_breaks_reuse(capsys):
    env = json.loads(launch(capsys, "claude", *KNOWN, "--api-key", "k")[1])["env"]
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert all(isinstance(value, str) for value in env.values())


def test_codex_speaks_responses_and_sends_the_key(capsys):
    config = tomllib.loads(launch(capsys, "codex", *KNOWN, "--api-key", 'a"b')[1])
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert provider["http_headers"] == {"x-api-key": 'a"b'}
    assert config["model_context_window"] == 4096


class Models(BaseHTTPRequestHandler):
    """Answers /v1/models, with a key."""

    def do_GET(self):
        right = self.path == "/v1/models" and self.headers["x-api-key"] == "k"
        body = json.dumps({"data": [{"id": "served", "context_window": 512}]}).encode()
        self.send_response(200 if right else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        pass


def test_the_server_is_asked_for_its_model(capsys):
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            _, out, _ = launch(capsys, "opencode", "--url", url, "--api-key", "k")
            status, _, err = launch(capsys, "opencode", "--url", url)
        finally:
            server.shutdown()
            thread.join()
    assert json.loads(out)["model"] == "ginfer/served"
    assert json.loads(out)["provider"]["ginfer"]["models"]["served"]["limit"]["context"] == 512
    assert status == 1
    assert "--api-key" in err
    status, _, err = launch(capsys, "opencode", "--url", url)
    assert (status, len(err.splitlines())) == (1, 1)
    assert "--model" in err


def test_a_made_key_opens_and_its_name_is_unique(capsys, home):
    file = home / "keys"
    args = ["key", "laptop", "--file", str(file)]
    assert invoke(group, args, "ginfer") == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(read_keys(file)).name_of(key) == "laptop"
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert invoke(group, args, "ginfer") == 1
    assert invoke(group, ["key", "a b", "--file", str(file)], "ginfer") == 1
    assert invoke(group, ["key", "desk", "--file", str(file)], "ginfer") == 0
    assert [k.name for k in read_keys(file)] == ["laptop", "desk"]
