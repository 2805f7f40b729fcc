"""Constrained requests on the demo model: what finishes obeys its grammar."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from ginfer.engine.request import Failed, FinishReason, StopString
from ginfer.errors import RequestError
from ginfer.frontend.grammar import ToolChoice, json_grammar, tool_grammar
from ginfer.prompt import Channel, PromptOptions
from tests.engines import make_request, open_demo, submit
from tests.frontends import function_tool, message
from tests.grammars import RandomSchemas, parse, random_tool

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.0}


@pytest.fixture(scope="module")
def engine():
    with open_demo(max_context=4096) as engine:
        yield engine
        engine.check_integrity()


def chat(engine, text="Describe a person.", thinking=False, tools=()):
    options = PromptOptions(thinking=thinking)
    return engine.frontend.prepare([message("user", text)], tools, options)


def run(engine, grammar, max_tokens=200, thinking=False, tools=(), **fields):
    prompt = chat(engine, thinking=thinking, tools=tools)
    return submit(engine, make_request(prompt, max_tokens, grammar=grammar, **fields)).wait()


def finished(engine, cases, max_tokens, **fields):
    """Run (grammar, case) pairs, eight rows together; yield text and case of what finished."""
    for start in range(0, len(cases), 16):
        part = cases[start : start + 16]
        runs = [
            (
                submit(engine, make_request(chat(engine), max_tokens, grammar=grammar, **fields)),
                case,
            )
            for grammar, case in part
        ]
        for one, case in runs:
            one.wait(300)
            if one.finished.reason is FinishReason.STOP_TOKEN:
                yield one.text(), case


def check_random_schemas(engine, count):
    rng = np.random.default_rng(31)
    schemas = RandomSchemas(rng)
    cases = [
        (json_grammar(schema), schema) for schema in (schemas.document() for _ in range(count))
    ]
    num_finished = 0
    for text, schema in finished(engine, cases, 96, sampling=HOT | {"seed": 5}):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        num_finished += 1
    assert num_finished > 0.7 * count


def test_every_finished_output_matches_its_random_schema(engine):
    check_random_schemas(engine, 100)


@pytest.mark.long
def test_every_finished_output_matches_its_random_schema_in_full(engine):
    check_random_schemas(engine, 2000)


def test_every_finished_output_has_the_calls_that_were_asked_for(engine):
    rng = np.random.default_rng(8)
    schemas, cases = RandomSchemas(rng), []
    for _ in range(24):
        tools = [random_tool(schemas, i, rng) for i in range(int(rng.integers(1, 3)))]
        choice = ToolChoice(mode="required", parallel=bool(rng.integers(2)))
        cases.append((tool_grammar(tools, choice), (tools, choice)))
    num_finished = 0
    for text, (tools, choice) in finished(engine, cases, 160, sampling=HOT | {"seed": 6}):
        calls, shown = parse(text, tools)
        assert calls
        assert not shown.strip()
        assert len(calls) == 1 or choice.parallel
        for name, arguments in calls:
            tool = next(tool for tool in tools if tool.name == name)
            if tool.strict:
                jsonschema.Draft202012Validator(tool.parameters).validate(arguments)
        num_finished += 1
    assert num_finished >= 8


@pytest.mark.parametrize("budget", [None, 0, 6])
def test_a_schema_with_thinking_waits_for_the_content(engine, budget):
    one = run(
        engine,
        json_grammar(PERSON),
        thinking=True,
        sampling=HOT | {"seed": 4},
        reasoning_budget=budget,
    )
    assert one.finished.reason is FinishReason.STOP_TOKEN
    jsonschema.validate(json.loads(one.text()), PERSON)
    assert bool(one.text(Channel.REASONING)) == (budget != 0)


def test_a_schema_with_tools_gives_either(engine):
    tools = (replace(function_tool("look_up", {"name": {"enum": ["a", "b"]}}), strict=True),)
    grammar = tool_grammar(tools, ToolChoice(), schema=PERSON)
    forms = set()
    for seed in range(12):
        one = run(engine, grammar, tools=tools, sampling={"temperature": 2.0, "seed": seed})
        calls, shown = parse(one.text(), tools)
        forms.add(bool(calls))
        if calls:
            assert not shown.strip()
        elif one.finished.reason is FinishReason.STOP_TOKEN:
            jsonschema.validate(json.loads(shown), PERSON)
    assert forms == {False, True}


def test_company_makes_no_difference(engine):
    """Constrained and free rows together give what each gives alone."""
    grammars = [json_grammar(PERSON), None, 'start: ("a" | "b" | " ")+ "."', None]
    prompts = [chat(engine, f"Tell me {i} things.", thinking=i == 2) for i in range(4)]
    requests = [
        make_request(prompt, 48, grammar=grammar, sampling=HOT | {"seed": i, "logprobs": 3})
        for i, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
    ]
    alone = [submit(engine, request).wait() for request in requests]
    renamed = [replace(r, request_id=f"{r.request_id}-again") for r in requests]
    together = [one.wait() for one in [submit(engine, request) for request in renamed]]
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == other.logprobs


def test_logprobs_are_over_legal_ids(engine):
    grammar = 'start: "a" ("b" | "c")'
    one = run(engine, grammar, sampling={"temperature": 0.0, "logprobs": 20})
    first, second = one.logprobs[0], one.logprobs[-1]
    legal = {"a", "ab", "ac"}
    assert {engine.frontend.token_text(i) for i, _ in first.top} <= legal
    for chosen in (first, second):
        assert math.isclose(sum(math.exp(p) for _, p in chosen.top), 1, abs_tol=1e-4)
        assert all(math.isfinite(p) for _, p in chosen.top)
    assert one.text() in ("ab", "ac")


def test_bias_and_penalties_stay_inside_the_grammar(engine):
    (x,), (a,), (b,) = map(engine.frontend.encode, "xab")
    grammar = 'start: "a" | "b"'
    bias = ((x, 100.0), (a, -100.0))
    one = run(engine, grammar, sampling={"temperature": 0.0, "logit_bias": bias})
    assert one.text() == "b"
    two = run(
        engine, 'start: "aaaa" "aaaa"', sampling={"temperature": 0.0, "presence_penalty": 2.0}
    )
    assert two.text() == "a" * 8
    assert b not in two.ids


def test_stops_and_limits_hold_inside_a_grammar(engine):
    grammar = 'start: "one two three" " four"+'
    one = run(engine, grammar, stop_strings=(StopString(text="thr"),))
    assert one.finished.reason is FinishReason.STOP_STRING
    assert one.text() == "one two "
    one = run(engine, grammar, max_tokens=2)
    assert one.finished.reason is FinishReason.OUTPUT_LIMIT
    assert "one two three".startswith(one.text())


def test_what_cannot_be_compiled_takes_no_place(engine):
    before = engine.stats()
    for fields in ({"grammar": "start: nothing"}, {"grammar": 'start: "a"', "ignore_eos": True}):
        with pytest.raises(RequestError):
            submit(engine, make_request(chat(engine), 8, **fields))
    after = engine.stats()
    assert after["submitted"] == before["submitted"]
    assert after["rejected"]["invalid_value"] == before["rejected"].get("invalid_value", 0) + 2


def test_a_grammar_that_fails_costs_its_request_alone(engine):
    many = " ".join(f"p{i}?" for i in range(3000))
    rules = "\n".join(f'p{i}: "{i}" /[a-z]/' for i in range(3000))
    grammar = f'start: "ab" {many} "!"\n{rules}\n'
    good = submit(engine, make_request(chat(engine), 40, grammar=json_grammar(PERSON)))
    bad = submit(engine, make_request(chat(engine), 40, grammar=grammar))
    with pytest.raises(RequestError, match="cannot be followed") as caught:
        bad.wait()
    assert caught.value.code == "grammar_failed"
    assert isinstance(bad.events[-1], Failed)
    assert good.wait().finished.reason in (FinishReason.STOP_TOKEN, FinishReason.OUTPUT_LIMIT)


def test_counters_say_what_masks_cost(engine):
    before = engine.stats()["grammar"]
    run(engine, json_grammar(PERSON), sampling=HOT | {"seed": 1})
    after = engine.stats()["grammar"]
    assert after["mask_s"] > before["mask_s"]
    assert after["wait_s"] > before["wait_s"]
    assert after["compiled"] + after["cached"] > before["compiled"] + before["cached"]
