"""Prompts of the Qwen frontend: golden renderings, options, late system turns, injection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.errors import ArtifactError, RequestError, UnsupportedError
from ginfer.frontend import open_frontend
from ginfer.frontend.qwen import QwenFrontend
from ginfer.frontend.template import ChatTemplate
from ginfer.frontend.tokenizer import MARK
from ginfer.prompt import ContentPart, Message, PromptOptions, ToolCall
from tests.frontends import (
    demo_frontend,
    demo_resources,
    function_tool,
    golden_chats,
    message,
    wire_message,
    wire_tool,
)

SYSTEM_LOW = "Reasoning effort: low."
SYSTEM_XHIGH = "Reasoning effort: xhigh."
PLAIN = PromptOptions(thinking=False)


def render(*messages: Message, options: PromptOptions = PLAIN, **fields: Any) -> str:
    return demo_frontend().prepare(messages, fields.get("tools", ()), options).text


@pytest.mark.parametrize("case", golden_chats(), ids=lambda c: str(c["name"]))
def test_prompt_equals_transformers(case: dict[str, Any]) -> None:
    prompt = demo_frontend().prepare(
        [wire_message(m) for m in case["messages"]],
        [wire_tool(t) for t in case["tools"] or ()],
        PromptOptions(
            thinking=case["enable_thinking"],
            effort=case["reasoning_effort"],
            preserve_thinking=case["preserve_thinking"],
        ),
    )
    assert prompt.text == case["prompt_text"]
    assert prompt.token_ids.tolist() == case["prompt_ids"]
    assert prompt.opens_reasoning == case["enable_thinking"]
    assert (prompt.positions, prompt.rope_delta) == (None, 0)


def test_stop_ids_presets_and_close_ids() -> None:
    frontend = open_frontend(
        "qwen3.8-demo", {f"frontend/{n}": d for n, d in demo_resources().items()}
    )
    assert frontend.stop_token_ids == (4098, 4096)
    assert frontend.reasoning_close_ids == (198, 4109, 275)
    assert frontend.sampling_defaults(thinking=True).temperature == 1.0
    assert frontend.sampling_defaults(thinking=False).presence_penalty == 1.5
    assert frontend.token_text(4098) == "<|im_end|>"
    assert frontend.encode("Hello!<|im_end|>") == [1908, 0, 4098]
    for case in golden_chats():  # what the model itself writes after its reasoning
        if case["enable_thinking"] and 4109 in case["greedy_ids"]:
            close = case["greedy_ids"].index(4109)
            assert tuple(case["greedy_ids"][close : close + 2]) == frontend.reasoning_close_ids[1:]


@pytest.mark.parametrize(
    ("effort", "shown"),
    [
        (None, SYSTEM_XHIGH),
        ("minimal", SYSTEM_LOW),
        ("low", SYSTEM_LOW),
        ("medium", None),
        ("high", SYSTEM_XHIGH),
        ("xhigh", SYSTEM_XHIGH),
        ("max", SYSTEM_XHIGH),
    ],
)
def test_effort_levels(effort: str | None, shown: str | None) -> None:
    prompt = demo_frontend().prepare([message("user", "Hi")], (), PromptOptions(effort=effort))
    assert prompt.opens_reasoning
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    assert prompt.text.startswith(f"<|im_start|>system\n{shown}" if shown else "<|im_start|>user")


def test_effort_none_turns_thinking_off() -> None:
    prompt = demo_frontend().prepare([message("user", "Hi")], (), PromptOptions(effort="none"))
    assert not prompt.opens_reasoning
    assert prompt.text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_unknown_effort_is_refused(thinking: bool) -> None:
    with pytest.raises(RequestError, match="'huge'") as caught:
        render(message("user", "Hi"), options=PromptOptions(thinking=thinking, effort="huge"))
    assert caught.value.code == "reasoning_effort_not_supported"
    assert caught.value.param == "reasoning_effort"


def test_leading_developer_message_is_the_system_message() -> None:
    assert render(message("developer", " Be brief. "), message("user", "Hi")) == (
        render(message("system", "Be brief."), message("user", "Hi"))
    )


def test_late_system_messages_are_rendered_in_place() -> None:
    text = render(
        message("system", "one"),
        message("developer", "two"),
        message("user", "Hi"),
        message("assistant", "Yes?"),
        message("system", "  three\n"),
        message("developer", " \n "),
        message("user", "Go"),
        message("system", "four"),
    )
    assert text == (
        "<|im_start|>system\none<|im_end|>\n"
        "<|im_start|>system\ntwo<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nYes?<|im_end|>\n"
        "<|im_start|>system\nthree<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n"
        "<|im_start|>system\nfour<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_late_system_message_is_not_a_user_query() -> None:
    kept = PromptOptions(thinking=False, preserve_thinking=False)
    call = ToolCall(call_id="1", name="f", arguments={})
    text = render(
        message("user", "Hi"),
        message("assistant", "", reasoning="why", tool_calls=(call,)),
        message("tool", "done"),
        message("system", "late"),
        options=kept,
    )
    assert "<think>\nwhy\n</think>" in text  # still the same tool loop
    assert text.count("<|im_start|>system\nlate<|im_end|>\n") == 1
    with pytest.raises(RequestError, match="a user message is required"):
        render(message("system", "one"), message("system", "two"))


def test_preserve_thinking_switches_earlier_reasoning() -> None:
    turns = [
        message("user", "a"),
        message("assistant", "b", reasoning=" because "),
        message("user", "c"),
    ]
    kept = render(*turns)
    dropped = render(*turns, options=PromptOptions(thinking=False, preserve_thinking=False))
    assert "<think>\nbecause\n</think>\n\nb" in kept
    assert "<|im_start|>assistant\nb<|im_end|>" in dropped


@pytest.mark.parametrize(
    ("messages", "words"),
    [([], "no messages"), ([message("assistant", "x")], "a user message is required")],
)
def test_template_error_is_a_request_error(messages: list[Message], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(*messages)
    assert caught.value.param == "messages"


def test_unknown_role_and_media_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"messages\.1\.role is 'function'"):
        render(message("user", "x"), message("function", "y"))
    for kind, code in [
        ("image", "vision_disabled"),
        ("video", "vision_disabled"),
        ("audio", "modality_not_supported"),
    ]:
        picture = Message(role="user", content=(ContentPart(kind=kind, source=b""),))
        with pytest.raises(UnsupportedError, match=kind) as caught:
            render(picture)
        assert (caught.value.code, caught.value.param) == (code, "messages.0.content")


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|im_end", "<|", "<", ">"]
        ),
        st.sampled_from(["|>", "system", "\n", " ", '"', "<tool_response>", "</tool_response>"]),
        st.sampled_from([MARK, MARK + "0", MARK + "2", "{{ 7 * 7 }}", "{% raw %}"]),
        st.just(f"<tool_response>{MARK}20{MARK}2</tool_response>"),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(st.lists(HOSTILE, min_size=9, max_size=9))
def test_nothing_in_a_conversation_becomes_a_control_token(texts: list[str]) -> None:
    frontend = demo_frontend()
    a, b, c, d, e, f, g, h, late = texts
    tools = [function_tool(a, {b: {"type": "string", "description": c}})]
    call = ToolCall(call_id="", name=d, arguments={e: f, "n": [{g: h}]})

    def conversation(s: str) -> list[Message]:
        return [
            message("user", "q" + s),
            message("assistant", a + s, reasoning=b + s, tool_calls=(call,)),
            message("tool", c + s),
            message("system", "s" + late + s),
            message("user", d + s + "q"),
        ]

    prompt = frontend.prepare(conversation(e), tools, PromptOptions())
    ids = [i for i in prompt.token_ids.tolist() if i in frontend.tokenizer.control_ids]
    start, end = 4097, 4098
    assert ids == [start, end] * 6 + [start]  # system, five messages, generation prompt


def test_markup_tokens_in_text_stay_markup() -> None:
    frontend = demo_frontend()
    prompt = frontend.prepare([message("user", "what is <think>?")], (), PLAIN)
    assert prompt.token_ids.tolist().count(frontend.tokenizer.added_token_id("<think>")) == 2


def test_text_shows_spelled_control_tokens_as_they_are() -> None:
    text = render(message("user", f"a<|im_end|>{MARK}b<|im_"), message("user", "c"))
    assert text.startswith(f"<|im_start|>user\na<|im_end|>{MARK}b<|im_<|im_end|>\n<|im_start|>user")


def test_tools_and_arguments_print_as_json_in_the_order_given() -> None:
    tool = function_tool("f", {"z": {"type": "string", "description": "é <b>"}, "a": {}})
    call = ToolCall(
        call_id="", name="f", arguments={"z": "x\ny", "a": {"k": [1, None, True]}, "e": "é"}
    )
    text = render(
        message("user", "q"),
        message("assistant", "", tool_calls=(call, call)),
        tools=[tool],
    )
    assert json.dumps(tool.wire, ensure_ascii=False) in text
    one = (
        "<tool_call>\n<function=f>\n<parameter=z>\nx\ny\n</parameter>\n<parameter=a>\n"
        '{"k": [1, null, true]}\n</parameter>\n<parameter=e>\né\n</parameter>\n</function>\n'
        "</tool_call>"
    )
    assert f"</think>\n\n{one}\n{one}<|im_end|>" in text


@pytest.mark.parametrize("name", ["hello", "story", "tool_weather"])
def test_generated_turn_is_replayed_token_by_token(name: str) -> None:
    frontend = QwenFrontend(demo_resources())
    (case,) = (c for c in golden_chats() if c["name"] == name)
    tools = [wire_tool(t) for t in case["tools"] or ()]
    turns = [wire_message(m) for m in case["messages"]]
    answer = case["greedy_text"].removesuffix("<|im_end|>")
    one_by_one = [i for c in answer for i in frontend.encode(c)]  # not what encode would give
    assert one_by_one != frontend.encode(answer)
    prompt = frontend.prepare(turns, tools, PLAIN)
    assert frontend.remember(prompt, one_by_one)
    assert not frontend.remember(prompt, [*one_by_one, 4098])
    assert not frontend.remember(prompt, [frontend.encode("é")[0], 220])  # half a character
    if name == "tool_weather":
        call = ToolCall(call_id="", name="get_weather", arguments={"city": "Oslo"})
        turns += [message("assistant", tool_calls=(call,)), message("tool", "-3")]
    else:
        turns += [message("assistant", answer), message("user", "more")]
    want = [*prompt.token_ids.tolist(), *one_by_one, 4098]
    assert frontend.prepare(turns, tools, PLAIN).token_ids.tolist()[: len(want)] == want


def test_turn_starts_are_where_the_template_begins_turns() -> None:
    frontend = QwenFrontend(demo_resources())
    spelled = "say <|im_start|>user twice: <|im_start|>"
    turns = [message("system", "Rules."), message("user", spelled)]
    prompt = frontend.prepare(turns, (), PLAIN)
    answer = [i for c in "one by one" for i in frontend.encode(c)]
    assert frontend.remember(prompt, answer)
    turns += [message("assistant", "one by one"), message("tool", "1"), message("tool", "2")]
    for _ in range(2):  # cold and from the piece cache
        longer = frontend.prepare(turns, (), PLAIN)
        ids = longer.token_ids.tolist()
        cuts = [0, *longer.turn_starts, len(ids)]
        parts = ["".join(map(frontend.token_text, ids[a:b])) for a, b in pairwise(cuts)]
        assert "".join(parts) == longer.text
        roles = [part.removeprefix("<|im_start|>").partition("\n")[0] for part in parts]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert spelled in parts[1]
        assert parts[4] == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    n = prompt.turn_starts[-1]
    assert prompt.turn_starts == longer.turn_starts[: len(prompt.turn_starts)]
    assert ids[n : longer.turn_starts[-2] - 2] == [*prompt.token_ids[n:].tolist(), *answer]


def test_user_text_never_replays_generated_ids() -> None:
    frontend = QwenFrontend(demo_resources())
    prompt = frontend.prepare([message("user", "again")], (), PLAIN)
    frontend.remember(prompt, [i for c in "hello there" for i in frontend.encode(c)])
    cold = QwenFrontend(demo_resources())
    for text in ("hello there", "<think>\n\n</think>\n\nhello there"):
        turns = [message("user", text)]
        assert (
            frontend.prepare(turns, (), PLAIN).token_ids.tolist()
            == cold.prepare(turns, (), PLAIN).token_ids.tolist()
        )


def test_missing_or_unusable_resource_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja"):
        QwenFrontend({n: d for n, d in demo_resources().items() if n != "chat_template.jinja"})
    with pytest.raises(ArtifactError, match="does not compile"):
        QwenFrontend({**demo_resources(), "chat_template.jinja": b"{% if %}"})
    for config in (b"{}", b"[]", b'{"eos_token_id": []}', b"x"):
        with pytest.raises(ArtifactError, match="eos_token_id"):
            QwenFrontend({**demo_resources(), "generation_config.json": config})
    with pytest.raises(ArtifactError, match="no frontend for model 'gpt'"):
        open_frontend("gpt", {})


def test_template_can_print_json_in_every_form() -> None:
    source = "{{ x | tojson }} {{ x | tojson(ensure_ascii=True) }}\n{{ x | tojson(indent=1) }}"
    text = ChatTemplate(source.encode(), escape=str.upper).render(x={"b": ["é"], "a": 1})
    assert text == (
        '{"B": ["É"], "A": 1} {"B": ["\\U00E9"], "A": 1}\n{\n "B": [\n  "É"\n ],\n "A": 1\n}'
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ loop_of.__self__ }}{{ ''.format.__globals__ }}",
        "{% for m in messages %}{{ loop._iterator.gi_frame.f_globals }}{% endfor %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_template_runs_in_a_sandbox(source: str) -> None:
    template = ChatTemplate(source.encode(), escape=str)
    try:
        text = template.render(messages=[{"role": "user"}])
    except RequestError:
        return
    assert text == ""  # undefined prints nothing


def test_long_history_is_prepared_quickly() -> None:
    """A warm history of 64K tokens in 160 turns and a new turn of 500; aim 10 ms, bound 100 ms for
    a machine that is busy with other things."""
    frontend = demo_frontend()
    words = golden_chats()[-1]["prompt_text"].replace("<|", "").split()
    turns = [
        message("user" if i % 2 == 0 else "assistant", f"{i} " + " ".join(words[:300]))
        for i in range(160)
    ]
    assert frontend.prepare(turns, (), PLAIN).num_tokens > 64_000
    seconds = []
    for i in range(5):
        new = message("user", f"{i} " + " ".join(words[300:550]))
        start = time.perf_counter()
        frontend.prepare([*turns, new], (), PLAIN)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


def test_importing_the_package_loads_no_tokenizer() -> None:
    code = (
        "import sys, ginfer.frontend; assert not {'tokenizers', 'jinja2', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
