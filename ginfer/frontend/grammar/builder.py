"""The text of one llguidance grammar, put together from rules and terminals."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ginfer.frontend.grammar.schema import Schema, SchemaReader

# White space that may stand before the content: the model writes an empty line after its reasoning.
LEAD = "/[ \\t\\r\\n]{0,16}/"
SPACED = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NO_ALIASES = {"json_allowed_escapes": 'nrbtf\\"'}  # every name of a member has one spelling


@dataclass
class GrammarBuilder:
    """Rules and terminals by name; `start` is the rule where the content begins."""

    rules: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)  # names by expression

    def text(self) -> str:
        """The whole grammar."""
        lines = ["%llguidance {}", f"start: {self.rules['start']}"]
        lines += [f"{name}: {rule}" for name, rule in self.rules.items() if name != "start"]
        lines += [f"{name}: {expression}" for expression, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def terminal(self, expression: str) -> str:
        """Name of the terminal with this expression."""
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")


def literal(text: str) -> str:
    """Text as a grammar spells it."""
    return json.dumps(text, ensure_ascii=False)


def json_value(reader: SchemaReader, schema: Schema, options: dict[str, Any]) -> str:
    """A JSON value by a schema that `reader` gave, as an element of a rule."""
    whole = reader.whole(schema)
    if isinstance(whole, bool):
        whole = {} if whole else {"enum": []}
    options = options | _NO_ALIASES if reader.aliases else options
    return "%json " + json.dumps({"x-guidance": options, **whole})
