"""Every request field of Chat Completions is obeyed, refused by name, or reported as advisory."""

import typing

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from appliance.protocols.chat_fields import FIELDS
from appliance.protocols.defaults import SamplingOverrides, ServerDefaults
from appliance.protocols.fields import Verdict
from appliance.protocols.openai_chat import parse_request
from appliance.protocols.openai_errors import error_body
from ginfer.engine.request import StopString
from ginfer.errors import OverloadedError, RequestError, UnsupportedError
from ginfer.frontend.base import SamplingDefaults
from ginfer.frontend.grammar import ANY_OBJECT
from ginfer.prompt import PreparedPrompt, PromptOptions
from tests.host.protocols.bodies import CALL, DEFAULTS, WEATHER, body, documented, nested, parse


def schema_of(member):
    """An object schema with the member x."""
    return {"type": "object", "properties": {"x": member}, "required": ["x"]}


def strict_tool(member):
    """A strict function with the parameter x."""
    function = {"name": "f", "strict": True, "parameters": schema_of(member)}
    return {"type": "function", "function": function}


def json_schema(member):
    """A response format with the member x."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema_of(member)}}


PRESET = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.5)
PROMPT = PreparedPrompt(token_ids=None)

# field, wire value -> where it arrives in the engine request, and as what
SAMPLING = [
    ("temperature", 0.25, 0.25),
    ("temperature", 0, 0.0),
    ("top_p", 0.5, 0.5),
    ("top_k", 3, 3),
    ("min_p", 0.1, 0.1),
    ("presence_penalty", -1, -1.0),
    ("frequency_penalty", 1.5, 1.5),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("logit_bias", {"7": -100, "3": 1.5}, ((3, 1.5), (7, -100.0))),
]

# field, wire value, attribute of ChatRequest, its value
KEPT = [
    ("max_tokens", 7, "max_tokens", 7),
    ("max_completion_tokens", 7, "max_tokens", 7),
    ("stop", "END", "stop", ("END",)),
    ("stop", ["a", "", "b"], "stop", ("a", "b")),
    ("n", 1, "stream", False),
    ("stream", True, "stream", True),
    ("thinking_budget", 0, "thinking_budget", 0),
    ("reasoning_effort", "none", "options", PromptOptions(thinking=False)),
    ("reasoning_effort", "high", "options", PromptOptions(effort="high")),
    ("enable_thinking", False, "options", PromptOptions(thinking=False)),
    ("preserve_thinking", False, "options", PromptOptions(preserve_thinking=False)),
    (
        "chat_template_kwargs",
        {"enable_thinking": True, "reasoning_effort": "low", "preserve_thinking": False},
        "options",
        PromptOptions(effort="low", preserve_thinking=False),
    ),
    ("parallel_tool_calls", True, "parallel_tool_calls", True),
    ("response_format", {"type": "text"}, "schema", None),
    ("response_format", {"type": "json_object"}, "schema", ANY_OBJECT),
    ("modalities", ["text"], "tools", ()),
    ("verbosity", "medium", "tools", ()),
    ("store", False, "accepted_without_effect", ()),
]

ADVISORY = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "text"},
}

REFUSED = [
    ({"n": 2}, "n", "n_not_supported"),
    ({"n": True}, "n", "n_not_supported"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "tools.0.type",
        "tool_type_not_supported",
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        "tool_choice.type",
        "tool_type_not_supported",
    ),
    (
        {"tools": [WEATHER, strict_tool({"type": "string", "pattern": "(?=a)b"})]},
        "tools.1.function.parameters.properties.x.pattern",
        "unsupported_schema",
    ),
    (
        {"response_format": json_schema({"type": "string", "pattern": "(?=a)b"})},
        "response_format.json_schema.schema.properties.x.pattern",
        "unsupported_schema",
    ),
    ({"modalities": ["text", "audio"]}, "modalities", "modality_not_supported"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", "modality_not_supported"),
    ({"verbosity": "low"}, "verbosity", "verbosity_not_supported"),
    ({"store": True}, "store", "store_not_supported"),
    ({"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "stream_option_not_supported",
    ),
    (
        {"chat_template_kwargs": {"add_vision_id": True}},
        "chat_template_kwargs.add_vision_id",
        "chat_template_option_not_supported",
    ),
]

MALFORMED = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"model": 3}, "model", "invalid_type"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unknown_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "conflicting_parameters"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_k": -1}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"07": 1}}, "logit_bias.07", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"temperature": nested(900)}, "temperature", "invalid_type"),
    ({"user": nested(900)}, "user", "invalid_type"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [5]}, "stop.0", "invalid_type"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 2000}, "stop", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
        "tools.0.function.parameters",
        "invalid_type",
    ),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.name", "unknown_parameter"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "reasoning_effort_not_supported"),
    (
        {"reasoning_effort": "none", "enable_thinking": True},
        "reasoning_effort",
        "conflicting_template_option",
    ),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        "reasoning_effort",
        "conflicting_template_option",
    ),
    (
        {"preserve_thinking": True, "chat_template_kwargs": {"preserve_thinking": False}},
        "chat_template_kwargs.preserve_thinking",
        "conflicting_template_option",
    ),
    ({"thinking_budget": -1}, "thinking_budget", "invalid_value"),
    ({"user": 1}, "user", "invalid_type"),
    ({"service_tier": "priority"}, "service_tier", "service_tier_not_supported"),
    ({"prompt_cache_retention": "1y"}, "prompt_cache_retention", "invalid_value"),
    ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        "response_format.schema",
        "unknown_parameter",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
]


def engine_request(**fields):
    return parse(**fields).to_engine_request(PROMPT, "r", PRESET)


@pytest.mark.parametrize(("name", "value", "arrives"), SAMPLING)
def test_sampling_field_reaches_the_engine(name, value, arrives):
    sampling = engine_request(**{name: value}).sampling
    assert getattr(sampling, name) == arrives
    assert getattr(engine_request().sampling, name) != arrives


def test_silent_sampling_fields_come_from_the_preset():
    sampling = engine_request(top_k=3).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.95, 3)
    assert sampling.presence_penalty == 0.5
    assert sampling.seed is None
    assert sampling.logprobs is None


def test_request_overrides_server_overrides_preset():
    server = ServerDefaults(sampling=SamplingOverrides(temperature=0.1, top_k=5, seed=9))
    request = parse_request(body(temperature=0.2), defaults=server)
    sampling = request.to_engine_request(PROMPT, "r", PRESET).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.2, 5, 0.95)
    assert sampling.seed == 9


@pytest.mark.parametrize(("name", "value", "attribute", "kept"), KEPT)
def test_field_is_kept(name, value, attribute, kept):
    request = parse(**{name: value})
    assert getattr(request, attribute) == kept
    assert request.accepted_without_effect == ()


def test_logprobs_and_usage_options():
    assert parse(logprobs=True).logprobs == 0
    assert parse(logprobs=True, top_logprobs=20).logprobs == 20
    assert parse(logprobs=False).logprobs is None
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={"include_obfuscation": False}).include_usage


def test_limits_and_stops_reach_the_engine():
    request = engine_request(max_tokens=9, stop=["a", "b"], thinking_budget=4)
    assert request.max_tokens == 9
    assert request.stop_strings == (StopString(text="a"), StopString(text="b"))
    assert request.reasoning_budget == 4
    assert engine_request().max_tokens == DEFAULTS.max_tokens


def test_server_defaults_of_thinking():
    quiet = ServerDefaults(thinking=False, effort="low", preserve_thinking=False)
    assert parse_request(body(), defaults=quiet).options == PromptOptions(
        thinking=False, preserve_thinking=False
    )
    loud = parse_request(body(reasoning_effort="max"), defaults=quiet).options
    assert (loud.thinking, loud.effort) == (True, "max")
    default = parse_request(body(enable_thinking=True), defaults=quiet).options
    assert (default.thinking, default.effort) == (True, "low")


def test_advisory_fields_are_reported_and_change_nothing():
    request = parse(**ADVISORY)
    assert set(request.accepted_without_effect) == set(ADVISORY)
    plain = parse()
    assert request.to_engine_request(PROMPT, "r", PRESET) == plain.to_engine_request(
        PROMPT, "r", PRESET
    )


def test_the_advisory_list_is_closed():
    accepted = {name for name, f in FIELDS.items() if f.verdict is Verdict.ACCEPTED}
    assert accepted == set(ADVISORY)


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_field_is_refused_by_name(fields, param, code):
    with pytest.raises(UnsupportedError) as caught:
        engine_request(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(("fields", "param", "code"), MALFORMED)
def test_malformed_field_names_its_path(fields, param, code):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


@pytest.mark.parametrize("value", [None, 3, "text", [], [1]])
def test_body_must_be_an_object(value):
    with pytest.raises(RequestError) as caught:
        parse_request(value, defaults=DEFAULTS)
    assert caught.value.code == "invalid_type"


def test_null_counts_as_absent():
    assert parse(**dict.fromkeys(set(FIELDS) - {"model", "messages"})) == parse()


def test_every_field_of_the_official_sdk_has_a_verdict():
    assert set(typing.get_type_hints(CompletionCreateParamsStreaming)) <= set(FIELDS)


def test_every_field_is_exercised_here():
    tables = [{n for n, *_ in SAMPLING}, {n for n, *_ in KEPT}, set(ADVISORY)]
    tables += [set(fields) for fields, *_ in REFUSED + MALFORMED]
    assert set(FIELDS) == set().union(*tables) - {"repetition_penalty"}  # unknown on purpose


def test_docs_list_the_fields_with_their_verdicts():
    listed = documented("Chat Completions: request")
    assert listed == {name: (f.verdict.value, f.note) for name, f in FIELDS.items()}


def test_tool_choice_none_hides_the_tools():
    request = parse(tools=[WEATHER], tool_choice="none")
    assert request.active_tools == ()
    assert not request.to_engine_request(PROMPT, "r", PRESET).keep_special_tokens
    shown = parse(tools=[WEATHER], tool_choice="auto")
    assert [t.name for t in shown.active_tools] == ["get_weather"]
    assert shown.to_engine_request(PROMPT, "r", PRESET).keep_special_tokens


def test_special_tokens_stay_visible_with_tool_history():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert engine_request(messages=messages).keep_special_tokens


def test_error_body_has_the_four_members():
    error = UnsupportedError("n: one choice", code="n_not_supported", param="n")
    assert error_body(error) == {
        "error": {
            "message": "n: one choice",
            "type": "invalid_request_error",
            "param": "n",
            "code": "n_not_supported",
        }
    }
    overloaded = error_body(OverloadedError("full"))["error"]
    assert (overloaded["type"], overloaded["code"]) == ("rate_limit_error", "server_overloaded")
