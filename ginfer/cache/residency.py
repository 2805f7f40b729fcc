"""Residency: what of the prefix tree is in the arena, what is parked on the host, what is lost.

Every unlocked segment in the arena leads to a snapshot in the arena, and every parked one to a
parked snapshot: what leads nowhere is parked or freed at once.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from ginfer.cache.arena import Arena
from ginfer.cache.eviction import IDLE_TURNS, Victims, worth
from ginfer.cache.prefix_tree import PrefixTree
from ginfer.cache.segment import PAGE_KEY_NBYTES, TOKEN_NBYTES, MadeBy, path
from ginfer.cache.snapshot import SnapshotKind
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.cache.eviction import Worth
    from ginfer.cache.geometry import CacheGeometry
    from ginfer.cache.moves import Moves
    from ginfer.cache.segment import Segment
    from ginfer.cache.snapshot import Snapshot


class Residency:
    """The tree with the arena and the host space that it lives in."""

    def __init__(self, geometry: CacheGeometry, moves: Moves) -> None:
        self.tree = PrefixTree()
        self.arena = _arena(geometry, geometry.num_units)
        self.host = _arena(geometry, geometry.num_host_units)
        self.resident, self.parked = Victims(geometry), Victims(geometry)
        self.num_evicted = self.num_parked = self.num_unparked = 0
        self._geometry, self._moves = geometry, moves

    # -- snapshots --------------------------------------------------------------------------------

    def keep(self, snapshot: Snapshot, slot: int) -> bool:
        """Save the state in `slot` as a new snapshot; False when all that could make room for it is
        worth more. Its node is locked by the caller."""
        node = snapshot.node
        node.snapshots[snapshot.rest] = snapshot
        node.settled = False
        node.num_resident += 1
        fresh = snapshot.kind is not SnapshotKind.INTERVAL
        idle_since = snapshot.used - IDLE_TURNS * self._geometry.num_slots if fresh else -1
        if not self._make_room(worth(snapshot, self._geometry), idle_since=idle_since):
            self._detach(snapshot)
            return False
        snapshot.units = self.arena.allocate_units(self._geometry.state_units)
        self._moves.save_state(slot, snapshot.units)
        self.resident.push(snapshot)
        return True

    def touch(self, snapshot: Snapshot) -> None:
        """Move a snapshot to where its changed facts belong in the order of eviction."""
        (self.parked if snapshot.parked else self.resident).push(snapshot)

    def keeps(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is still there."""
        return snapshot in self.resident or snapshot in self.parked

    def load(self, snapshot: Snapshot, slot: int, pages: list[int]) -> None:
        """Load a snapshot of a locked node into `slot`, and its partial page, if it has one, into a
        private page that is appended to `pages`."""
        (self.parked if snapshot.parked else self.resident).remove(snapshot)
        self._return(snapshot)
        if snapshot.parked:
            self._moves.load_parked_state(snapshot.units, slot)
        else:
            self._moves.load_state(snapshot.units, slot)
        if snapshot.page < 0:
            self.touch(snapshot)
        elif self._evict_for(1):
            pages += self.arena.allocate_pages(1)
            copy = self._unpark_page if snapshot.parked else self._moves.copy_page
            copy(snapshot.page, pages[-1])
            self.touch(snapshot)
        else:  # all other memory is promised: the page changes hands
            assert not snapshot.parked, "an empty arena has no page"
            pages.append(snapshot.page)
            snapshot.page = -1
            self._drop(snapshot)

    def discard(self, snapshot: Snapshot) -> None:
        """Lose a snapshot, and the segments that nothing else keeps."""
        (self.parked if snapshot.parked else self.resident).remove(snapshot)
        self._drop(snapshot)
        self.prune(snapshot.node)

    # -- pages ------------------------------------------------------------------------------------

    def take_pages(self, count: int) -> list[int]:
        """Allocate pages that were promised, evicting as needed."""
        possible = self._evict_for(count)
        assert possible, "promised pages cannot be had"
        return self.arena.allocate_pages(count)

    def adopt(self, node: Segment, pages: list[int]) -> None:
        """Give a parked segment equal pages of the arena; its host pages are freed."""
        assert node.parked
        assert node.parent is not None
        self.host.free_pages(node.pages)
        node.pages, node.parked = pages, False
        node.parent.num_resident += 1

    def unpark(self, node: Segment) -> None:
        """Bring the parked pages of a locked path back, which ends at `node`."""
        parked = list(takewhile(_is_parked, path(node)))
        if not parked:
            return
        possible = self._evict_for(sum(len(n.pages) for n in parked))
        assert possible, "promised pages cannot be had"
        for segment in list(takewhile(_is_parked, path(node))):  # neighbours may have been merged
            pages = self.arena.allocate_pages(len(segment.pages))
            self._moves.unpark_pages(segment.pages, pages)
            self.num_unparked += len(pages)
            self.adopt(segment, pages)

    def prune(self, node: Segment) -> None:
        """Park or free the segments from `node` upwards that lead to no snapshot in the arena."""
        while (parent := node.parent) is not None and node.refs == 0:
            if not node.num_children and not node.snapshots:
                (self.host if node.parked else self.arena).free_pages(node.pages)
                self.tree.remove(node)
                node = parent
            elif node.num_resident or node.parked:
                break
            elif self._park(node):
                node = parent
        self.tree.merge(node)

    # -- making room ------------------------------------------------------------------------------

    def _evict_for(self, num_pages: int) -> bool:
        """Evict until `num_pages` pages are free; False when there is nothing left to evict."""
        while not self.arena.fits(0, num_pages):
            cheapest = self.resident.cheapest()
            if cheapest is None:
                return False
            self._evict(*cheapest)
        return True

    def _make_room(self, limit: Worth, num_pages: int = 0, *, idle_since: int = -1) -> bool:
        """Evict what is worth less than `limit`, was not used after `idle_since`, or can be parked
        at no loss, until a state and `num_pages` pages fit."""
        while not self.arena.fits(self._geometry.state_units, num_pages):
            cheapest = self.resident.cheapest()
            if cheapest is None:
                return False
            value, victim = cheapest
            if value >= limit and victim.used > idle_since and not self._parks_freely(victim):
                return False
            self._evict(value, victim)
        return True

    def _evict(self, value: Worth, snapshot: Snapshot) -> None:
        self.resident.remove(snapshot)
        self.num_evicted += 1
        node, units, page = snapshot.node, snapshot.units, snapshot.page
        if self._make_host_room(self._geometry.state_units, page >= 0, value):
            snapshot.units = self.host.allocate_units(len(units))
            self._moves.park_units(units, snapshot.units)
            if page >= 0:
                (snapshot.page,) = self.host.allocate_pages(1)
                self._moves.park_pages([page], [snapshot.page])
                self.arena.free_pages([page])
            self.arena.free_units(units)
            snapshot.parked = True
            node.num_resident -= 1
            self.parked.push(snapshot)
        else:
            self._drop(snapshot)
        self.prune(node)

    # -- parking ----------------------------------------------------------------------------------

    def _parks_freely(self, snapshot: Snapshot) -> bool:
        """Whether the host has room for a snapshot and its segment beside all that is there."""
        return self.host.fits(self._geometry.state_units, 1 + len(snapshot.node.pages))

    def _return(self, snapshot: Snapshot) -> None:
        """Bring a parked snapshot back if what is worth less makes room."""
        num_pages, limit = int(snapshot.page >= 0), worth(snapshot, self._geometry)
        if not snapshot.parked or not self._make_room(limit, num_pages):
            return
        host_units, host_page = snapshot.units, snapshot.page
        snapshot.units = self.arena.allocate_units(len(host_units))
        self._moves.unpark_units(host_units, snapshot.units)
        self.host.free_units(host_units)
        if host_page >= 0:
            (snapshot.page,) = self.arena.allocate_pages(1)
            self._unpark_page(host_page, snapshot.page)
            self.host.free_pages([host_page])
        snapshot.parked = False
        snapshot.node.num_resident += 1

    def _unpark_page(self, host_page: int, page: int) -> None:
        self._moves.unpark_pages([host_page], [page])

    def _park(self, node: Segment) -> bool:
        """Park the pages of a segment; if they do not fit, lose the parked snapshots below it, so
        that it leads nowhere at all, and return False."""
        pages = node.pages
        if not self._make_host_room(0, len(pages), None):
            for segment in list(self.tree.walk(node)):
                for snapshot in list(segment.snapshots.values()):
                    self._discard_parked(snapshot)
        if not node.num_children and not node.snapshots:
            return False
        node.pages = self.host.allocate_pages(len(pages))
        self._moves.park_pages(pages, node.pages)
        self.arena.free_pages(pages)
        self.num_parked += len(pages)
        node.parked = True
        assert node.parent is not None
        node.parent.num_resident -= 1
        return True

    def _make_host_room(self, num_units: int, num_pages: int, limit: Worth | None) -> bool:
        """Lose parked snapshots that are worth less than `limit` (None: any) until there is room on
        the host; False when that is not enough."""
        if not self.host.holds(num_units, num_pages):
            return False
        while not self.host.fits(num_units, num_pages):
            cheapest = self.parked.cheapest()
            if cheapest is None or (limit is not None and cheapest[0] >= limit):
                return False
            self._discard_parked(cheapest[1])
        return True

    def _discard_parked(self, snapshot: Snapshot) -> None:
        """Lose a parked snapshot, and the parked segments that led to it alone."""
        self.parked.remove(snapshot)
        self._drop(snapshot)
        node = snapshot.node
        while node.parked and not node.refs and not node.num_children and not node.snapshots:
            self.host.free_pages(node.pages)
            node = self.tree.remove(node)

    def _drop(self, snapshot: Snapshot) -> None:
        """Free what a snapshot holds and forget it."""
        space = self.host if snapshot.parked else self.arena
        space.free_units(snapshot.units)
        if snapshot.page >= 0:
            space.free_pages([snapshot.page])
        self._detach(snapshot)

    def _detach(self, snapshot: Snapshot) -> None:
        del snapshot.node.snapshots[snapshot.rest]
        snapshot.node.num_resident -= not snapshot.parked

    def check_integrity(self, private: list[int]) -> None:
        """Assert that the tree, `private` pages and what is free make up both spaces exactly, and
        that nothing is kept that leads nowhere."""
        segments = list(self.tree.walk())
        snapshots = [s for node in segments for s in node.snapshots.values()]
        assert self.tree.num_segments == len(segments) - 1
        for space, parked in ((self.arena, False), (self.host, True)):
            held = [s for s in snapshots if s.parked is parked]
            assert set(held) == set(self.parked if parked else self.resident)
            pages = [p for node in segments if node.parked is parked for p in node.pages]
            pages += [s.page for s in held if s.page >= 0]
            space.check_integrity(pages if parked else pages + private, [s.units for s in held])
        for node in segments:
            _check_segment(node)


