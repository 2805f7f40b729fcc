"""Admission: which waiting request enters, so that memory is used and the oldest never starves.

The oldest waiting request is the protected head. While it does not fit, an epoch holds: of the
requests that ran when it began, the shortest prefix by remaining work whose end makes the head fit
are its donors; the furthest of them is `distance` away. Younger requests may pass the head only
- as persistent backfill: head, running requests but donors and borrowers, and it fit together; or
- as temporal backfill (a borrower): its work is within the distance left and within a credit that
  begins at the distance, is charged in full and never refunded.
As soon as the head would fit without the borrowers, nobody passes any more (drain).

Work is counted in decode rounds; a prefill chunk costs one, because chunks and rounds alternate. A
borrower therefore ends before the furthest donor, and a head waits at most distance + the chunks of
one prefill that entered just before, in rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What a request takes until it ends: one lane, its physical pages and `reserve` more.

    pages: [n] int32, held, or found for it in the cache; requests may share them. work: prefill
    chunks and decode rounds that are left at most.
    """

    key: str
    pages: NDArray[np.int32]
    reserve: int
    work: int


@dataclass
class Epoch:
    """Protection of one head. borrowers: temporal backfills that entered; credit: work that more of
    them may bring."""

    head: str
    donors: frozenset[str]
    credit: int
    borrowers: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Load:
    """Requests that run together: their lanes, their pages, and which page ids they hold."""

    lanes: int
    pages: int
    marks: NDArray[np.bool_]

    def joined_by(self, claim: Claim) -> tuple[int, int]:
        """(lanes, pages) with one request more."""
        shared = int(np.count_nonzero(self.marks[claim.pages]))
        return self.lanes + 1, self.pages + claim.reserve + len(claim.pages) - shared


class Admission:
    """The policy over `num_lanes` lanes and `num_pages` pages, whose ids are below `page_ids`."""

    def __init__(self, num_lanes: int, num_pages: int, *, page_ids: int | None = None) -> None:
        self._num_lanes, self._num_pages = num_lanes, num_pages
        self._page_ids = num_pages if page_ids is None else page_ids
        self.epoch: Epoch | None = None

    def fits(self, claims: Sequence[Claim]) -> bool:
        """Whether these requests can run together; a page that several hold counts once."""
        load = self._load(claims)
        return self._enough(load.lanes, load.pages)

    def _load(self, claims: Sequence[Claim]) -> Load:
        marks = np.zeros(self._page_ids, np.bool_)
        for claim in claims:
            marks[claim.pages] = True
        reserved = sum(claim.reserve for claim in claims)
        return Load(len(claims), int(np.count_nonzero(marks)) + reserved, marks)

    def _enough(self, lanes: int, pages: int) -> bool:
        return lanes <= self._num_lanes and pages <= self._num_pages

    def choose(self, waiting: Iterable[Claim], running: Sequence[Claim]) -> str | None:
        """The waiting request that enters now; its entry must follow. waiting: oldest first, read
        no further than needed. A head that ended otherwise has ended its epoch."""
        queue = iter(waiting)
        head = next(queue, None)
        if self.epoch is not None and (head is None or self.epoch.head != head.key):
            self.epoch = None
        if head is None:
            return None
        if self.fits((*running, head)):
            self.epoch = None
            return head.key
        if self.epoch is None:
            self.epoch = self._protect(head, running)
        return self._backfill(self.epoch, head, queue, running)

    def _protect(self, head: Claim, running: Sequence[Claim]) -> Epoch:
        """Begin an epoch: the shortest prefix of the running, by work, whose end is enough."""
        order = sorted(running, key=lambda claim: claim.work)
        counts = range(1, len(order) + 1)
        count = next((n for n in counts if self.fits((*order[n:], head))), 0)
        assert count, "a request that fits an empty engine was accepted"
        distance = order[count - 1].work
        return Epoch(head.key, frozenset(claim.key for claim in order[:count]), credit=distance)

    def _backfill(
        self, epoch: Epoch, head: Claim, queue: Iterable[Claim], running: Sequence[Claim]
    ) -> str | None:
        lasting = [claim for claim in running if claim.key not in epoch.borrowers]
        if self.fits((*lasting, head)):
            return None  # drain
        donors = [claim for claim in lasting if claim.key in epoch.donors]
        if not donors:  # a page that the head was to share is gone: choose donors again, no credit
            self.epoch = self._protect(head, running)
            self.epoch.credit = 0
            return None
        kept = [claim for claim in lasting if claim.key not in epoch.donors]
        distance = min(max(claim.work for claim in donors), epoch.credit)
        now, later = self._load(running), self._load((*kept, head))
        for claim in queue:
            if not self._enough(*now.joined_by(claim)):
                continue
            if self._enough(*later.joined_by(claim)):
                return claim.key
            if claim.work <= distance:
                epoch.credit -= claim.work
                epoch.borrowers.add(claim.key)
                return claim.key
        return None
