"""What the loop does next: the units of a round plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ginfer.engine.chunk_plan import Piece, PromptView


@dataclass(frozen=True)
class PrefillUnit:
    """One chunk: a piece of each of its prompts. A piece that ends its prompt draws the first
    token."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class DecodeUnit:
    """One token for every ready request, ordered by lane."""

    lanes: tuple[int, ...]


Unit = PrefillUnit | DecodeUnit


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What the scheduler sees. prompts: those in prefill, in the order of their entry. ready: lanes
    that can decode, ascending. decoded_last: the last unit was a decode round."""

    prompts: tuple[PromptView, ...] = ()
    ready: tuple[int, ...]
    decoded_last: bool


@dataclass(frozen=True)
class DraftPlan:
    """Drafts of a decode round over these lanes. widths: how many each row verifies. copies: their
    ids where they come from the context; an empty list where the drafter makes them, if any."""

    lanes: tuple[int, ...]
    widths: tuple[int, ...]
    copies: tuple[list[int], ...]
