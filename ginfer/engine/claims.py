"""Claims of requests on lanes and pages, as admission weighs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.cache import INTERVAL_TOKENS
from ginfer.engine.admission import Claim
from ginfer.engine.scheduler import entitled_pages
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from ginfer.cache import Hit, Sequence
    from ginfer.engine.request import Request


def waiting_claim(request: Request, limit: int, hit: Hit, prefill_chunk: int) -> Claim:
    """What a request that may draw `limit` tokens would take: pages that others hold, the rest of
    its own. A page that nobody holds may be evicted before it enters, so it counts as its own."""
    prompt = request.prompt
    shared = _held_pages(hit)
    return Claim(
        key=request.request_id,
        pages=np.array(shared, np.int32),
        reserve=entitled_pages(prompt.num_tokens, limit) - len(shared),
        work=_chunks(prompt.num_tokens - hit.num_tokens, prefill_chunk) + limit - 1,
    )


def running_claim(request_id: str, sequence: Sequence, work: tuple[int, int], chunk: int) -> Claim:
    """What a running request has and may still take. work: tokens of its prompt that are to be
    computed, tokens that it may still draw."""
    left, draws = work
    return Claim(
        key=request_id,
        pages=np.array(sequence.pages, np.int32),
        reserve=sequence.num_pages - len(sequence.pages),
        work=_chunks(left, chunk) + draws,
    )


def _chunks(num_tokens: int, prefill_chunk: int) -> int:
    """Most chunks that so many prompt tokens take; snapshots cut some of them."""
    cuts = 2 + 2 * num_tokens // INTERVAL_TOKENS
    return div_ceil(num_tokens, prefill_chunk) + cuts if num_tokens else 0


def _held_pages(hit: Hit) -> list[int]:
    """Pages in front of a hit that running sequences hold."""
    node = hit.snapshot.node if hit.snapshot is not None else None
    pages: list[int] = []
    while node is not None:
        pages += node.pages if node.refs else []
        node = node.parent
    return pages
