"""Whatever JSON arrives, a request of Responses is answered or refused by name; nothing else."""

import json

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.protocols.checks import decoded
from appliance.protocols.responses.fields import FIELDS
from appliance.protocols.responses.request import parse_request
from appliance.protocols.responses.response import ResponsesWriter
from ginfer.errors import RequestError
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import delta, finished
from tests.host.protocols.response_bodies import (
    CALL,
    DEFAULTS,
    HEAD,
    PATCH,
    RESULT,
    WEATHER,
    body,
    checked,
    memory,
)
from tests.host.protocols.test_chat_fuzz import places, replaced, wire_values

WORDS = [
    *("role", "content", "type", "text", "function", "name", "arguments", "id", "call_id"),
    *("user", "assistant", "developer", "auto", "none", "required", "summary", "strict", "tools"),
    *("parameters", "reasoning", "message", "input_text", "item_reference", "custom", "namespace"),
    *("function_call", "web_search", "allowed_tools", "mode", "{}", "call_1", "demo", "format"),
]
values = wire_values(WORDS)
VALID = body(
    instructions="i",
    input=[
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        CALL,
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "x"},
        RESULT,
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "y"},
    ],
    tools=[
        WEATHER,
        PATCH,
        {"type": "namespace", "name": "n", "description": "d", "tools": [WEATHER]},
        {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
    ],
    tool_choice={
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
    },
    reasoning={"effort": "low", "summary": "auto"},
    text={"format": {"type": "text"}},
    include=["reasoning.encrypted_content"],
    metadata={"k": "v"},
    stream=True,
)


def answer_or_refuse(wire):
    """Answer what the server would decode: a whole stream, or a RequestError (None)."""
    kept = memory()
    try:
        request = parse_request(decoded(json.dumps(wire)), defaults=DEFAULTS, memory=kept)
        demo_frontend().prepare(request.messages, request.active_tools, request.options)
    except RequestError as caught:
        error = caught
    else:
        return answered(request, kept)
    assert error.status in (400, 404)
    assert error.message
    return None


def answered(request, kept):
    """The events of an answer."""
    writer = ResponsesWriter(request, HEAD, demo_frontend(), kept)
    frames = writer.start() + writer.delta(delta("Hi")) + writer.flush()
    events = checked(frames + writer.finish(finished()))
    if request.store:
        assert orjson.loads(kept.previous(HEAD.response_id).body)["output"]
        kept.store.check_integrity()
    return events


def test_the_valid_request_is_valid():
    assert answer_or_refuse(VALID)[-1]["response"]["status"] == "completed"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(list(places(VALID))), values)
def test_any_value_at_any_place_is_answered_or_refused(place, value):
    answer_or_refuse(replaced(VALID, place, value))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FIELDS)), values)
def test_any_value_of_any_field_is_answered_or_refused(name, value):
    answer_or_refuse(body(**{name: value}))


def test_depth_is_bounded():
    deep = "x"
    for _ in range(70):
        deep = {"a": deep}
    for fields in (
        {"tools": [{"type": "web_search", "filters": deep}]},
        {"tools": [{**WEATHER, "parameters": deep}]},
        {"tool_choice": {"type": "web_search", "x": deep}},
        {"metadata": deep},
        {"text": deep},
        {"reasoning": deep},
        {"input": [deep]},
    ):
        assert answer_or_refuse(body(**fields)) is None