def _is_parked(node: Segment) -> bool:
    return node.parked


def _check_segment(node: Segment) -> None:
    """Assert what a segment says of itself, its children and its snapshots."""
    children = [child for siblings in node.children.values() for child in siblings]
    assert all(node.children.values()), "an empty list of siblings"
    assert node.num_children == len(children)
    assert node.only is (children[0] if len(children) == 1 else None)
    residents = sum(not c.parked for c in children)
    residents += sum(not s.parked for s in node.snapshots.values())
    assert node.num_resident == residents
    for key, siblings in node.children.items():
        first = node.end + PAGE_TOKENS
        heads = {tuple(s for s in child.seams if s.position < first) for child in siblings}
        assert len(heads) == len(siblings), "twins"
        assert all(child.data.startswith(key) for child in siblings)
    for child in children:
        assert (child.parent, child.start) == (node, node.end)
        assert child.end == child.start + len(child.data) // TOKEN_NBYTES
        assert child.refs <= node.refs or node.parent is None
        assert len(child.data) == len(child.pages) * PAGE_KEY_NBYTES > 0
        assert all(child.start <= s.position < child.end for s in child.seams)
        assert list(child.seams) == sorted(child.seams)
        if node.made_by is MadeBy.PREFILL:
            begins = [s for s in child.seams if s.position < child.start + PAGE_TOKENS]
            assert bool(child.seams) == bool(begins) == (child.made_by is MadeBy.DECODE)
        else:
            assert child.made_by is MadeBy.DECODE
        assert not (node.parked and not child.parked), "an orphan in the arena"
        assert not (child.parked and child.refs), "a parked segment is locked"
        wanted = child.parked or child.refs or child.num_resident
        assert wanted, "a segment in the arena leads nowhere"
        assert child.num_children or child.snapshots or child.refs, "a segment leads nowhere"
    for rest, snapshot in node.snapshots.items():
        assert (snapshot.node, snapshot.rest) == (node, rest)
        assert snapshot.num_tokens == node.end + len(rest) // TOKEN_NBYTES
        assert len(rest) < PAGE_KEY_NBYTES
        assert bool(rest) == (snapshot.page >= 0)
        assert snapshot.parked or not node.parked, "a state without its K/V"
        assert snapshot.made_by is (MadeBy.DECODE if rest else node.made_by)


def _arena(geometry: CacheGeometry, num_units: int) -> Arena:
    return Arena(
        num_units,
        units_per_page=geometry.units_per_page,
        pages_per_unit=geometry.pages_per_unit,
    )
