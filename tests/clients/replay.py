"""Send recorded requests again, with what the server has signed or sealed since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from tests.clients.streams import CHECKS, Event, events, outline

if TYPE_CHECKING:
    from tests.service.server import Server

GOLDEN = Path(__file__).parents[1] / "golden/clients"


def outlines(server: Server, exchanges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Status and, for a stream, the outline of its events, of each exchange. Every stream is
    checked as its client would."""
    found = []
    thoughts: list[dict[str, Any]] = []
    for exchange in exchanges:
        body = exchange.get("body")
        if body is not None:
            _renew(body, thoughts)
            body = orjson.dumps(body | {"temperature": 0})
        status, headers, data = server.request(
            exchange["method"], exchange["path"], body, exchange["headers"]
        )
        answer: dict[str, Any] = {"status": status}
        if "text/event-stream" in headers.get("content-type", ""):
            stream = events(data)
            CHECKS[exchange["path"].partition("?")[0]](stream)
            thoughts += _thoughts(stream)
            answer["events"] = outline(stream)
        elif status != 404:
            answer["error"] = orjson.loads(data).get("error")
        found.append(answer)
    return found


def _renew(body: dict[str, Any], thoughts: list[dict[str, Any]]) -> None:
    """Put the reasoning that this server has written where the recorded one was; a request without
    any begins a conversation."""
    items = list(body.get("input", ()))
    for message in body.get("messages", ()):
        items += message["content"] if isinstance(message["content"], list) else ()
    recorded = [item for item in items if item["type"] in ("reasoning", "thinking")]
    if not recorded:
        thoughts.clear()
    assert len(recorded) == len(thoughts), f"{len(recorded)} recorded, {len(thoughts)} new"
    for item, thought in zip(recorded, thoughts):
        item.update(thought)


def _thoughts(stream: list[Event]) -> list[dict[str, Any]]:
    """What a client sends back of the reasoning of an answer, one for each piece."""
    found: list[dict[str, Any]] = []
    for event in stream:
        item = event.get("item", {})
        if event.get("type") == "response.output_item.done" and item["type"] == "reasoning":
            found.append({k: item[k] for k in ("content", "encrypted_content")})
        delta = event.get("delta", {})
        if isinstance(delta, dict) and delta.get("type") == "thinking_delta":
            if not found or "signature" in found[-1]:
                found.append({"thinking": ""})
            found[-1]["thinking"] += delta["thinking"]
        if isinstance(delta, dict) and delta.get("type") == "signature_delta":
            found[-1]["signature"] = delta["signature"]
    return found
