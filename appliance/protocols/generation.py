"""Generation: what a request of any protocol asks of the engine, checked and complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.turn import CallTally
from ginfer.engine.request import Request, StopString
from ginfer.frontend.grammar import ToolChoice, json_grammar, tool_grammar

if TYPE_CHECKING:
    from ginfer.engine.request import Delta, Finished, Started
    from ginfer.errors import GInferError
    from ginfer.frontend.base import SamplingDefaults
    from ginfer.prompt import Message, PreparedPrompt, PromptOptions, Tool


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A checked request. `max_tokens` and `options` are final: server defaults are applied.

    sampling: the request's wishes over the server's. logprobs: None = off, else the number of
    alternatives per token. tool_choice: auto, none, required (one call or more), or named: exactly
    one call, of `named_tool`. parallel_tool_calls False = at most one call. schema: JSON schema of
    the content (calls may come instead), None = text. thinking_budget: most reasoning tokens, None
    = no limit. accepted_without_effect: names of the advisory fields given.

    schema_path, tool_schema_path: where the wire has `schema`, and that of tool number {}.
    tally: what became of the calls, filled as the answer is read.
    """

    model: str
    messages: tuple[Message, ...]
    options: PromptOptions
    max_tokens: int
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    named_tool: str | None = None
    parallel_tool_calls: bool = True
    schema: dict[str, Any] | bool | None = None
    schema_path: str = "schema"
    tool_schema_path: str = "tools.{}.parameters"
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None
    stream: bool = False
    accepted_without_effect: tuple[str, ...] = ()
    tally: CallTally = field(default_factory=CallTally, compare=False, repr=False)

    @property
    def active_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is shown and may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def has_tool_history(self) -> bool:
        """Whether the conversation contains tool calls or results."""
        return any(m.tool_calls or m.role == "tool" for m in self.messages)

    def content_grammar(self) -> str | None:
        """What the content must match, None = anything. Raises RequestError naming the keyword of
        the schema that cannot be enforced."""
        if self.active_tools:
            return tool_grammar(
                self.active_tools,
                ToolChoice(
                    mode=self.tool_choice,
                    name=self.named_tool,
                    parallel=self.parallel_tool_calls,
                ),
                param=self.tool_schema_path,
                schema=self.schema,
                schema_param=self.schema_path,
            )
        return None if self.schema is None else json_grammar(self.schema, param=self.schema_path)

    def to_engine_request(
        self, prompt: PreparedPrompt, request_id: str, preset: SamplingDefaults
    ) -> Request:
        """The request as the engine takes it; `preset` is the model's for `options.thinking`.
        Raises RequestError, as `content_grammar` does."""
        return Request(
            request_id=request_id,
            prompt=prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling.resolve(
                preset, logprobs=self.logprobs, logit_bias=self.logit_bias
            ),
            stop_strings=tuple(StopString(text=text) for text in self.stop),
            reasoning_budget=self.thinking_budget,
            grammar=self.content_grammar(),
            keep_special_tokens=bool(self.active_tools) or self.has_tool_history,
        )


class StreamWriter(Protocol):
    """Builds the frames of one streamed response: `start` once, `delta` per Delta, `flush`, then
    `finish` once; `fail` instead when it ends with an error, at any point."""

    def start(self) -> list[bytes]:
        """Frames that go out at once, while the request waits."""

    def started(self, event: Started) -> list[bytes]:
        """Frames for leaving the queue."""

    def delta(self, event: Delta) -> list[bytes]:
        """Frames for new output; none while it is ambiguous."""

    def flush(self) -> list[bytes]:
        """What was held back, once the output is over; goes out before `finish`, whose error must
        not take it along."""

    def finish(self, event: Finished) -> list[bytes]:
        """The closing frames. Raises GInferError when the output cannot be called complete."""

    def fail(self, error: GInferError) -> list[bytes]:
        """The frames that end the stream with an error."""


class Collector(Protocol):
    """Builds the body of one response that is not streamed."""

    def delta(self, event: Delta) -> None:
        """Take new output."""

    def finish(self, event: Finished) -> dict[str, Any]:
        """The body. Raises GInferError when the output cannot be called complete."""
