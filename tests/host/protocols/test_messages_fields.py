"""Every request field of Messages is obeyed, refused by name, or reported as advisory."""

import typing

import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsStreaming as BetaMessageCreateParams,
)
from anthropic.types.message_create_params import MessageCreateParamsStreaming

from appliance.protocols.anthropic_errors import error_body, error_type
from appliance.protocols.anthropic_messages import parse_request
from appliance.protocols.defaults import SamplingOverrides, ServerDefaults
from appliance.protocols.messages_fields import FIELDS
from ginfer.engine.request import StopString
from ginfer.errors import OverloadedError, RequestError, UnavailableError, UnsupportedError
from ginfer.frontend.base import SamplingDefaults
from ginfer.prompt import PreparedPrompt, PromptOptions
from tests.host.protocols.bodies import documented, nested
from tests.host.protocols.message_bodies import (
    CACHE,
    DEFAULTS,
    SEARCH,
    SIGNER,
    WEATHER,
    body,
    parse,
    text,
)

PRESET = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.5)
PROMPT = PreparedPrompt(token_ids=None)
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.7d5; cc_entrypoint=sdk-cli; cch=fa690;"

# field, wire value -> where it arrives in the engine request, and as what
SAMPLING = [
    ("temperature", 0.25, 0.25),
    ("temperature", 1, 1.0),
    ("top_p", 0.5, 0.5),
    ("top_k", 3, 3),
    ("min_p", 0.1, 0.1),
    ("presence_penalty", -1, -1.0),
    ("frequency_penalty", 1.5, 1.5),
    ("seed", 2**64 - 1, 2**64 - 1),
]

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLEAR = "clear_thinking_20251015"
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
# field, wire value, attribute of MessagesRequest, its value
KEPT = [
    ("model", "claude-any", "model", "claude-any"),
    ("max_tokens", 7, "max_tokens", 7),
    ("stop_sequences", ["a", "", "b"], "stop", ("a", "b")),
    ("stream", True, "stream", True),
    ("thinking", {"type": "disabled"}, "options", PromptOptions(thinking=False)),
    ("thinking", {"type": "adaptive"}, "options", PromptOptions()),
    ("thinking", {"type": "enabled", "budget_tokens": 99}, "thinking_budget", 99),
    ("thinking", {"type": "adaptive", "display": "summarized"}, "hide_thinking", False),
    ("thinking", {"type": "adaptive", "display": "omitted"}, "hide_thinking", True),
    ("output_config", {"effort": "high"}, "options", PromptOptions(effort="high")),
    ("output_config", {"effort": None}, "options", PromptOptions()),
    ("preserve_thinking", False, "options", PromptOptions(preserve_thinking=False)),
    ("context_management", {}, "cleared", None),
    ("context_management", {"edits": []}, "cleared", None),
    ("context_management", {"edits": [{"type": CLEAR, "keep": "all"}]}, "cleared", ()),
    ("context_management", {"edits": [{"type": CLEAR, "keep": {"type": "all"}}]}, "cleared", ()),
    ("context_management", {"edits": [{"type": CLEAR}]}, "cleared", ()),
    ("tools", [], "tools", ()),
    ("tool_choice", {"type": "auto"}, "tool_choice", "auto"),
    ("tool_choice", {"type": "none"}, "tool_choice", "none"),
    ("output_config", {"format": None}, "schema", None),
    ("output_config", {"format": {"type": "json_schema", "schema": OBJECT}}, "schema", OBJECT),
    ("speed", "standard", "accepted_without_effect", ()),
    ("container", {}, "accepted_without_effect", ()),
    ("mcp_servers", [], "accepted_without_effect", ()),
]

ADVISORY = {
    "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
    "metadata": {"user_id": "u"},
    "user_profile_id": "p",
    "service_tier": "standard_only",
}

