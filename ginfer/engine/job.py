"""Job and Round: an accepted request on its way, and a unit of work on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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


@dataclass(eq=False)
class Round:
    """A unit on its way: row i of its flight belongs to jobs[i]."""

    jobs: list[Job]
    flight: Flight
    decodes: bool
