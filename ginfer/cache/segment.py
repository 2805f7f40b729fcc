"""Segment: a node of the prefix tree, an immutable run of whole K/V pages of one history.

A history is its token ids and its seams: where another numeric family took over (a prompt's end,
a hit on a decode-made frontier) or a block of 64 was resumed in its middle. Both are needed to say
which bits its K/V and its recurrent state have; a history without seams was made by prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cache.snapshot import Snapshot

TOKEN_NBYTES = 4  # token ids are compared as little-endian int32
PAGE_KEY_NBYTES = PAGE_TOKENS * TOKEN_NBYTES


class MadeBy(StrEnum):
    """Numeric family of a history: prefill only if every token of it was made by prefill."""

    PREFILL = "prefill"
    DECODE = "decode"


class Seam(NamedTuple):
    """From token `position` on the tokens were computed anew by `made_by`."""

    position: int
    made_by: MadeBy


@dataclass(eq=False, slots=True)
class Segment:
    """Tokens [start, end) of a history and the pages that hold their K/V. `end`, a multiple of 64,
    stays as long as the segment does, wherever it is cut or joined.

    data: the token ids as bytes, 256 per page. seams: those inside it. made_by: of all its pages.
    parked: `pages` are host pages. refs: running sequences whose path holds it. children: by the
    bytes of their first page; siblings under one key differ in the seams of that page.
    snapshots: by the bytes of the tokens between `end` and the snapshot (fewer than 64 tokens).
    num_children, num_resident: children, and those children and snapshots that are not parked.
    only: the child, where there is one: long conversations are chains of those.
    settled: all its snapshots are passed and none ends a system prompt, so that a hit below changes
    none of them.
    """

    parent: Segment | None
    start: int
    data: bytes
    pages: list[int]
    seams: tuple[Seam, ...] = ()
    made_by: MadeBy = MadeBy.PREFILL
    parked: bool = False
    refs: int = 0
    children: dict[bytes, list[Segment]] = field(default_factory=dict)
    snapshots: dict[bytes, Snapshot] = field(default_factory=dict)
    num_children: int = 0
    num_resident: int = 0
    only: Segment | None = None
    settled: bool = False
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + len(self.data) // TOKEN_NBYTES

    def note_only(self) -> None:
        """The children have changed."""
        self.only = next(iter(self.children.values()))[0] if self.num_children == 1 else None


def path(node: Segment) -> Iterator[Segment]:
    """A segment and those above it, deepest first, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
