"""Frontend of the Qwen3.8 family: prompts, stop set, presets.

Its output side is in `channels` and `output`. Decisions where the template refuses or leaves room:
- A leading developer message is the system message. Every other system or developer message is
  rendered in place as one more system block; one without text renders nothing.
- Control tokens (`<|im_start|>`, ..) spelled in messages, reasoning, calls, results or schemas are
  ordinary text. Markup tokens (`<think>`, `<tool_call>`, ..) spelled there stay markup tokens.
- Effort: none turns thinking off; minimal and low are low; high, xhigh and max are xhigh.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.errors import ArtifactError, RequestError, UnsupportedError
from ginfer.frontend.base import SamplingDefaults
from ginfer.frontend.channels import QwenStreamDecoder
from ginfer.frontend.output import QwenOutputParser
from ginfer.frontend.template import ChatTemplate
from ginfer.frontend.tokenizer import MARK, Tokenizer
from ginfer.prompt import PreparedPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ginfer.prompt import Message, PromptOptions, Tool

EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
_PRESETS = {
    True: SamplingDefaults(temperature=1.0, top_p=0.95, top_k=20),
    False: SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=1.5),
}
# Stands for a late system block while the template runs; escaped text never holds MARK + "2". Being
# wrapped as a tool response, it does not count as a user query.
_PLACEHOLDER = f"<tool_response>{MARK}2{{}}{MARK}2</tool_response>"
_PLACED = re.compile(
    rf"<\|im_start\|>user\n<tool_response>{MARK}2(\d+){MARK}2</tool_response><\|im_end\|>\n"
)


class QwenFrontend:
    """Implements `Frontend`. Resources: tokenizer.json, tokenizer_config.json, chat_template.jinja
    and generation_config.json. Raises ArtifactError naming the one that is unusable."""

    def __init__(self, resources: Mapping[str, bytes]) -> None:
        try:
            tokenizer, config, template, generation = (
                resources[name]
                for name in (
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "chat_template.jinja",
                    "generation_config.json",
                )
            )
        except KeyError as error:
            raise ArtifactError(f"the package lacks the resource {error.args[0]}") from None
        self._tokenizer = Tokenizer(tokenizer, config)
        self._template = ChatTemplate(template, escape=self._tokenizer.escape)
        self._stop_token_ids = _stop_token_ids(generation)
        self._turn_start = self._tokenizer.added_token_id("<|im_start|>")
        self._reasoning_close_ids = tuple(self.encode("\n</think>\n\n"))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the package."""
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        return self._stop_token_ids

    @property
    def reasoning_close_ids(self) -> tuple[int, ...]:
        """Newline, closing tag, empty line: what the model writes at the end of its reasoning."""
        return self._reasoning_close_ids

    @property
    def reserved_token_ids(self) -> tuple[int, ...]:
        """Control tokens and the tags of the reasoning: no grammar reads them as text."""
        tags = (self._tokenizer.added_token_id(tag) for tag in ("<think>", "</think>"))
        return (*sorted(self._tokenizer.control_ids), *tags)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens recognised."""
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are not UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token."""
        return self._tokenizer.token_bytes(token_id)

    def sampling_defaults(self, *, thinking: bool) -> SamplingDefaults:
        """The preset of the mode."""
        return _PRESETS[thinking]

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: PromptOptions
    ) -> PreparedPrompt:
        """Render and tokenise a conversation. Raises RequestError naming the message or option."""
        effort = options.effort
        if effort not in (None, "none", *EFFORTS):
            raise RequestError(
                f"reasoning_effort is {effort!r}; legal: none, {', '.join(EFFORTS)}",
                code="reasoning_effort_not_supported",
                param="reasoning_effort",
            )
        thinking = options.thinking and effort != "none"
        chosen = {"reasoning_effort": EFFORTS[effort]} if effort in EFFORTS else {}
        turns, late = self._turns(messages)
        text = self._template.render(
            messages=turns,
            tools=[tool.wire for tool in tools] or None,
            enable_thinking=thinking,
            preserve_thinking=options.preserve_thinking,
            add_generation_prompt=True,
            **chosen,
        )
        text = _PLACED.sub(lambda m: f"<|im_start|>system\n{late[int(m[1])]}<|im_end|>\n", text)
        token_ids = self._tokenizer.encode(text, escaped=True)
        # Only the template writes this control token, and no cached or replayed piece holds one.
        turn_starts = np.flatnonzero(token_ids == self._turn_start)
        return PreparedPrompt(
            token_ids=token_ids,
            opens_reasoning=thinking,
            turn_starts=tuple(turn_starts[1:].tolist()),
            text=self._tokenizer.unescape(text),
        )

    def remember(self, prompt: PreparedPrompt, token_ids: Sequence[int]) -> bool:
        """Bind the turn that answered `prompt` to its generated ids (without the stop token): when
        it comes back word for word in a later prompt, it is replayed id for id. False if the ids
        hold a control token or a broken character."""
        start = int(np.flatnonzero(prompt.token_ids == self._turn_start)[-1]) + 1
        turn = [*prompt.token_ids[start:].tolist(), *token_ids]
        try:
            text = self._tokenizer.decode_bytes(turn).decode()
        except UnicodeDecodeError:
            return False
        return self._tokenizer.remember(text, turn)

    def stream_decoder(
        self, *, opens_reasoning: bool, raw: bool = False, keep_special_tokens: bool = False
    ) -> QwenStreamDecoder:
        """A decoder for one response."""
        return QwenStreamDecoder(
            self._tokenizer,
            stop_token_ids=self._stop_token_ids,
            opens_reasoning=opens_reasoning,
            raw=raw,
            keep_special_tokens=keep_special_tokens,
        )

    def output_parser(self, tools: Sequence[Tool]) -> QwenOutputParser:
        """A parser for one response; without tools, tool markup is text."""
        return QwenOutputParser(tools)

    def _turns(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages as the template takes them, and the text of the late system blocks."""
        turns: list[dict[str, Any]] = []
        late: list[str] = []
        for i, message in enumerate(messages):
            _check(message, i)
            text = self._tokenizer.escape(message.text)
            if message.role not in ("system", "developer"):
                turns.append(self._turn(message, text))
            elif i == 0:
                turns.append({"role": "system", "content": text})
            elif text := text.strip():
                turns.append({"role": "user", "content": _PLACEHOLDER.format(len(late))})
                late.append(text)
        return turns, late

    def _turn(self, message: Message, text: str) -> dict[str, Any]:
        escape = self._tokenizer.escape
        turn: dict[str, Any] = {"role": message.role, "content": text}
        if message.reasoning is not None:
            turn["reasoning_content"] = escape(message.reasoning)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": escape(call.name),
                        "arguments": {
                            escape(key): escape(value) if isinstance(value, str) else value
                            for key, value in call.arguments.items()
                        },
                    },
                }
                for call in message.tool_calls
            ]
        return turn


def _check(message: Message, i: int) -> None:
    if message.role not in ROLES:
        raise RequestError(
            f"messages.{i}.role is {message.role!r}; legal: {', '.join(ROLES)}",
            code="unsupported_role",
            param=f"messages.{i}.role",
        )
    for part in message.content:
        if part.kind != "text":
            seen = part.kind in ("image", "video")
            raise UnsupportedError(
                f"messages.{i} has a part of kind {part.kind!r}; this server takes text only",
                code="vision_disabled" if seen else "modality_not_supported",
                param=f"messages.{i}.content",
            )


def _stop_token_ids(generation_config: bytes) -> tuple[int, ...]:
    try:
        ids = json.loads(generation_config)["eos_token_id"]
    except (ValueError, KeyError, TypeError):
        ids = None
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise ArtifactError("generation_config.json has no eos_token_id")
    return tuple(ids)
