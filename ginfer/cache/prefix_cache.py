"""PrefixCache: pages and slots of running sequences, and the prefixes that outlive them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cache.arena import Pool
from ginfer.cache.prefix_tree import fitting
from ginfer.cache.residency import Residency
from ginfer.cache.segment import PAGE_KEY_NBYTES, TOKEN_NBYTES, MadeBy, Seam, Segment, path
from ginfer.cache.snapshot import Snapshot, SnapshotKind, snapshot_points
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ginfer.cache.geometry import CacheGeometry
    from ginfer.cache.moves import Moves
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

    slot: its recurrent slot. state_slot: where its state lies, that slot or one that goes with it.
    num_pages: its entitlement. pages: pages of its tokens so far, page j holds tokens
    64 j .. 64 j + 63; `commit` may exchange pages for equal shared ones, so read it anew after each
    call. cached_tokens: tokens at the front that were found computed, by `path` (see Hit); the slot
    holds the state after them. points: where prefill chunks must end, for a snapshot is taken
    there. node: deepest shared segment. data, seams: see Segment.
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
    data: bytes = field(repr=False)
    seams: list[Seam] = field(default_factory=list)
    state_slot: int = -1

    def __post_init__(self) -> None:
        self.state_slot = self.slot

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
        self.num_pages = geometry.num_pages
        self._memory = Residency(geometry, moves)
        self._slots = Pool(geometry.num_slots)
        self._moves, self._retain = moves, retain
        self._active: set[Sequence] = set()
        self._locked = 0  # pages of segments that running sequences hold
        self._unshared = 0  # pages promised to running sequences beyond those segments
        self._tick = 0
        self._asked: tuple[PreparedPrompt, bytes, Hit] | None = None  # last, if nothing has changed
        self._expected: list[tuple[PreparedPrompt, Snapshot]] = []  # of requests that wait

    @property
    def promised_pages(self) -> int:
        """Pages locked by running sequences or promised to them."""
        return self._locked + self._unshared

    # -- admission --------------------------------------------------------------------------------

    def match(self, prompt: PreparedPrompt) -> Hit:
        """The deepest usable snapshot of the prompt; at least one token is left to compute. Changes
        nothing, and is remembered until something does."""
        return self._ask(prompt)[1]

    def _ask(self, prompt: PreparedPrompt) -> tuple[bytes, Hit]:
        """The history of a prompt, and what it can reuse."""
        if self._asked is None or self._asked[0] is not prompt:
            data = _history(prompt.token_ids)
            self._asked = prompt, data, self._match(prompt, data)
        return self._asked[1:]

    def expect(self, prompt: PreparedPrompt) -> None:
        """A request waits: what it could reuse now is kept rather than other things, until it is
        acquired or dismissed."""
        snapshot = self.match(prompt).snapshot
        if snapshot is not None:
            self._expected.append((prompt, snapshot))
            snapshot.waiting += 1
            snapshot.used = self._tick
            self._memory.touch(snapshot)

    def dismiss(self, prompt: PreparedPrompt) -> None:
        """A request waits no more; nothing happens if none did."""
        for i, (expected, snapshot) in enumerate(self._expected):
            if expected is prompt:
                del self._expected[i]
                snapshot.waiting -= 1
                if self._memory.keeps(snapshot):
                    self._memory.touch(snapshot)
                return

    def known_tokens(self, prompt: PreparedPrompt) -> int:
        """Tokens in front whose K/V is here, in whole pages, with a usable state or without."""
        if prompt.positions is not None or not self._retain:
            return 0
        return self._memory.tree.common_tokens(self._ask(prompt)[0])

    def cost(self, prompt: PreparedPrompt, num_pages: int) -> int:
        """Pages by which admitting a request with this entitlement would raise `promised_pages`;
        shared pages that are locked already cost nothing."""
        return self._cost(self.match(prompt), num_pages)

    def freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Pages by which the end of all these sequences would lower `promised_pages`."""
        freed, holds = 0, Counter[Segment]()
        for sequence in sequences:
            freed += sequence.num_pages - sequence.node.end // PAGE_TOKENS
            holds.update(path(sequence.node))
        return freed + sum(len(node.pages) for node, n in holds.items() if n == node.refs)

    def can_admit(self, prompt: PreparedPrompt, num_pages: int) -> bool:
        """Whether `acquire` would succeed: a slot is free, and `cost` fits."""
        return self._fits(self.match(prompt), num_pages)

    def acquire(self, prompt: PreparedPrompt, num_pages: int) -> Sequence | None:
        """Admit a request with an entitlement of `num_pages` pages: lock what it can reuse, load
        the state into its slot (or clear the slot) and copy a partial page. None when it does not
        fit, and then nothing has changed."""
        data, hit = self._ask(prompt)
        if not self._fits(hit, num_pages):
            return None
        self._asked = None
        self.dismiss(prompt)
        (slot,) = self._slots.allocate(1)
        sequence = Sequence(
            slot=slot,
            num_pages=num_pages,
            pages=[],
            cached_tokens=hit.num_tokens,
            path=hit.path,
            num_prompt_tokens=prompt.num_tokens,
            shareable=self._retain and prompt.positions is None,
            points={},
            node=self._memory.tree.root,
            data=data,
        )
        if sequence.shareable:
            free = self._memory.arena.free_fraction
            sequence.points = snapshot_points(
                prompt.num_tokens, prompt.turn_starts, base=hit.num_tokens, free_fraction=free
            )
        self._active.add(sequence)
        self._unshared += num_pages
        self._tick += 1
        if hit.snapshot is None:
            self._moves.clear_slot(slot)
        else:
            self._enter(sequence, hit.snapshot)
        return sequence

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Make sure that pages for tokens [0, num_tokens) exist, within the entitlement."""
        wanted = div_ceil(num_tokens, PAGE_TOKENS)
        assert wanted <= sequence.num_pages, "a sequence outgrows its entitlement"
        if wanted > len(sequence.pages):
            self._asked = None
            sequence.pages += self._memory.take_pages(wanted - len(sequence.pages))

    # -- sharing ----------------------------------------------------------------------------------

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """A prefill chunk has ended: the first `num_tokens` tokens are computed, and the slot holds
        the state after them. At one of its points the sequence shares its pages and takes a
        snapshot if memory allows; elsewhere nothing happens."""
        kind = sequence.points.get(num_tokens)
        if kind is not None:
            self._asked = None
            self._share(sequence, sequence.data, num_tokens)
            self._keep(sequence, kind, sequence.data, num_tokens)

    def release(
        self, sequence: Sequence, token_ids: NDArray[np.int32], *, sound: bool = True
    ) -> None:
        """A request has ended with `token_ids` ([n] int32) computed; keep what can be used again.
        sound=False: what it computed is wrong, so that nothing of it may be used."""
        self._asked = None
        n = len(token_ids)
        used = div_ceil(n, PAGE_TOKENS)
        assert used <= len(sequence.pages), "a sequence has outgrown its pages"
        self._memory.arena.free_pages(sequence.pages[used:])
        del sequence.pages[used:]
        kind = SnapshotKind.TURN
        if n > sequence.num_prompt_tokens:
            sequence.seams.append(Seam(sequence.num_prompt_tokens, MadeBy.DECODE))
            kind = SnapshotKind.RESPONSE
        if not sound:
            self._disown(sequence)
        elif n > sequence.cached_tokens and _can_resume(sequence, n):
            data = _history(token_ids)
            self._share(sequence, data, n)
            self._keep(sequence, kind, data, n)
        self._leave(sequence)

    def clear(self) -> None:
        """Drop everything that no running sequence holds."""
        self._asked = None
        for victims in (self._memory.parked, self._memory.resident):
            for snapshot in list(victims):
                if snapshot in victims:
                    self._memory.discard(snapshot)

    # -- facts ------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """What the memory holds, and counts since the start: snapshots evicted, pages parked and
        brought back."""
        memory = self._memory
        return {
            "free_pages": memory.arena.num_free_pages,
            "promised_pages": self.promised_pages,
            "free_slots": self._slots.num_free,
            "segments": memory.tree.num_segments,
            "snapshots": len(memory.resident),
            "parked_snapshots": len(memory.parked),
            "evicted_snapshots": memory.num_evicted,
            "parked_pages": memory.num_parked,
            "unparked_pages": memory.num_unparked,
        }

    def free_units(self) -> list[int]:
        """Units of the arena that hold nothing."""
        return self._memory.arena.whole_units()

    def check_integrity(self) -> None:
        """Assert that every place of the arena, every slot and every host place is free or has
        exactly one owner, that counts are true, and that the promise above can be kept."""
        refs, private = Counter[Segment](), []
        for sequence in self._active:
            refs.update(path(sequence.node))
            num_shared = sequence.node.end // PAGE_TOKENS
            private += sequence.pages[num_shared:]
            assert num_shared <= len(sequence.pages) <= sequence.num_pages
            shared = [p for n in list(path(sequence.node))[::-1] for p in n.pages]
            assert sequence.pages[:num_shared] == shared, "a path and its pages differ"
        segments = list(self._memory.tree.walk())
        assert all(node.refs == refs[node] for node in segments), "a lock is lost"
        assert self._locked == sum(len(node.pages) for node in segments if node.refs)
        assert self._unshared == sum(s.num_pages - s.node.end // PAGE_TOKENS for s in self._active)
        assert self.promised_pages <= self.num_pages, "more is promised than there is"
        waiting = Counter(snapshot for _, snapshot in self._expected)
        live = (*self._memory.resident, *self._memory.parked)
        assert all(s.waiting == waiting[s] for s in live), "a request that waits is lost"
        self._memory.check_integrity(private)
        self._slots.check_integrity([s.slot for s in self._active])

    # -- inside -----------------------------------------------------------------------------------

    def _match(self, prompt: PreparedPrompt, data: bytes) -> Hit:
        """Prompts with explicit positions (media) never match: their ids do not say what they
        show. A digest of the media would join the bytes of a page."""
        if prompt.positions is not None or not self._retain:
            return Hit()
        snapshot = self._memory.tree.match(data, prompt.num_tokens - 1)
        if snapshot is None:
            return Hit()
        path = "append" if snapshot.kind is SnapshotKind.RESPONSE else "snapshot"
        return Hit(num_tokens=snapshot.num_tokens, path=path, snapshot=snapshot)

    def _cost(self, hit: Hit, num_pages: int) -> int:
        if hit.snapshot is None:
            return num_pages
        node = hit.snapshot.node
        while node.refs == 0 and node.parent is not None:
            node = node.parent
        return num_pages - node.end // PAGE_TOKENS  # what is held above costs nothing

    def _fits(self, hit: Hit, num_pages: int) -> bool:
        return bool(
            self._slots.num_free
            and self.promised_pages + self._cost(hit, num_pages) <= self.num_pages
        )

    def _enter(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Put a sequence behind a snapshot: lock the path, load the state, bring parked pages
        back."""
        nodes, tree = self._lock_path(snapshot.node), self._memory.tree
        sequence.node = snapshot.node
        sequence.seams = _seams_behind(snapshot, nodes)
        self._unshared -= snapshot.node.end // PAGE_TOKENS
        self._note_use(snapshot, nodes, sequence.data)
        tail: list[int] = []
        num_segments = tree.num_segments
        self._memory.load(snapshot, sequence.slot, tail)
        self._memory.unpark(sequence.node)
        if tree.num_segments != num_segments:  # neighbours may have been merged
            nodes = list(path(sequence.node))
        sequence.pages.extend(chain.from_iterable([node.pages for node in reversed(nodes)]))
        sequence.pages += tail

    def _lock_path(self, node: Segment) -> list[Segment]:
        """Hold a segment and those above it; `path` of it."""
        nodes = []
        while (parent := node.parent) is not None:
            nodes.append(node)
            if node.refs == 0:
                self._locked += len(node.pages)
            node.refs += 1
            node = parent
        return nodes

    def _note_use(self, hit: Snapshot, nodes: list[Segment], data: bytes) -> None:
        """Tell a snapshot that it is used, and those before it on its path that they are passed;
        the end of a system prompt is used by all that pass it."""
        hit.hits += 1
        system = SnapshotKind.SYSTEM
        for node in [n for n in (*nodes, self._memory.tree.root) if not n.settled or n is hit.node]:
            for snapshot in node.snapshots.values():
                if not snapshot.passed or snapshot is hit or snapshot.kind is system:
                    break
            else:
                node.settled = True
                continue
            limit = hit.num_tokens - node.end
            for snapshot in fitting(node, data, node.end * TOKEN_NBYTES, limit):
                snapshot.passed = True
                if snapshot is hit or snapshot.kind is system:
                    snapshot.used = self._tick
                if snapshot is not hit:  # which is loaded next
                    self._memory.touch(snapshot)

    def _share(self, sequence: Sequence, data: bytes, num_tokens: int) -> None:
        """Make segments of the private whole pages among the first `num_tokens` tokens."""
        stop = num_tokens // PAGE_TOKENS * PAGE_TOKENS
        while (begin := sequence.node.end) < stop:
            end = stop
            if sequence.seams:  # what prefill made ends with the page before the first seam
                border = sequence.seams[0].position // PAGE_TOKENS * PAGE_TOKENS
                end = min(stop, border) if border > begin else stop
            seams = tuple(s for s in sequence.seams if begin <= s.position < end)
            self._append(sequence, data[begin * TOKEN_NBYTES : end * TOKEN_NBYTES], seams)

    def _append(self, sequence: Sequence, data: bytes, seams: tuple[Seam, ...]) -> None:
        """Extend the shared path by pages with the tokens `data`, or by those of them that the tree
        has already; its pages then replace the private ones."""
        tree, first = self._memory.tree, sequence.node.end // PAGE_TOKENS
        child, count = tree.find(sequence.node, data, seams)
        count = count or len(data) // PAGE_KEY_NBYTES
        own = sequence.pages[first : first + count]
        if child is None:
            child = tree.add(sequence.node, data, own, seams)
        else:
            if count < len(child.pages):
                child = tree.split(child, count)
            if child.parked:
                self._memory.adopt(child, own)
            else:
                self._memory.arena.free_pages(own)
                sequence.pages[first : first + count] = child.pages
        self._lock(sequence, child)

    def _keep(self, sequence: Sequence, kind: SnapshotKind, data: bytes, num_tokens: int) -> None:
        """Take a snapshot at the frontier of a sequence whose whole pages are shared. The partial
        page goes with it: only a release can be inside a page."""
        node = sequence.node
        rest = data[node.end * TOKEN_NBYTES : num_tokens * TOKEN_NBYTES]
        known = node.snapshots.get(rest)
        if known is not None:
            known.used = self._tick
            if kind is SnapshotKind.SYSTEM or known.kind is SnapshotKind.INTERVAL:
                known.kind, node.settled = kind, False
            self._memory.touch(known)
            return
        snapshot = Snapshot(
            node=node,
            rest=rest,
            num_tokens=num_tokens,
            kind=kind,
            units=[],
            page=sequence.pages[-1] if rest else -1,
            made_by=sequence.made_by,
            last_by=sequence.seams[-1].made_by if sequence.seams else MadeBy.PREFILL,
            seams=tuple(s for s in sequence.seams if s.position >= node.end),
            used=self._tick,
        )
        if self._memory.keep(snapshot, sequence.state_slot) and rest:
            sequence.pages.pop()

    def _disown(self, sequence: Sequence) -> None:
        """Lose the snapshots that a sequence has taken or passed beyond its hit."""
        for node in path(sequence.node):
            for snapshot in list(node.snapshots.values()):
                if snapshot.num_tokens > sequence.cached_tokens:
                    self._memory.discard(snapshot)

    def _leave(self, sequence: Sequence) -> None:
        """Give back what a sequence holds."""
        num_shared = sequence.node.end // PAGE_TOKENS
        self._memory.arena.free_pages(sequence.pages[num_shared:])
        self._unshared -= sequence.num_pages - num_shared
        node = sequence.node
        while (parent := node.parent) is not None:
            node.refs -= 1
            if node.refs == 0:
                self._locked -= len(node.pages)
            node = parent
        self._memory.prune(sequence.node)
        self._slots.free([sequence.slot])
        self._active.remove(sequence)

    def _lock(self, sequence: Sequence, node: Segment) -> None:
        """Make `node` the deepest segment of a sequence."""
        if node.refs == 0:
            self._locked += len(node.pages)
        node.refs += 1
        self._unshared -= len(node.pages)
        sequence.node = node


def _history(token_ids: NDArray[np.int32]) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


def _seams_behind(snapshot: Snapshot, nodes: list[Segment]) -> list[Seam]:
    """Seams of a history that goes on after a snapshot. What prefill adds at a page border of a
    prefill-made frontier is what it would have added anyway; elsewhere it begins anew."""
    runs = [snapshot.seams, *[node.seams for node in nodes if node.seams]]
    seams = list(chain.from_iterable(reversed(runs)))
    if snapshot.last_by is MadeBy.DECODE or snapshot.num_tokens % PAGE_TOKENS:
        seams.append(Seam(snapshot.num_tokens, MadeBy.PREFILL))
    return seams


def _can_resume(sequence: Sequence, num_tokens: int) -> bool:
    """Whether a prompt may go on at this frontier. Inside a block of 64 a prefill-made one is
    useless: a longer prompt computes that block in one piece, and a hit must equal no hit."""
    on_border = num_tokens % PAGE_TOKENS == 0
    return sequence.shareable and (on_border or sequence.made_by is MadeBy.DECODE)
