"""Tools and tool choice of Chat Completions, and the JSON formats of its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from ginfer.frontend.grammar import ANY_OBJECT, ToolChoice, tool_grammar
from ginfer.prompt import Tool

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CHOICES = ("none", "auto", "required")
MAX_FORMAT_NAME = 64


@dataclass(frozen=True)
class ChatChoice:
    """The wish about calls: `mode` as in Generation.tool_choice. `allowed`: the tools that are
    shown, None = all; both hold (name, path of the name)."""

    mode: str
    named: tuple[str, str] | None = None
    allowed: tuple[tuple[str, str], ...] | None = None


def parse_tools(value: Any, path: str = "tools") -> tuple[Tool, ...]:
    """The functions on offer. Raises RequestError with the member's path."""
    tools = [_tool(entry, f"{path}.{i}") for i, entry in enumerate(checks.array(value, path))]
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise checks.wrong(f"{path}.{i}.function.name", tool.name, "a name not given before")
        seen.add(tool.name)
    return tuple(tools)


def parse_tool_choice(value: Any, path: str = "tool_choice") -> ChatChoice:
    """A choice by its word, by a function's name, or among allowed tools. Raises RequestError with
    the member's path."""
    if not isinstance(value, dict):
        return ChatChoice(checks.one_of(value, path, CHOICES))
    kind = checks.string(checks.required(value, path, "type"), f"{path}.type")
    if kind != "allowed_tools":
        return ChatChoice("named", named=_named(value, path))
    where = f"{path}.allowed_tools"
    found = checks.required(checks.members(value, path, ("type", "allowed_tools")), path, kind)
    found = checks.members(found, where, ("mode", "tools"))
    mode = checks.required(found, where, "mode")
    entries = checks.array(checks.required(found, where, "tools"), f"{where}.tools")
    return ChatChoice(
        checks.one_of(mode, f"{where}.mode", ("auto", "required")),
        allowed=tuple(_named(entry, f"{where}.tools.{i}") for i, entry in enumerate(entries)),
    )


def chosen_tools(choice: ChatChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools that the choice leaves. Raises RequestError when it names one that is not there, or
    asks for calls without tools."""
    known = {tool.name for tool in tools}
    for name, path in (*filter(None, [choice.named]), *(choice.allowed or ())):
        if name not in known:
            raise checks.wrong(path, name, "the name of one of the tools")
    if choice.allowed is not None:
        allowed = {name for name, _ in choice.allowed}
        tools = [tool for tool in tools if tool.name in allowed]
    if choice.mode != "none" and not tools:
        raise checks.wrong("tool_choice", choice.mode, "tools with it, or 'none'")
    return tuple(tools)


def parse_response_format(value: Any, path: str = "response_format") -> dict[str, Any] | None:
    """The JSON schema that the answer must match; None = any text."""
    kind = checks.string(checks.required(checks.mapping(value, path), path, "type"), f"{path}.type")
    checks.one_of(kind, f"{path}.type", ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        checks.members(value, path, ("type",))
        return ANY_OBJECT if kind == "json_object" else None
    found = checks.required(checks.members(value, path, ("type", kind)), path, kind)
    return named_schema(found, f"{path}.{kind}")


def named_schema(value: Any, path: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The schema of a JSON format: name, schema, strict, description. `strict: false` changes
    nothing: a schema is always enforced. also: other members, checked by the caller."""
    found = checks.members(value, path, ("name", "schema", "strict", "description", *also))
    name = checks.string(checks.required(found, path, "name"), f"{path}.name")
    if not 0 < len(name) <= MAX_FORMAT_NAME:
        raise checks.wrong(f"{path}.name", name, f"1 to {MAX_FORMAT_NAME} characters")
    checks.boolean(found.get("strict", False), f"{path}.strict")
    checks.string(found.get("description", ""), f"{path}.description")
    schema = checks.mapping(checks.required(found, path, "schema"), f"{path}.schema")
    return checks.shallow(schema, f"{path}.schema")


def tool_name(value: Any, path: str) -> str:
    """A legal function name."""
    if not TOOL_NAME.fullmatch(checks.string(value, path)):
        raise checks.wrong(path, value, "1 to 64 letters, digits, '_' or '-'")
    return str(value)


def _named(value: Any, path: str) -> tuple[str, str]:
    """A function named in a choice, and where."""
    found = checks.mapping(value, path)
    kind = checks.string(checks.required(found, path, "type"), f"{path}.type")
    if kind != "function":
        raise checks.refused(
            f"{path}.type", f"{kind} tools are not supported", code="tool_type_not_supported"
        )
    function = checks.required(checks.members(found, path, ("type", kind)), path, kind)
    where = f"{path}.function.name"
    members = checks.members(function, f"{path}.function", ("name",))
    return checks.string(checks.required(members, f"{path}.function", "name"), where), where


def _tool(value: Any, path: str) -> Tool:
    """One function on offer. `wire` keeps the client's object, which the template prints."""
    found = checks.mapping(value, path)
    kind = checks.string(checks.required(found, path, "type"), f"{path}.type")
    if kind != "function":
        raise checks.refused(
            f"{path}.type", f"{kind} tools are not supported", code="tool_type_not_supported"
        )
    found = checks.members(found, path, ("type", "function"))
    where = f"{path}.function"
    function = checks.members(
        checks.required(found, path, "function"),
        where,
        ("name", "description", "parameters", "strict"),
    )
    if "description" in function:
        checks.string(function["description"], f"{where}.description")
    strict = checks.boolean(function.get("strict", False), f"{where}.strict")
    parameters = checks.mapping(function.get("parameters", EMPTY_SCHEMA), f"{where}.parameters")
    checks.shallow(parameters, f"{where}.parameters")
    name = tool_name(checks.required(function, where, "name"), f"{where}.name")
    tool = Tool(name=name, parameters=parameters, wire=value, strict=strict)
    if strict:  # the path is known here, hidden tools counted
        tool_grammar((tool,), ToolChoice(), param=f"{where}.parameters")
    return tool
