"""Drafting: which drafts the rows of a decode round verify, and what is learned from their fate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ginfer.engine.context_copy import MAX_DRAFTS, ContextCopy
from ginfer.engine.cost_table import RoundCosts
from ginfer.engine.draft_width import DraftWidths, Offer, Origin
from ginfer.engine.round import DraftPlan
from ginfer.engine.round_costs import measure_costs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from ginfer.backend import MemoryPlan
    from ginfer.batch import I32
    from ginfer.engine.cost_table import CostTable
    from ginfer.engine.grammar import Constraint
    from ginfer.engine.job import Job, Round
    from ginfer.engine.rank import Flight, Rank
    from ginfer.engine.stats import Stats
    from ginfer.frontend.base import Frontend

WINDOW = 7  # drafts of a copy that has not proved itself, where there is no drafter
PATIENCE, SELDOM = 8, 4  # rounds without a match before a look-up that delays comes seldom
PAUSE = 8  # rounds from a plan in which no drafts of the drafter are worth it to the next one
NOTHING = Offer(Origin.COPY, 0)
INLINE_TOKENS = 4096  # longest prompt that is indexed at once; longer ones beside the rounds


class Drafting:
    """Drafts of one engine's requests, by lane. Copies of the context come before the drafter's.

    max_drafts: of the drafter, 0 without one. limit: most drafts of a row and round, None = as many
    as there are. delays: planning takes time from the rounds, which do not run ahead of it.
    """

    def __init__(
        self,
        costs: CostTable,
        frontend: Frontend,
        stats: Stats,
        *,
        max_drafts: int,
        limit: int | None,
        delays: bool,
    ) -> None:
        most = MAX_DRAFTS if limit is None else min(limit, MAX_DRAFTS)
        self._learned, self.costs = min(max_drafts, most), RoundCosts(costs)
        self.widths = DraftWidths(
            self.costs, learned=self._learned or min(WINDOW, most), copied=most
        )
        self._frontend, self._stats, self._delays = frontend, stats, delays
        self._close = frontend.token_text(frontend.reasoning_close_ids[-1])[-1]
        self._copies: dict[int, ContextCopy] = {}
        self._indexing: dict[int, Future[ContextCopy]] = {}  # of prompts that are being indexed
        self._misses: dict[int, int] = {}  # rounds without a match in a row
        self._offers: dict[int, Offer] = {}  # of the last plan
        self._ahead: tuple[int, ...] = ()  # lanes whose drafts no plan has taken
        self._futile, self._pause = dict[int, Origin](), 0  # what was not worth it, rounds to go
        self._read: tuple[float, int, dict[int, Origin]] | None = None  # time, chunks, who drafted
        self._indexer = ThreadPoolExecutor(1, "ginfer-index")

    def close(self) -> None:
        """End the worker."""
        self._indexer.shutdown(wait=False, cancel_futures=True)

    def enter(self, job: Job) -> None:
        """A request has its lane: index its prompt."""
        self.forget(job.lane)
        self._pause = 0
        prompt = job.request.prompt
        capacity = prompt.num_tokens + job.limit
        if prompt.num_tokens > INLINE_TOKENS:
            self._indexing[job.lane] = self._indexer.submit(ContextCopy, prompt.token_ids, capacity)
        else:
            self._copies[job.lane] = ContextCopy(prompt.token_ids, capacity)

    def forget(self, lane: int) -> None:
        """The request of a lane has ended."""
        self.widths.forget(lane)
        self._copies.pop(lane, None)
        self._indexing.pop(lane, None)
        self._misses.pop(lane, None)

    # -- plans ------------------------------------------------------------------------------------

    def plan(self, jobs: Sequence[Job]) -> DraftPlan | None:
        """Drafts of a round over these requests, by the tokens that are known; None when nobody
        drafts. What was drafted ahead and is not in the plan is a loss."""
        ahead, self._ahead = self._ahead, ()
        plan = self._plan(jobs)
        if not ahead:
            return plan
        taken = {} if plan is None else dict(zip(plan.lanes, plan.widths))
        lost = [job.lane for job in jobs if job.lane in ahead and not taken.get(job.lane)]
        if len(lost) == len(ahead):
            drafts = dict.fromkeys(lost, Origin.DRAFTER)
            self.widths.charge(drafts, self.costs.draft_s(len(lost)))
        return plan

    def _plan(self, jobs: Sequence[Job]) -> DraftPlan | None:
        rows, began, lanes = len(jobs), perf_counter(), [job.lane for job in jobs]
        may = {Origin.COPY: self.widths.may_draft(lanes, Origin.COPY, rows)}
        if not may[Origin.COPY] and not self._learned:
            self._offers = dict.fromkeys(lanes, NOTHING)
            return None
        copies = self._offer(jobs, may[Origin.COPY])
        found, worth = perf_counter(), dict[int, Origin]()
        if self._learned:
            may[Origin.DRAFTER] = self.widths.may_draft(lanes, Origin.DRAFTER, rows)
        if self._learned or copies:
            worth = {
                lane: offer.origin
                for lane, offer in self._offers.items()
                if offer.limit and lane in may[offer.origin]
            }
        widths = self._widths(worth) if worth and self.costs.known(rows) else {}
        if any(widths.values()):
            return DraftPlan(
                lanes=tuple(widths),
                widths=tuple(widths.values()),
                copies=tuple(copies.get(lane, [])[: widths[lane]] for lane in widths),
            )
        if self._delays:
            self.widths.charge(dict.fromkeys(may[Origin.COPY], Origin.COPY), found - began)
            self.widths.charge(worth, perf_counter() - found)
        return None

    def _widths(self, worth: dict[int, Origin]) -> dict[int, int]:
        """Widths of a round. Where the drafter was not worth it, little has changed a round later:
        it is asked again after a pause."""
        self._pause -= 1
        if self._pause > 0 and worth == self._futile:
            return {}
        widths = self.widths.plan(self._offers)
        if Origin.COPY not in worth.values() and not any(widths.values()):
            self._futile, self._pause = worth, PAUSE
        return widths

    def _offer(self, jobs: Sequence[Job], searched: set[int]) -> dict[int, list[int]]:
        """Offers of these requests; returns the copies, which some have that are searched."""
        copies, offers = dict[int, list[int]](), dict[int, Offer]()
        for lane in [lane for lane, index in self._indexing.items() if index.done()]:
            self._copies[lane] = self._indexing.pop(lane).result()
        for job in jobs:
            lane, offer = job.lane, NOTHING
            if lane in searched and (copy := self._copy(job)):
                copies[lane], offer = copy, Offer(Origin.COPY, len(copy))
            elif self._learned:
                offer = _of_drafter(max(min(_most_drafts(job), self._learned), 0))
            offers[lane] = offer
        self._offers = offers
        return copies

    def _copy(self, job: Job) -> list[int]:
        """What followed the last tokens of a request where they occurred before."""
        lane = job.lane
        if self._delays:
            misses = self._misses[lane] = self._misses.get(lane, 0) + 1
            if misses > PATIENCE and misses % SELDOM:
                return []
        index = self._copies.get(lane)  # none while its prompt is being indexed
        if index is None or not index.follow(job.generated):
            return []
        copy = index.propose(min(_most_drafts(job), self.widths.copy_limit(lane)))
        if copy:
            self._misses[lane] = 0
        return copy

    def ahead(self, ordered: Round) -> tuple[int, ...]:
        """Lanes whose next drafts are worth ordering before a round is read that verifies: where
        its drafts are no trial, and the request cannot end at its limit with fewer tokens."""
        plan = ordered.flight.plan
        if self._delays or plan is None:
            return ()
        self._ahead = tuple(
            job.lane
            for job, width, copy in zip(ordered.jobs, plan.widths, plan.copies, strict=True)
            if width and not copy and job.lane != self.widths.tried and _most_drafts(job) > 0
        )
        return self._ahead

    # -- results ----------------------------------------------------------------------------------

    def limits(self, constraints: Sequence[Constraint | None], flight: Flight) -> I32:
        """Columns that the rows of a verification may use: a row whose grammar begins with the
        content ends where a draft may end its reasoning."""
        limits = np.diff(flight.batch.row_indptr)
        for i, constraint in enumerate(constraints):
            if constraint is not None and not constraint.active:
                ends = map(self._may_close, flight.drafts(i))
                limits[i] = next((n for n, end in enumerate(ends, 1) if end), limits[i])
        return limits

    def _may_close(self, token_id: int) -> bool:
        return self._close in self._frontend.token_text(token_id)

    def record(self, done: Round, accepted: Sequence[int]) -> None:
        """A decode round was read that accepted so many drafts of each row."""
        plan = done.flight.plan
        self._time(done)
        if plan is None:
            self.widths.pass_round(self._offers)
            return
        given, taken = dict(zip(plan.lanes, plan.widths)), dict(zip(plan.lanes, accepted))
        self.widths.record(self._offers, given, taken)
        origins = [self._offers[lane].origin.value for lane in plan.lanes]
        self._stats.drafts(origins, plan.widths, accepted, wide=WINDOW)
        for job, width, count in zip(done.jobs, plan.widths, accepted, strict=True):
            job.draft_tokens += width
            job.accepted_tokens += count

    def _time(self, done: Round) -> None:
        """What a round took since the one before, if that was read and no prompt came between. A
        plain round behind one that verifies did not run ahead: what it lost so is a loss of those
        that drafted."""
        flight, before, now = done.flight, self._read, perf_counter()
        rows, plan = len(flight.lanes), flight.plan
        widths = () if plan is None else zip(plan.lanes, plan.widths)
        drafted = {lane: self._offers[lane].origin for lane, width in widths if width}
        self._read = (now, done.chunks, drafted)
        if before is None or before[1] != done.chunks:
            return
        seconds = now - before[0]
        if drafted or not before[2] or self._delays:
            columns = flight.batch.num_columns
            self.costs.observe(rows, columns, seconds, drafter=bool(flight.drafted))
        else:
            plain = self.costs.plain_s(rows)
            self.widths.charge(before[2], min(max(seconds - plain, 0.0), plain))


def open_drafting(
    rank: Rank, plan: MemoryPlan, frontend: Frontend, stats: Stats, *, limit: int | None
) -> Drafting | None:
    """Drafting on a backend that verifies; None on others. Measures the costs of rounds."""
    speculation = rank.backend.speculation
    if speculation is None or not plan.max_recorded:
        return None
    with ThreadPoolExecutor(1, "ginfer-costs") as beside:  # as in service, where another thread
        costs = beside.submit(measure_costs, rank.spec, rank.backend, plan)  # has begun kernels
    return Drafting(
        costs.result(),
        frontend,
        stats,
        max_drafts=speculation.max_drafts,
        limit=limit,
        delays=not rank.runs_ahead,
    )


@cache
def _of_drafter(limit: int) -> Offer:
    return Offer(Origin.DRAFTER, limit)


def _most_drafts(job: Job) -> int:
    """Drafts that a request can verify: behind them it draws one more token, and none of both may
    be one that is forced."""
    assert job.output is not None
    most = job.limit - len(job.generated) - job.in_flight - 1
    free = job.output.free_tokens
    return most if free is None else min(most, free - job.in_flight - 1)
