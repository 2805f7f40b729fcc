"""Checks of a request against the model and the capacity, before it takes a place."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ginfer.engine.scheduler import effective_output, entitled_pages
from ginfer.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from ginfer.engine.memory import Capacity
    from ginfer.engine.request import Request
    from ginfer.prompt import PreparedPrompt
    from ginfer.spec import ModelSpec


def check_request(request: Request, spec: ModelSpec, capacity: Capacity) -> None:
    """Raise RequestError naming the field, or ContextLengthError with both lengths."""
    if not request.request_id:
        raise RequestError("request_id is empty; give a unique one", param="request_id")
    _check_prompt(request.prompt, spec)
    _check_limits(request)
    ids = (*request.stop_token_ids, *(i for i, _ in request.sampling.logit_bias))
    fields = ("stop_token_ids",) * len(request.stop_token_ids) + ("logit_bias",) * len(ids)
    for token_id, field in zip(ids, fields, strict=False):
        if not 0 <= token_id < spec.num_token_ids:
            raise RequestError(
                f"{field} names token {token_id}; legal: 0 to {spec.num_token_ids - 1}", param=field
            )
    _check_length(request, capacity)


def _check_prompt(prompt: PreparedPrompt, spec: ModelSpec) -> None:
    ids = prompt.token_ids
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise RequestError(
            f"prompt token ids are {ids.dtype} of rank {ids.ndim}; give int32 of rank 1",
            param="prompt",
        )
    if len(ids) == 0:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    wrong = np.flatnonzero((ids < 0) | (ids >= spec.num_token_ids))
    if len(wrong):
        raise RequestError(
            f"prompt token {wrong[0]} is {ids[wrong[0]]}; legal: 0 to {spec.num_token_ids - 1}",
            param="prompt",
        )
    if prompt.positions is not None and (
        prompt.positions.shape != (3, len(ids)) or prompt.positions.dtype != np.int32
    ):
        raise RequestError(
            f"prompt positions are {prompt.positions.dtype} {prompt.positions.shape}; give int32 "
            f"(3, {len(ids)})",
            param="prompt",
        )
    borders = (0, *prompt.turn_starts, len(ids))
    if any(a >= b for a, b in pairwise(borders)):
        raise RequestError(
            f"prompt turns start at {prompt.turn_starts}; give ascending tokens between 1 and "
            f"{len(ids) - 1}",
            param="prompt",
        )


def _check_limits(request: Request) -> None:
    if request.max_tokens < 0:
        raise RequestError(
            f"max_tokens is {request.max_tokens}; give 0 or more", param="max_tokens"
        )
    if any(not stop.text for stop in request.stop_strings):
        raise RequestError("a stop string is empty; give at least one character", param="stop")
    if request.grammar is not None and request.ignore_eos:
        raise RequestError(
            "ignore_eos leaves a grammar without an end; give one of the two", param="ignore_eos"
        )
    if request.reasoning_budget is not None:
        if request.reasoning_budget < 0:
            raise RequestError(
                f"reasoning_budget is {request.reasoning_budget}; give 0 or more",
                param="reasoning_budget",
            )
        if request.raw:
            raise RequestError(
                "reasoning_budget needs channels; leave it out of a raw request",
                param="reasoning_budget",
            )


def _check_length(request: Request, capacity: Capacity) -> None:
    num_prompt = request.prompt.num_tokens
    if num_prompt > capacity.max_context:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens; the context holds {capacity.max_context}",
            param="prompt",
        )
    limit = effective_output(num_prompt, max(request.max_tokens, 1), capacity.max_context)
    if entitled_pages(num_prompt, limit) > capacity.num_pages:
        raise ContextLengthError(
            f"prompt and answer need {num_prompt + limit - 1} tokens of K/V; all requests together "
            f"have {capacity.kv_capacity}; lower max_tokens",
            param="max_tokens",
        )
