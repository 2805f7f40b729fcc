"""Output parser: calls, broken calls and text, the same for every way of cutting the stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import validate

from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    OutputEvent,
    ReasoningText,
)
from ginfer.prompt import Channel, Message, PromptOptions, Tool, ToolCall
from tests.frontends import demo_frontend, function_tool, golden_chats, message, wire_tool

PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=150)
TOOLS = [
    function_tool(
        "write",
        {
            "path": {"type": "string"},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "force": {"type": "boolean"},
            "any": {},
        },
    ),
    function_tool("write_all"),
    function_tool("ls"),
]


def parse(
    *chunks: str, tools: Any = TOOLS, channel: Channel = Channel.CONTENT
) -> list[OutputEvent]:
    """Events of a response that arrives in these chunks."""
    parser = demo_frontend().output_parser(tools)
    events = [event for chunk in chunks for event in parser.feed(channel, chunk)]
    return joined([*events, *parser.finish()])


def joined(events: list[OutputEvent]) -> list[OutputEvent]:
    """Events with adjacent text of one kind joined."""
    merged: list[OutputEvent] = []
    for event in events:
        match merged[-1:], event:
            case [ContentText(a)], ContentText(b):
                merged[-1] = ContentText(a + b)
            case [ReasoningText(a)], ReasoningText(b):
                merged[-1] = ReasoningText(a + b)
            case [CallArguments(i, a)], CallArguments(_, b):
                merged[-1] = CallArguments(i, a + b)
            case _:
                merged.append(event)
    return merged


def call(name: str, *parameters: tuple[str, str]) -> str:
    """A call as the template writes it."""
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def ended(index: int, name: str, arguments: str) -> list[OutputEvent]:
    return [CallStarted(index, name), CallArguments(index, arguments), CallEnded(index)]


@pytest.mark.parametrize(
    "case",
    [c for c in golden_chats() if "<tool_call>" in c["greedy_text"]],
    ids=lambda c: c["name"],
)
def test_golden_calls(case: dict[str, Any]) -> None:
    tools = [wire_tool(t) for t in case["tools"]]
    decoder = demo_frontend().stream_decoder(opens_reasoning=case["enable_thinking"])
    parser = demo_frontend().output_parser(tools)
    pieces = [piece for i in case["greedy_ids"] for piece in decoder.feed(i)] + decoder.finish()
    events = joined([e for piece in pieces for e in parser.feed(*piece)] + parser.finish())
    num_calls = case["greedy_text"].count("<tool_call>")
    assert [e.index for e in events if isinstance(e, CallEnded)] == list(range(num_calls))
    assert not [e for e in events if isinstance(e, ContentText | CallBroken)]
    for event in events:
        if isinstance(event, CallArguments):
            (name,) = (
                e.name for e in events if e == CallStarted(event.index, getattr(e, "name", ""))
            )
            (tool,) = (t for t in tools if t.name == name)
            validate(json.loads(event.fragment), tool.parameters)


def test_call_after_text_loses_the_space_between() -> None:
    text = " Let me look. \n\n" + call("write", ("path", "a.txt"), ("mode", "3"))
    assert parse(text) == [
        ContentText(" Let me look."),
        *ended(0, "write", '{"path": "a.txt", "mode": 3}'),
    ]


def test_parallel_calls_and_text_after_them() -> None:
    text = call("ls") + "\n" + call("write", ("path", "")) + call("ls") + "\n\nDone. "
    assert parse(text) == [
        *ended(0, "ls", "{}"),
        *ended(1, "write", '{"path": ""}'),
        *ended(2, "ls", "{}"),
        ContentText("\n\nDone. "),
    ]


VALUES = [
    ("path", "x", '"x"'),
    ("path", "12", '"12"'),
    ("path", "null", '"null"'),
    ("path", "\n a\n\n", '"\\n a\\n\\n"'),
    ("path", 'say "é\\" \x01', '"say \\"é\\\\\\" \\u0001"'),
    ("text", "null", "null"),
    ("text", "nul", '"nul"'),
    ("text", "null!", '"null!"'),
    ("text", "", '""'),
    ("mode", "7", "7"),
    ("mode", " -7 ", "-7"),
    ("mode", "seven", '"seven"'),
    ("mode", "", '""'),
    ("mode", "NaN", '"NaN"'),
    ("force", "True", "true"),
    ("force", "false", "false"),
    ("any", "None", "null"),
    ("any", "x", '"x"'),
    ("undeclared", "[1]", "[1]"),
    ("tags", '["a",\n "b"]', '["a",\n "b"]'),
    ("tags", "[" * 5000, json.dumps("[" * 5000)),
    ("tags", "['a']", "\"['a']\""),
]


@pytest.mark.parametrize(("key", "value", "want"), VALUES)
def test_values_are_typed_by_the_schema(key: str, value: str, want: str) -> None:
    assert parse(call("write", (key, value))) == ended(0, "write", f'{{"{key}": {want}}}')


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        ({"type": ["string", "integer"]}, '"5"'),
        ({"type": ["integer", "null"]}, "5"),
        ({"type": "string", "nullable": True}, '"5"'),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, '"5"'),
        ({"enum": ["5", "6"]}, '"5"'),
        ({"enum": [5, 6]}, "5"),
        ({"const": "5"}, '"5"'),
        ({"$ref": "#/$defs/name"}, '"5"'),
        ({"$ref": "#/$defs/loop"}, "5"),
        ({"$ref": "#/nowhere"}, "5"),
        ({"$ref": 5, "type": {"a": 1}, "anyOf": 3, "enum": 4}, "5"),
        ({"type": [{"a": []}, "string"]}, '"5"'),
        (True, "5"),
        ("string", "5"),
    ],
)
def test_union_with_string_takes_text_as_it_is(schema: Any, want: str) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 50}
    tool = function_tool(
        "f", {"x": schema}, **{"$defs": {"name": {"type": "string"}, "loop": loop}}
    )
    assert parse(call("f", ("x", "5")), tools=[tool]) == ended(0, "f", f'{{"x": {want}}}')


def test_parameters_of_an_open_schema() -> None:
    tool = function_tool("f", None, additionalProperties={"type": "string"})
    odd = [Tool(name="f", parameters={"properties": [1]}, wire={})]
    assert parse(call("f", ("x", "5")), tools=[tool]) == ended(0, "f", '{"x": "5"}')
    assert parse(call("f", ("x", "5")), tools=odd) == ended(0, "f", '{"x": 5}')


def test_string_streams_while_it_is_written() -> None:
    parser = demo_frontend().output_parser(TOOLS)
    steps = [
        ("Go", [ContentText("Go")]),
        ("!\n", [ContentText("!")]),
        ("<tool_call>\n<function=wri", []),
        ("te>", [CallStarted(0, "write")]),
        ("\n<parameter=path>\n", [CallArguments(0, '{"path": "')]),
        ('a"', [CallArguments(0, 'a\\"')]),
        ("b\n", [CallArguments(0, "b")]),
        ("<", []),
        ("c</par", [CallArguments(0, "\\n<c")]),
        ("ameter>\n</function", []),
        (">", [CallArguments(0, '"}'), CallEnded(0)]),
        ("\n</tool_call>", []),
        (" ok", [ContentText(" ok")]),
    ]
    for text, want in steps:
        assert parser.feed(Channel.CONTENT, text) == want, text
    assert parser.finish() == []


def test_reasoning_passes_untouched() -> None:
    text = call("ls") + "<think> ` "
    assert parse(text, channel=Channel.REASONING) == [ReasoningText(text)]


def test_without_tools_markup_is_text() -> None:
    text = "a \n" + call("ls") + "  "
    parser = demo_frontend().output_parser(())
    assert parser.feed(Channel.CONTENT, text) == [ContentText(text)]
    assert parser.finish() == []


UNANNOUNCED = [
    call("unknown", ("a", "b")),
    "a < b <tool_call> c",
    "<tool_call>\n<function=",
    "<tool_call>\n<function=ls",
    "<tool_call>\n<function=l s>\n</function>\n</tool_call>",
    "<tool_call>\n<function>ls</function></tool_call>",
    '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
    "<tool_call>" + " " * 65 + "<function=ls></function></tool_call>",
    "text <function=ls></function>",
    "</tool_call></function></parameter><parameter=x>",
    "Write `" + call("ls") + "` so",
    "``a`" + "<tool_call><function=ls>``",
    "a lone ` here\n" + call("ls"),
    "a ` lone\n```\n" + call("ls") + "\n\n" + call("ls"),
    "``` <tool_call><function=ls></function> ```",
    "```\n" + call("ls") + "\n```\n",
    "   ````python\n```\n" + call("ls") + "\n`````\n",
    "```\n``` x\n" + call("ls"),
    "```\n    ```\n" + call("ls"),
    "```\r\n" + call("ls") + "\r\n```\r\n \t",
    " \n ",
]


@pytest.mark.parametrize("text", UNANNOUNCED)
def test_what_is_not_announced_is_text_in_full(text: str) -> None:
    assert parse(text) == [ContentText(text)]
    assert parse(*text) == [ContentText(text)]


def test_calls_that_are_none_are_counted_and_quoted_ones_are_not() -> None:
    counts = []
    for text in UNANNOUNCED:
        parser = demo_frontend().output_parser(TOOLS)
        parser.feed(Channel.CONTENT, text)
        parser.finish()
        counts.append(parser.num_unannounced)
    assert counts == [1] * 8 + [0] * (len(UNANNOUNCED) - 8)


@pytest.mark.parametrize(
    "before",
    [
        "see `ls`:",
        "a lone ` here\n",
        "```py\nx\n```",
        "```py\nx\n``` \t",
        "````\n```\n````",
        "``a ` b``",
        "    ```\n",
        "```` `x` ````",
        "```a``` b",
    ],
)
def test_call_after_code_is_a_call(before: str) -> None:
    want = [ContentText(before.rstrip()), *ended(0, "ls", "{}")]
    assert parse(before + "\n" + call("ls")) == want
    assert parse(*(before + "\n" + call("ls"))) == want


FORGIVEN = [
    "<function=ls>\n</function>",
    "  <function=ls></function></tool_call>",
    "<tool_call><function=ls></function></tool_call>",
    "<tool_call>\n\n<function=ls>\n\n</function>",
    "<tool_call>\n<function=ls>\n</tool_call>",
    "<tool_call>\n<function=ls>\n</function>\n</tool_",
]


@pytest.mark.parametrize("text", FORGIVEN)
def test_missing_envelope_is_forgiven(text: str) -> None:
    assert parse(text) == ended(0, "ls", "{}")
    assert parse(*text) == ended(0, "ls", "{}")


def test_missing_closing_tags_are_forgiven_where_nothing_else_is_possible() -> None:
    def opened(end: str) -> str:
        return f"<tool_call>\n<function=write>\n<parameter=path>\nx\n{end}"

    want = ended(0, "write", '{"path": "x"}')
    assert parse(opened("</parameter>\n</tool_call>")) == want
    assert parse(opened("</function>\n</tool_call>")) == want
    assert parse(opened("</function>\n")) == want
    assert parse(opened("</parameter>\n" + call("ls"))) == [*want, *ended(1, "ls", "{}")]
    two = "<tool_call>\n<function=ls>\n<function=ls>\n</function>\n<function=ls></function>"
    assert parse(two) == [*ended(0, "ls", "{}"), *ended(1, "ls", "{}"), *ended(2, "ls", "{}")]


DATA = [
    "</parameter> is a tag",
    "</parameter>",
    "<parameter=mode>\n5",
    "</function>\n</tool_call>\nand more",
    "x</function>",
    call("ls"),
    "\n" + call("ls") + "\n",
    "<tool_call>\n<function=ls>",
    "```\n<tool_call>",
    "</think> <think>",
    "</parameter>" + " " * 65 + "</function>",
    "</function>" + " " * 65,
]


@pytest.mark.parametrize("value", DATA)
def test_data_in_a_value_stays_data(value: str) -> None:
    text = call("write", ("path", value), ("mode", "1"))
    want = ended(0, "write", json.dumps({"path": value, "mode": 1}))
    assert parse(text) == want
    assert parse(*text) == want


def test_nothing_ends_in_a_string_of_json() -> None:
    tags = json.dumps(['</parameter><parameter=mode>"', "\\", '\\"</parameter>\n</function>'])
    for value, want in ((tags, tags), ('["a', json.dumps('["a'))):  # broken JSON ends with its line
        text = call("write", ("tags", value), ("mode", "1"))
        events = ended(0, "write", f'{{"tags": {want}, "mode": 1}}')
        assert parse(text) == parse(*text) == events


BROKEN = [
    ("<tool_call>\n<function=ls>", []),
    ("<tool_call>\n<function=ls>\n</func", []),
    ("<tool_call>\n<function=write>\n<parameter=path", []),
    ("<tool_call>\n<function=write>\n<parameter=path>\nabc", []),
    ("<tool_call>\n<function=write>\n<parameter=path>\nabc\n</parameter>\n", []),
    ("<tool_call>\n<function=write>\n<parameter=mode>\n5\n</parameter", []),
    ("<tool_call>\n<function=ls>\nhm </tool_call> x", [ContentText("hm </tool_call> x")]),
    ("<tool_call><function=ls><parameter=>1", [ContentText("<parameter=>1")]),
    ("<tool_call><function=ls><parameter=a\nb>", [ContentText("<parameter=a\nb>")]),
    (
        "<tool_call><function=ls><parameter=" + "k" * 257,
        [ContentText("<parameter=" + "k" * 257)],
    ),
    (
        call("write", ("mode", "1"), ("mode", "2")),
        [ContentText("<parameter=mode>\n2\n</parameter>\n</function>\n</tool_call>")],
    ),
]


@pytest.mark.parametrize(("text", "after"), BROKEN)
def test_announced_call_that_breaks_is_reported(text: str, after: list[OutputEvent]) -> None:
    for events in (parse(text), parse(*text)):
        assert isinstance(events[0], CallStarted)
        (at,) = (i for i, e in enumerate(events) if isinstance(e, CallBroken))
        assert events[at + 1 :] == after
        assert not [e for e in events if isinstance(e, CallEnded)]


def test_a_call_can_follow_a_broken_one() -> None:
    events = parse("<tool_call>\n<function=ls>\n oops\n" + call("ls"))
    assert [type(e) for e in events[:2]] == [CallStarted, CallBroken]
    assert events[2:] == [ContentText("oops"), *ended(1, "ls", "{}")]


MARKUP = st.one_of(
    st.sampled_from(["<tool_call>", "</tool_call>", "<function=ls>", "<function=write>", "<"]),
    st.sampled_from(["</function>", "<parameter=path>", "<parameter=mode>", "</parameter>", ">"]),
    st.sampled_from(["<tool_call>\n<function=write>\n<parameter=path>\n", "\n</parameter>\n"]),
    st.sampled_from([call("ls"), call("write", ("path", "v"), ("mode", "2")), "<parameter=text>"]),
    st.sampled_from(["null", "12", "<parameter=", "</", "<function=", "<function=no>", "<think>"]),
    st.sampled_from(["`", "```", "```\n", "\n", "\n\n", " ", "  \n", "\r\n", "\t", "a", "é€"]),
    st.just(" " * 65),
    st.sampled_from(["<parameter=tags>", '["', '"', "\\", '{"', '\\"</parameter>']),
    st.text(max_size=3),
)
SOUP = st.lists(MARKUP, max_size=14).map("".join)


def same_for_any_cut(text: str, data: st.DataObject) -> None:
    whole = parse(text)
    assert parse(*text) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    assert parse(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)]))) == whole


@pytest.mark.parametrize(
    "count", [PROPERTY.max_examples, pytest.param(8_000, marks=pytest.mark.long)]
)
def test_any_cut_of_any_text_gives_the_same_events(count: int) -> None:
    settings(PROPERTY, max_examples=count)(given(SOUP, st.data())(same_for_any_cut))()


@PROPERTY
@given(SOUP)
@example("<tool_call>" * 3 + "\n`<tool_call>`")
def test_no_byte_is_lost_and_events_are_in_order(text: str) -> None:
    events = parse(text)
    content = "".join(e.text for e in events if isinstance(e, ContentText))
    calls = [e for e in events if not isinstance(e, ContentText)]
    if not calls:
        assert content == text
    assert _is_subsequence(content, text)
    open_call: int | None = None
    num_calls = 0
    for event in calls:
        if isinstance(event, CallStarted):
            assert (open_call, event.index) == (None, num_calls)
            open_call, num_calls = event.index, num_calls + 1
            arguments = ""
        else:
            assert event.index == open_call
            if isinstance(event, CallArguments):
                arguments += event.fragment
            else:
                open_call = None
            if isinstance(event, CallEnded):
                assert isinstance(json.loads(arguments), dict)
    assert open_call is None


def _is_subsequence(part: str, whole: str) -> bool:
    letters = iter(whole)
    return all(letter in letters for letter in part)


PROSE = st.text(st.characters(exclude_characters="<`", exclude_categories=["Cs"]), max_size=20)
VALUE = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda v: "</parameter>" not in v
)


@PROPERTY
@given(
    st.lists(
        st.tuples(PROSE, st.dictionaries(st.sampled_from(["path", "text"]), VALUE)), max_size=4
    ),
    PROSE,
    st.integers(1, 7),
)
def test_prose_and_calls_come_out_as_they_went_in(
    turns: list[tuple[str, dict[str, str]]], tail: str, size: int
) -> None:
    text = "".join(prose + "\n\n" + call("write", *a.items()) for prose, a in turns) + tail
    want: list[OutputEvent] = []
    for i, (prose, arguments) in enumerate(turns):
        shown = prose.rstrip(" \t\r\n")
        nulls = {k: None if k == "text" and v == "null" else v for k, v in arguments.items()}
        want += [ContentText(shown)] * bool(shown)
        want += ended(i, "write", json.dumps(nulls, ensure_ascii=False))
    want += [ContentText(tail)] * bool(tail)
    assert parse(*(text[i : i + size] for i in range(0, len(text), size))) == want


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
OTHER = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.lists(TEXT, max_size=3), st.booleans(), st.none()
)


@PROPERTY
@given(
    st.dictionaries(st.sampled_from(["mode", "tags", "force", "any", "other"]), OTHER),
    st.one_of(TEXT, OTHER),
)
def test_history_rendered_by_the_template_parses_back(others: dict[str, Any], path: Any) -> None:
    arguments = {"path": path, **others}
    calls = (ToolCall(call_id="", name="write", arguments=arguments),)
    made = Message(role="assistant", tool_calls=calls)
    prompt = demo_frontend().prepare([message("user", "q"), made], TOOLS, PromptOptions()).text
    turn = prompt.split("<|im_start|>assistant\n<think>\n\n</think>\n\n")[1]
    events = parse(turn.partition("<|im_end|>\n<|im_start|>assistant")[0])
    want = {
        **arguments,
        "path": path if isinstance(path, str) else json.dumps(path, ensure_ascii=False),
    }
    assert [type(e) for e in events] == [CallStarted, CallArguments, CallEnded]
    assert isinstance(events[1], CallArguments)
    assert list(json.loads(events[1].fragment).items()) == list(want.items())


def test_long_response_is_parsed_piece_by_piece() -> None:
    value = "x\n<y>" * 4000
    text = "a < b\n" * 2000 + call("write", ("path", value), ("tags", '["é"]'))
    want = ended(0, "write", json.dumps({"path": value, "tags": ["é"]}, ensure_ascii=False))
    events = parse(*(text[i : i + 4] for i in range(0, len(text), 4)))
    assert events == [ContentText(("a < b\n" * 2000)[:-1]), *want]
