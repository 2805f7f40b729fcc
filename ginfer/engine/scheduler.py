"""Round scheduler: pure functions from what waits and runs to the next unit of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.engine.chunk_plan import has_room, plan_chunk
from ginfer.engine.round import DecodeUnit, PrefillUnit
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.engine.chunk_plan import ChunkLimits
    from ginfer.engine.round import RoundView, Unit


def effective_output(num_prompt: int, max_tokens: int, max_context: int) -> int:
    """Tokens that a request can draw at most. The last one is never fed back, so it needs no
    place in the context."""
    return min(max_tokens, max_context - num_prompt + 1)


def entitled_pages(num_prompt: int, num_output: int) -> int:
    """K/V pages of a request, fixed at admission: everything but its last drawn token."""
    return div_ceil(num_prompt + num_output - 1, PAGE_TOKENS)


def may_admit(view: RoundView, limits: ChunkLimits) -> bool:
    """Whether this turn may admit a request: the next chunk has columns left, and running requests
    have had their decode round."""
    return _may_prefill(view) and has_room(view.prompts, limits)


def next_unit(view: RoundView, limits: ChunkLimits) -> Unit | None:
    """The next unit; prefill chunks and decode rounds alternate strictly while both have work."""
    if view.prompts and _may_prefill(view):
        return PrefillUnit(plan_chunk(view.prompts, limits))
    return DecodeUnit(view.ready) if view.ready else None


def _may_prefill(view: RoundView) -> bool:
    return view.decoded_last or not view.ready
