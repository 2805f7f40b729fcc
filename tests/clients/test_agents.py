"""Agent clients read a file with a tool and answer from it: real clients, sockets and model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.agents import AGENTS, Space
from tests.service.launch import PACKAGE
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = os.environ.get("GINFER_CLIENTS_DIR")
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server as a user starts it."""
    if not FOLDER:
        pytest.skip("GINFER_CLIENTS_DIR is not set; see make test-clients")
    state = tmp_path_factory.mktemp("state")
    options = ("--port", "0", "--greedy", "--state-dir", str(state))
    with Server("-m", "appliance.cli", "serve", str(PACKAGE), *options) as server:
        yield server
        server.check_log()


@pytest.fixture
def space(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Space]:
    """Folders; that of the work has a short name, because the demo model copies it."""
    work = Path(tempfile.gettempdir()) / "agents" / request.node.callspec.id
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "notes.txt").write_text("The secret word is heron.\nSECRET_NUMBER=413887\n")
    yield Space(tools=Path(FOLDER), home=tmp_path, work=work)
    shutil.rmtree(work)


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_reads_a_file_and_answers_from_it(
    name: str, space: Space, serving: Server
) -> None:
    agent = AGENTS[name](serving.url, space)
    if not space.installed(agent):
        pytest.skip(f"{agent.binary} is not in {FOLDER}")
    before = posts(serving)
    answers = space.run(agent)
    assert agent.secret in answers[-1], answers
    after = posts(serving)
    assert after["200"] - before["200"] >= 2
    assert after["others"] == before["others"], "\n".join(serving.lines)
    assert after["cached"] > before["cached"]


def posts(server: Server) -> dict[str, float]:
    """Answers to POST requests, by whether they are 200, and how many prompt tokens were reused."""
    metrics = server.settle()
    found = {"200": 0.0, "others": 0.0, "cached": metrics["ginfer_engine_cached_tokens_total"]}
    for name, value in metrics.items():
        if 'method="POST"' in name:
            found["200" if 'status="200"' in name else "others"] += value
    return found
