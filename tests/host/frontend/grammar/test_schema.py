"""Schemas in, grammars out: every legal keyword is enforced, every other one refused by name."""

import itertools
import json
import random
import re
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.grammar import json_grammar
from ginfer.frontend.grammar.schema import (
    ANNOTATIONS,
    ENFORCED,
    FORMATS,
    MAX_DEPTH,
    MAX_NODES,
    MAX_PROPERTIES,
)
from tests.grammars import RandomSchemas, accepts, dumps, random_text

CLOSED = {"type": "object", "additionalProperties": False}
PAIR = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}

# keyword, schema, values that match, values that do not
CASES = [
    ("type", {"type": "integer"}, [0, -3, 12], ["1", 1.5, None, [1]]),
    ("type", {"type": ["string", "null"]}, ["x", None], [1, True]),
    ("const", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, "x"]),
    ("enum", {"enum": ["red", 3, None, 'a"b\n']}, ["red", 3, None, 'a"b\n'], ["blue", 4]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "éé"], ["a", ""]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "éé"], ["abc"]),
    ("pattern", {"type": "string", "pattern": "^a.c$|x"}, ["abc", "yxy"], ["abcd", "b"]),
    ("pattern", {"type": "string", "pattern": r"^\w+\/\d$"}, ["ab/1"], ["ab", "/1"]),
    ("minimum", {"type": "integer", "minimum": -5}, [-5, 100], [-6]),
    ("maximum", {"type": "number", "maximum": 2.5}, [2.5, -7.25], [2.6, 3]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}, [0.9, -1], [1]),
    ("multipleOf", {"type": "number", "multipleOf": 0.25}, [0.25, 3], [0.3]),
    ("items", {"type": "array", "items": {"type": "boolean"}}, [[], [True]], [[1]]),
    ("prefixItems", {"prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 1]]),
    ("minItems", {"type": "array", "minItems": 1}, [[0]], [[]]),
    ("maxItems", {"type": "array", "maxItems": 1}, [[], ["x"]], [[1, 2]]),
    ("properties", {**CLOSED, **PAIR}, [{"a": 1}, {"a": 1, "b": "x"}], [{"a": "1"}]),
    ("required", {**CLOSED, **PAIR}, [{"a": 1}], [{}, {"b": "x"}]),
    ("additionalProperties", {**CLOSED, **PAIR}, [{"a": 1}], [{"a": 1, "c": 1}]),
    (
        "additionalProperties",
        {**PAIR, "type": "object", "additionalProperties": {"type": "null"}},
        [{"a": 1, "c": None}],
        [{"a": 1, "c": 1}, {"a": 1, "b": None}],
    ),
    (
        "patternProperties",
        {**CLOSED, "patternProperties": {"^x": {"type": "integer"}}},
        [{}, {"x1": 1}],
        [{"x1": "1"}, {"y": 1}],
    ),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("anyOf", {"anyOf": [{"const": 1}, {"type": "string"}]}, [1, "x"], [2, None]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x"], [None]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    ("$ref", {"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, [None], [1]),
    (
        "$ref",
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}, {"next": {"n": {}}}],
    ),
]
FORMAT_CASES = {
    "date-time": ("2026-02-28T23:59:59Z", "2026-02-28 23:59:59Z"),
    "time": ("12:00:00Z", "25:00:00Z"),
    "date": ("2026-12-31", "2026-13-01"),
    "duration": ("P1W", "1W"),
    "email": ("a.b@example.org", "a.b"),
    "hostname": ("example.org", "-example"),
    "ipv4": ("127.0.0.1", "256.0.0.1"),
    "ipv6": ("::1", "::g"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "uri": ("https://example.org/x?y=1", "no uri"),
}


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), CASES)
def test_keyword_is_enforced(keyword, schema, good, bad):
    grammar = json_grammar(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert all(map(validator.is_valid, good))
    assert not any(map(validator.is_valid, bad))
    assert [value for value in good if not accepts(grammar, dumps(value))] == []
    assert [value for value in bad if accepts(grammar, dumps(value))] == []


def test_every_legal_keyword_has_a_case():
    assert {keyword for keyword, *_ in CASES} | {"format"} == set(ENFORCED)
    assert set(FORMAT_CASES) == set(FORMATS)


def test_the_page_names_every_keyword_and_format():
    page = (Path(__file__).parents[4] / "docs/schemas.md").read_text()
    named = set(re.findall(r"`([$\w]+)`", page))
    assert set(ENFORCED) <= named
    assert ANNOTATIONS - {"example"} <= named
    assert ", ".join(FORMATS) in page


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_enforced(name):
    grammar = json_grammar({"type": "string", "format": name})
    good, bad = FORMAT_CASES[name]
    assert accepts(grammar, dumps(good))
    assert not accepts(grammar, dumps(bad))


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {}}, "contains"),
        ({"propertyNames": {"pattern": "x"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"$ref": "https://example.org/x"}, "$ref"),
        ({"nullable": True}, "nullable"),
        ({"x": 1}, "x"),
        ({"format": "regex"}, "format"),
        ({"pattern": "(?=x)y"}, "pattern"),
        ({"pattern": r"(a)\1"}, "pattern"),
        ({"pattern": r"\bx"}, "pattern"),
        ({"pattern": "a(^b)"}, "pattern"),
        ({"minProperties": 3}, "minProperties"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(part, path):
    schema = {"type": "object", "properties": {"a": {"items": part}}}
    with pytest.raises(UnsupportedError) as caught:
        json_grammar(schema, param="format.schema")
    assert caught.value.param == f"format.schema.properties.a.items.{path}"
    assert caught.value.param in caught.value.message


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ([], "schema"),
        ({"type": "text"}, "schema.type"),
        ({"type": []}, "schema.type"),
        ({"enum": []}, "schema.enum"),
        ({"minLength": -1}, "schema.minLength"),
        ({"minLength": True}, "schema.minLength"),
        ({"maximum": "3"}, "schema.maximum"),
        ({"maximum": float("nan")}, "schema.maximum"),
        ({"multipleOf": 0}, "schema.multipleOf"),
        ({"exclusiveMinimum": True}, "schema.exclusiveMinimum"),
        ({"required": "a"}, "schema.required"),
        ({"properties": []}, "schema.properties"),
        ({"items": [{}]}, "schema.items"),
        ({"anyOf": []}, "schema.anyOf"),
        ({"pattern": "(a"}, "schema.pattern"),
        ({"pattern": "a" * 2000}, "schema.pattern"),
        ({"$ref": "#/$defs/none"}, "schema.$ref"),
        ({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "schema.properties"),
    ],
)
def test_malformed_schemas_are_refused_by_name(schema, param):
    with pytest.raises(RequestError) as caught:
        json_grammar(schema)
    assert caught.value.param == param


def test_depth_and_size_are_limited():
    deep = wide = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    wide = {"anyOf": [{"anyOf": [{} for _ in range(100)]} for _ in range(MAX_NODES // 100 + 1)]}
    for schema in (deep, wide):
        with pytest.raises(RequestError, match="too large"):
            json_grammar(schema)


def test_annotations_change_nothing():
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    noted = {"$schema": "x", "title": "t", "x-order": 1, **plain, "examples": [{}]}
    noted["properties"] = {"a": {"description": "d", "type": "string", "default": "b"}}
    assert json_grammar(plain) == json_grammar(noted)


def test_properties_keep_their_order():
    grammar = json_grammar({**CLOSED, **PAIR})
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, '{"b": "x", "a": 1}')


def test_a_declared_name_has_one_spelling():
    """An escaped spelling would slip past the schema of the declared member."""
    for rest in ({}, {"additionalProperties": {}}, {"additionalProperties": True}):
        grammar = json_grammar({"type": "object", **PAIR, **rest})
        assert not accepts(grammar, r'{"a": 1, "\u0062": 5}')
        assert not accepts(grammar, r'{"a": 1, "\u0061": "x"}')
        assert accepts(grammar, '{"a": 1, "c": "x"}')


def test_one_of_with_a_discriminator():
    def branch(kind, name):
        return {
            **CLOSED,
            "properties": {"kind": {"const": kind}, name: {"type": "integer"}},
            "required": ["kind", name],
        }

    schema = {
        "$defs": {"cat": branch("cat", "lives"), "dog": branch("dog", "age")},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    }
    grammar = json_grammar(schema)
    assert accepts(grammar, '{"kind": "dog", "age": 3}')
    assert not accepts(grammar, '{"kind": "dog", "lives": 3}')
    schema["$defs"]["dog"]["properties"]["kind"] = {"type": "string"}
    with pytest.raises(UnsupportedError):
        json_grammar(schema)


def test_white_space_before_and_inside():
    grammar = json_grammar(None)
    assert accepts(grammar, '\n\n{\n  "a": [1, {"b": null}]\n}')
    assert not accepts(grammar, "{" + " " * 65 + "}")
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, 'x {"a": 1}')


def tower(levels, width, last):
    """References that fan out: levels of `width` branches each, all to the next level."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(levels)}
    return defs | {f"d{levels}": last}


LOOP = {
    "type": "object",
    "required": ["x", "y"],
    "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/b"}},
}
NESTED = [[]]
for _ in range(500):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": tower(40, 2, {}), "oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]},
        {"$defs": {"a": LOOP, "b": LOOP}, "oneOf": [{"$ref": f"#/$defs/{d}"} for d in "ab"]},
        {"oneOf": [{"const": i} for i in range(3000)]},
        {"const": NESTED},
        {"enum": [NESTED]},
        {"required": [f"r{i}" for i in range(100_000)]},
        {"multipleOf": 5e-324},
        {"maximum": 1e300},
    ],
)
def test_hostile_schemas_are_refused_at_once(schema):
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        json_grammar(schema)
    assert time.process_time() - began < 2
    assert caught.value.param.startswith("schema.")


def test_random_texts_of_random_schemas_match_them():
    check_random_schemas(60)


@pytest.mark.long
def test_random_texts_of_many_random_schemas_match_them():
    check_random_schemas(2000)


def check_random_schemas(count):
    rng = np.random.default_rng(20_261)
    schemas, num_finished = RandomSchemas(rng), 0
    for _ in range(count):
        schema = schemas.document()
        text = random_text(json_grammar(schema), rng)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            num_finished += 1
    assert num_finished > 0.9 * count


def test_random_documents_never_break_the_reader():
    """Whatever stands where, the only errors are ours."""
    rng = random.Random(5)
    words = [*ENFORCED, "not", "x-a", "$defs", "title"]
    atoms = [None, True, 0, -1, 1.5, "a", "#/x", "#", "string", [], {}, ["object"], ["a", 1], "(("]

    def value(depth):
        kind = rng.random()
        if depth == 0 or kind < 0.4:
            return rng.choice(atoms)
        if kind < 0.5:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(words): value(depth - 1) for _ in range(rng.randrange(4))}

    outcomes = set()
    for _ in itertools.repeat(None, 3000):
        try:
            json_grammar(value(4))
            outcomes.add("grammar")
        except RequestError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"grammar", "RequestError", "UnsupportedError"}
