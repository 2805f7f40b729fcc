"""Every request field of Responses is obeyed, refused by name, or reported as advisory."""

import typing

import pytest
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from appliance.protocols.fields import Verdict
from appliance.protocols.responses.fields import FIELDS, VACUOUS
from appliance.protocols.responses.request import parse_request
from ginfer.errors import RequestError, UnsupportedError
from ginfer.frontend.base import SamplingDefaults
from ginfer.prompt import PreparedPrompt, PromptOptions
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import delta, documented
from tests.host.protocols.response_bodies import (
    CALL,
    DEFAULTS,
    PATCH,
    RESULT,
    WEATHER,
    body,
    memory,
    parse,
    whole,
)

PRESET = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.5)
PROMPT = PreparedPrompt(token_ids=None)

SAMPLING = [
    ("temperature", 0.25, 0.25),
    ("top_p", 0.5, 0.5),
    ("top_k", 3, 3),
    ("min_p", 0.1, 0.1),
    ("presence_penalty", -1, -1.0),
    ("frequency_penalty", 1.5, 1.5),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("logit_bias", {"7": -100}, ((7, -100.0),)),
]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON_FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
NAMED = {"type": "function", "name": "get_weather"}
FILES = {"type": "namespace", "name": "fs", "description": "Files", "tools": [WEATHER]}
ODD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
STRICT = {**WEATHER, "strict": True}
DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}"}

# fields, attribute of ResponsesRequest, its value
KEPT = [
    ({"max_output_tokens": 16}, "max_tokens", 16),
    ({}, "max_tokens", DEFAULTS.max_tokens),
    ({"stream": True, "stream_options": {"include_obfuscation": False}}, "stream", True),
    ({"stop": "END"}, "stop", ("END",)),
    ({"thinking_budget": 0}, "thinking_budget", 0),
    ({"store": False}, "store", False),
    ({}, "store", True),
    ({"include": ["reasoning.encrypted_content"]}, "seals_reasoning", True),
    ({"include": ["message.output_text.logprobs"]}, "logprobs", 0),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 20}, "logprobs", 20),
    ({"include": list(VACUOUS)}, "logprobs", None),
    ({"top_logprobs": 0}, "logprobs", None),
    ({"reasoning": {"effort": "none"}}, "options", PromptOptions(thinking=False)),
    ({"reasoning": {"effort": "high"}}, "options", PromptOptions(effort="high")),
    ({"reasoning": {"mode": "standard"}}, "options", PromptOptions()),
    ({"reasoning": {"context": "current_turn"}}, "options", PromptOptions(preserve_thinking=False)),
    ({"reasoning": {"context": "all_turns"}}, "options", PromptOptions()),
    ({"preserve_thinking": False}, "options", PromptOptions(preserve_thinking=False)),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "options",
        PromptOptions(thinking=False),
    ),
    ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, "tools", ()),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", True),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"text": {"format": {"type": "text"}}}, "schema", None),
    ({"text": {"format": {"type": "json_object"}}}, "schema", {"type": "object"}),
    ({"text": {"format": JSON_FORMAT}}, "schema", SCHEMA),
    ({"text": {"format": JSON_FORMAT | {"strict": False}}}, "schema", SCHEMA),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "required"),
    ({"tools": [WEATHER, PATCH], "tool_choice": NAMED}, "tool_choice", "named"),
    ({"tools": [WEATHER, PATCH], "tool_choice": NAMED}, "named_tool", "get_weather"),
    ({"tools": [FILES], "tool_choice": NAMED}, "named_tool", "fs.get_weather"),
    ({"max_tool_calls": 3}, "tool_choice", "auto"),
    ({"truncation": "disabled"}, "tool_choice", "auto"),
    ({"background": False}, "tool_choice", "auto"),
    ({"metadata": {"a": "b"}}, "accepted_without_effect", ()),
]

ADVISORY = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "service_tier": "auto",
    "client_metadata": {"installation": "x"},
}

