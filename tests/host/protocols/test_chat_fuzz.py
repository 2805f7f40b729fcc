"""Whatever JSON arrives, parsing returns a request or raises RequestError; nothing else."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.protocols.chat_fields import FIELDS
from appliance.protocols.checks import decoded
from appliance.protocols.openai_chat import ChatRequest, parse_request
from ginfer.errors import RequestError
from ginfer.frontend.base import SamplingDefaults
from ginfer.prompt import PreparedPrompt
from tests.host.protocols.bodies import CALL, DEFAULTS, WEATHER, body

PRESET = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20)
WORDS = [
    *("role", "content", "type", "text", "function", "name", "arguments", "id", "tool_calls"),
    *("user", "assistant", "tool", "system", "auto", "none", "index", "tool_call_id", "strict"),
    *("parameters", "reasoning", "include_usage", "enable_thinking", "{}", "call_1", "demo"),
]
NUMBERS = [0, 1, -1, 2, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, 1e300, -0.0]


def wire_values(words):
    """JSON values made of the protocol's own words, edge numbers and noise."""
    leaves = (
        st.none()
        | st.booleans()
        | st.sampled_from(NUMBERS)
        | st.sampled_from(words)
        | st.text(max_size=5)
    )
    names = st.sampled_from(words) | st.text(max_size=3)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
        max_leaves=12,
    )


values = wire_values(WORDS)
VALID = body(
    tools=[WEATHER],
    messages=[
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "x", "name": "get_weather"},
    ],
    stream=True,
    stream_options={"include_usage": True},
    chat_template_kwargs={"enable_thinking": True},
    logit_bias={"1": 2},
    response_format={"type": "text"},
    prediction={"type": "content", "content": "x"},
)


def parse_or_refuse(wire):
    """Parse what the server would decode; the outcome is a request, or a RequestError (None)."""
    try:
        request = parse_request(decoded(orjson.dumps(wire)), defaults=DEFAULTS)
    except RequestError as caught:
        error = caught
    else:
        assert isinstance(request, ChatRequest)
        request.to_engine_request(PreparedPrompt(token_ids=None), "r", PRESET)
        return request
    assert error.status == 400
    assert error.message
    assert error.param
    return None


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    children = enumerate(value) if isinstance(value, list) else ()
    for key, child in value.items() if isinstance(value, dict) else children:
        yield from places(child, (*path, key))


def replaced(value, path, new):
    """A copy of a JSON value with another value at one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_the_valid_request_is_valid():
    assert parse_or_refuse(VALID) is not None


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(list(places(VALID))), values)
def test_any_value_at_any_place_is_taken_or_refused(place, value):
    parse_or_refuse(replaced(VALID, place, value))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FIELDS)), values)
def test_any_value_of_any_field_is_taken_or_refused(name, value):
    parse_or_refuse(body(**{name: value}))


@pytest.mark.long
@settings(max_examples=20000, deadline=None, derandomize=True)
@given(st.sampled_from(list(places(VALID))), values, st.sampled_from(sorted(FIELDS)), values)
def test_two_changes_are_taken_or_refused(place, value, name, other):
    changed = replaced(VALID, place, value)
    parse_or_refuse({**changed, name: other} if isinstance(changed, dict) else changed)
