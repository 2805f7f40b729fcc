"""Round scheduler: pure functions from what waits and runs to the next unit of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.engine.round import DecodeUnit, PrefillUnit
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.engine.round import RoundView, Unit


def effective_output(num_prompt: int, max_tokens: int, max_context: int) -> int:
    """Tokens that a request can draw at most. The last one is never fed back, so it needs no
    place in the context."""
    return min(max_tokens, max_context - num_prompt + 1)


def entitled_pages(num_prompt: int, num_output: int) -> int:
    """K/V pages of a request, fixed at admission: everything but its last drawn token."""
    return div_ceil(num_prompt + num_output - 1, PAGE_TOKENS)


def may_admit(view: RoundView) -> bool:
    """Whether this turn may admit a request: prefill has no owner, and running requests have had
    their decode round."""
    return view.owner is None and (view.decoded_last or not view.ready)


def chunk_end(start: int, num_prompt: int, prefill_chunk: int) -> int:
    """End of the chunk that starts at `start`: the prompt's end, or an absolute multiple of 64."""
    limit = start + prefill_chunk
    return num_prompt if limit >= num_prompt else limit // PAGE_TOKENS * PAGE_TOKENS


def next_unit(view: RoundView, prefill_chunk: int) -> Unit | None:
    """The next unit; prefill chunks and decode rounds alternate strictly while both have work."""
    if view.owner is not None and (view.decoded_last or not view.ready):
        lane, start, num_prompt = view.owner
        stop = chunk_end(start, num_prompt, prefill_chunk)
        stop = next((point for point in view.points if start < point < stop), stop)
        return PrefillUnit(lane, start, stop, last=stop == num_prompt)
    return DecodeUnit(view.ready) if view.ready else None