REFUSED = [
    ({"text": {"verbosity": "low"}}, "text.verbosity", "verbosity_not_supported"),
    ({"truncation": "auto"}, "truncation", "truncation_not_supported"),
    ({"background": True}, "background", "background_not_supported"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "stream_option_not_supported",
    ),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "reasoning_option_not_supported"),
    ({"reasoning": {"budget": 1}}, "reasoning.budget", "reasoning_option_not_supported"),
    ({"conversation": "conv_1"}, "conversation", "parameter_not_supported"),
    ({"context_management": []}, "context_management", "parameter_not_supported"),
    ({"prompt": {"id": "p"}}, "prompt", "parameter_not_supported"),
    ({"moderation": {"model": "m"}}, "moderation", "parameter_not_supported"),
    ({"access_programs": {}}, "access_programs", "parameter_not_supported"),
    ({"background_options": {}}, "background_options", "parameter_not_supported"),
    ({"image": {}}, "image", "modality_not_supported"),
    (
        {"tool_choice": {"type": "web_search_preview"}},
        "tool_choice",
        "tool_choice_not_supported",
    ),
    (
        {"tool_choice": "required", "tools": [{"type": "web_search"}]},
        "tool_choice",
        "tool_choice_not_supported",
    ),
    ({"tools": [{"type": "telepathy"}]}, "tools.0.type", "tool_type_not_supported"),
    (
        {"tools": [{**WEATHER, "allowed_callers": ["programmatic"]}]},
        "tools.0.allowed_callers",
        "unsupported_parameter",
    ),
    ({"tools": [{**PATCH, "async": True}]}, "tools.0.async", "unsupported_parameter"),
    (
        {"tools": [{**PATCH, "format": {**DIGITS, "syntax": "lark"}}]},
        "tools.0.format.syntax",
        "custom_tool_format_not_supported",
    ),
]

FORMAT_SYNTAX = ("tools.0.format.syntax", "unknown_parameter")
FORMAT_MISSING = ("tools.0.format.syntax", "missing_required_parameter")

INVALID = [
    ({"service_tier": "priority"}, "service_tier", "service_tier_not_supported"),
    ({"colour": "red"}, "colour", "unknown_parameter"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 3}, "input", "invalid_type"),
    ({"max_output_tokens": 15}, "max_output_tokens", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"include": ["everything"]}, "include.0", "include_not_supported"),
    ({"include": "x"}, "include", "invalid_type"),
    ({"include": [["x"]]}, "include.0", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a" * 65: "x"}}, "metadata", "invalid_value"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "response_not_found"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning_effort_not_supported"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
    (
        {"reasoning": {"context": "all_turns"}, "preserve_thinking": False},
        "reasoning.context",
        "conflicting_template_option",
    ),
    (
        {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
        "chat_template_kwargs.reasoning_effort",
        "conflicting_template_option",
    ),
    (
        {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
        "reasoning.effort",
        "conflicting_template_option",
    ),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.name", "invalid_value"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "invalid_value"),
    ({"tools": [{**WEATHER, "colour": 1}]}, "tools.0.colour", "unknown_parameter"),
    (
        {"tools": [{"type": "namespace", "name": "n"}]},
        "tools.0.tools",
        "missing_required_parameter",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        "tools.0.tools.0.type",
        "invalid_value",
    ),
    ({"tools": [{**PATCH, "format": {"type": "text", "syntax": "regex"}}]}, *FORMAT_SYNTAX),
    ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, *FORMAT_MISSING),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": JSON_FORMAT | {"name": ""}}}, "text.format.name", "invalid_value"),
    ({"text": {"format": JSON_FORMAT | {"schema": []}}}, "text.format.schema", "invalid_type"),
    ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]},
        "tool_choice.name",
        "invalid_value",
    ),
]


# fields whose grammar cannot be made -> the member that says so
UNENFORCEABLE = [
    (
        {"text": {"format": JSON_FORMAT | {"schema": {"type": "object", "minProperties": 2}}}},
        "text.format.schema.minProperties",
    ),
    (
        {
            "tools": [
                {"type": "web_search"},
                FILES | {"tools": [PATCH, STRICT | {"parameters": ODD}]},
            ]
        },
        "tools.1.tools.1.parameters.properties.x.pattern",
    ),
    (
        {"tools": [PATCH | {"format": DIGITS | {"definition": "(?=a)b"}}]},
        "tools.0.format.definition",
    ),
]


@pytest.mark.parametrize(("fields", "param"), UNENFORCEABLE)
def test_what_cannot_be_enforced_is_named(fields, param):
    with pytest.raises(RequestError) as caught:
        parse(**fields).to_engine_request(PROMPT, "r", PRESET)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": JSON_FORMAT}},
        {"tools": [STRICT]},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [PATCH | {"format": DIGITS}]},
    ],
)
def test_what_is_enforced_is_a_grammar(fields):
    assert parse(**fields).to_engine_request(PROMPT, "r", PRESET).grammar
    assert parse(tools=[WEATHER, PATCH]).to_engine_request(PROMPT, "r", PRESET).grammar is None


