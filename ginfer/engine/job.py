"""Job and Round: an accepted request on its way, and a unit of work on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ginfer.engine.request import Timings, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.batch import Selection
    from ginfer.cache import Sequence
    from ginfer.engine.grammar import Constraint
    from ginfer.engine.output import Output
    from ginfer.engine.rank import Flight
    from ginfer.engine.request import Event, Request

    Sink = Callable[[Event], None]


@dataclass(eq=False)
class Job:
    """One accepted request: waiting (lane -1), prefill, decode. Times are of the engine's clock."""

    request: Request
    sink: Sink
    submitted: float
    constraint: Constraint | None = None
    limit: int = 0
    output: Output | None = None
    lane: int = -1
    sequence: Sequence | None = None
    generated: list[int] = field(default_factory=list)
    in_flight: int = 0  # tokens that are ordered and not read
    cached_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def wants_more(self) -> bool:
        """Whether it can go on after the tokens that are in flight."""
        return len(self.generated) + self.in_flight < self.limit

    def timings(self, now: float) -> Timings:
        """Of a request that ends now."""
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Timings(
            queue_s=admitted - self.submitted,
            prefill_s=first - admitted,
            first_token_s=first - self.submitted,
            decode_s=now - first,
            total_s=now - self.submitted,
        )

    def logprob(self, selection: Selection, column: int) -> TokenLogprob | None:
        """Logprob of a column, if the request wants it."""
        n = self.request.sampling.logprobs
        if n is None:
            return None
        ids, values = selection.top_ids[column, :n], selection.top_logprobs[column, :n]
        best = zip(ids.tolist(), values.tolist())
        return TokenLogprob(
            token_id=int(selection.token_ids[column]),
            logprob=float(selection.logprobs[column]),
            top=tuple(pair for pair in best if pair[0] >= 0),  # fewer than n may be legal
        )


@dataclass(eq=False)
class Round:
    """A unit on its way: row i of its flight belongs to jobs[i]. chunks: ordered before it."""

    jobs: list[Job]
    flight: Flight
    decodes: bool
    chunks: int
