"""Frames of server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """An event that carries a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\n" + data(value)
