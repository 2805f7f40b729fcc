"""The frontend of the demo model from its package, and short hands for conversations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ginfer.artifact import Package
from ginfer.frontend.qwen import QwenFrontend
from ginfer.prompt import ContentPart, Message, Tool, ToolCall

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"


@cache
def demo_resources() -> dict[str, bytes]:
    """Resource files of the demo model, by name."""
    with Package.open(PACKAGE) as package:
        return {n.removeprefix("frontend/"): package.resource(n) for n in package.resources}


@cache
def demo_frontend() -> QwenFrontend:
    """One frontend for all tests; its piece cache stays warm."""
    return QwenFrontend(demo_resources())


@cache
def golden_chats() -> list[dict[str, Any]]:
    """Conversations with rendered prompt, ids and greedy answer, made by Transformers."""
    golden = json.loads((ROOT / "tests/golden/chat_bf16.json").read_text())
    cases: list[dict[str, Any]] = golden["cases"]
    return cases


def message(role: str, text: str = "", **fields: Any) -> Message:
    """A message with one text part."""
    return Message(role=role, content=(ContentPart(kind="text", text=text),), **fields)


def wire_message(wire: dict[str, Any]) -> Message:
    """A message in OpenAI form whose arguments are objects."""
    calls = tuple(
        ToolCall(call_id="", name=c["function"]["name"], arguments=c["function"]["arguments"])
        for c in wire.get("tool_calls") or ()
    )
    reasoning = wire.get("reasoning_content")
    return message(wire["role"], wire["content"] or "", reasoning=reasoning, tool_calls=calls)


def function_tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> Tool:
    """A function tool with the given parameter schemas."""
    parameters = {"type": "object", "properties": properties or {}, **schema}
    function = {"name": name, "parameters": parameters}
    return Tool(name=name, parameters=parameters, wire={"type": "function", "function": function})


def wire_tool(wire: dict[str, Any]) -> Tool:
    """A tool in OpenAI form."""
    function = wire["function"]
    return Tool(name=function["name"], parameters=function["parameters"], wire=wire)
