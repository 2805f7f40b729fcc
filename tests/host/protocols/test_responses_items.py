"""Input items of Responses: what clients send, in one form, and the turns that it makes."""

import pytest
from openai.types.responses import ResponseItemList

from appliance.protocols.responses.items import check_input
from appliance.protocols.responses.pages import page
from ginfer.engine.request import FinishReason
from ginfer.errors import RequestError
from ginfer.prompt import Channel
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import delta, finished, nested
from tests.host.protocols.response_bodies import (
    CALL,
    PATCH,
    RESULT,
    WEATHER,
    memory,
    parse,
    whole,
)

USER = {"role": "user", "content": "Hi"}
SAID = {"type": "message", "role": "assistant", "content": "Hello"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
CUSTOM = {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "diff"}
DONE = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"}


def messages(*items, **fields):
    return parse(input=list(items), **fields).messages


def outline(found):
    """Role, text, reasoning and names of calls."""
    return [(m.role, m.text, m.reasoning, [c.name for c in m.tool_calls]) for m in found]


def test_a_string_is_a_user_message():
    (message,) = parse(input="Hi").messages
    assert (message.role, message.text) == ("user", "Hi")


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_roles_and_parts(role):
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]
    found = messages(USER, {"role": role, "content": parts})
    assert (found[1].role, found[1].text) == (role, "a\nb")


def test_one_turn_of_the_assistant():
    found = messages(USER, THOUGHT, SAID, CALL, CUSTOM, DONE, RESULT, USER)
    assert outline(found) == [
        ("user", "Hi", None, []),
        ("assistant", "Hello", "hm", ["get_weather", "apply_patch"]),
        ("tool", "rain", None, []),
        ("tool", "ok", None, []),
        ("user", "Hi", None, []),
    ]
    assert [call.arguments for call in found[1].tool_calls] == [{"city": "Oslo"}, {"input": "diff"}]


def test_turns_end_where_they_are_answered():
    found = messages(USER, THOUGHT, CALL, RESULT, THOUGHT, CUSTOM, DONE, SAID, SAID)
    assert [m.role for m in found] == ["user", *["assistant", "tool"] * 2, *["assistant"] * 2]


def test_text_after_a_call_stays_in_its_turn():
    found = messages(USER, SAID, CALL, {**SAID, "content": "\nwait"}, RESULT)
    assert outline(found)[1:] == [
        ("assistant", "Hello\nwait", None, ["get_weather"]),
        ("tool", "rain", None, []),
    ]


def test_a_turn_may_be_reasoning_alone():
    found = messages(USER, THOUGHT, USER)
    assert outline(found)[1] == ("assistant", "", "hm", [])


def test_reasoning_without_its_text_says_nothing():
    found = messages(USER, {"type": "reasoning", "id": "rs_1", "summary": []}, USER)
    assert [m.role for m in found] == ["user", "user"]


def test_a_namespaced_call_is_shown_under_its_full_name():
    found = messages(USER, {**CALL, "namespace": "mcp__fs"}, RESULT)
    assert found[1].tool_calls[0].name == "mcp__fs.get_weather"


def test_results_of_parts():
    result = {
        **RESULT,
        "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
    }
    assert messages(USER, CALL, result)[2].text == "a\nb"


def test_sealed_reasoning_is_opened():
    kept = memory()
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": kept.seal("hm")}
    found = parse(kept, input=[USER, sealed, SAID]).messages
    assert found[1].reasoning == "hm"
    both = {**sealed, "content": THOUGHT["content"]}
    assert parse(kept, input=[USER, both, SAID]).messages[1].reasoning == "hm"


def test_references_are_resolved():
    kept = memory()
    first = whole([delta("Hello")], demo_frontend(), remembered=kept)
    (said,) = first["output"]
    for reference in ({"type": "item_reference", "id": said["id"]}, {"id": said["id"]}):
        found = parse(kept, input=[USER, reference, USER]).messages
        assert [m.text for m in found] == ["Hi", "Hello", "Hi"]