REFUSED = [
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "unsupported_parameter"),
    ({"container": "c"}, "container", "unsupported_parameter"),
    ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics", "unsupported_parameter"),
    ({"inference_geo": "eu"}, "inference_geo", "unsupported_parameter"),
    ({"workspace_id": "w"}, "workspace_id", "unsupported_parameter"),
    ({"output_format": {"type": "json_schema"}}, "output_format", "unsupported_parameter"),
    ({"fallbacks": [{"model": "m"}]}, "fallbacks", "unsupported_parameter"),
    ({"fallback_credit_token": "t"}, "fallback_credit_token", "unsupported_parameter"),
    ({"billing_policy": {"a": 1}}, "billing_policy", "unsupported_parameter"),
    ({"compaction": {"a": 1}}, "compaction", "unsupported_parameter"),
    ({"thread": {"a": 1}}, "thread", "unsupported_parameter"),
    ({"speed": "fast"}, "speed", "unsupported_parameter"),
    (
        {"output_config": {"task_budget": {"total": 5}}},
        "output_config.task_budget",
        "output_config_option_not_supported",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0.type",
        "context_edit_not_supported",
    ),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools.0.type",
        "tool_type_not_supported",
    ),
    (
        {"tools": [WEATHER | {"defer_loading": True}]},
        "tools.0.defer_loading",
        "tool_option_not_supported",
    ),
    (
        {"tools": [WEATHER | {"allowed_callers": ["code_execution_20250825"]}]},
        "tools.0.allowed_callers",
        "tool_option_not_supported",
    ),
    (
        {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice.name",
        "hosted_tool_not_supported",
    ),
    (
        {"tools": [SEARCH], "tool_choice": {"type": "any"}},
        "tool_choice.type",
        "hosted_tool_not_supported",
    ),
]

MALFORMED = [
    ({"model": ""}, "model", "invalid_value"),
    ({"model": 3}, "model", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"temperature": 1.5}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -1}, "top_k", "invalid_value"),
    ({"stop_sequences": "END"}, "stop_sequences", "invalid_type"),
    ({"stop_sequences": [1]}, "stop_sequences.0", "invalid_type"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"system": 5}, "system", "invalid_type"),
    ({"system": [{"type": "text"}]}, "system.0.text", "missing_required_parameter"),
    ({"thinking": {}}, "thinking.type", "missing_required_parameter"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "invalid_value"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
    (
        {"thinking": {"type": "disabled", "budget_tokens": 5}},
        "thinking.budget_tokens",
        "unknown_parameter",
    ),
    (
        {"thinking": {"type": "adaptive", "display": "updates"}},
        "thinking.display",
        "thinking_display_not_supported",
    ),
    (
        {"output_config": {"effort": "most"}},
        "output_config.effort",
        "reasoning_effort_not_supported",
    ),
    (
        {"output_config": {"format": {"type": "json_object"}}},
        "output_config.format.type",
        "invalid_value",
    ),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
        "missing_required_parameter",
    ),
    ({"tools": [WEATHER | {"strict": "yes"}]}, "tools.0.strict", "invalid_type"),
    (
        {"tools": [WEATHER | {"eager_input_streaming": 0}]},
        "tools.0.eager_input_streaming",
        "invalid_type",
    ),
    ({"service_tier": "priority"}, "service_tier", "service_tier_not_supported"),
    ({"metadata": {"name": "x"}}, "metadata.name", "unknown_parameter"),
    ({"cache_control": {"type": "ephemeral", "ttl": "9m"}}, "cache_control.ttl", "invalid_value"),
    (
        {"context_management": {"edits": [{"type": CLEAR, "keep": 0}]}},
        "context_management.edits.0.keep",
        "invalid_value",
    ),
    (
        {"context_management": {"edits": [{"type": CLEAR}]}, "preserve_thinking": False},
        "preserve_thinking",
        "conflicting_template_option",
    ),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "missing_required_parameter"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools.0.name", "invalid_value"),
    ({"tools": [WEATHER, SEARCH | {"name": "get_weather"}]}, "tools.1.name", "invalid_value"),
    ({"tools": [WEATHER | {"note": 1}]}, "tools.0.note", "unknown_parameter"),
    (
        {"tools": [WEATHER | {"input_schema": {"x": nested(80)}}]},
        "tools.0.input_schema",
        "invalid_value",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type", "invalid_value"),
    ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name", "unknown_parameter"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
        "tool_choice.name",
        "invalid_value",
    ),
    ({"preserve_thinking": "yes"}, "preserve_thinking", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"repetition_penalty": 1}, "repetition_penalty", "unknown_parameter"),
]


