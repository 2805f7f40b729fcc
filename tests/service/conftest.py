"""Servers shared by the tests of this folder: the real application, engine process and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_MIB = 1


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Eight requests at once, small bodies."""
    with Server.launch(max_request_mib=LIMIT_MIB) as running:
        yield running
        running.check_log()


@pytest.fixture(scope="session")
def narrow() -> Iterator[Server]:
    """One request at once, two waiting for at most 2 s; impatient with clients. Its context lets a
    request, without drafts and graphs, take the lane for longer than that on a GPU too."""
    engine = {"max_concurrency": 1, "max_pending": 2, "pending_timeout_s": 2.0}
    engine |= {"max_context": 16_384, "spec": "none", "cuda_graphs": False}
    with Server.launch(
        engine=engine, keepalive_s=0.2, request_timeout_s=1.0, send_timeout_s=1.0
    ) as running:
        yield running
        running.check_log()
