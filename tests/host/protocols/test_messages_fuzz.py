"""Whatever JSON arrives at Messages, parsing returns a request or raises RequestError."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.protocols.anthropic_messages import MessagesRequest, parse_request
from appliance.protocols.checks import decoded
from appliance.protocols.messages_fields import FIELDS
from ginfer.errors import RequestError
from ginfer.frontend.base import SamplingDefaults
from ginfer.prompt import PreparedPrompt
from tests.frontends import demo_frontend
from tests.host.protocols.message_bodies import (
    CACHE,
    DEFAULTS,
    SEARCH,
    SIGNER,
    WEATHER,
    body,
    result,
    text,
    use,
)
from tests.host.protocols.test_chat_fuzz import places, replaced, wire_values

PRESET = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20)
WORDS = [
    *("role", "content", "type", "text", "tool_use", "tool_result", "thinking", "signature", "id"),
    *("user", "assistant", "system", "auto", "none", "any", "tool", "input", "tool_use_id", "name"),
    *("input_schema", "custom", "edits", "keep", "effort", "display", "omitted", "toolu_1"),
    *("ephemeral", "is_error", "", "clear_thinking_20251015", SIGNER.seal("x"), SIGNER.sign("x")),
]
wire = wire_values(WORDS)
VALID = body(
    max_tokens=9,
    system=[text("s", cache_control=CACHE)],
    tools=[WEATHER | {"strict": True}, SEARCH],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    messages=[
        {"role": "user", "content": [text("a")]},
        {"role": "system", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": SIGNER.sign("hm")},
                {"type": "redacted_thinking", "data": "x"},
                text("c"),
                use("toolu_1"),
                use("toolu_2"),
            ],
        },
        {
            "role": "user",
            "content": [result("toolu_2"), result("toolu_1", [text("d")], is_error=True)],
        },
    ],
    thinking={"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    output_config={
        "effort": "low",
        "format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}},
    },
    context_management={
        "edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
        ]
    },
    stop_sequences=["x"],
    metadata={"user_id": "u"},
)


def parse_or_refuse(value):
    """Parse what the server would decode; the outcome is a request, or a RequestError (None)."""
    try:
        request = parse_request(decoded(orjson.dumps(value)), defaults=DEFAULTS, signer=SIGNER)
        request.to_engine_request(PreparedPrompt(token_ids=None), "r", PRESET)
    except RequestError as caught:
        error = caught
    else:
        assert isinstance(request, MessagesRequest)
        return request
    assert error.status == 400
    assert error.message
    assert error.param
    return None


def test_the_valid_request_is_valid():
    request = parse_or_refuse(VALID)
    assert request is not None
    assert demo_frontend().prepare(request.messages, request.tools, request.options).num_tokens > 50


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(list(places(VALID))), wire)
def test_any_value_at_any_place_is_taken_or_refused(place, value):
    parse_or_refuse(replaced(VALID, place, value))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FIELDS)), wire)
def test_any_value_of_any_field_is_taken_or_refused(name, value):
    parse_or_refuse(body(**{name: value}))


@pytest.mark.long
@settings(max_examples=10000, deadline=None, derandomize=True)
@given(st.sampled_from(list(places(VALID))), wire, st.sampled_from(sorted(FIELDS)), wire)
def test_two_changes_are_taken_or_refused(place, value, name, other):
    changed = replaced(VALID, place, value)
    parse_or_refuse({**changed, name: other} if isinstance(changed, dict) else changed)
