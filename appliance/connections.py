"""Bounded connections: one above the limit is answered 503 and closed, never left unaccepted."""

from __future__ import annotations

import resource
from typing import Any

import orjson
from sanic.server.protocols.http_protocol import HttpProtocol

from appliance.protocols.openai_errors import error_body
from ginfer.errors import UnavailableError

MAX_CONNECTIONS = 1024
RESERVED_FILES = 64  # of the process: listener, engine process, package, logs


def allow_connections() -> int:
    """Raise this process's limit of open files as far as MAX_CONNECTIONS needs it; how many
    connections it then bears. Without a bound of its own a server that runs out of files logs an
    error for each attempt and answers nobody, probes included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    unlimited = soft == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else max(1, min(MAX_CONNECTIONS, soft - RESERVED_FILES))


def _refusal() -> bytes:
    error = UnavailableError(
        "the server has as many connections as it bears; try again later",
        code="too_many_connections",
    )
    body = orjson.dumps(error_body(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


REFUSAL = _refusal()


class BoundedProtocol(HttpProtocol):
    """Sanic's HTTP protocol under a limit of connections."""

    __slots__ = ()

    def connection_made(self, transport: Any) -> None:
        """Serve the connection, or refuse it."""
        context: Any = self.app.ctx
        if len(self.connections) < context.max_connections:
            base: Any = super()
            base.connection_made(transport)
            return
        context.http_stats.refused_connections += 1
        transport.write(REFUSAL)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """A refused connection has left nothing behind."""
        if self.conn_info is not None:
            base: Any = super()
            base.connection_lost(exc)
