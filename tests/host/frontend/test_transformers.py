"""Prompts of random conversations against the live Transformers tokenizer and template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.prompt import PromptOptions
from tests.frontends import demo_frontend, demo_resources, wire_message, wire_tool

TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            ["<think>", "</think>", "<tool_response>", "</tool_response>", "<|im_", "\n"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=5,
).map("".join)
JSON = st.recursive(
    st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
NAME = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
CALL = st.builds(
    lambda name, arguments: {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    NAME,
    st.dictionaries(NAME, JSON, max_size=3),
)
TOOL = st.builds(
    lambda name, text, parameters: {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": parameters},
    },
    NAME,
    TEXT,
    st.dictionaries(NAME, JSON, max_size=2),
)
MESSAGE = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), TEXT
    ),
    st.builds(
        lambda text, reasoning, calls: (
            {"role": "assistant", "content": text, "tool_calls": calls}
            | ({} if reasoning is None else {"reasoning_content": reasoning})
        ),
        TEXT,
        st.none() | TEXT,
        st.lists(CALL, max_size=2),
    ),
)


@pytest.mark.oracle
@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(
    st.none() | TEXT,
    st.lists(MESSAGE, max_size=6),
    st.lists(TOOL, max_size=2),
    st.tuples(st.booleans(), st.sampled_from(["low", "medium", "xhigh"]), st.booleans()),
)
def test_random_conversations_equal_transformers(
    system: str | None, turns: list[Any], tools: list[Any], options: tuple[bool, str, bool]
) -> None:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": "q"}, *turns]
    thinking, effort, preserve = options
    settings_ = PromptOptions(thinking=thinking, effort=effort, preserve_thinking=preserve)
    ours = demo_frontend().prepare(
        [wire_message(m) for m in messages], [wire_tool(t) for t in tools], settings_
    )
    variables = {
        "tools": tools or None,
        "add_generation_prompt": True,
        "enable_thinking": thinking,
        "reasoning_effort": effort,
        "preserve_thinking": preserve,
    }
    oracle = _transformers()
    assert ours.text == oracle.apply_chat_template(messages, tokenize=False, **variables)
    assert ours.token_ids.tolist() == oracle(ours.text, add_special_tokens=False)["input_ids"]


@cache
def _transformers() -> Any:
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        for name, data in demo_resources().items():
            (Path(folder) / name).write_bytes(data)
        return AutoTokenizer.from_pretrained(folder)
