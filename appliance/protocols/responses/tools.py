"""Tools and tool choice of the Responses protocol: functions, custom tools, namespaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_tools import EMPTY_SCHEMA, tool_name
from appliance.protocols.responses.turns import CUSTOM_INPUT
from ginfer.prompt import Tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ginfer.errors import RequestError

# Run by their provider or by a client that knows them; nothing here calls them.
HOSTED = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "computer_use",
    "computer_use_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "programmatic_tool_calling",
)
CHOICES = ("none", "auto", "required")
CALLERS = ("direct", "programmatic")
FORMATS = {"text": ("type",), "grammar": ("type", "syntax", "definition")}
FORMAT_MEMBERS = FORMATS["grammar"]
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}
# Under whatever name the model gives it, the one parameter is the text.
ANY_INPUT: dict[str, Any] = {**INPUT_SCHEMA, "additionalProperties": {"type": "string"}}


@dataclass(frozen=True)
class Offer:
    """A tool on offer: as the model knows it, and as the client does."""

    tool: Tool
    name: str
    path: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request by the names that the model knows. hosted: types of those that
    nothing calls; unused: names of members without effect; echo: the tools as a response shows
    them."""

    offers: Mapping[str, Offer] = field(default_factory=dict)
    hosted: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    echo: tuple[dict[str, Any], ...] = ()

    def find(self, name: str, *, custom: bool) -> str | None:
        """The name that the model knows of a client's tool; None unless exactly one fits."""
        fits = [
            shown
            for shown, offer in self.offers.items()
            if name in (shown, offer.name) and offer.custom is custom
        ]
        return fits[0] if len(fits) == 1 else None


@dataclass(frozen=True)
class Choice:
    """A tool choice. mode: none, auto or required. named: the tool that must be called. allowed:
    the tools that may be called, None = all. Tools are (name, whether it is custom, path)."""

    mode: str = "auto"
    named: tuple[str, bool, str] | None = None
    allowed: tuple[tuple[str, bool, str], ...] | None = None
    echo: Any = "auto"


def parse_tools(value: Any, path: str = "tools") -> ToolSet:
    """The tools on offer. Raises RequestError with the member's path."""
    offers: dict[str, Offer] = {}
    hosted, unused, echo = set[str](), set[str](), []
    for i, entry in enumerate(checks.array(value, path)):
        where = f"{path}.{i}"
        found = checks.shallow(checks.mapping(entry, where), where)
        kind = checks.string(checks.required(found, where, "type"), f"{where}.type")
        if kind in HOSTED:
            hosted.add(kind)
            echo.append(found)
            continue
        if kind not in (*_OWN_MEMBERS, "namespace"):
            known = ", ".join((*_OWN_MEMBERS, "namespace"))
            why = f"{checks.shown(kind)} is neither one of {known} nor a hosted tool"
            raise checks.refused(f"{where}.type", why, code="tool_type_not_supported")
        for offer in _namespace(found, where) if kind == "namespace" else [_tool(found, where)]:
            if offer.tool.name in offers:
                raise checks.wrong(f"{offer.path}.name", offer.name, "a name not given before")
            offers[offer.tool.name] = offer
        unused |= _unused(found)
        echo.append(_echo(found))
    return ToolSet(offers, frozenset(hosted), frozenset(unused), tuple(echo))


def parse_choice(value: Any, path: str = "tool_choice") -> Choice:
    """The tool choice. Raises RequestError; a hosted tool cannot be forced."""
    if isinstance(value, str):
        return Choice(checks.one_of(value, path, CHOICES), echo=value)
    value = checks.shallow(checks.mapping(value, path), path)
    kind = checks.string(checks.required(value, path, "type"), f"{path}.type")
    if kind == "allowed_tools":
        found = checks.members(value, path, ("type", "mode", "tools"))
        mode = checks.one_of(
            checks.required(found, path, "mode"), f"{path}.mode", ("auto", "required")
        )
        entries = checks.array(checks.required(found, path, "tools"), f"{path}.tools")
        named = (_named(entry, f"{path}.tools.{i}") for i, entry in enumerate(entries))
        return Choice(mode, allowed=tuple(n for n in named if n is not None), echo=value)
    tool = _named(value, path)
    if tool is None:
        why = f"the hosted tool {kind} cannot be called here, so it cannot be forced"
        raise checks.refused(path, why, code="tool_choice_not_supported")
    return Choice("required", named=tool, echo=value)


def _named(value: Any, path: str) -> tuple[str, bool, str] | None:
    """A tool named in a choice; None for a hosted one."""
    found = checks.mapping(value, path)
    kind = checks.string(checks.required(found, path, "type"), f"{path}.type")
    if kind in HOSTED:
        return None
    if kind not in _OWN_MEMBERS:
        raise checks.wrong(f"{path}.type", kind, "one of " + ", ".join((*_OWN_MEMBERS, *HOSTED)))
    found = checks.members(found, path, ("type", "name"))
    name = checks.string(checks.required(found, path, "name"), f"{path}.name")
    return name, kind == "custom", f"{path}.name"


def _namespace(found: dict[str, Any], path: str) -> Iterator[Offer]:
    """The tools of a namespace, called `namespace.name`; its description precedes that of its
    first tool."""
    checks.members(found, path, ("type", "name", "description", "tools"))
    namespace = tool_name(checks.required(found, path, "name"), f"{path}.name")
    about = checks.string(found.get("description") or "", f"{path}.description")
    entries = checks.array(checks.required(found, path, "tools"), f"{path}.tools")
    for i, entry in enumerate(entries):
        where = f"{path}.tools.{i}"
        kind = checks.required(checks.mapping(entry, where), where, "type")
        checks.one_of(kind, f"{where}.type", tuple(_OWN_MEMBERS))
        yield _tool(entry, where, namespace, about if i == 0 else "")


