"""Engine events to Anthropic messages and their stream events, from one account of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import orjson

from appliance.protocols import frames
from appliance.protocols.anthropic_errors import error_body
from appliance.protocols.messages_fields import CLEAR_THINKING
from appliance.protocols.turn import OutputTurn
from ginfer.engine.request import FinishReason
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    ReasoningText,
)

if TYPE_CHECKING:
    from appliance.protocols.anthropic_messages import MessagesRequest
    from appliance.protocols.thinking_signature import ThinkingSigner
    from ginfer.engine.request import Delta, Finished, Started, Usage
    from ginfer.errors import GInferError
    from ginfer.frontend.base import Frontend, OutputEvent

PING = frames.event("ping", {"type": "ping"})


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What one response is called, who signs its thinking, and what was cut from its history (None
    = not asked to). The id is `msg_` and 16 hexadecimal digits unless given."""

    signer: ThinkingSigner
    applied_edits: tuple[dict[str, Any], ...] | None = None
    response_id: str = field(default_factory=lambda: f"msg_{token_hex(8)}")

    def call_id(self, index: int) -> str:
        """The id of tool call number `index`: `toolu_` and 16 hexadecimal digits."""
        data = f"{self.response_id} {index}".encode()
        return "toolu_" + blake2b(data, digest_size=8).hexdigest()


