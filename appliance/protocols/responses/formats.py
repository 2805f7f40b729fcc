"""What a response is forced to: the format of its text, and errors of schemas at their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_tools import named_schema
from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.grammar import ANY_OBJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.protocols.responses.tools import ToolSet
    from ginfer.prompt import Tool

FORMAT = "text.format"
KINDS = ("text", "json_object", "json_schema")


def check_format(value: Any, path: str = FORMAT) -> dict[str, Any] | None:
    """The JSON schema that the answer must match; None = any text. `strict: false` changes
    nothing: a schema is always enforced."""
    kind = checks.string(checks.required(checks.mapping(value, path), path, "type"), f"{path}.type")
    checks.one_of(kind, f"{path}.type", KINDS)
    if kind == "json_schema":
        return named_schema(value, path, also=("type",))
    checks.members(value, path, ("type",))
    return ANY_OBJECT if kind == "json_object" else None


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
