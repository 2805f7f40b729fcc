"""PrefixTree: segments by their tokens; look up, extend, split at page borders, remove."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from ginfer.cache.segment import PAGE_KEY_NBYTES, TOKEN_NBYTES, MadeBy, Segment
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cache.segment import Seam
    from ginfer.cache.snapshot import Snapshot


class PrefixTree:
    """A radix tree over whole pages. Histories are bytes of token ids (see Segment)."""

    def __init__(self) -> None:
        self.root = Segment(parent=None, start=0, data=b"", pages=[])
        self.num_segments = 0

    def match(self, data: bytes, limit: int) -> Snapshot | None:
        """The deepest snapshot among the first `limit` tokens of a history; on a tie one that
        prefill made, then the one used last. Only segments that equal the history are visited."""
        equals, equal, forked = data.startswith, [self.root], False
        for node in equal:  # it grows by the children that are equal too
            at, child = node.end * TOKEN_NBYTES, node.only
            if child is not None:
                if child.end <= limit and equals(child.data, at):
                    equal.append(child)
            elif node.num_children:
                twins = node.children.get(data[at : at + PAGE_KEY_NBYTES], ())
                equal += [c for c in twins if c.end <= limit and equals(c.data, at)]
                forked = forked or len(twins) > 1
        by_end = sorted(equal, key=attrgetter("end"), reverse=True) if forked else reversed(equal)
        best: Snapshot | None = None
        for node in by_end:
            if best is not None and node.end < best.node.end:
                break
            found = deepest(node, data, node.end * TOKEN_NBYTES, limit - node.end)
            if found is not None and (best is None or _rank(found) > _rank(best)):
                best = found
        return best

    def common_tokens(self, data: bytes) -> int:
        """Tokens in front, in whole pages, with which some history of the tree begins too."""
        best, equal = 0, [(0, self.root)]
        for at, node in equal:
            for child in node.children.get(data[at : at + PAGE_KEY_NBYTES], ()):
                piece = child.data
                end = at + len(piece)
                if data.startswith(piece, at):
                    equal.append((end, child))
                else:
                    end = at + _common_pages(piece, data[at:end]) * PAGE_KEY_NBYTES
                best = max(best, end)
        return best // TOKEN_NBYTES

    def find(
        self, node: Segment, data: bytes, seams: tuple[Seam, ...]
    ) -> tuple[Segment | None, int]:
        """The child of `node` that begins as `data` with `seams` does, and the number of pages that
        they have in common."""
        for child in node.children.get(data[:PAGE_KEY_NBYTES], ()):
            count = min(_common_pages(child.data, data), _pages_before_difference(child, seams))
            if count:
                return child, count
        return None, 0

    def add(self, node: Segment, data: bytes, pages: list[int], seams: tuple[Seam, ...]) -> Segment:
        """Append whole pages below `node`, where `find` finds nothing."""
        assert len(data) == len(pages) * PAGE_KEY_NBYTES
        made_by = MadeBy.DECODE if seams else node.made_by
        child = Segment(
            parent=node, start=node.end, data=data, pages=pages, seams=seams, made_by=made_by
        )
        node.children.setdefault(data[:PAGE_KEY_NBYTES], []).append(child)
        node.num_children += 1
        node.num_resident += 1
        node.note_only()
        self.num_segments += 1
        return child

    def split(self, node: Segment, num_pages: int) -> Segment:
        """Cut the first `num_pages` pages off a segment and return them as its new parent; `node`
        stays the deeper part, so who holds it holds the same history as before."""
        parent, cut = node.parent, num_pages * PAGE_KEY_NBYTES
        assert parent is not None
        assert 0 < cut < len(node.data)
        upper = Segment(
            parent=parent,
            start=node.start,
            data=node.data[:cut],
            pages=node.pages[:num_pages],
            seams=tuple(s for s in node.seams if s.position < node.start + num_pages * PAGE_TOKENS),
            made_by=node.made_by,
            parked=node.parked,
            refs=node.refs,
            num_children=1,
            num_resident=0 if node.parked else 1,
        )
        siblings = parent.children[node.data[:PAGE_KEY_NBYTES]]
        siblings[siblings.index(node)] = upper
        node.parent, node.start, node.seams = upper, upper.end, node.seams[len(upper.seams) :]
        node.data, node.pages = node.data[cut:], node.pages[num_pages:]
        upper.children[node.data[:PAGE_KEY_NBYTES]] = [node]
        upper.note_only()
        parent.note_only()
        self.num_segments += 1
        return upper

    def merge(self, node: Segment) -> None:
        """Join a segment to its child when nothing tells the two apart any more; the child stays,
        with the pages of both."""
        child = node.only
        if node.parent is None or node.snapshots or child is None:
            return
        if (child.refs, child.parked, child.made_by) != (node.refs, node.parked, node.made_by):
            return
        siblings = node.parent.children[node.data[:PAGE_KEY_NBYTES]]
        siblings[siblings.index(node)] = child
        node.parent.note_only()
        child.parent, child.start = node.parent, node.start
        child.data, child.pages = node.data + child.data, node.pages + child.pages
        child.seams = node.seams + child.seams
        self.num_segments -= 1

    def remove(self, node: Segment) -> Segment:
        """Take a leaf without snapshots out of the tree; return its parent."""
        parent, key = node.parent, node.data[:PAGE_KEY_NBYTES]
        assert parent is not None
        assert not node.num_children
        assert not node.snapshots
        siblings = parent.children[key]
        siblings.remove(node)
        if not siblings:
            del parent.children[key]
        parent.num_children -= 1
        parent.note_only()
        parent.num_resident -= not node.parked
        self.num_segments -= 1
        return parent

    def walk(self, node: Segment | None = None) -> Iterator[Segment]:
        """All segments at and below `node` (default: the root), parents first."""
        pending = [node or self.root]
        while pending:
            node = pending.pop()
            yield node
            for siblings in node.children.values():
                pending += siblings


def fitting(node: Segment, data: bytes, at: int, num_tokens: int) -> list[Snapshot]:
    """The snapshots of `node` whose rest continues `data` at byte `at` and has at most `num_tokens`
    tokens. At most 64 fit, however many there are."""
    snapshots, limit = node.snapshots, num_tokens * TOKEN_NBYTES
    if not snapshots:
        return []
    if len(snapshots) <= PAGE_TOKENS:
        rests = [rest for rest in snapshots if len(rest) <= limit and data.startswith(rest, at)]
    else:
        stop = at + min(limit + TOKEN_NBYTES, PAGE_KEY_NBYTES, len(data) - at + TOKEN_NBYTES)
        rests = [data[at:end] for end in range(at, stop, TOKEN_NBYTES)]
    return [snapshots[rest] for rest in rests if rest in snapshots]


def deepest(node: Segment, data: bytes, at: int, num_tokens: int) -> Snapshot | None:
    """The deepest of the snapshots that fit."""
    return max(fitting(node, data, at, num_tokens), key=lambda s: s.num_tokens, default=None)


def _rank(snapshot: Snapshot) -> tuple[int, bool, int]:
    return snapshot.num_tokens, snapshot.made_by is MadeBy.PREFILL, snapshot.used


def _common_pages(a: bytes, b: bytes) -> int:
    """Pages in front that are equal; a binary search, for equality of a prefix is monotone."""
    low, high = 0, min(len(a), len(b)) // PAGE_KEY_NBYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[: middle * PAGE_KEY_NBYTES]):
            low = middle
        else:
            high = middle - 1
    return low


def _pages_before_difference(node: Segment, seams: tuple[Seam, ...]) -> int:
    """Pages of `node` in front of the first seam that only it or only `seams` has."""
    differing = set(node.seams).symmetric_difference(seams)
    if not differing:
        return len(node.pages)
    return (min(differing).position - node.start) // PAGE_TOKENS
