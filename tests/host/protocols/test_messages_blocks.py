"""Turns and blocks of Messages become conversation values, or are refused by their path."""

import itertools

import pytest

from appliance.protocols.thinking_signature import ThinkingSigner
from ginfer.errors import RequestError, UnsupportedError
from ginfer.prompt import ToolCall
from tests.host.protocols.message_bodies import SIGNER, parse, result, text, use, with_messages

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}


def turns(request):
    """(role, text) of the messages."""
    return [(m.role, m.text) for m in request.messages]


def thought(value, signature=""):
    return {"type": "thinking", "thinking": value, "signature": signature}


def test_system_blocks_come_first_joined_by_newlines():
    assert turns(parse(system="S")) == [("system", "S"), ("user", "Hi")]
    assert turns(parse(system=[text("a"), text("b")])) == [("system", "a\nb"), ("user", "Hi")]
    assert turns(parse(system="")) == turns(parse(system=[])) == [("user", "Hi")]


def test_system_entries_stand_where_they_are():
    request = with_messages(
        ("user", "u"), ("system", "s"), ("assistant", "a"), ("system", [text("t")]), ("user", "v")
    )
    expected = [("user", "u"), ("system", "s"), ("assistant", "a"), ("system", "t"), ("user", "v")]
    assert turns(request) == expected


def test_entries_of_one_role_in_a_row_are_one_turn():
    request = with_messages(
        ("user", "a"),
        ("user", [text("b"), text("c")]),
        ("assistant", "x"),
        ("assistant", [text("y"), use()]),
        ("user", [result()]),
    )
    assert turns(request) == [("user", "a\nb\nc"), ("assistant", "xy"), ("tool", "rain")]
    assert request.messages[1].tool_calls[0].call_id == "toolu_1"


def test_assistant_blocks():
    request = with_messages(
        ("user", "u"),
        (
            "assistant",
            [
                thought("hm"),
                {"type": "redacted_thinking", "data": "xyz"},
                text("Let me see.", citations=None),
                use() | {"caller": {"type": "direct"}},
            ],
        ),
        ("user", [result(content=[text("4 °C"), text("rain")])]),
    )
    turn = request.messages[1]
    assert (turn.reasoning, turn.text) == ("hm", "Let me see.")
    call = ToolCall(call_id="toolu_1", name="get_weather", arguments={"city": "Oslo"})
    assert turn.tool_calls == (call,)
    assert request.messages[2].text == "4 °C\nrain"
    assert request.messages[2].tool_call_id == "toolu_1"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"content": "boom", "is_error": True}, "Error: boom"),
        ({"content": "Error: boom", "is_error": True}, "Error: boom"),
        ({"content": "boom", "is_error": False}, "boom"),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": None}, ""),
    ],
)
def test_results_and_errors(fields, shown):
    request = with_messages(("user", "u"), ("assistant", [use()]), ("user", [result(**fields)]))
    assert turns(request)[-1] == ("tool", shown)


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("abc")])
def test_results_are_put_into_the_order_of_the_calls(order):
    calls = [use(name, city=name) for name in "abc"]
    answers = [result(name, content=name) for name in order]
    want = [("tool", name) for name in "abc"]
    one = with_messages(("user", "u"), ("assistant", calls), ("user", answers))
    assert turns(one)[2:] == want
    apart = with_messages(("user", "u"), ("assistant", calls), *[("user", [a]) for a in answers])
    assert turns(apart)[2:] == want


def test_text_between_results_stays_between_them():
    request = with_messages(
        ("user", "u"),
        ("assistant", [use("a"), use("b")]),
        ("user", [result("b", "B"), text("and"), result("a", "A"), text("so?")]),
        ("assistant", "x"),
        ("user", "v"),
    )
    assert turns(request)[2:] == [
        ("tool", "A"),
        ("user", "and"),
        ("tool", "B"),
        ("user", "so?"),
        ("assistant", "x"),
        ("user", "v"),
    ]


def test_a_system_entry_may_stand_before_the_results():
    request = with_messages(
        ("user", "u"), ("assistant", [use()]), ("system", "s"), ("user", [result()])
    )
    assert turns(request)[2:] == [("system", "s"), ("tool", "rain")]