def applied_edits(
    request: MessagesRequest, frontend: Frontend
) -> tuple[dict[str, Any], ...] | None:
    """The report of what context_management cut, None when it was not given."""
    cleared = request.cleared
    if not cleared:
        return None if cleared is None else ()
    num_tokens = sum(len(frontend.encode(text)) for text in cleared)
    edit = {
        "type": CLEAR_THINKING,
        "cleared_thinking_turns": len(cleared),
        "cleared_input_tokens": num_tokens,
    }
    return (edit,)


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; the prompt is the sum of the input counts, reused tokens are those read."""
    return {
        **_input_counts(usage.prompt_tokens, usage.cached_tokens),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _input_counts(prompt_tokens: int, cached_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


class Blocks:
    """The content blocks of one response: output events to the events of the protocol, each a
    dictionary with type and index. A call that breaks is never stopped; what comes after it has
    the next index."""

    def __init__(self, origin: Origin, request: MessagesRequest) -> None:
        self._origin = origin
        self._hide_thinking = request.hide_thinking
        self._unstreamed = request.unstreamed
        self._held: list[str] | None = None  # input of the open call, if it is sent in one piece
        self._index = -1  # of the newest block
        self._kind: str | None = None  # of the open block: thinking, text, tool_use
        self._thinking: list[str] = []  # text of the open thinking block

    def take(self, event: OutputEvent) -> list[dict[str, Any]]:
        """The events that show an output event."""
        match event:
            case ReasoningText(text):
                events = self._continue("thinking", {"thinking": "", "signature": ""})
                self._thinking.append(text)
                if not self._hide_thinking:
                    events.append(self._delta("thinking_delta", thinking=text))
                return events
            case ContentText(text):
                return [*self._continue("text", {"text": ""}), self._delta("text_delta", text=text)]
            case CallStarted(index, name):
                self._held = [] if name in self._unstreamed else None
                call = {"id": self._origin.call_id(index), "name": name, "input": {}}
                return [*self.stop(), self._start("tool_use", call)]
            case CallArguments(_, fragment) if self._held is not None:
                self._held.append(fragment)
            case CallArguments(_, fragment):
                return [self._delta("input_json_delta", partial_json=fragment)]
            case CallEnded():
                held, self._held = self._held, None
                whole = (
                    [self._delta("input_json_delta", partial_json="".join(held))] if held else []
                )
                return [*whole, *self.stop()]
            case CallBroken():
                self._kind = None
        return []

    def finish(self) -> list[dict[str, Any]]:
        """The events that close the last block; an answer without any gets an empty one."""
        if self._index < 0:
            return [self._start("text", {"text": ""}), *self.stop()]
        return self.stop()

    def stop(self) -> list[dict[str, Any]]:
        """The events that close the open block; none if none is open."""
        if self._kind is None:
            return []
        events = []
        if self._kind == "thinking":
            text, signer = "".join(self._thinking), self._origin.signer
            signature = signer.seal(text) if self._hide_thinking else signer.sign(text)
            events.append(self._delta("signature_delta", signature=signature))
            self._thinking = []
        self._kind = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _continue(self, kind: str, members: dict[str, Any]) -> list[dict[str, Any]]:
        """The events that make a block of this kind the open one."""
        return [] if self._kind == kind else [*self.stop(), self._start(kind, members)]

    def _start(self, kind: str, members: dict[str, Any]) -> dict[str, Any]:
        self._index += 1
        self._kind = kind
        block = {"type": kind, **members}
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **members: str) -> dict[str, Any]:
        delta = {"type": kind, **members}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _Answer:
    """What a streamed and a whole response have in common."""

    def __init__(self, request: MessagesRequest, origin: Origin, frontend: Frontend) -> None:
        self._request = request
        self._origin = origin
        self._turn = OutputTurn(request, frontend)
        self._blocks = Blocks(origin, request)

    def _feed(self, event: Delta) -> list[dict[str, Any]]:
        return self._shown(self._turn.feed(event))

    def _close(self) -> list[dict[str, Any]]:
        return self._shown(self._turn.close())

    def _shown(self, events: list[OutputEvent]) -> list[dict[str, Any]]:
        return [shown for event in events for shown in self._blocks.take(event)]

    def _end(self, event: Finished) -> dict[str, Any]:
        """stop_reason and stop_sequence. Raises MalformedToolCallError."""
        reason = self._turn.finish_reason(event.reason)
        if event.reason is FinishReason.CONTEXT_LIMIT:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        if reason == "stop" and event.reason is FinishReason.STOP_STRING:
            return {"stop_reason": "stop_sequence", "stop_sequence": event.stop}
        names = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        return {"stop_reason": names[reason], "stop_sequence": None}

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The message before its end; it tells what happened to the request."""
        message: dict[str, Any] = {
            "id": self._origin.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        report = {
            "accepted_without_effect": list(self._request.accepted_without_effect),
            "canonicalised": list(self._request.canonicalised),
        }
        report = {name: names for name, names in report.items() if names}
        return message | {"ginfer": report} if report else message

    def _context_management(self) -> dict[str, Any]:
        """The member that reports what was cut from the history, when the request asked for it."""
        edits = self._origin.applied_edits
        return {} if edits is None else {"context_management": {"applied_edits": list(edits)}}


class MessagesWriter(_Answer):
    """The events of a streamed response: implements `StreamWriter`."""

    def start(self) -> list[bytes]:
        """A ping: the message starts when its reused tokens are known."""
        return [PING]

    def started(self, event: Started) -> list[bytes]:
        """message_start, with the input counts."""
        usage = _input_counts(event.prompt_tokens, event.cached_tokens) | {"output_tokens": 0}
        return _frames([{"type": "message_start", "message": self._message(usage)}])

    def delta(self, event: Delta) -> list[bytes]:
        """Events for new output; none while it is ambiguous."""
        return _frames(self._feed(event))

    def flush(self) -> list[bytes]:
        """Events of what was held back."""
        return _frames(self._close())

    def finish(self, event: Finished) -> list[bytes]:
        """What `flush` has not given yet, the end of the last block, message_delta, message_stop.

        Raises MalformedToolCallError; the events before it stand."""
        events = self._close()
        delta = {"type": "message_delta", "delta": self._end(event)}
        delta |= {"usage": usage_body(event.usage)} | self._context_management()
        return _frames([*events, *self._blocks.finish(), delta, {"type": "message_stop"}])

    def fail(self, error: GInferError) -> list[bytes]:
        """The error event; nothing follows it."""
        return _frames([error_body(error)])


class MessagesCollector(_Answer):
    """The message of a response that is not streamed: implements `Collector`."""

    def __init__(self, request: MessagesRequest, origin: Origin, frontend: Frontend) -> None:
        super().__init__(request, origin, frontend)
        self._content: dict[int, dict[str, Any]] = {}  # blocks by index
        self._parts: dict[int, list[str]] = {}
        self._whole: set[int] = set()  # blocks that were stopped

    def delta(self, event: Delta) -> None:
        """Take new output."""
        self._take(self._feed(event))

    def finish(self, event: Finished) -> dict[str, Any]:
        """The message. A call that a limit cut is left out of it.

        Raises MalformedToolCallError."""
        self._take(self._close())
        end = self._end(event)
        self._take(self._blocks.finish())
        message = self._message(usage_body(event.usage))
        content = [self._block(index) for index in sorted(self._whole)]
        return message | end | {"content": content} | self._context_management()

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            index = event["index"]
            match event["type"]:
                case "content_block_start":
                    self._content[index] = event["content_block"]
                    self._parts[index] = []
                case "content_block_stop":
                    self._whole.add(index)
                case _:
                    self._add(index, event["delta"])

    def _add(self, index: int, delta: dict[str, str]) -> None:
        match delta["type"]:
            case "thinking_delta":
                self._parts[index].append(delta["thinking"])
            case "text_delta":
                self._parts[index].append(delta["text"])
            case "input_json_delta":
                self._parts[index].append(delta["partial_json"])
            case "signature_delta":
                self._content[index]["signature"] = delta["signature"]

    def _block(self, index: int) -> dict[str, Any]:
        block, text = self._content[index], "".join(self._parts[index])
        match block["type"]:
            case "tool_use":
                return block | {"input": orjson.loads(text)}
            case kind:
                return block | {kind: text}


def _frames(events: list[dict[str, Any]]) -> list[bytes]:
    return [frames.event(event["type"], event) for event in events]
