"""What agent clients have sent is answered with the events that they were recorded with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.clients.replay import GOLDEN, outlines

if TYPE_CHECKING:
    from tests.service.server import Server


@pytest.mark.parametrize("name", ["claude", "cline", "codex", "opencode", "qwen"])
def test_recorded_requests_get_the_recorded_events(name: str, server: Server) -> None:
    recorded = json.loads((GOLDEN / f"{name}.json").read_text())["exchanges"]
    expected = [{k: e[k] for k in ("status", "events") if k in e} for e in recorded]
    assert outlines(server, recorded) == expected
