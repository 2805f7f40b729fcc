"""EventFormatter: a log record as one line, text or JSON."""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson


class EventFormatter(logging.Formatter):
    """A record as one line. `extra={"event": name, "fields": {...}}` makes it an event with
    members; text shows them as name=value."""

    def __init__(self, form: str, source: str = "server") -> None:
        super().__init__()
        self._json, self._source = form == "json", source

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end; a traceback adds lines to text only."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp += f".{int(record.msecs):03d}Z"
        event = getattr(record, "event", "message")
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if not self._json:
            more = "".join(f" {name}={value}" for name, value in fields.items())
            line = f"{stamp} {self._source} {record.levelname.lower()} {text}{more}"
            return f"{line}\n{trace}" if trace else line
        body = {"time": stamp, "level": record.levelname.lower(), "source": self._source}
        body |= {"event": event} | ({"message": text} if text else {}) | fields
        if trace:
            body["exception"] = trace
        return orjson.dumps(body, default=str).decode()
