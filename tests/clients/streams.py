"""What clients demand of event streams, and the order of events as a short list."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import orjson

Event = dict[str, Any]


def events(body: bytes) -> list[Event]:
    """The decoded events of a stream; comments are left out, [DONE] is {"done": True}."""
    found = []
    for block in body.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                found.append({"done": True} if text == "[DONE]" else orjson.loads(text))
    return found


def outline(found: list[Event]) -> list[str]:
    """The kinds of the events in their order, runs of one kind as one, pings left out."""
    kinds = (_chat_kind(e) if "choices" in e or "done" in e else _typed_kind(e) for e in found)
    return [kind for kind, _ in groupby(kind for kind in kinds if kind != "ping")]


def _chat_kind(event: Event) -> str:
    if "done" in event:
        return "[DONE]"
    if not event["choices"]:
        return "usage"
    (choice,) = event["choices"]
    delta = choice["delta"]
    if choice["finish_reason"]:
        return f"finish {choice['finish_reason']}"
    if calls := delta.get("tool_calls"):
        return f"call {calls[0]['function']['name']}" if "id" in calls[0] else "arguments"
    return "+".join(sorted(delta))


def _typed_kind(event: Event) -> str:
    inner = event.get("item") or event.get("content_block") or event.get("delta")
    detail = inner.get("type") or inner.get("stop_reason") if isinstance(inner, dict) else None
    return f"{event['type']} {detail}" if detail else str(event["type"])


def check_chat(found: list[Event]) -> None:
    """AI SDK, Qwen Code, Cline: one id, a name once per call, no null text, valid arguments."""
    *chunks, last = found
    assert last == {"done": True}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    arguments: dict[int, str] = {}
    reasons = []
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        assert choice["index"] == 0
        delta = choice["delta"]
        assert all(delta[k] is not None for k in ("content", "reasoning_content") if k in delta)
        for call in delta.get("tool_calls", ()):
            first = call["index"] not in arguments
            assert first == ("id" in call) == ("name" in call["function"]) == ("type" in call)
            arguments.setdefault(call["index"], "")
            arguments[call["index"]] += call["function"].get("arguments", "")
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert list(arguments) == list(range(len(arguments)))
    assert all(isinstance(orjson.loads(text), dict) for text in arguments.values())
    assert reasons == ["tool_calls" if arguments else "stop"]


def check_responses(found: list[Event]) -> None:
    """Codex: counted events; the same item added, filled and done at the same place."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    first, last = found[0], found[-1]
    assert (first["type"], last["type"]) == ("response.created", "response.completed")
    assert first["response"]["id"] == last["response"]["id"]
    done: list[Event] = []
    for event in found:
        if event["type"] == "response.output_item.added":
            opened, text = event, ""
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            assert event["output_index"] == opened["output_index"] == len(done)
            assert (item["id"], item["type"]) == (opened["item"]["id"], opened["item"]["type"])
            if item["type"] == "function_call":
                assert item["call_id"] == opened["item"]["call_id"]
                assert item["name"] == opened["item"]["name"]
                assert item["arguments"] == text
                assert isinstance(orjson.loads(text), dict)
            done.append(item)
        elif "item_id" in event:
            assert event["item_id"] == opened["item"]["id"]
            assert event["output_index"] == opened["output_index"]
            text += event["delta"] if event["type"].endswith(".delta") else ""
    assert last["response"]["output"] == done
    assert last["response"]["usage"]["total_tokens"] > 0


def check_messages(found: list[Event]) -> None:
    """Claude Code: one block at a time, counted from 0; inputs that decode; signed thinking."""
    found = [event for event in found if event["type"] != "ping"]
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    kinds: list[str] = []
    deltas: list[Counter[str]] = []
    inputs: dict[int, str] = {}
    is_open = False
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            kinds.append(event["content_block"]["type"])
            deltas.append(Counter())
        assert event["index"] == len(kinds) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            deltas[-1][event["delta"]["type"]] += 1
            inputs.setdefault(event["index"], "")
            inputs[event["index"]] += event["delta"].get("partial_json", "")
    assert not is_open
    for i, (kind, seen) in enumerate(zip(kinds, deltas)):
        if kind == "thinking":
            assert set(seen) == {"thinking_delta", "signature_delta"}
            assert seen["signature_delta"] == 1
        elif kind == "tool_use":
            assert set(seen) == {"input_json_delta"}
            assert isinstance(orjson.loads(inputs[i]), dict)
        else:
            assert set(seen) == {"text_delta"}
    expected = "tool_use" if "tool_use" in kinds else "end_turn"
    assert found[-2]["delta"]["stop_reason"] == expected


CHECKS = {
    "/v1/chat/completions": check_chat,
    "/v1/responses": check_responses,
    "/v1/messages": check_messages,
}
