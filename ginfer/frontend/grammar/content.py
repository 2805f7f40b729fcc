"""Grammar of a content that is one JSON value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ginfer.frontend.grammar.builder import LEAD, SPACED, GrammarBuilder, json_value
from ginfer.frontend.grammar.schema import SchemaReader

if TYPE_CHECKING:
    from ginfer.frontend.grammar.schema import Schema

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_grammar(schema: Schema | None, *, param: str = "schema") -> str:
    """Grammar of a content that matches a JSON schema; None = any object.

    Properties come in declared order. Raises RequestError for a malformed schema and
    UnsupportedError for a keyword that cannot be enforced; `param` is the path of the keyword,
    under `param`.
    """
    schema = ANY_OBJECT if schema is None else schema
    reader = SchemaReader(schema, param)
    value = json_value(reader, reader.read(schema), SPACED)
    return GrammarBuilder(rules={"start": f"{LEAD} {value}"}).text()
