"""Request and events: what a caller hands to the engine, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from ginfer.errors import GInferError, RequestError
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from ginfer.prompt import PreparedPrompt

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    OUTPUT_LIMIT = "output_limit"  # max_tokens reached
    CONTEXT_LIMIT = "context_limit"  # max_context reached
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Raises RequestError naming the field.

    temperature 0 = greedy (penalties, bias and mask still apply). top_k 0 = no limit. seed None =
    fresh per request.
    logprobs None = off, n = the chosen token and the n best. logit_bias: (token id, value) pairs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 2),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} is {value}; legal: {low} to {high}", param=name)
        for name, low, high in (
            ("top_k", 0, 1 << 31),
            ("seed", 0, 1 << 64),
            ("logprobs", 0, MAX_TOP_LOGPROBS + 1),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value < high:
                raise RequestError(f"{name} is {value}; legal: {low} to {high - 1}", param=name)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias names {len(self.logit_bias)} tokens; legal: up to {MAX_LOGIT_BIAS}",
                param="logit_bias",
            )
        for token_id, value in self.logit_bias:
            if not (isfinite(value) and -100 <= value <= 100):
                raise RequestError(
                    f"logit_bias of token {token_id} is {value}; legal: -100 to 100",
                    param="logit_bias",
                )


@dataclass(frozen=True, kw_only=True)
class StopString:
    """Text that ends the response when it appears in its channel; it is not shown unless
    `include`."""

    text: str
    channel: Channel = Channel.CONTENT
    include: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. `request_id` is unique among running requests.

    stop_token_ids: in addition to the model's own. reasoning_budget: most tokens of the think
    block, None = no limit; at the limit the engine forces the closing tag. raw: no channel split,
    special tokens visible, everything is content.
    keep_special_tokens: special tokens stay visible in content (needed when the caller parses tool
    calls).
    ignore_eos: the model's own stop tokens do not end the response (benchmarks).
    grammar: llguidance text that the content must match (see engine.grammar); reasoning is free.
    """

    request_id: str
    prompt: PreparedPrompt
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[StopString, ...] = ()
    reasoning_budget: int | None = None
    raw: bool = False
    keep_special_tokens: bool = False
    ignore_eos: bool = False
    grammar: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Logprob of one generated token and of the best alternatives (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a request. completion_tokens counts the stop token; reasoning_tokens is a
    part of it. draft_tokens were verified for it, accepted_tokens of them accepted."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of a request: waiting in the queue, prefill, first token since submission, decode,
    total."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Started:
    """The request left the queue; the first `cached_tokens` of its prompt are reused, by the named
    path: 'append' to an earlier response, from a 'snapshot' before its end, or 'none'. The
    `recomputed_tokens` behind them are computed again although K/V of them is here: no recurrent
    state was kept so deep."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    reuse_path: str
    recomputed_tokens: int = 0


class Delta(NamedTuple):
    """New output of one channel: text that is safe to show, the token ids behind it so far unsent,
    their logprobs when wanted. Text and ids may arrive at different times (text is held back while
    ambiguous)."""

    request_id: str
    channel: Channel
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Terminal: the response is complete. `stop` is the stop string or token text that ended it,
    if any."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Terminal: the request ended with an error."""

    request_id: str
    error: GInferError


Event = Started | Delta | Finished | Failed


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an open engine is; constant until it restarts. Capacities are tokens."""

    model_id: str
    weights_id: str
    package_digest: str
    backend: str
    max_context: int
    kv_capacity: int
    max_concurrency: int
    max_pending: int
