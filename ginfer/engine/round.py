"""What the loop does next: the units of a round plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillUnit:
    """One chunk of the prefill owner: its prompt tokens `start` .. `stop`. `last` ends the prompt
    and draws the first token."""

    lane: int
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class DecodeUnit:
    """One token for every ready request, ordered by lane."""

    lanes: tuple[int, ...]


Unit = PrefillUnit | DecodeUnit


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What the scheduler sees. owner: (lane, computed tokens, prompt tokens) of the request in
    prefill; points: ascending tokens where its chunks must end. ready: lanes that can decode,
    ascending. decoded_last: the last unit was a decode round."""

    owner: tuple[int, int, int] | None
    points: tuple[int, ...] = ()
    ready: tuple[int, ...]
    decoded_last: bool