@pytest.mark.parametrize(
    "messages",
    [
        [("user", [result("toolu_9")])],
        [("user", "u"), ("assistant", [use()]), ("user", [result("toolu_2")])],
        [("user", "u"), ("assistant", [use()]), ("user", [result(), result()])],
        [
            ("user", "u"),
            ("assistant", [use()]),
            ("user", "no"),
            ("assistant", "a"),
            ("user", [result()]),
        ],
    ],
)
def test_a_result_without_its_call_is_refused(messages):
    with pytest.raises(RequestError) as caught:
        with_messages(*messages)
    assert caught.value.code == "invalid_message_order"
    assert caught.value.param.endswith(".tool_use_id")


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([("user", [IMAGE])], "messages.0.content.0.type", "modality_not_supported"),
        ([("user", [DOCUMENT])], "messages.0.content.0.type", "file_inputs_not_supported"),
        (
            [("user", [{"type": "search_result"}])],
            "messages.0.content.0.type",
            "block_type_not_supported",
        ),
        (
            [("user", "u"), ("assistant", [{"type": "server_tool_use"}]), ("user", "v")],
            "messages.1.content.0.type",
            "block_type_not_supported",
        ),
        (
            [("user", "u"), ("assistant", [use()]), ("user", [result(content=[IMAGE])])],
            "messages.2.content.0.content.0.type",
            "modality_not_supported",
        ),
        ([("user", "u"), ("assistant", "The answer is")], "messages.1", "prefill_not_supported"),
        (
            [("user", [text("a", citations=[{}])])],
            "messages.0.content.0.citations",
            "citations_not_supported",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(messages, param, code):
    with pytest.raises(UnsupportedError) as caught:
        with_messages(*messages)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([("developer", "x")], "messages.0.role", "unsupported_role"),
        ([("user", 5)], "messages.0.content", "invalid_type"),
        ([("user", [])], "messages.0.content", "invalid_value"),
        ([("user", ["x"])], "messages.0.content.0", "invalid_type"),
        ([("user", [{"text": "x"}])], "messages.0.content.0.type", "missing_required_parameter"),
        ([("user", [text("x", note=1)])], "messages.0.content.0.note", "unknown_parameter"),
        ([("user", [thought("x")])], "messages.0.content.0.type", "block_type_not_supported"),
        (
            [("user", [text("x", cache_control={"type": "big"})])],
            "messages.0.content.0.cache_control.type",
            "invalid_value",
        ),
        (
            [("user", "u"), ("assistant", [use() | {"input": "{}"}])],
            "messages.1.content.0.input",
            "invalid_type",
        ),
        (
            [("user", "u"), ("assistant", [use(), use()])],
            "messages.1.content.1.id",
            "invalid_value",
        ),
        (
            [("user", "u"), ("assistant", [use() | {"caller": {"type": "x"}}])],
            "messages.1.content.0.caller.type",
            "invalid_value",
        ),
        (
            [("user", "u"), ("assistant", [use() | {"toolset_name": "x"}])],
            "messages.1.content.0.toolset_name",
            "unsupported_parameter",
        ),
    ],
)
def test_malformed_member_names_its_path(messages, param, code):
    with pytest.raises(RequestError) as caught:
        with_messages(*messages)
    assert (caught.value.param, caught.value.code) == (param, code)


def history(*thoughts):
    """A conversation whose assistant turns begin with these thinking blocks."""
    messages = [("user", "u")]
    for block in thoughts:
        messages += [("assistant", [block, text("a")]), ("user", "u")]
    return messages


def reasoning(request):
    return [m.reasoning for m in request.messages if m.role == "assistant"]


def test_signed_thinking_round_trips():
    assert reasoning(with_messages(*history(thought("hm", SIGNER.sign("hm"))))) == ["hm"]
    assert reasoning(with_messages(*history(thought("", SIGNER.seal("hm\u00e9"))))) == ["hm\u00e9"]


@pytest.mark.parametrize(
    "block",
    [
        thought("hm!", SIGNER.sign("hm")),
        thought("", SIGNER.sign("hm")),
        thought("hm", SIGNER.seal("hm")),
        thought("", SIGNER.seal("hm")[:-6] + "AAAAAA"),
        thought("hm", SIGNER.sign("hm") + "0"),
    ],
)
def test_a_signature_of_ours_on_other_thinking_is_refused(block):
    with pytest.raises(RequestError) as caught:
        with_messages(*history(block))
    assert caught.value.code == "invalid_thinking_signature"
    assert caught.value.param == "messages.1.content.0.signature"


def test_thinking_that_others_signed_is_what_the_client_says():
    other = ThinkingSigner(b"o" * 32)
    blocks = [thought("a"), thought("b", "EqQBCg=="), thought("c", other.sign("x"))]
    request = with_messages(*history(*blocks, thought("", other.seal("gone"))))
    assert reasoning(request) == ["a", "b", "c", None]


@pytest.mark.parametrize(
    ("keep", "kept", "cleared"),
    [
        ("all", ["a", "b", "c"], ()),
        (5, ["a", "b", "c"], ()),
        ({"type": "thinking_turns", "value": 2}, [None, "b", "c"], ("a",)),
        (1, [None, None, "c"], ("a", "b")),
    ],
)
def test_old_thinking_is_cut_as_asked(keep, kept, cleared):
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    request = with_messages(
        *history(thought("a"), thought("b"), thought("c")), context_management={"edits": edits}
    )
    assert reasoning(request) == kept
    assert request.cleared == cleared
    assert request.options.preserve_thinking
