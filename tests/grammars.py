"""Grammars over the demo tokenizer without a model, and random schemas whose texts are short."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.engine.grammar import Grammars
from ginfer.frontend.base import CallArguments, CallBroken, CallEnded, CallStarted, ContentText
from ginfer.prompt import Channel
from tests.frontends import demo_frontend, function_tool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.engine.grammar import Constraint
    from ginfer.prompt import Tool

VOCAB = 4224


@cache
def demo_grammars() -> Grammars:
    """One compiler for all tests."""
    return Grammars(demo_frontend(), VOCAB)


def accepts(grammar: str, text: str) -> bool:
    """Whether the text, as the tokenizer cuts it, is a whole sentence of the grammar."""
    row, ids = demo_grammars().open(grammar), demo_frontend().encode(text)
    return row.matcher.validate_tokens(ids) == len(ids) and ends(row, ids)


def ends(row: Constraint, ids: list[int]) -> bool:
    """Whether the grammar may end after these tokens."""
    row.pending = list(ids)
    row.consume()
    return row.fault is None and bool(row.matcher.is_accepting())


def legal_ids(row: Constraint) -> np.ndarray:
    """Ids that the mask of the next token admits."""
    return np.flatnonzero(np.unpackbits(row.row.view(np.uint8), bitorder="little"))


def random_text(grammar: str, rng: np.random.Generator, limit: int = 300) -> str | None:
    """A sentence of the grammar, drawn token by token; None if it does not end in time.

    Tokens that bring an end closer are drawn more often than the rest."""
    grammars, frontend = demo_grammars(), demo_frontend()
    row, ids = grammars.open(grammar), []
    closing = {i for text in ('"', "}", "]", "\n", "</") for i in frontend.encode(text)}
    while len(ids) < limit:
        row.ready.wait()
        assert row.fault is None, row.fault
        legal = legal_ids(row).tolist()
        stops = set(legal) & set(frontend.stop_token_ids)
        if stops and (len(stops) == len(legal) or rng.random() < 0.4):
            return b"".join(map(frontend.token_bytes, ids)).decode()
        likely = [i for i in legal if i in closing]
        pool = likely if likely and rng.random() < 0.3 else [i for i in legal if i not in stops]
        ids.append(int(rng.choice(pool)))
        row.active, row.pending = True, [ids[-1]]
        grammars.advance([row])
    return None


class RandomSchemas:
    """Schemas of all keywords that are enforced. Their texts are short; few are endless."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._defs: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        """A whole schema."""
        self._defs = {"leaf": self._scalar()}
        if self._rng.random() < 0.3:
            node = {"value": self._scalar(), "children": self._list({"$ref": "#/$defs/node"})}
            self._defs["node"] = self._object(node, required=["value"])
            self._defs["node"]["properties"]["children"]["maxItems"] = 2
        schema = self._schema(3)
        return {**schema, "$defs": self._defs}

    def _pick(self, *choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _schema(self, depth: int) -> dict[str, Any]:
        kind = self._rng.random()
        if depth == 0 or kind < 0.25:
            return self._pick(self._scalar, self._scalar, self._reference)()
        if kind < 0.65:
            names = [f"{self._pick('name', 'x', 'größe', 'a b')}{i}" for i in range(3)]
            count = int(self._rng.integers(1, 4))
            members = {name: self._schema(depth - 1) for name in names[:count]}
            return self._object(members, [n for n in members if self._rng.random() < 0.6])
        if kind < 0.85:
            return self._list(self._schema(depth - 1))
        if kind < 0.95:
            return {"anyOf": [self._schema(depth - 1), self._schema(depth - 1)]}
        return self._map()

    def _object(self, members: dict[str, Any], required: list[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": members,
            "required": required,
            "additionalProperties": False,
        }

    def _list(self, items: Any) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": items, "maxItems": 3}
        if self._rng.random() < 0.3:
            schema["prefixItems"] = [self._scalar()]
        if self._rng.random() < 0.3:
            schema["minItems"] = 1
        return schema

    def _map(self) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            free = {"patternProperties": {"^k[0-9]$": self._scalar()}}
            return {"type": "object", **free, "additionalProperties": False, "maxProperties": 2}
        return {"type": "object", "additionalProperties": self._scalar(), "maxProperties": 2}

    def _reference(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._pick(*self._defs)}"}

    def _scalar(self) -> dict[str, Any]:
        low = int(self._rng.integers(-1000, 1000))
        return dict(
            self._pick(
                {"type": "string", "maxLength": 8},
                {"type": "string", "minLength": 2, "maxLength": 5},
                {"type": "string", "pattern": self._pick("^[a-z]{2,6}$", r"^\d{3}-\d{2}$")},
                {"type": "string", "pattern": "^(red|green|blue)+$", "maxLength": 12},
                {"type": "string", "format": self._pick("date", "uuid", "ipv4", "time")},
                {"enum": ["alpha", "beta", 'say "hi"', 3, None, {"k": [1]}]},
                {"const": self._pick("only", 17, True, ["x", 1])},
                {"type": "integer", "minimum": low, "maximum": low + int(self._rng.integers(300))},
                {"type": "integer", "exclusiveMinimum": 0, "maximum": 1000, "multipleOf": 7},
                {"type": "number", "minimum": low, "exclusiveMaximum": low + 2, "multipleOf": 0.25},
                {"type": self._pick("boolean", "null", ["boolean", "null"])},
                {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
            )
        )


def dumps(value: Any) -> str:
    """JSON as a content grammar admits it, too."""
    return json.dumps(value, ensure_ascii=False)


def random_tool(schemas: RandomSchemas, i: int, rng: np.random.Generator) -> Tool:
    """A tool with parameters of random schemas, most often a strict one."""
    names = ["first", "second", "third"][: int(rng.integers(1, 4))]
    properties = {name: schemas.document() for name in names}
    defs: dict[str, Any] = {"node": {"type": "boolean"}}
    for part in properties.values():
        defs = part.pop("$defs") | defs
    tool = function_tool(
        f"tool_{i}",
        properties,
        required=[name for name in names if rng.random() < 0.5],
        additionalProperties=False,
        **{"$defs": defs},
    )
    return replace(tool, strict=bool(rng.random() < 0.8))


def parse(text: str, tools: Sequence[Tool]) -> tuple[list[tuple[str, Any]], str]:
    """Calls (name, arguments) and visible text of a response; no call may break."""
    parser = demo_frontend().output_parser(tools)
    events = [*parser.feed(Channel.CONTENT, text), *parser.finish()]
    assert not [e for e in events if isinstance(e, CallBroken)]
    started = [e for e in events if isinstance(e, CallStarted)]
    assert len(started) == sum(isinstance(e, CallEnded) for e in events)
    shown = "".join(e.text for e in events if isinstance(e, ContentText))
    joined = {
        e.index: "".join(
            a.fragment for a in events if isinstance(a, CallArguments) and a.index == e.index
        )
        for e in started
    }
    return [(e.name, json.loads(joined[e.index])) for e in started], shown