def _tool(found: dict[str, Any], path: str, namespace: str | None = None, about: str = "") -> Offer:
    known = ("type", "name", "description", "defer_loading", "allowed_callers", "async")
    found = checks.members(found, path, (*known, *_OWN_MEMBERS[found["type"]]))
    name = tool_name(checks.required(found, path, "name"), f"{path}.name")
    description = checks.string(found.get("description", ""), f"{path}.description")
    checks.boolean(found.get("defer_loading", False), f"{path}.defer_loading")
    if checks.boolean(found.get("async", False), f"{path}.async"):
        raise checks.refused(
            f"{path}.async", "calls are not asynchronous", code="unsupported_parameter"
        )
    callers = checks.array(found.get("allowed_callers", ["direct"]), f"{path}.allowed_callers")
    for i, caller in enumerate(callers):
        checks.one_of(caller, f"{path}.allowed_callers.{i}", CALLERS)
    if "direct" not in callers:
        why = "programs do not call tools here; allow 'direct'"
        raise checks.refused(f"{path}.allowed_callers", why, code="unsupported_parameter")
    custom = found["type"] == "custom"
    pattern = _custom_pattern(found, path) if custom else None
    schema = INPUT_SCHEMA if custom else _function_schema(found, path)
    shown = f"{namespace}.{name}" if namespace else name
    wire: dict[str, Any] = {"name": shown}
    if about or description:
        wire["description"] = "\n\n".join(text for text in (about, description) if text)
    tool = Tool(
        name=shown,
        parameters=_input_schema(pattern) if custom else schema,
        wire={"type": "function", "function": {**wire, "parameters": schema}},
        strict=checks.boolean(found.get("strict", pattern is not None), f"{path}.strict"),
    )
    return Offer(tool, name, path, namespace, custom)


def _function_schema(found: dict[str, Any], path: str) -> dict[str, Any]:
    checks.mapping(found.get("output_schema", {}), f"{path}.output_schema")
    return checks.mapping(found.get("parameters", EMPTY_SCHEMA), f"{path}.parameters")


def _custom_pattern(found: dict[str, Any], path: str) -> str | None:
    """The pattern that the whole text of a custom tool's call must match; None = any text."""
    where = f"{path}.format"
    form = checks.members(found.get("format", {"type": "text"}), where, FORMAT_MEMBERS)
    kind = checks.required(form, where, "type")
    if checks.one_of(kind, f"{where}.type", tuple(FORMATS)) == "text":
        checks.members(form, where, FORMATS["text"])
        return None
    checks.members(form, where, FORMATS["grammar"])
    syntax = checks.required(form, where, "syntax")
    if checks.one_of(syntax, f"{where}.syntax", ("regex", "lark")) == "lark":
        why = "a text cannot be forced to a Lark grammar; use a regex, or {'type': 'text'}"
        raise checks.refused(f"{where}.syntax", why, code="custom_tool_format_not_supported")
    definition = checks.required(form, where, "definition")
    return f"^(?:{checks.string(definition, f'{where}.definition')})$"


def _input_schema(pattern: str | None) -> dict[str, Any]:
    """Schema of a custom tool's text, as calls are constrained and read."""
    if pattern is None:
        return ANY_INPUT
    return {**INPUT_SCHEMA, "properties": {CUSTOM_INPUT: {"type": "string", "pattern": pattern}}}


def _unused(found: dict[str, Any]) -> set[str]:
    """Members without effect, in the tool or those of its namespace."""
    inner = found["tools"] if found["type"] == "namespace" else [found]
    names = ("defer_loading", "output_schema")
    return {f"tools.{name}" for tool in inner for name in names if tool.get(name)}


def _echo(found: dict[str, Any]) -> dict[str, Any]:
    """A tool as a response shows it: with the members that it always has."""
    if found["type"] == "namespace":
        return {**found, "tools": [_echo(tool) for tool in found["tools"]]}
    given = {name: value for name, value in found.items() if value is not None}
    if found["type"] == "function":
        return {"parameters": None, "strict": False, **given}
    return given


def chosen(tools: ToolSet, choice: Choice) -> tuple[tuple[Tool, ...], str | None]:
    """The tools that may be called, and the name of the one that must be.

    Raises RequestError when the choice names a tool that is not on offer, or wants a call and
    there is nothing to call."""
    allowed = tools.offers
    if choice.allowed is not None:
        names = {_offered(tools, *tool) for tool in choice.allowed}
        allowed = {name: offer for name, offer in tools.offers.items() if name in names}
    named = _offered(tools, *choice.named) if choice.named is not None else None
    if choice.mode == "required" and not allowed:
        raise _nothing_to_call(tools)
    return tuple(offer.tool for offer in allowed.values()), named


def _offered(tools: ToolSet, name: str, custom: bool, path: str) -> str:
    shown = tools.find(name, custom=custom)
    if shown is None:
        raise checks.wrong(path, name, "the name of one of the tools")
    return shown


def _nothing_to_call(tools: ToolSet) -> RequestError:
    if tools.hosted:
        why = "hosted tools cannot be called here, so a call cannot be required"
        return checks.refused("tool_choice", why, code="tool_choice_not_supported")
    return checks.wrong("tool_choice", "required", "tools with it, or 'auto' or 'none'")


_OWN_MEMBERS: dict[str, tuple[str, ...]] = {
    "function": ("parameters", "strict", "output_schema"),
    "custom": ("format",),
}
