"""The server's own log: one line per event on stderr, text or JSON, written by a thread."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from appliance.line_writer import LineWriter
from appliance.log_lines import EventFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from appliance.http_request import HttpRequest

ACCESS = logging.getLogger("appliance.access")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})  # probes; their failures are told


class QueueHandler(logging.Handler):
    """Hands formatted records to a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record."""
        self._writer.put(self.format(record).encode(errors="backslashreplace") + b"\n")


@contextmanager
def to_stderr(form: str) -> Iterator[LineWriter]:
    """Log to stderr in the given format until the end of the block: warnings of everybody, events
    of ours."""
    writer = LineWriter(_write_stderr)
    handler = QueueHandler(writer)
    handler.setFormatter(EventFormatter(form))
    root, ours = logging.getLogger(), logging.getLogger("appliance")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    try:
        yield writer
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        writer.close()


def _write_stderr(lines: Sequence[bytes]) -> None:
    with suppress(ValueError):  # closed at interpreter exit
        sys.stderr.buffer.write(b"".join(lines))
        sys.stderr.buffer.flush()


def event(logger: logging.Logger, name: str, text: str = "", **fields: Any) -> None:
    """Log an event with members at level info."""
    if logger.isEnabledFor(logging.INFO):  # not `info`, which looks for its caller
        extra = {"event": name, "fields": fields}
        here = logger.name, logging.INFO, __file__, 0, text or name, (), None
        logger.handle(logger.makeRecord(*here, extra=extra))


def access(request: HttpRequest, status: int, error: str | None = None) -> None:
    """The access line of one request, when its answer is over. error: code of a failure that the
    status does not tell."""
    if request.path in QUIET_PATHS and status < 400:
        return
    fields: dict[str, Any] = {
        "status": status,
        "duration_ms": round(1e3 * request.age_s, 1),
        "request_id": request.request_id,
        "client": request.ip,
    }
    if request.key_name is not None:
        fields["key"] = request.key_name
    if error is not None:
        fields["error"] = error
    line = f"{request.method[:20]} {request.path[:200]}"
    event(ACCESS, "access", line if line.isprintable() else repr(line), **fields)
