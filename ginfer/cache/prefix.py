"""Prefixes kept after their requests have ended: the interface, and its append implementation.

A recurrent model cannot resume in the middle of a history, so the append implementation offers an
idle conversation only at its exact frontier: to a prompt that starts with every token it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ginfer.cache.segment import MadeBy
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.cache.arena import Pool
    from ginfer.prompt import PreparedPrompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """A computed history: `token_ids` ([n] int32) are in K/V `pages` and recurrent `slot`."""

    token_ids: NDArray[np.int32]
    pages: tuple[int, ...]
    slot: int
    made_by: MadeBy

    @property
    def num_tokens(self) -> int:
        """n, the position of the frontier."""
        return len(self.token_ids)


class PrefixCache(Protocol):
    """Owner of idle prefixes. What it holds, nobody else holds."""

    path: str

    @property
    def num_pages(self) -> int:
        """Pages held."""

    @property
    def num_prefixes(self) -> int:
        """Idle prefixes held."""

    def match(self, prompt: PreparedPrompt) -> Prefix | None:
        """The longest usable prefix of the prompt; at least one token is left to compute. Changes
        nothing."""

    def take(self, prefix: Prefix) -> None:
        """Hand a matched prefix over to the caller, who owns its pages and slot from now on."""

    def insert(self, prefix: Prefix) -> bool:
        """Keep a history; False when it cannot be used again (the caller then frees it)."""

    def evict(self, keep: Prefix | None) -> Prefix | None:
        """Drop the prefix that is worth least, never `keep`; the caller frees what it held. None
        when there is none."""

    def check_integrity(self, pages: Pool, slots: Pool) -> tuple[list[int], list[int]]:
        """Assert the invariants; return all pages and slots held."""


class AppendPrefixCache:
    """Idle conversations in order of last use; the least recently used one is evicted first."""

    path = "append"

    def __init__(self) -> None:
        self._idle: dict[int, Prefix] = {}  # by slot, least recently used first

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return sum(len(p.pages) for p in self._idle.values())

    @property
    def num_prefixes(self) -> int:
        """Idle conversations held."""
        return len(self._idle)

    def match(self, prompt: PreparedPrompt) -> Prefix | None:
        """The longest idle conversation that the prompt continues. Prompts with explicit positions
        (media) never match: their ids do not say what they show."""
        if prompt.positions is not None:
            return None
        usable = (p for p in self._idle.values() if _starts_with(prompt.token_ids, p.token_ids))
        return max(usable, key=_preference, default=None)

    def take(self, prefix: Prefix) -> None:
        """Hand a conversation over."""
        assert self._idle.pop(prefix.slot, None) is prefix, "not an idle conversation"

    def insert(self, prefix: Prefix) -> bool:
        """Keep a conversation. A prefill-made frontier inside a block of 64 is refused: a longer
        prompt computes that block in one piece, and a hit must equal no hit bit for bit. A second
        copy of a history is refused too; the first one then counts as just used."""
        n = prefix.num_tokens
        if n == 0 or (prefix.made_by is MadeBy.PREFILL and n % PAGE_TOKENS):
            return False
        twin = next((p for p in self._idle.values() if _same_history(p, prefix)), None)
        latest = twin or prefix
        self._idle.pop(latest.slot, None)
        self._idle[latest.slot] = latest
        return twin is None

    def evict(self, keep: Prefix | None) -> Prefix | None:
        """Drop the least recently used conversation but `keep`."""
        victim = next((p for p in self._idle.values() if p is not keep), None)
        if victim is not None:
            del self._idle[victim.slot]
        return victim

    def check_integrity(self, pages: Pool, slots: Pool) -> tuple[list[int], list[int]]:
        """Assert that every conversation has exactly the pages of its tokens."""
        for slot, p in self._idle.items():
            assert slot == p.slot
            assert len(p.pages) == -(-p.num_tokens // PAGE_TOKENS), f"pages of slot {slot}"
        held = [page for p in self._idle.values() for page in p.pages]
        assert len(held) <= pages.size
        assert len(self._idle) <= slots.size
        return held, list(self._idle)


def _preference(prefix: Prefix) -> tuple[int, bool]:
    """Order of matches: the deeper one, on a tie the one made by prefill."""
    return prefix.num_tokens, prefix.made_by is MadeBy.PREFILL


def _same_history(a: Prefix, b: Prefix) -> bool:
    return a.made_by is b.made_by and np.array_equal(a.token_ids, b.token_ids)


def _starts_with(ids: NDArray[np.int32], head: NDArray[np.int32]) -> bool:
    n = len(head)
    return n < len(ids) and bool(ids[n - 1] == head[-1]) and np.array_equal(ids[:n], head)
