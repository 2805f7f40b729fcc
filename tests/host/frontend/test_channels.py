"""Channel splitter: where reasoning ends, what is dropped, and that nothing else is."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ginfer.prompt import Channel
from tests.frontends import demo_frontend, golden_chats

FRONTEND = demo_frontend()
REASONING, CONTENT = Channel.REASONING, Channel.CONTENT
THINK, CLOSE, CALL, CALL_END = FRONTEND.encode("<think></think><tool_call></tool_call>")


def joined(pieces: list[tuple[Channel, str]]) -> list[tuple[str, str]]:
    """Adjacent pieces of one channel joined."""
    grouped = groupby(pieces, key=lambda piece: piece[0])
    return [(str(channel), "".join(text for _, text in group)) for channel, group in grouped]


def decode(ids: list[int], *, opens_reasoning: bool = True, **options: bool) -> Any:
    decoder = FRONTEND.stream_decoder(opens_reasoning=opens_reasoning, **options)
    pieces = [piece for i in ids for piece in decoder.feed(i)]
    pieces += decoder.finish()
    assert all(text for _, text in pieces)
    return joined(pieces)


def spelled(text: str) -> list[int]:
    """Ids of text with no added token: one token per byte."""
    of_byte = {FRONTEND.token_bytes(i): i for i in range(256)}
    return [of_byte[bytes([b])] for b in text.encode()]


@pytest.mark.parametrize("case", golden_chats(), ids=lambda c: str(c["name"]))
def test_golden_answers_split_at_the_closing_tag(case: dict[str, Any]) -> None:
    thinking = case["enable_thinking"]
    text = case["greedy_text"].removesuffix("<|im_end|>")
    before, _, after = text.partition("</think>\n\n") if thinking else ("", "", text)
    want = [("reasoning", before)] * thinking + [("content", after)] * bool(after)
    assert decode(case["greedy_ids"], opens_reasoning=thinking) == want


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["<", "</", "</think", "</th", "ink>", "<tool_call>", "\n", "é", "<<"]),
            st.text(max_size=4),
        ),
        max_size=8,
    ).map("".join),
    st.text(max_size=6),
    st.booleans(),
)
@example("a</thi", "b", True)
@example("a</think", "b", False)
def test_reasoning_ends_at_the_first_closing_tag(before: str, after: str, token: bool) -> None:
    ids = spelled(before) + ([CLOSE] if token else spelled("</think>")) + spelled(after)
    if token:  # a second closing token, after the spelled one, is dropped
        first, _, rest = before.partition("</think>")
        rest += after
    else:
        first, _, rest = (before + "</think>" + after).partition("</think>")
    rest = rest.lstrip("\n")
    want = [("reasoning", first)] * bool(first) + [("content", rest)] * bool(rest)
    assert decode(ids) == want


def test_newlines_after_the_closing_tag_are_dropped_across_tokens() -> None:
    ids = [*spelled("a\n"), CLOSE, *spelled("\n"), *spelled("\n\n x\n")]
    assert decode(ids) == [("reasoning", "a\n"), ("content", " x\n")]
    assert decode(spelled("\n\nx"), opens_reasoning=False) == [("content", "\n\nx")]


def test_channel_is_that_of_the_next_token() -> None:
    decoder = FRONTEND.stream_decoder(opens_reasoning=True)
    assert decoder.channel is REASONING
    decoder.feed(CLOSE)
    assert decoder.channel is CONTENT
    assert FRONTEND.stream_decoder(opens_reasoning=False).channel is CONTENT


def test_text_is_shown_at_once_unless_it_may_begin_the_tag() -> None:
    decoder = FRONTEND.stream_decoder(opens_reasoning=True)
    shown = [decoder.feed(i) for i in spelled("a<b</thy")]
    assert [t for pieces in shown for _, t in pieces] == ["a", "<b", "</thy"]
    assert shown[0] == [(REASONING, "a")]
    assert shown[2] == [(REASONING, "<b")]


def test_tool_markup_inside_reasoning_is_reasoning() -> None:
    ids = [CALL, *spelled("\n<function=f>"), CALL_END, CLOSE, *spelled("x")]
    assert decode(ids) == [
        ("reasoning", "<tool_call>\n<function=f></tool_call>"),
        ("content", "x"),
    ]


def test_stray_think_tokens() -> None:
    assert decode([THINK, *spelled("a"), THINK, CLOSE]) == [("reasoning", "a")]
    assert decode([CLOSE, *spelled("a"), CLOSE, *spelled("b")]) == [("content", "ab")]
    assert decode([CLOSE, CLOSE, *spelled("\n\nb")]) == [("content", "b")]
    assert decode([CLOSE, *spelled("a</think>")]) == [("content", "a</think>")]
    quoted = [THINK, *spelled("x"), CLOSE, CLOSE, *spelled("y")]
    assert decode(quoted, opens_reasoning=False) == [("content", "<think>x</think>y")]
    call = [CALL, *spelled("v"), CLOSE, CALL_END, CLOSE]
    assert decode(call, opens_reasoning=False) == [("content", "<tool_call>v</think></tool_call>")]


def test_control_tokens_are_hidden_or_kept() -> None:
    start, end = FRONTEND.encode("<|im_start|><|im_end|>")
    ids = [*spelled("a"), start, CLOSE, start, *spelled("b"), end]
    assert decode(ids) == [("reasoning", "a"), ("content", "b")]
    kept = [("reasoning", "a"), ("content", "<|im_start|>b")]
    assert decode(ids, keep_special_tokens=True) == kept
    raw = [("content", "a<|im_start|></think><|im_start|>b<|im_end|>")]
    assert decode(ids, raw=True) == raw


def test_raw_shows_every_token_as_it_is() -> None:
    for case in golden_chats():
        assert decode(case["greedy_ids"], raw=True) == [("content", case["greedy_text"])]


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert decode(spelled("a€")[:-1]) == [("reasoning", "a\ufffd")]
    assert decode([*spelled("<€")[:-1], CLOSE]) == [("reasoning", "<\ufffd")]
    assert decode(spelled("€")[:-1], opens_reasoning=False) == [("content", "\ufffd")]