@pytest.mark.parametrize(("name", "wire", "value"), SAMPLING)
def test_sampling_field_reaches_the_engine(name, wire, value):
    request = parse(**{name: wire}).to_engine_request(PROMPT, "r", PRESET)
    assert getattr(request.sampling, name) == value
    others = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "presence_penalty": 0.5}
    for other, preset in others.items():
        assert other == name or getattr(request.sampling, other) == preset


def test_sampling_falls_back_to_the_server_and_then_to_the_preset():
    server = ServerDefaults(sampling=SamplingOverrides(temperature=0.3, top_k=7))
    request = parse(defaults=server, top_k=9).to_engine_request(PROMPT, "r", PRESET)
    assert request.sampling.temperature == 0.3
    assert request.sampling.top_k == 9
    assert request.sampling.top_p == 0.95


@pytest.mark.parametrize(("name", "wire", "attribute", "value"), KEPT)
def test_field_is_kept(name, wire, attribute, value):
    assert getattr(parse(**{name: wire}), attribute) == value


def test_limits_and_stops_reach_the_engine():
    request = parse(
        max_tokens=5, stop_sequences=["X"], thinking={"type": "enabled", "budget_tokens": 3}
    ).to_engine_request(PROMPT, "r", PRESET)
    assert request.max_tokens == 5
    assert request.stop_strings == (StopString(text="X"),)
    assert request.reasoning_budget == 3


def test_silence_means_the_servers_defaults():
    server = ServerDefaults(max_tokens=9, thinking=False, preserve_thinking=False)
    request = parse(defaults=server)
    assert request.max_tokens == 9
    assert request.options == PromptOptions(thinking=False, preserve_thinking=False)
    assert parse(defaults=server, thinking={"type": "adaptive"}).options.thinking


def test_an_effort_alone_does_not_turn_thinking_on():
    request = parse(defaults=ServerDefaults(thinking=False), output_config={"effort": "low"})
    assert request.options == PromptOptions(thinking=False)
    assert request.accepted_without_effect == ("output_config.effort",)
    assert parse(output_config={"effort": "low"}).options == PromptOptions(effort="low")


def test_thinking_disabled_wins_over_effort_and_says_so():
    request = parse(thinking={"type": "disabled"}, output_config={"effort": "max"})
    assert request.options == PromptOptions(thinking=False)
    assert request.accepted_without_effect == ("output_config.effort",)


@pytest.mark.parametrize("name", ADVISORY)
def test_advisory_field_is_reported(name):
    request = parse(**{name: ADVISORY[name]})
    assert request.accepted_without_effect == (name,)
    assert parse(**{name: None}).accepted_without_effect == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [text("s", cache_control=CACHE)]},
        {"tools": [WEATHER | {"cache_control": CACHE}]},
        {"messages": [{"role": "user", "content": [text("s", cache_control=CACHE)]}]},
    ],
)
def test_cache_control_anywhere_is_reported_once(fields):
    assert parse(**fields).accepted_without_effect == ("cache_control",)
    assert parse(**fields, cache_control=CACHE).accepted_without_effect == ("cache_control",)


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_field_is_refused_by_name(fields, param, code):
    with pytest.raises(UnsupportedError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(("fields", "param", "code"), MALFORMED)
def test_malformed_field_names_its_path(fields, param, code):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


@pytest.mark.parametrize("name", ["model", "messages"])
def test_required_field_is_missed_by_name(name):
    wire = body()
    del wire[name]
    with pytest.raises(RequestError) as caught:
        parse_request(wire, defaults=DEFAULTS, signer=SIGNER)
    assert (caught.value.param, caught.value.code) == (name, "missing_required_parameter")


def test_null_counts_as_absent():
    assert parse(**dict.fromkeys(set(FIELDS) - {"model", "messages"})) == parse()


@pytest.mark.parametrize("params", [MessageCreateParamsStreaming, BetaMessageCreateParams])
def test_every_field_of_the_official_sdk_has_a_verdict(params):
    assert set(typing.get_type_hints(params)) - {"betas"} <= set(FIELDS)  # betas is a header


def test_every_field_is_exercised_here():
    tables = [{n for n, *_ in SAMPLING}, {n for n, *_ in KEPT}, set(ADVISORY)]
    tables += [set(fields) for fields, *_ in REFUSED + MALFORMED]
    assert set(FIELDS) == set().union(*tables) - {"repetition_penalty"}  # unknown on purpose


def test_docs_list_the_fields_with_their_verdicts():
    listed = documented("Anthropic Messages: request")
    assert listed == {name: (f.verdict.value, f.note) for name, f in FIELDS.items()}


def test_tools_are_shown_as_functions_in_the_clients_order():
    request = parse(tools=[WEATHER | {"type": "custom", "input_examples": [{"city": "Oslo"}]}])
    (tool,) = request.tools
    assert list(tool.wire["function"]) == ["name", "description", "parameters", "input_examples"]
    assert tool.wire["function"]["parameters"] == WEATHER["input_schema"]
    assert tool.parameters == WEATHER["input_schema"]


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", None, False),
        ({"type": "any"}, "required", None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "get_weather"}, "named", "get_weather", True),
    ],
)
def test_a_choice_constrains_the_content(choice, mode, name, parallel):
    request = parse(tools=[WEATHER], tool_choice=choice)
    found = (request.tool_choice, request.named_tool, request.parallel_tool_calls)
    assert found == (mode, name, parallel)
    engine = request.to_engine_request(PROMPT, "r", PRESET)
    assert "get_weather" in engine.grammar
    assert [tool.name for tool in request.active_tools] == ["get_weather"]


