"""Order of eviction: the snapshot whose loss costs least comes first.

A snapshot is worth the tokens that would have to be computed again without it (since the one before
it on its path), per byte that its loss would free. The worth halves while HALF_LIFE requests are
admitted that do not use it. A snapshot that one conversation has gone past is unlikely to be
needed again, until a second request starts there or when it ends a system prompt. One that a
waiting request will start from is worth more: where more conversations take turns than memory
holds, the least recently used is the next to be needed. Snapshots inside long prompts go before all
others. K/V without a snapshot is never kept.

A new snapshot is kept if it is worth more than the one that makes room, or if that one has lain
idle: a conversation that runs now goes before a longer one that nobody has come back to.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import log2
from typing import TYPE_CHECKING

from ginfer.cache.prefix_tree import deepest
from ginfer.cache.segment import TOKEN_NBYTES
from ginfer.cache.snapshot import SnapshotKind
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cache.geometry import CacheGeometry
    from ginfer.cache.snapshot import Snapshot

    Worth = tuple[bool, float]

HALF_LIFE = 64  # admitted requests
IDLE_TURNS = 4  # admitted requests per lane after which an unused snapshot is idle
PASSED_BITS = 3.0  # log2 of the discount for what a conversation has gone past
WAITED_BITS = 5.0  # log2 of what it adds that somebody waits for a snapshot


def worth(snapshot: Snapshot, geometry: CacheGeometry) -> Worth:
    """What the loss of a snapshot would cost, comparable with others of the same arena."""
    tokens, pages = _loss(snapshot)
    nbytes = geometry.state_units * geometry.unit_nbytes + pages * geometry.page_nbytes
    shared = snapshot.kind is SnapshotKind.SYSTEM or snapshot.hits > 1
    discount = PASSED_BITS if snapshot.passed and not shared else 0.0
    bits = log2(tokens / nbytes) + snapshot.used / HALF_LIFE - discount
    bits += WAITED_BITS if snapshot.waiting else 0.0
    return snapshot.kind is not SnapshotKind.INTERVAL, bits


def _loss(snapshot: Snapshot) -> tuple[int, int]:
    """Tokens to compute again without the snapshot, and pages that nothing else keeps."""
    node, data = snapshot.node, snapshot.rest
    earlier = deepest(node, data, 0, len(data) // TOKEN_NBYTES - 1)
    if earlier is not None:
        return snapshot.num_tokens - earlier.num_tokens, 1
    pages = int(snapshot.page >= 0)
    alone = not node.num_children and all(s is snapshot for s in node.snapshots.values())
    while node.parent is not None:
        pages += len(node.pages) if alone else 0
        data, node = node.data, node.parent
        earlier = deepest(node, data, 0, PAGE_TOKENS)
        if earlier is not None:
            return snapshot.num_tokens - earlier.num_tokens, pages
        alone = alone and node.num_children == 1 and not node.snapshots
    return max(1, snapshot.num_tokens), pages


class Victims:
    """Snapshots in ascending order of worth. A worth may rise behind our back, when a neighbour is
    lost; it is looked at again before a victim is named."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._heap: list[tuple[Worth, int, Snapshot]] = []
        self._live: dict[Snapshot, int] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._live)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._live

    def push(self, snapshot: Snapshot) -> None:
        """Enter a snapshot, or move it to where its worth now belongs."""
        self._stamp += 1
        self._live[snapshot] = self._stamp
        heappush(self._heap, (worth(snapshot, self._geometry), self._stamp, snapshot))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [e for e in self._heap if self._live.get(e[2]) == e[1]]
            heapify(self._heap)

    def remove(self, snapshot: Snapshot) -> None:
        """Take a snapshot out; its entry in the heap is skipped later."""
        del self._live[snapshot]

    def cheapest(self) -> tuple[Worth, Snapshot] | None:
        """The snapshot that is worth least, and its worth."""
        while self._heap:
            known, stamp, snapshot = self._heap[0]
            if self._live.get(snapshot) != stamp:
                heappop(self._heap)
                continue
            current = worth(snapshot, self._geometry)
            if current <= known:
                return known, snapshot
            heapreplace(self._heap, (current, stamp, snapshot))
        return None
