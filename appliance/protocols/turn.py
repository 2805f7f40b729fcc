"""OutputTurn: engine deltas to output events, one response at a time; where its end is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ginfer.engine.request import FinishReason
from ginfer.errors import GInferError
from ginfer.frontend.base import CallBroken, CallEnded
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from appliance.protocols.generation import Generation
    from ginfer.engine.request import Delta, TokenLogprob
    from ginfer.frontend.base import Frontend, OutputEvent

LIMITS = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_LIMIT)


class MalformedToolCallError(GInferError):
    """The model announced a call and ended its turn without completing it; a retry may help."""

    code = "tool_call_malformed"
    status = 502


@dataclass
class CallTally:
    """What became of the tool calls of one response: completed, announced and then broken or cut
    off, shown as text because they were no calls."""

    completed: int = 0
    broken: int = 0
    as_text: int = 0


class OutputTurn:
    """One response being parsed: channel text to output events, and the state of its calls."""

    def __init__(self, generation: Generation, frontend: Frontend) -> None:
        self._parser = frontend.output_parser(generation.active_tools)
        self._frontend = frontend
        self._wants_logprobs = generation.logprobs is not None
        self._tally = generation.tally
        self._num_ended = 0
        self._broken: str | None = None
        self._closed = False

    def feed(self, delta: Delta) -> list[OutputEvent]:
        """Output events that the delta makes certain."""
        return self._watch(self._parser.feed(delta.channel, delta.text))

    def close(self) -> list[OutputEvent]:
        """What was held back; nothing the second time."""
        if self._closed:
            return []
        self._closed = True
        events = self._watch(self._parser.finish())
        self._tally.as_text += self._parser.num_unannounced
        return events

    def finish_reason(self, reason: FinishReason) -> str:
        """length at a limit, tool_calls if a call was completed, else stop.

        Raises MalformedToolCallError when an announced call is unfinished although no limit and no
        cancellation cut it."""
        if reason in LIMITS:
            return "length"
        if self._broken is not None and reason is not FinishReason.CANCELLED:
            raise MalformedToolCallError(f"the model did not complete a tool call: {self._broken}")
        return "tool_calls" if self._num_ended else "stop"

    def logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        """Entries of the answer's tokens in the delta, when the request wants them."""
        if not self._wants_logprobs or delta.channel is not Channel.CONTENT:
            return []
        return [self._entry(entry) for entry in delta.logprobs]

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._frontend.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._frontend.token_bytes(token_id)),
        }

    def _watch(self, events: list[OutputEvent]) -> list[OutputEvent]:
        for event in events:
            if isinstance(event, CallEnded):
                self._num_ended += 1
                self._tally.completed += 1
            elif isinstance(event, CallBroken):
                self._broken = event.reason
                self._tally.broken += 1
        return events
