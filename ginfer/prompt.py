"""Conversations in, prepared prompts out: the values between protocols, frontend and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Channel(StrEnum):
    """Where a piece of generated text belongs."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, kw_only=True)
class ContentPart:
    """A piece of a message. kind: 'text', 'image' or 'video'; `text` for text, `source` (URL or
    bytes) for media."""

    kind: str
    text: str = ""
    source: str | bytes = ""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that an assistant message made. `arguments` is the JSON object as a dictionary, in
    the order given."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn. role: system, developer, user, assistant or tool. `reasoning` and `tool_calls`
    belong to assistants,
    `tool_call_id` to tools."""

    role: str
    content: tuple[ContentPart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text parts joined without separator."""
        return "".join(p.text for p in self.content if p.kind == "text")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; `wire` is the object that
    the template prints, in OpenAI form {"type": "function", "function": {...}}, members in the
    client's order."""

    name: str
    parameters: dict[str, Any]
    wire: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How to render. effort None = the template's default; preserve_thinking None = the server's
    default."""

    thinking: bool = True
    effort: str | None = None
    preserve_thinking: bool = True


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt as the engine takes it.

    token_ids: [T] int32. positions: [3, T] int32 (axes T, H, W), or None for plain text (0 .. T-1
    on all axes).
    rope_delta: next rotary position minus T. opens_reasoning: generation starts inside the think
    block.
    turn_starts: token positions where turns begin, ascending: the end of system and tools, every
    later turn, and last the header of the turn to be generated. Hints of where prompts part.
    text: the rendered prompt, for people.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32] | None = None
    rope_delta: int = 0
    opens_reasoning: bool = False
    turn_starts: tuple[int, ...] = ()
    text: str = field(default="", repr=False)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)
