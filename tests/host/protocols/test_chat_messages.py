"""Messages and tools of Chat Completions become conversation values, or errors with a path."""

import pytest

from ginfer.errors import RequestError
from ginfer.prompt import Message
from tests.host.protocols.bodies import CALL, WEATHER, parse, with_messages

USER = {"role": "user", "content": "Hi"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def call(call_id, name="get_weather", arguments="{}"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_roles_stay_where_they_are():
    order = ["system", "user", "developer", "assistant", "system", "user"]
    request = with_messages(*({"role": r, "content": r.upper()} for r in order))
    assert [(m.role, m.text) for m in request.messages] == [(r, r.upper()) for r in order]


def test_adjacent_text_parts_are_joined_with_a_newline():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = with_messages({"role": "user", "content": parts}).messages
    assert message.text == "a\nb"


def test_assistant_turn_with_everything():
    turn = {**ASKED, "content": "Let me see.", "reasoning_content": "hm"}
    _, message, result = with_messages(USER, turn, RESULT).messages
    assert (message.text, message.reasoning) == ("Let me see.", "hm")
    (made,) = message.tool_calls
    assert (made.call_id, made.name, made.arguments) == ("call_1", "get_weather", {"city": "Oslo"})
    assert (result.role, result.text, result.tool_call_id) == ("tool", "rain", "call_1")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_accepted_back_under_both_names(name):
    _, message = with_messages(USER, {"role": "assistant", "content": "x", name: "hm"}).messages
    assert message.reasoning == "hm"


def test_message_of_the_sdk_with_its_null_members():
    nulls = dict.fromkeys(
        ("refusal", "audio", "function_call", "annotations", "parsed", "tool_calls")
    )
    _, message = with_messages(USER, {"role": "assistant", "content": "x", **nulls}).messages
    assert message == Message(role="assistant", content=message.content)


def test_argument_order_and_types_are_kept():
    arguments = '{"z": 1, "a": [true, null], "m": {"k": 1.5}}'
    _, message = with_messages(
        USER, {"role": "assistant", "tool_calls": [call("c", "f", arguments)]}
    ).messages
    assert list(message.tool_calls[0].arguments.items()) == [
        ("z", 1),
        ("a", [True, None]),
        ("m", {"k": 1.5}),
    ]


def test_empty_arguments_mean_none():
    _, message = with_messages(
        USER, {"role": "assistant", "tool_calls": [call("c", "f", "")]}
    ).messages
    assert message.tool_calls[0].arguments == {}


def test_results_are_put_into_the_order_of_the_calls():
    turn = {"role": "assistant", "tool_calls": [call("c1"), call("c2"), call("c3")]}
    results = [{"role": "tool", "tool_call_id": c, "content": c} for c in ("c3", "c1", "c2")]
    request = with_messages(USER, turn, *results, USER)
    assert [m.text for m in request.messages[2:]] == ["c1", "c2", "c3", "Hi"]


def test_result_may_name_its_function():
    with_messages(USER, ASKED, {**RESULT, "name": "get_weather"})


def test_tools_keep_the_object_of_the_client():
    (tool,) = parse(tools=[WEATHER]).tools
    assert tool.wire is not None
    assert list(tool.wire["function"]) == ["name", "description", "parameters"]
    assert tool.parameters == WEATHER["function"]["parameters"]
    (bare,) = parse(tools=[{"type": "function", "function": {"name": "f", "strict": False}}]).tools
    assert bare.parameters == {"type": "object", "properties": {}}


PARSED = call("c") | {"function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}
DEEP = '{"a":' * 100 + "1" + "}" * 100

WRONG = [
    ([{"content": "x"}], "messages.0.role", "missing_required_parameter"),
    (["hi"], "messages.0", "invalid_type"),
    ([{"role": "robot", "content": "x"}], "messages.0.role", "invalid_value"),
    ([{"role": "function", "name": "f", "content": "x"}], "messages.0.role", "unsupported_role"),
    ([{"role": "user"}], "messages.0.content", "missing_required_parameter"),
    ([{"role": "user", "content": None}], "messages.0.content", "missing_required_parameter"),
    ([{"role": "user", "content": []}], "messages.0.content", "invalid_type"),
    ([{"role": "user", "content": 5}], "messages.0.content", "invalid_type"),
    ([{"role": "user", "content": "x", "extra": 1}], "messages.0.extra", "unknown_parameter"),
    ([{"role": "user", "content": "x", "name": "Bo"}], "messages.0.name", "name_not_supported"),
    (
        [{"role": "user", "content": "x", "tool_calls": []}],
        "messages.0.tool_calls",
        "unknown_parameter",
    ),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages.0.content.0.text",
        "missing_required_parameter",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        "messages.0.content.0.text",
        "invalid_type",
    ),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "invalid_type"),
    (
        [{"role": "user", "content": [{"type": "poem", "text": ""}]}],
        "messages.0.content.0.type",
        "invalid_value",
    ),
    *(
        (
            [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, part]}],
            "messages.1.content.1.type",
            code,
        )
        for part, code in (
            ({"type": "image_url", "image_url": {"url": "data:,"}}, "modality_not_supported"),
            ({"type": "video_url", "video_url": "http://x"}, "modality_not_supported"),
            ({"type": "input_audio", "input_audio": {}}, "modality_not_supported"),
            ({"type": "file", "file": {}}, "file_inputs_not_supported"),
        )
    ),
    ([USER, {"role": "assistant"}], "messages.1.content", "missing_required_parameter"),
    (
        [USER, {"role": "assistant", "content": "x", "refusal": "no"}],
        "messages.1.refusal",
        "unsupported_parameter",
    ),
    (
        [USER, {"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}],
        "messages.1.reasoning",
        "invalid_value",
    ),
    (
        [
            USER,
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
        ],
        "messages.1.tool_calls.0.id",
        "missing_required_parameter",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [call("c", "f", "[1]")]}],
        "messages.1.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [call("c", "f", {"a": 1})]}],
        "messages.1.tool_calls.0.function.arguments",
        "invalid_type",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [call("c", "f", "{")]}],
        "messages.1.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [call("c", "f", DEEP)]}],
        "messages.1.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [call("c"), call("c")]}],
        "messages.1.tool_calls",
        "invalid_value",
    ),
    (
        [USER, ASKED, {"role": "tool", "content": "x"}],
        "messages.2.tool_call_id",
        "missing_required_parameter",
    ),
    (
        [USER, {"role": "assistant", "tool_calls": [PARSED]}],
        "messages.1.tool_calls.0.function.parsed_arguments",
        "unsupported_parameter",
    ),
    ([USER, RESULT], "messages.1.tool_call_id", "invalid_message_order"),
    (
        [USER, ASKED, {**RESULT, "tool_call_id": "other"}],
        "messages.2.tool_call_id",
        "invalid_message_order",
    ),
    ([USER, ASKED, RESULT, RESULT], "messages.3.tool_call_id", "invalid_message_order"),
    ([USER, ASKED, USER, RESULT], "messages.3.tool_call_id", "invalid_message_order"),
    ([USER, ASKED, {**RESULT, "name": "other"}], "messages.2.name", "invalid_value"),
]


@pytest.mark.parametrize(("messages", "param", "code"), WRONG)
def test_wrong_message_names_its_path(messages, param, code):
    with pytest.raises(RequestError) as caught:
        with_messages(*messages)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)


def test_deep_schema_is_refused():
    schema = {}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError, match="deeper"):
        parse(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
