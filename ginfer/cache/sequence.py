"""SequenceCache: what running requests own of K/V pages and recurrent slots, and what idle prefixes
keep.

Every page and every slot is free, owned by one running sequence, or kept by the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cache.arena import Pool
from ginfer.cache.prefix import AppendPrefixCache, Prefix
from ginfer.cache.segment import MadeBy
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ginfer.cache.prefix import PrefixCache
    from ginfer.prompt import PreparedPrompt


@dataclass(eq=False)
class Sequence:
    """The memory of one running request: its whole entitlement of pages, and a recurrent slot.

    cached_tokens: tokens at the front that are computed already (0: the slot must be cleared
    first). path: how they were found, 'none' or the prefix cache's name. shareable: whether the
    token ids identify the history.
    """

    pages: list[int]
    slot: int
    cached_tokens: int
    path: str
    made_by: MadeBy
    shareable: bool


class SequenceCache:
    """Pages and slots of one engine. Without `retain` nothing outlives its request."""

    def __init__(self, num_pages: int, num_slots: int, *, retain: bool = True) -> None:
        self.pages = Pool(num_pages)
        self.slots = Pool(num_slots)
        self.prefixes: PrefixCache = AppendPrefixCache()
        self._retain = retain
        self._active: set[Sequence] = set()

    @property
    def num_active(self) -> int:
        """Sequences of running requests."""
        return len(self._active)

    def acquire(self, prompt: PreparedPrompt, num_pages: int) -> Sequence | None:
        """Give a request its entitlement of `num_pages`, evicting idle prefixes as needed; None
        when the running requests leave too little, and then nothing has changed."""
        hit = self.prefixes.match(prompt)
        kept = len(hit.pages) if hit else 0
        reclaimable = self.pages.num_free + self.prefixes.num_pages - kept
        idle_slots = self.slots.num_free + self.prefixes.num_prefixes
        if num_pages - kept > reclaimable or idle_slots == 0:
            return None
        while self.pages.num_free < num_pages - kept or not (hit or self.slots.num_free):
            victim = self.prefixes.evict(hit)
            assert victim is not None, "the prefix cache holds less than it says"
            self._free(list(victim.pages), victim.slot)
        sequence = self._take(hit) if hit else self._fresh(prompt)
        sequence.pages += self.pages.allocate(num_pages - kept)
        self._active.add(sequence)
        return sequence

    def release(self, sequence: Sequence, token_ids: NDArray[np.int32]) -> None:
        """A request has ended with `token_ids` ([n] int32) computed: keep them if they can be used
        again, free the rest."""
        self._active.remove(sequence)
        used = div_ceil(len(token_ids), PAGE_TOKENS)
        assert used <= len(sequence.pages), "a sequence outgrew its entitlement"
        prefix = Prefix(
            token_ids=token_ids,
            pages=tuple(sequence.pages[:used]),
            slot=sequence.slot,
            made_by=sequence.made_by,
        )
        if self._retain and sequence.shareable and self.prefixes.insert(prefix):
            self.pages.free(sequence.pages[used:])
        else:
            self._free(sequence.pages, sequence.slot)

    def clear(self) -> None:
        """Drop every idle prefix."""
        while (victim := self.prefixes.evict(None)) is not None:
            self._free(list(victim.pages), victim.slot)

    def check_integrity(self) -> None:
        """Assert that every page and slot is free, active or kept, exactly once."""
        kept_pages, kept_slots = self.prefixes.check_integrity(self.pages, self.slots)
        self.pages.check_integrity(kept_pages + [p for s in self._active for p in s.pages])
        self.slots.check_integrity(kept_slots + [s.slot for s in self._active])

    def _take(self, hit: Prefix) -> Sequence:
        self.prefixes.take(hit)
        return Sequence(
            pages=list(hit.pages),
            slot=hit.slot,
            cached_tokens=hit.num_tokens,
            path=self.prefixes.path,
            made_by=hit.made_by,
            shareable=True,
        )

    def _fresh(self, prompt: PreparedPrompt) -> Sequence:
        (slot,) = self.slots.allocate(1)
        return Sequence(
            pages=[],
            slot=slot,
            cached_tokens=0,
            path="none",
            made_by=MadeBy.PREFILL,
            shareable=prompt.positions is None,
        )

    def _free(self, pages: list[int], slot: int) -> None:
        self.pages.free(pages)
        self.slots.free([slot])
