"""Trace: what the request log tells about one request of a protocol, from arrival to end."""

from __future__ import annotations

import re
import time
from asyncio import CancelledError
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

from appliance.errors import as_error
from ginfer.engine.request import Failed, Finished, SamplingParams, Started
from ginfer.errors import OverloadedError, QueueTimeoutError, UnavailableError

if TYPE_CHECKING:
    from appliance.protocols.generation import Generation
    from appliance.protocols.turn import CallTally
    from appliance.request_log import RequestLog
    from ginfer.engine.request import Event
    from ginfer.engine.request import Request as EngineRequest
    from ginfer.errors import GInferError

MODEL_CHARS = 100
SAFE_PARAM = re.compile(r"[A-Za-z0-9_.\[\]-]{1,100}")
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "logit_bias")
OWN_WORDS = (OverloadedError, QueueTimeoutError, UnavailableError)  # messages that quote nobody


class Trace:
    """Writes request_rejected, or request_start and then request_done or request_error. A context
    manager around the whole exchange: an exception that passes through is the request's end."""

    def __init__(
        self, log: RequestLog, *, request_id: str, protocol: str, key_name: str | None
    ) -> None:
        self._log = log
        self._began = time.perf_counter()
        self._request: dict[str, Any] = {"request_id": request_id, "protocol": protocol}
        if key_name is not None:
            self._request["key"] = key_name
        self._prepare_s = 0.0
        self._reuse_path, self._recomputed = "none", 0
        self._phase = "prepare"
        self._over = False

    def prepared(self, generation: Generation, request: EngineRequest) -> None:
        """The request is checked, rendered and tokenised."""
        self._prepare_s = time.perf_counter() - self._began
        self._phase = "queue"
        if self._log.enabled:
            self._request |= _description(generation, request)

    def accepted(self) -> None:
        """The engine has it."""
        self._phase = ""
        self._log.write("request_start", request=self._request, preparation_seconds=self._prepare_s)

    def follow(self, event: Event) -> None:
        """An event of the engine, before the client has seen it."""
        if isinstance(event, Started):
            self._reuse_path, self._recomputed = event.reuse_path, event.recomputed_tokens
        elif isinstance(event, Failed):
            self.failed(event.error)

    def done(self, event: Finished, tally: CallTally) -> None:
        """The answer is complete."""
        if self._over:
            return
        self._over = True
        usage, timings = event.usage, event.timings
        result = {
            "finish_reason": event.reason.value,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "draft_tokens": usage.draft_tokens,
            "accepted_draft_tokens": usage.accepted_tokens,
            "computed_prefill_tokens": usage.prompt_tokens - usage.cached_tokens,
            "prefix_cache_hit_tokens": usage.cached_tokens,
            "prefix_reuse_path": self._reuse_path,
            "prefix_snapshot_depth": usage.cached_tokens,  # a hit ends at its snapshot
            "prefix_recomputed_tokens": self._recomputed,
            "tool_call_count": tally.completed,
            "malformed_tool_call_count": tally.broken + tally.as_text,
        }
        seconds = {
            "prepare": self._prepare_s,
            "queue": timings.queue_s,
            "ttft": timings.first_token_s,
            "prefill": timings.prefill_s,
            "decode": timings.decode_s,
            "total": time.perf_counter() - self._began,
        }
        self._log.write(
            "request_done", request=self._request, result=result, timings_seconds=seconds
        )

    def failed(self, error: GInferError) -> None:
        """The request ended with an error; later ends are not written."""
        if self._over:
            return
        self._over = True
        members = {"request": self._request, "error": _report(error)}
        if self._phase:
            self._log.write("request_rejected", phase=self._phase, **members)
        else:
            self._log.write("request_error", **members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, CancelledError):
            self.failed(UnavailableError("the client is gone", code="client_disconnected"))
        elif error is not None:
            self.failed(as_error(error))


def _description(generation: Generation, request: EngineRequest) -> dict[str, Any]:
    """What was asked, without a word of it."""
    parts = [part for message in generation.messages for part in message.content]
    sampling = {name: getattr(request.sampling, name) for name in SAMPLING_FIELDS}
    return {
        "response_id": request.request_id,
        "model": generation.model[:MODEL_CHARS],
        "stream": generation.stream,
        "message_count": len(generation.messages),
        "media_item_count": sum(part.kind != "text" for part in parts),
        "prompt_tokens": request.prompt.num_tokens,
        "requested_output_tokens": generation.max_tokens,
        "tool_count": len(generation.tools),
        "tool_choice": generation.tool_choice,
        "has_tool_history": generation.has_tool_history,
        "enable_thinking": generation.options.thinking,
        "preserve_thinking": generation.options.preserve_thinking,
        "thinking_budget": generation.thinking_budget,
        "sampling": sampling,
    }


def _report(error: GInferError) -> dict[str, Any]:
    """An error without what it quotes of the request."""
    param = error.param if error.param and SAFE_PARAM.fullmatch(error.param) else None
    report = {"code": error.code, "status": error.status, "param": param}
    return report | ({"message": error.message} if isinstance(error, OWN_WORDS) else {})