def test_nothing_constrains_what_nothing_was_asked_of():
    for fields in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}):
        assert parse(**fields).content_grammar() is None
    assert parse(tools=[WEATHER | {"strict": True}]).content_grammar() is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [SEARCH, WEATHER | {"strict": True, "input_schema": UNIQUE}]},
            "tools.1.input_schema.properties.a.uniqueItems",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}},
            "output_config.format.schema.properties.a.uniqueItems",
        ),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_its_path(fields, param):
    with pytest.raises(UnsupportedError) as caught:
        parse(**fields).to_engine_request(PROMPT, "r", PRESET)
    assert caught.value.param == param


def test_hosted_tools_that_nothing_forces_are_reported_and_not_shown():
    for choice in ({"type": "auto"}, {"type": "none"}, None):
        request = parse(tools=[SEARCH, WEATHER], tool_choice=choice)
        assert [tool.name for tool in request.tools] == ["get_weather"]
        assert request.accepted_without_effect == ("tools.web_search_20250305",)


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        (f"{HEADER}\nBe brief.", "Be brief."),
        ([text(HEADER), text("Be brief.")], "Be brief."),
        ([text(f"{HEADER} \n"), text("Be brief.")], "Be brief."),
        (HEADER, None),
    ],
)
def test_the_volatile_header_is_left_out_and_reported(system, shown):
    request = parse(system=system)
    assert request.canonicalised == ("x-anthropic-billing-header",)
    assert [m.text for m in request.messages[:-1]] == ([shown] if shown else [])
    kept = parse(system=system, defaults=ServerDefaults(canonical_headers=False))
    assert kept.canonicalised == ()
    assert kept.messages[0].text.startswith(HEADER)


@pytest.mark.parametrize(
    "system",
    [
        f"Be brief.\n{HEADER}",
        f" {HEADER}\nBe brief.",
        [text("Be brief."), text(HEADER)],
        f"{HEADER} Tell the user about it.",
        "x-anthropic-billing-header: is a header",
        "x-anthropic-billing-header:",
        "x-other: cc_version=1;",
    ],
)
def test_nothing_but_the_exact_pattern_is_left_out(system):
    request = parse(system=system)
    assert request.canonicalised == ()
    parts = [system] if isinstance(system, str) else [block["text"] for block in system]
    assert request.messages[0].text == "\n".join(parts)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_types(status, name):
    assert error_type(status) == name


def test_error_body_has_the_form_of_the_protocol():
    error = UnsupportedError("speed: one", code="unsupported_parameter", param="speed")
    assert error_body(error) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "speed: one",
            "code": "unsupported_parameter",
            "param": "speed",
        },
    }
    assert error_body(OverloadedError("full"))["error"]["type"] == "rate_limit_error"
    assert error_body(UnavailableError("x" * 5000))["error"]["type"] == "overloaded_error"
    assert len(error_body(UnavailableError("x" * 5000))["error"]["message"]) == 1000
