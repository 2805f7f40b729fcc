"""Engine events to Responses objects and events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from appliance.protocols import frames
from appliance.protocols.openai_errors import error_body
from appliance.protocols.responses.output import Output
from appliance.protocols.turn import MalformedToolCallError, OutputTurn
from ginfer.engine.request import FinishReason

if TYPE_CHECKING:
    from appliance.protocols.responses.request import ResponsesRequest
    from ginfer.engine.request import Delta, Finished, SamplingParams, Started, Usage
    from ginfer.errors import GInferError
    from ginfer.frontend.base import Frontend

    Item = dict[str, Any]

WIRE_VALUES = ("tools", "tool_choice", "text")  # of the client, with integers of any size


class Keeper(Protocol):
    """What the server does for a response besides answering."""

    def keep(self, request: ResponsesRequest, body: dict[str, Any]) -> None:
        """Store a response that has ended, if the request wants it. Raises GInferError."""

    def seal(self, text: str) -> str:
        """Reasoning as encrypted_content."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What one response is called and how it was sampled. created: Unix seconds."""

    model: str
    created: int
    sampling: SamplingParams
    response_id: str


def new_id() -> str:
    """The id of a response."""
    return f"resp_{token_hex(16)}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts; the stop token counts, reasoning is a part of the output. No tokens are kept
    in a cache that is paid for."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Builder:
    """The response object and its output, whether streamed or not."""

    def __init__(
        self, request: ResponsesRequest, head: Head, frontend: Frontend, keeper: Keeper
    ) -> None:
        self._request = request
        self._keeper = keeper
        self._turn = OutputTurn(request, frontend)
        self._unsent: list[Item] = []
        seal = keeper.seal if request.seals_reasoning else None
        self._output = Output(head.response_id, request.toolset, seal)
        echo = {
            name: orjson.Fragment(json.dumps(value)) if name in WIRE_VALUES else value
            for name, value in request.echo.items()
        }
        self._head = {
            "id": head.response_id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "temperature": head.sampling.temperature,
            "top_p": head.sampling.top_p,
            **echo,
        }
        if request.accepted_without_effect:
            names = list(request.accepted_without_effect)
            self._head["ginfer"] = {"accepted_without_effect": names}

    def _feed(self, delta: Delta) -> list[Item]:
        logprobs = self._turn.logprobs(delta)
        return self._output.take(self._turn.feed(delta), logprobs)

    def _flush(self) -> list[Item]:
        return self._output.take(self._turn.close())

    def _end(self, finished: Finished) -> tuple[list[Item], dict[str, Any]]:
        """The last events and the final object, which is stored first. Raises
        MalformedToolCallError, or what the keeper does."""
        events = self._flush()
        status = self._status(finished.reason)
        events += self._output.end("completed" if status == "completed" else "incomplete")
        self._unsent = events  # when storing fails
        body = self._body(status, usage=usage_body(finished.usage))
        if status != "cancelled":
            self._keeper.keep(self._request, body)
        self._unsent = []
        return events, body

    def _status(self, reason: FinishReason) -> str:
        """How the response ended. Raises MalformedToolCallError."""
        told = self._turn.finish_reason(reason)
        if reason is FinishReason.CANCELLED:
            return "cancelled"
        if told == "length":
            return "incomplete"
        if self._output.malformed is not None:
            raise MalformedToolCallError(f"a tool call was malformed: {self._output.malformed}")
        return "completed"

    def _body(self, status: str, **members: Any) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        completed_at = int(time.time()) if status == "completed" else None
        return {
            **self._head,
            "status": status,
            "completed_at": completed_at,
            "error": None,
            "incomplete_details": incomplete,
            "output": self._output.items if status != "in_progress" else [],
            "usage": None,
            **members,
        }


class ResponsesWriter(_Builder):
    """The events of a streamed response: implements `StreamWriter`."""

    def __init__(
        self, request: ResponsesRequest, head: Head, frontend: Frontend, keeper: Keeper
    ) -> None:
        super().__init__(request, head, frontend, keeper)
        self._sequence_number = 0

    def start(self) -> list[bytes]:
        """The response is created and in progress."""
        body = self._body("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._frames([{"type": kind, "response": body} for kind in kinds])

    def started(self, event: Started) -> list[bytes]:
        """Nothing: the usage at the end says it."""
        return []

    def delta(self, event: Delta) -> list[bytes]:
        """Events for new output; none while it is ambiguous."""
        return self._frames(self._feed(event))

    def flush(self) -> list[bytes]:
        """Events of what was held back."""
        return self._frames(self._flush())

    def finish(self, event: Finished) -> list[bytes]:
        """The item that is open is closed; response.completed, .incomplete or .cancelled.

        Raises MalformedToolCallError, or what storing raises."""
        events, body = self._end(event)
        return self._frames([*events, {"type": f"response.{body['status']}", "response": body}])

    def fail(self, error: GInferError) -> list[bytes]:
        """The item that is open is closed, incomplete; response.failed with the error."""
        events = self._unsent + self._output.end("incomplete")
        told = error_body(error)["error"]
        body = self._body("failed", error=told)
        return self._frames([*events, {"type": "response.failed", "response": body}])

    def _frames(self, events: list[Item]) -> list[bytes]:
        made = []
        for event in events:
            numbered = {**event, "sequence_number": self._sequence_number}
            made.append(frames.event(event["type"], numbered))
            self._sequence_number += 1
        return made


class ResponsesCollector(_Builder):
    """The object of a response that is not streamed: implements `Collector`."""

    def delta(self, event: Delta) -> None:
        """Take new output."""
        self._feed(event)

    def finish(self, event: Finished) -> dict[str, Any]:
        """The response body. Raises MalformedToolCallError, or what storing raises."""
        return self._end(event)[1]
