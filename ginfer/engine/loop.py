"""RoundLoop: the state machine of one engine; one thread calls it, one step is one round.

A step orders the forward of the next unit, reads what the unit before has drawn, and then orders
the draw of its own. Where the backend runs ahead, that is left to be read by the next step: the
device computes while the host takes the tokens of the round before, and rows that end with them are
dropped from the one that is on its way. Otherwise it is read at once.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.cache import PrefixCache
from ginfer.engine.admission import Admission
from ginfer.engine.claims import running_claim, waiting_claim
from ginfer.engine.drafting import open_drafting
from ginfer.engine.grammar import Grammars
from ginfer.engine.job import Job, Round
from ginfer.engine.output import Ending, Output
from ginfer.engine.prefill import PrefillQueue
from ginfer.engine.request import (
    Failed,
    Finished,
    FinishReason,
    Started,
    TokenLogprob,
    Usage,
)
from ginfer.engine.round import DecodeUnit, PrefillUnit, RoundView
from ginfer.engine.scheduler import effective_output, entitled_pages, may_admit, next_unit
from ginfer.engine.stats import Stats
from ginfer.errors import GInferError, InternalError, QueueTimeoutError
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.batch import Selection
    from ginfer.cache import Sequence
    from ginfer.config import EngineConfig
    from ginfer.engine.admission import Claim
    from ginfer.engine.chunk_plan import ChunkLimits, Piece
    from ginfer.engine.memory import Capacity
    from ginfer.engine.rank import Draw, Rank
    from ginfer.engine.request import Event
    from ginfer.engine.round import DraftPlan, Unit
    from ginfer.frontend.base import Frontend

log = logging.getLogger(__name__)


class RoundLoop:
    """Waiting and running requests of one engine, and the rounds over them.

    `on_end(request_id)` is called when a request holds nothing any more, before its terminal event.
    """

    def __init__(
        self,
        *,
        rank: Rank,
        frontend: Frontend,
        capacity: Capacity,
        config: EngineConfig,
        clock: Callable[[], float],
        on_end: Callable[[str], None],
    ) -> None:
        plan = capacity.plan
        self.cache = PrefixCache(capacity.geometry, rank.backend, retain=config.prefix_reuse)
        self.stats = Stats()
        self._rank, self._frontend, self._clock, self._on_end = rank, frontend, clock, on_end
        self.grammars = Grammars(frontend, rank.spec.vocab_size)
        self._max_context = capacity.max_context
        self._prefill = PrefillQueue(rank.spec, plan, config.decode_gap_ms, goes_on=rank.goes_on)
        self._timeout_s = config.pending_timeout_s
        self._waiting: deque[Job] = deque()
        self._lanes: list[Job | None] = [None] * plan.num_rows
        self._admission = Admission(
            plan.num_rows, capacity.num_pages, page_ids=capacity.geometry.num_pages
        )
        self._stalled = False  # nobody can enter before something ends or arrives
        self._ready: tuple[int, ...] = ()
        self._decoded_last, self._began = False, 0.0  # since when a round's time is not counted
        self._outstanding: Round | None = None  # drawn and not read
        self._drafting = open_drafting(rank, plan, frontend, self.stats, limit=config.draft_tokens)

    # -- control: between rounds ------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Take an accepted request: it waits, or is complete at once when it wants no output."""
        request = job.request
        wanted, num_prompt = request.max_tokens, request.prompt.num_tokens
        job.limit = effective_output(num_prompt, wanted, self._max_context)
        reason = FinishReason.OUTPUT_LIMIT if job.limit == wanted else FinishReason.CONTEXT_LIMIT
        try:
            job.output = Output(request, self._frontend, job.limit, reason)
            if job.constraint is not None:
                job.constraint.active = job.output.in_content
        except Exception as error:
            log.exception("request %s cannot be set up", request.request_id)
            self._fail(job, InternalError(f"the request cannot be set up: {error}"))
            return
        if job.limit == 0:
            self._end(job, Ending(reason=FinishReason.OUTPUT_LIMIT))
        else:
            self._waiting.append(job)
            self.cache.expect(request.prompt)
            self._stalled = False

    def cancel(self, request_id: str, since: float) -> None:
        """End a request that was cancelled at time `since`; unknown ids have ended already."""
        for job in (*self._waiting, *self._lanes):
            if job is not None and job.request.request_id == request_id:
                self._end(job, Ending(reason=FinishReason.CANCELLED))
                self.stats.cancel_to_free_s.observe(self._clock() - since)
                return

    def expire(self) -> None:
        """Fail the requests that have waited too long."""
        now = self._clock()
        while self._waiting and self._waiting[0].submitted + self._timeout_s <= now:
            message = f"the request waited {self._timeout_s:g} s in the queue; try again later"
            self._fail(self._waiting[0], QueueTimeoutError(message))

    def gauges(self) -> dict[str, Any]:
        """What its lanes, pages and slots hold."""
        return {
            "running": sum(job is not None for job in self._lanes),
            "decoding": len(self._ready),
            **self.cache.gauges(),
        }

    def close(self) -> None:
        """End the workers."""
        self.grammars.close()
        if self._drafting is not None:
            self._drafting.close()

    def rest(self) -> None:
        """Give memory that holds nothing back to the system, until `wake`."""
        self._rank.backend.give_back(self.cache.free_units())

    def wake(self) -> None:
        """Have all memory again."""
        self._rank.backend.take_back()

    def check_integrity(self) -> None:
        """Assert that lanes, pages and slots have exactly one owner each."""
        self.cache.check_integrity()
        running = [job for job in self._lanes if job is not None]
        assert all(self._lanes[job.lane] is job for job in running)
        expected = {job.lane for job in running if job not in self._prefill.jobs}
        assert set(self._ready) == expected
        assert self.cache.gauges()["free_slots"] == len(self._lanes) - len(running)
        assert self._admission.fits([self._running_claim(job) for job in running])

    # -- rounds -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit requests while the next chunk has room, order one unit and read the one before;
        False when there is nothing to do. An exception that comes out is the backend's, and the
        loop cannot go on after it."""
        self._began = perf_counter()
        self._prefill.observe(self._rank.backend.chunk_times())
        admitted = False
        while self._may_admit() and self._admit():
            admitted = True
        unit = self._next_unit()
        if unit is None and self._outstanding is None:
            assert admitted or not self._waiting, "an empty engine refuses a request that fits"
            return admitted
        ordered = None if unit is None else self._order(unit)
        self._settle()
        if ordered is not None:
            self._draw(ordered)
        if not self._rank.runs_ahead or (ordered is not None and ordered.flight.plan is not None):
            self._settle()
        self.stats.busy_s += perf_counter() - self._began
        return True

    def _next_unit(self) -> Unit | None:
        """The next unit. A round that will verify drafts is planned by all tokens before it."""
        view = self._view()
        unit = next_unit(view, self._limits(view))
        if isinstance(unit, DecodeUnit) and self._outstanding is not None:
            if self._plan_drafts(unit) is None:
                return unit
            self._settle()
            view = self._view()
            unit = next_unit(view, self._limits(view))
        return unit

    def _plan_drafts(self, unit: DecodeUnit) -> DraftPlan | None:
        if self._drafting is None:
            return None
        return self._drafting.plan([job for lane in unit.lanes if (job := self._lanes[lane])])

    def _view(self) -> RoundView:
        lanes, prompts = self._lanes, self._prefill.views(self._rank.frontier)
        ready = tuple(lane for lane in self._ready if (job := lanes[lane]) and job.wants_more)
        return RoundView(prompts=prompts, ready=ready, decoded_last=self._decoded_last)

    def _limits(self, view: RoundView) -> ChunkLimits:
        return self._prefill.limits(decoding=bool(view.ready))

    def _may_admit(self) -> bool:
        if not self._waiting or self._stalled or None not in self._lanes:
            return False
        view = self._view()
        return may_admit(view, self._limits(view)) and (not view.prompts or self._may_join())

    def _may_join(self) -> bool:
        """Whether the oldest waiting request may enter beside prompts in prefill. Nobody passes it
        there, and it waits for a state that they leave."""
        prompt = self._waiting[0].request.prompt
        if self._prefill.will_help(prompt, self.cache.match(prompt).num_tokens):
            return False
        claims = *self._running_claims(), self._waiting_claim(self._waiting[0])
        return self._admission.fits(claims)

    def _admit(self) -> bool:
        """Let the request enter that the policy chooses, if any."""
        claims = map(self._waiting_claim, self._waiting)
        key = self._admission.choose(claims, self._running_claims())
        job = next((job for job in self._waiting if job.request.request_id == key), None)
        self._stalled = job is None
        if job is None:
            return False
        prompt = job.request.prompt
        known = self.cache.known_tokens(prompt)
        sequence = self.cache.acquire(prompt, entitled_pages(prompt.num_tokens, job.limit))
        self._stalled = sequence is None
        if sequence is not None:
            self._enter(job, sequence, max(known - sequence.cached_tokens, 0))
        return sequence is not None

    def _running_claims(self) -> list[Claim]:
        return [self._running_claim(job) for job in self._lanes if job is not None]

    def _waiting_claim(self, job: Job) -> Claim:
        prompt = job.request.prompt
        chunk = self._prefill.chunk_beside(prompt.num_tokens)
        return waiting_claim(job.request, job.limit, self.cache.match(prompt), chunk)

    def _running_claim(self, job: Job) -> Claim:
        assert job.sequence is not None
        num_prompt = job.request.prompt.num_tokens
        left = num_prompt - int(self._rank.frontier[job.lane])
        work = max(left, 0), job.limit - len(job.generated)
        chunk = self._prefill.chunk_beside(num_prompt)
        return running_claim(job.request.request_id, job.sequence, work, chunk)

    def _enter(self, job: Job, sequence: Sequence, num_recomputed: int) -> None:
        """Give an admitted request its lane; prefill is next."""
        request, now = job.request, self._clock()
        num_prompt = request.prompt.num_tokens
        self.stats.passed += job is not self._waiting[0]
        self._waiting.remove(job)
        job.sequence, job.lane, job.admitted = sequence, self._lanes.index(None), now
        job.cached_tokens = sequence.cached_tokens
        self._lanes[job.lane] = job
        self._prefill.jobs.append(job)
        self._rank.open_lane(job.lane, request, sequence)
        if self._drafting is not None:
            self._drafting.enter(job)
        self.stats.queue_s.observe(now - job.submitted)
        self.stats.prompt_tokens += num_prompt
        self.stats.cached_tokens += job.cached_tokens
        self.stats.recomputed_tokens += num_recomputed
        self.stats.reuse[sequence.path] += 1
        started = Started(
            request_id=request.request_id,
            prompt_tokens=num_prompt,
            cached_tokens=job.cached_tokens,
            reuse_path=sequence.path,
            recomputed_tokens=num_recomputed,
        )
        try:
            job.sink(started)
        except Exception as error:
            self._at_fault(job, error)

    def _order(self, unit: Unit) -> Round | None:
        """Order the forward of a unit; None when it draws nothing."""
        began = perf_counter()
        prefills = isinstance(unit, PrefillUnit)
        ordered = self._advance(unit) if isinstance(unit, PrefillUnit) else self._decode(unit)
        self.stats.forward_s += perf_counter() - began
        self._decoded_last = not prefills
        if ordered.flight.batch.selection is None:
            return None
        for job in ordered.jobs:
            job.in_flight += 1
        return ordered

    def _advance(self, unit: PrefillUnit) -> Round:
        """Order a chunk. Its prompts that end want their first token drawn."""
        jobs = {job.lane: job for job in self._prefill.jobs}
        for piece in unit.pieces:
            self._grow(jobs[piece.lane], piece.stop)
        flight = self._rank.prefill(unit.pieces)
        self._prefill.ordered(unit.pieces)
        self.stats.prefill_rounds += 1
        for piece in unit.pieces:
            self._commit_piece(jobs[piece.lane], piece)
        drawn, chunks = [jobs[lane] for lane in flight.lanes], self.stats.prefill_rounds
        return Round(drawn, flight, decodes=False, chunks=chunks)

    def _commit_piece(self, job: Job, piece: Piece) -> None:
        """A piece is ordered; behind it the prompt may have ended."""
        assert job.sequence is not None
        self.cache.commit(job.sequence, piece.stop)
        self._rank.settle_piece(piece.lane)
        self.stats.prefill_tokens += piece.num_columns
        if piece.last:
            self._prefill.jobs.remove(job)
            self._stalled = False
            self._ready = tuple(sorted((*self._ready, piece.lane)))

    def _decode(self, unit: DecodeUnit) -> Round:
        jobs = [job for lane in unit.lanes if (job := self._lanes[lane]) is not None]
        plan = self._plan_drafts(unit) if self._outstanding is None else None
        ordered, widths = self._rank.ordered.tolist(), plan.widths if plan else repeat(0)
        for job, width in zip(jobs, widths):
            self._grow(job, ordered[job.lane] + 1 + width)
        flight = self._rank.verify(plan) if plan else self._rank.decode(unit.lanes)
        return Round(jobs, flight, decodes=True, chunks=self.stats.prefill_rounds)

    def _grow(self, job: Job, num_tokens: int) -> None:
        """Have pages for the first `num_tokens` tokens of a request, within its entitlement."""
        sequence = job.sequence
        assert sequence is not None
        if num_tokens > len(sequence.pages) * PAGE_TOKENS:
            known = len(sequence.pages)
            self.cache.grow(sequence, num_tokens)
            self._rank.set_pages(job.lane, sequence.pages, first=known)

    def _draw(self, ordered: Round) -> None:
        """Order the draw of a round, by what its requests want after the tokens read so far. Rows
        that have ended draw like free ones; nobody reads them."""
        living = [job if job.lane >= 0 else None for job in ordered.jobs]
        if not any(living):
            return
        began = perf_counter()
        flight = ordered.flight
        forced = [job.output.forced if job and job.output else -1 for job in living]
        constraints = [job.constraint if job else None for job in living]
        if flight.plan is None:
            self._rank.draw(flight, forced, self.grammars.mask(constraints))
        else:
            assert self._drafting is not None
            limits = self._drafting.limits(constraints, flight)
            mask = self.grammars.path_mask(constraints, flight)
            self._rank.accept(flight, limits, forced, mask)
            self._rank.draft_ahead(flight, self._drafting.ahead(ordered))
        self.stats.forward_s += perf_counter() - began
        self._outstanding = ordered

    def _settle(self) -> None:
        """Read the outstanding round, and hand its tokens to the requests that still run."""
        done, self._outstanding = self._outstanding, None
        if done is None:
            return
        began = perf_counter()
        draw = self._rank.read(done.flight)
        now = perf_counter()
        self.stats.wait(now - began, round_s=now - self._began)
        self._began = now
        rows = [i for i, job in enumerate(done.jobs) if job.lane >= 0]
        self._rank.settle(done.flight, rows)
        if done.decodes:
            self.stats.decode_rounds += 1
            self.stats.row_rounds += len(rows)
            if self._drafting is not None:
                self._drafting.record(done, [n - 1 for n in draw.counts])
        self._commit(done.jobs, rows, draw)

    def _commit(self, jobs: list[Job], rows: list[int], draw: Draw) -> None:
        """Hand the jobs of these rows their tokens; row i of the draw belongs to jobs[i]."""
        token_ids, finite = draw.selection.token_ids.tolist(), draw.selection.finite.tolist()
        for i in rows:
            job = jobs[i]
            job.in_flight -= 1
            if job.first_token is None:
                job.first_token = self._clock()
                self.stats.first_token_s.observe(job.first_token - job.submitted)
            for column in range(draw.first[i], draw.first[i] + draw.counts[i]):
                if job.lane >= 0:
                    token_id = token_ids[column] if finite[column] else -1
                    self._take(job, token_id, draw.selection, column)
        self.grammars.advance([c for job in jobs if job.lane >= 0 and (c := job.constraint)])

    def _take(self, job: Job, token_id: int, selection: Selection, column: int) -> None:
        """Hand a job the token of a column, which is -1 where the logits were not finite."""
        if job.constraint is not None and job.constraint.fault is not None:
            self._fail(job, job.constraint.error())
        elif token_id >= 0:
            try:
                self._accept(job, token_id, job.logprob(selection, column))
            except Exception as error:
                self._at_fault(job, error)
        else:
            message = "the model produced a logit that is not a number"
            self._fail(job, InternalError(message, code="nonfinite_logits"), keep=False)

    def _accept(self, job: Job, token_id: int, logprob: TokenLogprob | None) -> None:
        output, constraint = job.output, job.constraint
        assert output is not None
        job.generated.append(token_id)
        self.stats.completion_tokens += 1
        forced = constraint is not None and output.forced >= 0
        deltas = output.commit(token_id, logprob)
        if constraint is not None and output.ending is None:
            self.grammars.follow(constraint, output, token_id, forced=forced)
        for delta in deltas:
            job.sink(delta)
        if output.ending is not None:
            self._end(job, output.ending)

    # -- ends -------------------------------------------------------------------------------------

    def _at_fault(self, job: Job, error: Exception) -> None:
        """What belongs to one request failed, which costs that request alone."""
        log.error("request %s failed", job.request.request_id, exc_info=error)
        if job.lane >= 0:
            self._fail(job, InternalError(f"the request failed: {error!r}"))

    def _end(self, job: Job, ending: Ending) -> None:
        """Complete a request: free what it holds, then tell its sink."""
        output, request_id = job.output, job.request.request_id
        assert output is not None
        try:
            rest = output.end(ending) if output.ending is None else []
        except Exception as error:
            log.exception("request %s cannot be ended", request_id)
            self._fail(job, InternalError(f"the request failed: {error!r}"))
            return
        ending = output.ending or ending  # a stop string may hide in the text held back
        timings = job.timings(self._clock())
        self._release(job, keep=True)
        final = Finished(
            request_id=request_id,
            reason=ending.reason,
            usage=Usage(
                prompt_tokens=job.request.prompt.num_tokens,
                cached_tokens=job.cached_tokens,
                completion_tokens=output.completion_tokens,
                reasoning_tokens=output.reasoning_tokens,
                draft_tokens=job.draft_tokens,
                accepted_tokens=job.accepted_tokens,
            ),
            timings=timings,
            stop=ending.stop,
            stop_token_id=ending.stop_token_id,
        )
        self.stats.finish(ending.reason.value, timings, output.completion_tokens)
        self._tell(job, (*rest, final))

    def _fail(self, job: Job, error: GInferError, *, keep: bool = True) -> None:
        """End a request with an error. keep: its computed history is sound."""
        self._release(job, keep=keep)
        self.stats.failed[error.code] += 1
        self._tell(job, (Failed(request_id=job.request.request_id, error=error),))

    def _release(self, job: Job, *, keep: bool) -> None:
        if job.lane < 0:
            if job in self._waiting:
                self._waiting.remove(job)
                self.cache.dismiss(job.request.prompt)
        else:
            assert job.sequence is not None
            prompt, frontier = job.request.prompt, int(self._rank.frontier[job.lane])
            if keep:
                taken = prompt.num_tokens + max(len(job.generated) - 1, 0)
                frontier = self._rank.shorten(job.lane, taken)
            if self._drafting is not None:
                self._drafting.forget(job.lane)
            history = np.concatenate((prompt.token_ids, np.array(job.generated, np.int32)))
            self.cache.release(job.sequence, history[:frontier], sound=keep)
            self._lanes[job.lane] = None
            self._ready = tuple(lane for lane in self._ready if lane != job.lane)
            if job in self._prefill.jobs:
                self._prefill.jobs.remove(job)
            job.lane = -1
        self._stalled = False
        self._on_end(job.request.request_id)

    def _tell(self, job: Job, events: tuple[Event, ...]) -> None:
        try:
            for event in events:
                job.sink(event)
        except Exception:
            log.exception("the sink of request %s refuses its end", job.request.request_id)
