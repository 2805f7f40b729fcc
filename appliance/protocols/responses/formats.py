"""What a response is forced to: the format of its text, and errors of schemas at their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.grammar import ANY_OBJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.protocols.responses.tools import ToolSet
    from ginfer.prompt import Tool

FORMAT = "text.format"
FORMAT_MEMBERS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "schema", "strict", "description"),
}
MAX_NAME_CHARS = 64


def check_format(value: Any, path: str = FORMAT) -> dict[str, Any] | None:
    """The JSON schema that the answer must match; None = any text. `strict: false` changes
    nothing: a schema is always enforced."""
    kind = checks.string(checks.required(checks.mapping(value, path), path, "type"), f"{path}.type")
    checks.one_of(kind, f"{path}.type", tuple(FORMAT_MEMBERS))
    found = checks.members(value, path, FORMAT_MEMBERS[kind])
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    name = checks.string(checks.required(found, path, "name"), f"{path}.name")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise checks.wrong(f"{path}.name", name, f"1 to {MAX_NAME_CHARS} characters")
    checks.boolean(found.get("strict", False), f"{path}.strict")
    checks.string(found.get("description", ""), f"{path}.description")
    schema = checks.mapping(checks.required(found, path, "schema"), f"{path}.schema")
    return checks.shallow(schema, f"{path}.schema")


def at_its_tool(error: RequestError, tools: Sequence[Tool], toolset: ToolSet) -> RequestError:
    """The same error with the path of the client's tool instead of its place among all shown."""
    for i, tool in enumerate(tools):
        shown = f"tools.{i}.parameters"
        if error.param is None or not f"{error.param}.".startswith(f"{shown}."):
            continue
        offer = toolset.offers[tool.name]
        where = f"{offer.path}.format.definition"
        param = where if offer.custom else f"{offer.path}.parameters{error.param[len(shown) :]}"
        message = error.message.replace(error.param, param)
        kind = UnsupportedError if isinstance(error, UnsupportedError) else RequestError
        return kind(message, code=error.code, param=param)
    return error
