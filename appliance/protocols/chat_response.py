"""Engine events to Chat Completions objects and chunks; the finish reason is decided here alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from appliance.protocols import frames
from appliance.protocols.openai_errors import error_body
from appliance.protocols.turn import OutputTurn
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallStarted,
    ContentText,
    ReasoningText,
)

if TYPE_CHECKING:
    from appliance.protocols.openai_chat import ChatRequest
    from ginfer.engine.request import Delta, Finished, Started, Usage
    from ginfer.errors import GInferError
    from ginfer.frontend.base import Frontend, OutputEvent


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What one response is called: `chatcmpl-` and 16 hexadecimal digits unless given. created:
    Unix seconds."""

    model: str
    created: int
    response_id: str = field(default_factory=lambda: f"chatcmpl-{token_hex(8)}")
    system_fingerprint: str | None = None

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every object of the response starts with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def call_id(self, index: int) -> str:
        """The id of tool call number `index`: `call_` and 16 hexadecimal digits."""
        return "call_" + blake2b(f"{self.response_id} {index}".encode(), digest_size=8).hexdigest()

    def call(self, index: int, name: str, arguments: str = "") -> dict[str, Any]:
        """The tool call object."""
        return {
            "id": self.call_id(index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def reasoning_members(text: str) -> dict[str, str]:
    """Reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def acceptance_report(request: ChatRequest) -> dict[str, Any]:
    """The response member that names what was accepted without effect; nothing if nothing was."""
    names = request.accepted_without_effect
    return {"ginfer": {"accepted_without_effect": list(names)}} if names else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; the stop token counts, reasoning is a part of the completion. What became of
    drafts is told where there were any."""
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.draft_tokens:
        rejected = usage.draft_tokens - usage.accepted_tokens
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = rejected
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


class ChatWriter:
    """The chunks of a streamed response: implements `StreamWriter`."""

    def __init__(self, request: ChatRequest, identity: Identity, frontend: Frontend) -> None:
        self._request = request
        self._identity = identity
        self._head = identity.head("chat.completion.chunk")
        self._turn = OutputTurn(request, frontend)
        self._held_logprobs: list[dict[str, Any]] = []  # of tokens whose text is still ambiguous

    def start(self) -> list[bytes]:
        """The role chunk; it names what was accepted without effect."""
        chunk = self._chunk({"role": "assistant", "content": ""})
        return [frames.data(chunk | acceptance_report(self._request))]

    def started(self, event: Started) -> list[bytes]:
        """Nothing: the usage at the end says it."""
        return []

    def delta(self, event: Delta) -> list[bytes]:
        """Chunks for new output; none while it is ambiguous."""
        self._held_logprobs += self._turn.logprobs(event)
        return self._chunks(self._turn.feed(event))

    def flush(self) -> list[bytes]:
        """Chunks of what was held back."""
        return self._chunks(self._turn.close())

    def finish(self, event: Finished) -> list[bytes]:
        """What `flush` has not given yet, the finish chunk, the usage chunk if wanted, `[DONE]`.

        Raises MalformedToolCallError; the chunks before it stand."""
        chunks = self.flush()
        reason = self._turn.finish_reason(event.reason)
        chunks.append(frames.data(self._chunk({}, finish_reason=reason)))
        if self._request.include_usage:
            usage = {**self._head, "choices": [], "usage": usage_body(event.usage)}
            chunks.append(frames.data(usage))
        return [*chunks, frames.DONE]

    def fail(self, error: GInferError) -> list[bytes]:
        """The error object as an event; no `[DONE]`."""
        return [frames.data(error_body(error))]

    def _chunks(self, events: list[OutputEvent]) -> list[bytes]:
        deltas = [self._wire_delta(event) for event in events]
        return [frames.data(self._chunk(delta)) for delta in deltas if delta]

    def _wire_delta(self, event: OutputEvent) -> dict[str, Any]:
        """The delta that shows an event; empty for events that show nothing."""
        match event:
            case ReasoningText(text):
                return reasoning_members(text)
            case ContentText(text):
                return {"content": text}
            case CallStarted(index, name):
                return {"tool_calls": [{"index": index, **self._identity.call(index, name)}]}
            case CallArguments(index, fragment):
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        return {}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        held, self._held_logprobs = self._held_logprobs, []
        logprobs = {"content": held, "refusal": None} if held else None
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._request.include_usage else chunk


class ChatCollector:
    """The object of a response that is not streamed: implements `Collector`."""

    def __init__(self, request: ChatRequest, identity: Identity, frontend: Frontend) -> None:
        self._request = request
        self._identity = identity
        self._head = identity.head("chat.completion")
        self._turn = OutputTurn(request, frontend)
        self._logprobs: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def delta(self, event: Delta) -> None:
        """Take new output."""
        self._logprobs += self._turn.logprobs(event)
        self._take(self._turn.feed(event))

    def finish(self, event: Finished) -> dict[str, Any]:
        """The response body. A call that a limit cut is left out of it.

        Raises MalformedToolCallError."""
        self._take(self._turn.close())
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": self._logprobs_body(),
            "finish_reason": self._turn.finish_reason(event.reason),
        }
        body = {**self._head, "choices": [choice], "usage": usage_body(event.usage)}
        return body | acceptance_report(self._request)

    def _take(self, events: list[OutputEvent]) -> None:
        for event in events:
            match event:
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ContentText(text):
                    self._content.append(text)
                case CallStarted(index, name):
                    self._names[index] = name
                    self._arguments[index] = []
                case CallArguments(index, fragment):
                    self._arguments[index].append(fragment)
                case CallBroken(index, _):
                    del self._names[index]

    def _message(self) -> dict[str, Any]:
        calls = [
            self._identity.call(index, name, "".join(self._arguments[index]))
            for index, name in sorted(self._names.items())
        ]
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if self._reasoning:
            message |= reasoning_members("".join(self._reasoning))
        return message | {"tool_calls": calls} if calls else message

    def _logprobs_body(self) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        return {"content": self._logprobs, "refusal": None}
