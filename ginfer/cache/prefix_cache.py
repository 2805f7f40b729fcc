"""PrefixCache: pages and slots of running sequences, and the prefixes that outlive them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ginfer.cache.segment import MadeBy

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from ginfer.cache.geometry import CacheGeometry
    from ginfer.cache.moves import Moves
    from ginfer.cache.segment import Seam, Segment
    from ginfer.cache.snapshot import Snapshot, SnapshotKind
    from ginfer.prompt import PreparedPrompt


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What a prompt can reuse: its first `num_tokens` tokens. path: 'none', 'append' (the end of an
    earlier response) or 'snapshot'."""

    num_tokens: int = 0
    path: str = "none"
    snapshot: Snapshot | None = None


@dataclass(eq=False)
class Sequence:
    """The memory of one running request.

    slot: its recurrent slot. num_pages: its entitlement. pages: pages of its tokens so far, page j
    holds tokens 64 j .. 64 j + 63; `commit` may exchange pages for equal shared ones, so read it
    anew after each call. cached_tokens: tokens at the front that were found computed, by `path`
    (see Hit); the slot holds the state after them. points: where prefill chunks must end, for a
    snapshot is taken there. node: deepest shared segment. seams: see Segment.
    """

    slot: int
    num_pages: int
    pages: list[int]
    cached_tokens: int
    path: str
    num_prompt_tokens: int
    shareable: bool
    points: dict[int, SnapshotKind]
    node: Segment
    seams: list[Seam] = field(default_factory=list)

    @property
    def made_by(self) -> MadeBy:
        """Numeric family of the history."""
        return MadeBy.DECODE if self.seams else MadeBy.PREFILL

    def chunk_end(self, start: int, stop: int) -> int:
        """End of the prefill chunk that begins at `start` and may go up to `stop`."""
        return next((point for point in self.points if start < point < stop), stop)


class PrefixCache:
    """All pages, slots and snapshots of one engine. Without `retain` nothing outlives its request.

    Invariant of admission: pages locked by running sequences plus pages that they were promised and
    do not share yet are at most `num_pages`; everything else can be evicted, so `grow` cannot fail.
    """

    def __init__(self, geometry: CacheGeometry, moves: Moves, *, retain: bool = True) -> None:
        raise NotImplementedError

    @property
    def num_pages(self) -> int:
        """Pages that can be promised in all."""
        raise NotImplementedError

    @property
    def promised_pages(self) -> int:
        """Pages locked by running sequences or promised to them."""
        raise NotImplementedError

    def match(self, prompt: PreparedPrompt) -> Hit:
        """The deepest usable snapshot of the prompt; at least one token is left to compute. Changes
        nothing."""
        raise NotImplementedError

    def cost(self, prompt: PreparedPrompt, num_pages: int) -> int:
        """Pages by which admitting a request with this entitlement would raise
        `promised_pages`; shared pages that are locked already cost nothing."""
        raise NotImplementedError

    def freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Pages by which the end of all these sequences would lower `promised_pages`."""
        raise NotImplementedError

    def can_admit(self, prompt: PreparedPrompt, num_pages: int) -> bool:
        """Whether `acquire` would succeed: a slot is free, and `cost` fits."""
        raise NotImplementedError

    def acquire(self, prompt: PreparedPrompt, num_pages: int) -> Sequence | None:
        """Admit a request with an entitlement of `num_pages` pages: lock what it can reuse, load
        the state into its slot (or clear the slot) and copy a partial page. None when it does not
        fit, and then nothing has changed."""
        raise NotImplementedError

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make sure that pages for tokens [0, num_tokens) exist, within the entitlement."""
        raise NotImplementedError

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """A prefill chunk has ended: the first `num_tokens` tokens are computed, and the slot holds
        the state after them. At one of its points the sequence shares its pages and takes a
        snapshot if memory allows; elsewhere nothing happens."""
        raise NotImplementedError

    def release(
        self, sequence: Sequence, token_ids: NDArray[np.int32], *, sound: bool = True
    ) -> None:
        """A request has ended with `token_ids` ([n] int32) computed; keep what can be used again.
        sound=False: what it computed is wrong, so that nothing of it may be used."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop everything that no running sequence holds."""
        raise NotImplementedError

    def gauges(self) -> dict[str, int]:
        """What the memory holds: free_pages, promised_pages, cached_pages, parked_pages, segments,
        snapshots, parked_snapshots, free_slots, and counts of evictions and parkings since the
        start."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert that every place of the arena, every slot and every host place is free or has
        exactly one owner, that counts are true, and that the promise above can be kept."""
        raise NotImplementedError