@pytest.mark.parametrize(("field", "wire", "value"), SAMPLING)
def test_sampling_reaches_the_engine(field, wire, value):
    request = parse(**{field: wire}).to_engine_request(PROMPT, "r", PRESET)
    assert getattr(request.sampling, field) == value


@pytest.mark.parametrize(("fields", "attribute", "value"), KEPT)
def test_obeyed(fields, attribute, value):
    assert getattr(parse(**fields), attribute) == value


@pytest.mark.parametrize("field", ADVISORY)
def test_advisory_fields_are_reported(field):
    assert parse(**{field: ADVISORY[field]}).accepted_without_effect == (field,)


def test_members_without_effect_are_reported():
    fields = {
        "reasoning": {"summary": "auto", "effort": "low"},
        "tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, WEATHER],
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "x"}}
                ],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        ],
    }
    assert parse(**fields).accepted_without_effect == (
        "input.prompt_cache_breakpoint",
        "input.reasoning.summary",
        "reasoning.summary",
        "tools.mcp",
        "tools.web_search",
    )


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_refused_by_name(fields, param, code):
    with pytest.raises(UnsupportedError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(("fields", "param", "code"), INVALID)
def test_invalid(fields, param, code):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_the_table_covers_what_the_sdk_can_send():
    assert set(typing.get_type_hints(ResponseCreateParamsStreaming)) <= set(FIELDS)


def test_every_refused_or_advisory_field_is_tested():
    refused = {next(iter(fields)) for fields, _, _ in REFUSED}
    for name, found in FIELDS.items():
        if found.verdict is Verdict.REFUSED:
            assert name in refused
    assert set(ADVISORY) == {n for n, f in FIELDS.items() if f.verdict is Verdict.ACCEPTED}


def test_the_response_repeats_the_request():
    fields = {
        "instructions": "Be brief.",
        "max_output_tokens": 64,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "store": False,
        "temperature": 0.5,
        "tools": [WEATHER],
        "top_logprobs": 0,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    found = whole([delta("Hi")], demo_frontend(), **fields)
    repeated = {
        **fields,
        "temperature": 1.0,  # of the head that the test made
        "reasoning": {"effort": "low", "summary": None},
        "background": False,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "service_tier": "default",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "truncation": "disabled",
        "error": None,
        "incomplete_details": None,
    }
    assert {name: found[name] for name in repeated} == repeated
    Response.model_validate(found)


def test_instructions_come_first_and_are_not_stored():
    kept = memory()
    request = parse(kept, instructions="Be brief.")
    assert [m.role for m in request.messages] == ["developer", "user"]
    assert [item["type"] for item in request.items] == ["message"]


def test_a_follow_up_continues_the_conversation():
    kept = memory()
    first = whole(
        [delta("Hello")],
        demo_frontend(),
        remembered=kept,
        instructions="x",
        preserve_thinking=False,
    )
    request = parse(kept, input="And now?", previous_response_id=first["id"])
    assert [(m.role, m.text) for m in request.messages] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "And now?"),
    ]
    assert request.options.preserve_thinking is False
    again = parse(kept, previous_response_id=first["id"], preserve_thinking=True)
    assert again.options.preserve_thinking is True


def test_what_is_not_to_be_stored_is_not():
    kept = memory()
    found = whole([delta("Hello")], demo_frontend(), remembered=kept, store=False)
    assert kept.previous(found["id"]) is None
    assert len(kept.store) == 0


def test_tool_choice_none_hides_the_tools():
    request = parse(tools=[WEATHER], tool_choice="none")
    assert request.active_tools == ()
    assert [t.name for t in parse(tools=[WEATHER]).active_tools] == ["get_weather"]


def test_tool_results_keep_special_tokens_visible():
    items = [{"role": "user", "content": "Hi"}, CALL, RESULT]
    assert parse(input=items).to_engine_request(PROMPT, "r", PRESET).keep_special_tokens


def test_the_body_must_be_an_object():
    with pytest.raises(RequestError) as caught:
        parse_request([body()], defaults=DEFAULTS, memory=memory())
    assert caught.value.param == "body"


def test_docs_list_the_fields_with_their_verdicts():
    listed = documented("Responses: request")
    assert listed == {name: (f.verdict.value, f.note) for name, f in FIELDS.items()}
