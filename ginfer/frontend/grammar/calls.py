"""Grammar of tool calls in the syntax of the Qwen family (see frontend.output).

A string parameter is raw text without `</parameter>`; any other is JSON on one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.arguments import types_of
from ginfer.frontend.grammar.builder import COMPACT, LEAD, GrammarBuilder, json_value, literal
from ginfer.frontend.grammar.content import json_grammar
from ginfer.frontend.grammar.schema import ANNOTATIONS, SchemaReader
from ginfer.frontend.grammar.text import ANYTHING, text_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ginfer.frontend.grammar.schema import Schema
    from ginfer.prompt import Tool

MODES = ("none", "auto", "required", "named")
MAX_KEY = 256  # characters of a parameter's name
_OPENING = "<tool_call>\n<function="
_CALL_END = "</function>\n</tool_call>"
_BITS = 64  # of the value that a rule carries
_NEWLINE, _VALUE_END = "\n", "\n</parameter>\n"
_NO_CALL = r"/(?s:.*)/ & ~/(?s:.*<tool_call>.*)/ & ~/(?s:(.*\n)?[ \t\r]*<function=.*)/"
_NO_END = r"~/(?s:.*<\/parameter>.*)/"
_TOP_LEVEL = {*ANNOTATIONS, "type", "properties", "required", "additionalProperties"}


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Which calls a response may hold.

    mode: none = no call; auto = text, then any number of calls; required = calls only, at least
    one; named = exactly one call, of tool `name`. parallel False = at most one call.
    """

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        assert self.mode in MODES
        assert (self.name is None) == (self.mode != "named")


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    param: str = "tools.{}.parameters",
    schema: Schema | None = None,
    schema_param: str = "schema",
) -> str | None:
    """Grammar of a content with the calls that `choice` admits; None if nothing is to be enforced.

    Arguments of strict tools match their schemas: parameters in any order, each at most once, the
    required ones all there. Calls of other tools are well formed, their values free.
    schema: the content is JSON by this schema, or calls; None = free text, then calls.
    param: path of the schema of tool number {}, for errors. Raises RequestError, UnsupportedError.
    """
    if choice.mode == "none" or not tools:
        if schema is not None:
            return json_grammar(schema, param=schema_param)
        grammar = GrammarBuilder()
        grammar.rules["start"] = grammar.terminal(_NO_CALL)
        return grammar.text()
    free = choice.mode == "auto" and choice.parallel and schema is None
    if free and not any(tool.strict for tool in tools):
        return None
    chosen = [(i, tool) for i, tool in enumerate(tools) if choice.name in (None, tool.name)]
    if not chosen:
        raise RequestError(f"no tool is named {choice.name!r}", param="tool_choice")
    grammar = GrammarBuilder()
    for i, tool in chosen:
        parameters = (
            _strict(grammar, tool, param.format(i)) if tool.strict else _free(grammar, tool)
        )
        members = _members(grammar, f"members_{i}", list(parameters))
        name = literal(f"{tool.name}>\n")
        grammar.rules[f"call_{i}"] = f"{name} {members} {literal(_CALL_END)}"
    grammar.rules["call"] = " | ".join(f"call_{i}" for i, _ in chosen)
    several = choice.parallel and choice.mode != "named"
    more = f' ("\\n" {literal(_OPENING)} call)*' if several else ""
    calls = f"{LEAD} {literal(_OPENING)} call{more}"
    if choice.mode != "auto":
        grammar.rules["start"] = calls
    elif schema is not None:
        reader = SchemaReader(schema, schema_param)
        value = json_value(reader, reader.read(schema), COMPACT)
        grammar.rules["start"] = f"{LEAD} {value} | {calls}"
    else:
        first = grammar.terminal(f"({_NO_CALL}) {literal(_OPENING)}")
        grammar.rules["start"] = f"{grammar.terminal(_NO_CALL)} | {first} call{more}"
    return grammar.text()


def _members(grammar: GrammarBuilder, name: str, members: list[tuple[str, bool]]) -> str:
    """The parameters of a call: (element, whether it is required). Bit k of the rule's value says
    that number k has been written. More than there are bits come in a fixed order: the required
    ones, then the others, as declared."""
    members = sorted(members, key=lambda member: not member[1])
    if len(members) > _BITS:
        return " ".join(text if required else f"({text})?" for text, required in members)
    num_required = sum(required for _, required in members)
    rule = f'"" %if is_ones([0:{num_required}])' if num_required else '""'
    for k, (text, _) in enumerate(members):
        rule += f" | {text} {name}::set_bit({k}) %if bit_clear({k})"
    grammar.rules[f"{name}::_"] = rule
    return f"{name}::0"


def _free(grammar: GrammarBuilder, tool: Tool) -> Iterator[tuple[str, bool]]:
    """Parameters of a tool that is not strict: each may be there, its value is any text."""
    declared = tool.parameters.get("properties")
    value = _raw(grammar, ANYTHING)
    for key in declared if isinstance(declared, dict) else ():
        if _is_key(key):
            yield f"{literal(f'<parameter={key}>')} {value}", False


def _strict(grammar: GrammarBuilder, tool: Tool, param: str) -> Iterator[tuple[str, bool]]:
    """Parameters of a strict tool."""
    schema = tool.parameters
    declared, required = _object(schema, param)
    reader = SchemaReader(schema, param)
    for key, part in declared.items():
        where = f"{param}.properties.{key}"
        if not _is_key(key):
            raise UnsupportedError(f"{where}: no call can spell this name", param=where)
        value = _value(grammar, reader, (schema, key, part), where)
        yield f"{literal(f'<parameter={key}>')} {value}", key in required


def _object(schema: dict[str, Any], param: str) -> tuple[dict[str, Any], list[str]]:
    """Declared properties and required names of a strict tool's schema."""
    for name in schema:
        if name not in _TOP_LEVEL and not name.startswith("x-"):
            where = f"{param}.{name}"
            raise UnsupportedError(
                f"{where}: the parameters of a strict tool are one object with properties",
                code="unsupported_schema",
                param=where,
            )
    SchemaReader(schema, param).read({n: v for n, v in schema.items() if n != "properties"})
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(declared, dict):
        raise RequestError(f"{param} must describe an object", code="invalid_schema", param=param)
    for name in required:
        if name not in declared:
            where = f"{param}.required"
            raise RequestError(
                f"{where} names {name!r}, which properties does not declare",
                code="invalid_schema",
                param=where,
            )
    return declared, required


def _value(
    grammar: GrammarBuilder,
    reader: SchemaReader,
    member: tuple[dict[str, Any], str, Any],
    where: str,
) -> str:
    """The value of a parameter, up to and with its closing tag."""
    root, key, part = member
    schema = reader.read(part, f"/properties/{key}")
    types = types_of(root, key)
    if "string" not in types and schema not in ({}, True):
        value = json_value(reader, schema, COMPACT)
        return " ".join((literal(_NEWLINE), value, literal(_VALUE_END)))
    text = text_terminal(schema, reader.defs, where)
    if text is None:
        raise UnsupportedError(
            f"{where}: what is called a string there admits none",
            code="unsupported_schema",
            param=where,
        )
    return _raw(grammar, f'({text}) | "null"' if "null" in types else text)


def _raw(grammar: GrammarBuilder, text: str) -> str:
    """A raw value in lines of its own."""
    return grammar.terminal(f"{literal(_NEWLINE)} (({text}) & {_NO_END}) {literal(_VALUE_END)}")


def _is_key(key: str) -> bool:
    return 0 < len(key) <= MAX_KEY and not set(key) & set("<>\n")
