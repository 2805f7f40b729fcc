"""Tool grammars: what each choice admits, and that the output parser reads what comes out."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.grammar import ToolChoice, tool_grammar
from tests.frontends import function_tool
from tests.grammars import RandomSchemas, accepts, parse, random_text, random_tool

EDIT = replace(
    function_tool(
        "edit_file",
        {
            "path": {"type": "string"},
            "count": {"type": "integer", "minimum": 1},
            "mode": {"enum": ["all", "first"]},
            "note": {"type": ["string", "null"], "maxLength": 3},
            "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}},
            "extra": {},
            "code": {"type": "string", "pattern": r"^[A-Z]{2}/\d+$"},
        },
        required=["path", "count"],
        additionalProperties=False,
        **{
            "$defs": {
                "edit": {
                    "type": "object",
                    "properties": {"old": {"type": "string"}},
                    "required": ["old"],
                    "additionalProperties": False,
                }
            }
        },
    ),
    strict=True,
)
RUN = function_tool("run", {"cmd": {"type": "string"}, "n": {"type": "integer"}})
NOW = function_tool("now")
REQUIRED = ToolChoice(mode="required")
DOCUMENT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def call(name, **arguments):
    """A call as the template writes it."""
    parts = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def test_required_takes_calls_only():
    grammar = tool_grammar([EDIT, RUN], REQUIRED)
    good = call("edit_file", path="a\n\n</b", count=2)
    assert accepts(grammar, good)
    assert accepts(grammar, f"\n\n{good}\n{call('run', cmd='ls')}\n{call('run')}")
    for bad in ("", "hello", f"hello {good}", f"{good} bye", call("other"), call("edit")):
        assert not accepts(grammar, bad)


def test_parallel_false_takes_one_call():
    one, two = call("run", cmd="ls"), f"{call('run')}\n{call('run')}"
    assert accepts(tool_grammar([RUN], replace(REQUIRED, parallel=False)), one)
    assert not accepts(tool_grammar([RUN], replace(REQUIRED, parallel=False)), two)
    auto = tool_grammar([RUN], ToolChoice(parallel=False))
    for good in ("", "hello <b> & `x`\n", one, f"Let me look.\n\n{one}"):
        assert accepts(auto, good)
    for bad in (two, f"x {two}", f"{one} bye"):
        assert not accepts(auto, bad)


def test_named_takes_one_call_of_that_tool():
    grammar = tool_grammar([EDIT, RUN], ToolChoice(mode="named", name="run"))
    assert accepts(grammar, call("run", cmd="ls", n="many"))
    assert not accepts(grammar, call("edit_file", path="a", count=1))
    assert not accepts(grammar, f"{call('run')}\n{call('run')}")
    with pytest.raises(RequestError) as caught:
        tool_grammar([RUN], ToolChoice(mode="named", name="walk"))
    assert caught.value.param == "tool_choice"


def test_none_takes_no_call():
    grammar = tool_grammar([EDIT, RUN], ToolChoice(mode="none"))
    assert accepts(grammar, "No <tool> here: <function=x is text.")
    for bad in (call("run"), f"x{call('run')}", "<tool_call>", " <function=run>"):
        assert not accepts(grammar, bad)


def test_auto_needs_a_grammar_only_for_strict_tools():
    assert tool_grammar([RUN], ToolChoice()) is None
    grammar = tool_grammar([EDIT, RUN], ToolChoice())
    good = call("edit_file", path="a", count=1)
    for text in ("Hello, <b>you</b>!", f"First:\n{good}", f"{good}\n{call('run', n='x')}"):
        assert accepts(grammar, text)
    for text in ("<tool_call>\n", call("edit_file", path="a"), "x\n <function=run>\n", f"{good} x"):
        assert not accepts(grammar, text)


def test_a_schema_stands_where_text_would():
    grammar = tool_grammar([EDIT, RUN], ToolChoice(), schema=DOCUMENT)
    assert accepts(grammar, '\n\n{"x": 1}')
    assert accepts(grammar, f"{call('run', cmd='ls')}\n{call('run')}")
    for bad in ("hello", '{"x": "1"}', f'{{"x": 1}}\n{call("run")}'):
        assert not accepts(grammar, bad)
    only = tool_grammar([RUN], ToolChoice(mode="none"), schema=DOCUMENT)
    assert accepts(only, '{"x": 1}')
    assert not accepts(only, call("run"))
    assert not accepts(tool_grammar([RUN], REQUIRED, schema=DOCUMENT), '{"x": 1}')


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("count", ["1", "37"], ["0", "-1", "1.5", "'1'", ""]),
        ("mode", ["all"], ["", "al", '"all"', "first "]),
        ("note", ["", "abc", "null"], ["abcd"]),
        ("edits", ["[]", '[{"old": "</parameter>\\n"}, {"old": ""}]'], ["[1]", "{}", "[{}]"]),
        ("extra", ["anything\nat all", '{"a": 1}'], ["</parameter>"]),
        ("code", ["AB/1"], ["AB/", "xAB/1", "AB/1\n"]),
        ("other", [], ["x"]),
    ],
)
def test_values_of_strict_tools_obey_their_schemas(name, good, bad):
    grammar = tool_grammar([EDIT], REQUIRED)
    order = [*EDIT.parameters["properties"], "other"]
    for values, legal in ((good, True), (bad, False)):
        for value in values:
            given = {"path": "p", "count": "1", name: value}
            text = call("edit_file", **{key: given[key] for key in order if key in given})
            assert accepts(grammar, text) is legal, value


def test_parameters_come_in_any_order_each_once_the_required_ones_all():
    grammar = tool_grammar([EDIT], REQUIRED)
    assert accepts(grammar, call("edit_file", mode="all", count=1, path="p"))
    assert not accepts(grammar, call("edit_file", path="p", mode="all"))
    assert not accepts(grammar, call("edit_file", path="p", count=1).replace("count", "path"))
    twice = call("edit_file", path="p", count=1, mode="all").replace("count", "mode")
    assert not accepts(grammar, twice)
    assert not accepts(grammar, call("edit_file", path="p", count=1).replace("count", "cnt"))


def test_more_parameters_than_bits_come_in_a_fixed_order():
    many = function_tool("many", {f"p{i}": {"type": "string"} for i in range(70)}, required=["p69"])
    grammar = tool_grammar([replace(many, strict=True)], REQUIRED)
    assert accepts(grammar, call("many", p69="x", p3="y", p5="z"))
    assert not accepts(grammar, call("many", p69="x", p5="z", p3="y"))
    assert not accepts(grammar, call("many", p3="y"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "array"}, ""),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "properties.a.not"),
        ({"type": "object", "properties": {"a<b": {}}}, "properties.a<b"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_strict_schemas_are_refused_by_name(schema, path):
    tool = replace(NOW, parameters=schema, strict=True)
    with pytest.raises(RequestError) as caught:
        tool_grammar([RUN, tool], ToolChoice(), param="tools.{}.function.parameters")
    assert caught.value.param == "tools.1.function.parameters" + (path and f".{path}")


def test_a_string_parameter_that_refers_to_itself_is_refused():
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    text = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}
    endless = {"type": "object", "properties": {"a": text}, "$defs": {"a": text}}
    assert "%json" in tool_grammar([replace(NOW, parameters=loop, strict=True)], REQUIRED)
    with pytest.raises(UnsupportedError):
        tool_grammar([replace(NOW, parameters=endless, strict=True)], REQUIRED)


@pytest.mark.parametrize("last", [{"type": "null"}, {"type": "string"}])
def test_references_that_fan_out_cost_little(last):
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 60} for i in range(9)}
    part = {"type": ["string", "null"], "anyOf": [{"$ref": "#/$defs/d0"}, {"type": "string"}]}
    schema = {"type": "object", "properties": {"a": part}, "$defs": defs | {"d9": last}}
    tool, began = replace(NOW, parameters=schema, strict=True), time.process_time()
    with suppress(UnsupportedError):
        assert accepts(tool_grammar([tool], REQUIRED), call("now", a="x"))
    assert time.process_time() - began < 5


def test_random_calls_are_read_back_and_match_their_schemas():
    check_random_calls(40)


@pytest.mark.long
def test_many_random_calls_are_read_back_and_match_their_schemas():
    check_random_calls(1000)


def check_random_calls(count):
    rng = np.random.default_rng(7)
    schemas, num_finished = RandomSchemas(rng), 0
    for _ in range(count):
        tools = [random_tool(schemas, i, rng) for i in range(int(rng.integers(1, 4)))]
        mode = str(rng.choice(["required", "auto"]))
        choice = ToolChoice(mode=mode, parallel=bool(rng.integers(2)))
        grammar = tool_grammar(tools, choice)
        text = None if grammar is None else random_text(grammar, rng, 400)
        if text is None:
            continue
        calls, shown = parse(text, tools)
        by_name = {tool.name: tool for tool in tools}
        num_finished += bool(calls)
        assert not (mode == "required" and (shown.strip() or not calls)), text
        assert len(calls) <= 1 or choice.parallel
        for name, arguments in calls:
            if by_name[name].strict:
                validator = jsonschema.Draft202012Validator(by_name[name].parameters)
                validator.validate(arguments)
    assert num_finished > count // 5