INVALID = [
    ([5], "input.0", "invalid_type"),
    ([{"type": "telepathy"}], "input.0.type", "item_type_not_supported"),
    ([{"type": "web_search_call", "id": "ws_1"}], "input.0.type", "item_type_not_supported"),
    ([{"type": "compaction_trigger"}], "input.0.type", "compaction_not_supported"),
    ([{"type": "message", "content": "x"}], "input.0.role", "missing_required_parameter"),
    ([{"role": "tool", "content": "x"}], "input.0.role", "unsupported_role"),
    ([{"role": "user"}], "input.0.content", "missing_required_parameter"),
    ([{**USER, "name": "bob"}], "input.0.name", "unknown_parameter"),
    ([{**SAID, "phase": "commentary"}], "input.0.phase", "phase_not_supported"),
    ([{**USER, "status": "odd"}], "input.0.status", "invalid_value"),
    ([{**USER, "id": ""}], "input.0.id", "invalid_value"),
    ([{**USER, "id": "a"}, {**SAID, "id": "a"}], "input.1.id", "invalid_value"),
    ([{"id": "msg_unknown"}], "input.0.id", "item_not_found"),
    ([CALL, RESULT, RESULT], "input.2.call_id", "invalid_message_order"),
    ([RESULT], "input.0.call_id", "invalid_message_order"),
    ([CALL, USER, RESULT], "input.2.call_id", "invalid_message_order"),
    ([CALL, CALL], "input.1.call_id", "invalid_value"),
    ([{**CALL, "arguments": "{"}], "input.0.arguments", "invalid_value"),
    ([{**CALL, "arguments": "[1]"}], "input.0.arguments", "invalid_value"),
    ([{**CALL, "call_id": ""}], "input.0.call_id", "invalid_value"),
    ([{**CALL, "name": "a b"}], "input.0.name", "invalid_value"),
    ([{**CUSTOM, "input": {}}], "input.0.input", "invalid_type"),
    ([{**RESULT, "output": 5}], "input.0.output", "invalid_type"),
    (
        [{**THOUGHT, "encrypted_content": "gAAAAABo"}],
        "input.0.encrypted_content",
        "invalid_encrypted_content",
    ),
    (
        [{**THOUGHT, "content": [{"type": "text"}]}],
        "input.0.content.0.text",
        "missing_required_parameter",
    ),
    ([{**THOUGHT, "content": "hm"}], "input.0.content", "invalid_type"),
]
PARTS = [
    ({"type": "input_image", "image_url": "x"}, "type", "modality_not_supported"),
    ({"type": "input_file", "file_id": "x"}, "type", "file_inputs_not_supported"),
    ({"type": "input_audio"}, "type", "audio_inputs_not_supported"),
    ({"type": "input_video"}, "type", "modality_not_supported"),
    ({"type": "output_text", "text": "x"}, "type", "invalid_value"),
    ({"type": "refusal", "refusal": "x"}, "type", "invalid_value"),
    ({"type": "input_text"}, "text", "missing_required_parameter"),
    ({"type": "input_text", "text": "x", "annotations": []}, "annotations", "unknown_parameter"),
    ({"type": "input_text", "text": nested(9)}, "text", "invalid_type"),
]


@pytest.mark.parametrize(("items", "param", "code"), INVALID)
def test_invalid_items(items, param, code):
    with pytest.raises(RequestError) as caught:
        parse(input=items)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(("part", "member", "code"), PARTS)
def test_invalid_parts(part, member, code):
    with pytest.raises(RequestError) as caught:
        parse(input=[{"role": "user", "content": [part]}])
    assert (caught.value.param, caught.value.code) == (f"input.0.content.0.{member}", code)


def test_citations_are_refused_and_empty_lists_of_them_accepted():
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    assert messages(USER, {**SAID, "content": [part]})[1].text == "x"
    part["annotations"] = [{"type": "url_citation"}]
    with pytest.raises(RequestError) as caught:
        messages(USER, {**SAID, "content": [part]})
    assert caught.value.param == "input.1.content.0.annotations"


def test_contradicting_reasoning_is_refused():
    kept = memory()
    item = {**THOUGHT, "encrypted_content": kept.seal("other")}
    with pytest.raises(RequestError) as caught:
        parse(kept, input=[USER, item, SAID])
    assert caught.value.param == "input.1.content"


def test_the_output_of_a_response_is_accepted_back():
    """A client without a stored response sends everything again, every member of it."""
    kept = memory()
    text = (
        "Look.<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    first = whole(
        [delta("hm", Channel.REASONING), delta(text)],
        demo_frontend(),
        remembered=kept,
        tools=[WEATHER, PATCH],
        include=["reasoning.encrypted_content"],
    )
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    sent = parse(kept, input=[USER, *first["output"], result], store=False)
    chained = parse(kept, input=[result], previous_response_id=first["id"])
    assert outline(sent.messages) == outline(chained.messages)
    assert sent.messages[1].reasoning == "hm"
    assert sent.messages[1].tool_calls == chained.messages[1].tool_calls


def test_a_call_cut_by_a_limit_is_no_part_of_the_conversation():
    kept = memory()
    text = "Look.<tool_call>\n<function=get_weather>\n<parameter=city>\nOs"
    first = whole(
        [delta(text)],
        demo_frontend(),
        end=finished(FinishReason.OUTPUT_LIMIT),
        remembered=kept,
        tools=[WEATHER],
    )
    assert first["output"][-1]["status"] == "incomplete"
    found = parse(kept, input="Go on.", previous_response_id=first["id"]).messages
    assert outline(found)[1] == ("assistant", "Look.", None, [])


def test_listed_items_are_what_the_sdk_expects():
    items, _ = check_input([USER, THOUGHT, SAID, CALL, RESULT, CUSTOM, DONE], "input")
    listed = page(items, {"order": "asc"})
    read = ResponseItemList.model_validate(listed)
    assert [item.type for item in read.data] == [item["type"] for item in items]
    assert all(item.id for item in read.data)


def test_pages():
    items = [{"id": str(i)} for i in range(5)]
    first = page(items, {"limit": "2"})
    assert [i["id"] for i in first["data"]] == ["4", "3"]
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("4", "3", True)
    rest = page(items, {"after": "3", "limit": "3"})
    assert [i["id"] for i in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    assert [i["id"] for i in page(items, {"order": "asc"})["data"]] == list("01234")
    end = page(items, {"after": "0"})
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "nobody"}, "after"),
    ],
)
def test_invalid_pages(query, param):
    with pytest.raises(RequestError) as caught:
        page([{"id": "a"}], query)
    assert (caught.value.param, caught.value.code) == (param, "invalid_pagination")
