"""Tools and tool choice of Anthropic Messages; all that is not obeyed is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from ginfer.frontend.grammar import ToolChoice, tool_grammar
from ginfer.prompt import Tool

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
TOOL_MEMBERS = (
    *("type", "name", "description", "input_schema", "strict", "cache_control", "input_examples"),
    *("eager_input_streaming", "allowed_callers", "defer_loading"),
)
# tools that Anthropic's servers would run; the model simply does not see them
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")
MODES = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}


@dataclass(frozen=True, kw_only=True)
class OfferedTools:
    """Tools of a request: those that the model sees, and the hosted ones that it does not (name to
    type). unstreamed: names of those whose input is sent in one piece. cached: whether a tool
    carries cache_control."""

    tools: tuple[Tool, ...] = ()
    hosted: Mapping[str, str] = field(default_factory=dict)
    unstreamed: frozenset[str] = frozenset()
    cached: bool = False


def parse_cache_control(value: Any, path: str) -> None:
    """A hint where the client expects a prefix to end."""
    found = checks.members(value, path, ("type", "ttl", "scope"))
    checks.one_of(checks.required(found, path, "type"), f"{path}.type", ("ephemeral",))
    if "ttl" in found:
        checks.one_of(found["ttl"], f"{path}.ttl", ("5m", "1h"))
    if "scope" in found:
        checks.string(found["scope"], f"{path}.scope")


def tool_name(value: Any, path: str) -> str:
    """A legal tool name."""
    if not TOOL_NAME.fullmatch(checks.string(value, path)):
        raise checks.wrong(path, value, "1 to 128 letters, digits, '_' or '-'")
    return str(value)


def parse_tools(value: Any, path: str = "tools") -> OfferedTools:
    """The tools on offer. Raises RequestError with the member's path."""
    tools: list[Tool] = []
    hosted: dict[str, str] = {}
    entries = checks.array(value, path)
    for i, entry in enumerate(entries):
        where = f"{path}.{i}"
        kind = checks.mapping(entry, where).get("type")
        name = tool_name(checks.required(entry, where, "name"), f"{where}.name")
        if name in hosted or any(tool.name == name for tool in tools):
            raise checks.wrong(f"{where}.name", name, "a name not given before")
        if kind in (None, "custom"):
            tools.append(_tool(entry, where, name))
        elif checks.string(kind, f"{where}.type").startswith(HOSTED):
            hosted[name] = kind
        else:
            why = f"{kind} is not supported; define it as a custom tool with its input_schema"
            raise checks.refused(f"{where}.type", why, code="tool_type_not_supported")
    cached = any(entry.get("cache_control") is not None for entry in entries)
    whole = [e["name"] for e in entries if e.get("eager_input_streaming") is False]
    return OfferedTools(
        tools=tuple(tools), hosted=hosted, unstreamed=frozenset(whole), cached=cached
    )


def _tool(value: dict[str, Any], path: str, name: str) -> Tool:
    """One custom tool. `wire` is what the template prints."""
    found = checks.members(value, path, TOOL_MEMBERS)
    if "cache_control" in found:
        parse_cache_control(found["cache_control"], f"{path}.cache_control")
    _check_options(found, path)
    schema = checks.mapping(checks.required(found, path, "input_schema"), f"{path}.input_schema")
    function: dict[str, Any] = {"name": name}
    if "description" in found:
        function["description"] = checks.string(found["description"], f"{path}.description")
    function["parameters"] = checks.shallow(schema, f"{path}.input_schema")
    if "input_examples" in found:
        examples = checks.array(found["input_examples"], f"{path}.input_examples")
        for i, example in enumerate(examples):
            where = f"{path}.input_examples.{i}"
            checks.shallow(checks.mapping(example, where), where)
        function["input_examples"] = examples
    wire = {"type": "function", "function": function}
    strict = checks.boolean(found.get("strict", False), f"{path}.strict")
    tool = Tool(name=name, parameters=schema, wire=wire, strict=strict)
    if strict:  # the path is known here, hosted tools counted
        tool_grammar((tool,), ToolChoice(), param=f"{path}.input_schema")
    return tool


def _check_options(found: dict[str, Any], path: str) -> None:
    """Switches of a tool; most have one position here."""
    if "eager_input_streaming" in found:
        checks.boolean(found["eager_input_streaming"], f"{path}.eager_input_streaming")
    if checks.boolean(found.get("defer_loading", False), f"{path}.defer_loading"):
        why = "there is no tool search that would load it; leave it out"
        raise checks.refused(f"{path}.defer_loading", why, code="tool_option_not_supported")
    callers = checks.array(found.get("allowed_callers", ["direct"]), f"{path}.allowed_callers")
    if callers != ["direct"]:
        why = "only the model itself calls tools; give ['direct'] or leave it out"
        raise checks.refused(f"{path}.allowed_callers", why, code="tool_option_not_supported")


def parse_tool_choice(value: Any, path: str = "tool_choice") -> ToolChoice:
    """The wish about calls. Raises RequestError with the member's path."""
    kind = checks.one_of(
        checks.required(checks.mapping(value, path), path, "type"), f"{path}.type", MODES
    )
    known = ["type"]
    if kind != "none":
        known.append("disable_parallel_tool_use")
    if kind == "tool":
        known.append("name")
    found = checks.members(value, path, known)
    where = f"{path}.disable_parallel_tool_use"
    single = checks.boolean(found.get("disable_parallel_tool_use", False), where)
    name = None
    if kind == "tool":
        name = checks.string(checks.required(found, path, "name"), f"{path}.name")
    return ToolChoice(mode=MODES[kind], name=name, parallel=not single)


def check_choice(choice: ToolChoice, offered: OfferedTools, path: str = "tool_choice") -> None:
    """Raise RequestError if what is forced is not on offer, or is nothing that could be forced."""
    if choice.mode in ("auto", "none"):
        return
    if choice.name is not None and choice.name in offered.hosted:
        why = f"{offered.hosted[choice.name]} does not run here and cannot be forced"
        raise checks.refused(f"{path}.name", why, code="hosted_tool_not_supported")
    if not offered.tools:
        if offered.hosted:
            why = "the hosted tools do not run here and cannot be forced"
            raise checks.refused(f"{path}.type", why, code="hosted_tool_not_supported")
        kind = "tool" if choice.mode == "named" else "any"
        raise checks.wrong(f"{path}.type", kind, "tools with it, or 'auto' or 'none'")
    if choice.mode == "named" and choice.name not in {tool.name for tool in offered.tools}:
        raise checks.wrong(f"{path}.name", choice.name, "the name of one of the tools")
