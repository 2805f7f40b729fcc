"""What a model's frontend offers: prompts in, output events back.

The engine process uses the tokenizer, the stream decoder and the forced tokens; the process that
speaks HTTP uses `prepare` and the output parser, which turns channel text into reasoning, content
and tool calls. Pure host code, one per model family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.prompt import Channel, Message, PreparedPrompt, PromptOptions, Tool


@dataclass(frozen=True)
class ReasoningText:
    """New reasoning text."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """New visible text."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """Tool call number `index` (from 0) is announced: its name is complete and registered."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More argument text. All fragments of a call joined are one JSON object once the call has
    ended."""

    index: int
    fragment: str


@dataclass(frozen=True)
class CallEnded:
    """The call is complete."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """An announced call ended unfinished (`reason` says how); its arguments are not valid JSON."""

    index: int
    reason: str


OutputEvent = ReasoningText | ContentText | CallStarted | CallArguments | CallEnded | CallBroken


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """The model's preset for one mode."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class StreamDecoder(Protocol):
    """Token ids to channel text, incremental and UTF-8 safe; holds back what is still ambiguous."""

    @property
    def channel(self) -> Channel:
        """Channel of the next token."""

    def feed(self, token_id: int) -> list[tuple[Channel, str]]:
        """Take one token; return the text that is now certain, in order."""

    def finish(self) -> list[tuple[Channel, str]]:
        """Return what was held back; an incomplete UTF-8 tail becomes U+FFFD."""


class OutputParser(Protocol):
    """Channel text to output events, incremental: any split of the same text gives the same events
    joined. num_unannounced: calls that began and were none (no such tool, wrong syntax), which is
    why they are content."""

    num_unannounced: int

    def feed(self, channel: Channel, text: str) -> list[OutputEvent]:
        """Take text; return every event that is now certain."""

    def finish(self) -> list[OutputEvent]:
        """The response has ended; return what was held back and close or break open calls."""


class Frontend(Protocol):
    """The frontend of one model, built from the resources of its package."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""

    @property
    def reasoning_close_ids(self) -> tuple[int, ...]:
        """Ids that the engine forces to close the think block when its budget is spent."""

    @property
    def reserved_token_ids(self) -> tuple[int, ...]:
        """Ids that are no text of a constrained content: control tokens, tags of the reasoning."""

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: PromptOptions
    ) -> PreparedPrompt:
        """Render and tokenise. Raises RequestError naming the message or option."""

    def remember(self, prompt: PreparedPrompt, token_ids: Sequence[int]) -> bool:
        """Bind the turn that answered `prompt` to its generated ids (without the stop token), so
        that it is replayed id for id when it comes back word for word; False if it cannot be."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens recognised."""

    def sampling_defaults(self, *, thinking: bool) -> SamplingDefaults:
        """The preset of contracts 1.3 for the mode."""

    def stream_decoder(
        self, *, opens_reasoning: bool, raw: bool = False, keep_special_tokens: bool = False
    ) -> StreamDecoder:
        """A decoder for one response (engine side)."""

    def output_parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser for one response (caller's side); without tools, tool markup is text."""

    def token_text(self, token_id: int) -> str:
        """Text of one token for logprob listings; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token."""
