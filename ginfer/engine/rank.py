"""Rank: the loop's view of one backend, lanes in and chosen tokens out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.batch import DraftBatch, ForwardBatch, Phase, Purpose, Selection
from ginfer.engine.sampler import SamplingTable
from ginfer.engine.work_items import work_items
from ginfer.models import qwen
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.backend import Backend, Hidden, MemoryPlan
    from ginfer.batch import (
        I32,
        PendingAcceptance,
        PendingDrafts,
        PendingSelection,
        TokenMask,
        WorkItems,
    )
    from ginfer.cache import Sequence
    from ginfer.engine.chunk_plan import Piece
    from ginfer.engine.request import Request
    from ginfer.engine.round import DraftPlan
    from ginfer.prompt import PreparedPrompt
    from ginfer.spec import ModelSpec


@dataclass(frozen=True)
class Drafted:
    """Drafts that are ordered, so many of each lane; row i of `pending` belongs to lanes[i]."""

    lanes: tuple[int, ...]
    num_drafts: int
    pending: PendingDrafts


@dataclass(eq=False)
class Flight:
    """A forward that is ordered, and its selection once it is drawn. lanes: of the R rows that draw
    tokens. stops, slots: [R] int32, their tokens in K/V and state after it, and where that is.

    plan: of a round that verifies drafts, whose stops are known once it is read; drafted: those of
    its lanes that copy nothing, the last order first."""

    lanes: tuple[int, ...]
    batch: ForwardBatch
    stops: I32
    slots: I32
    hidden: Hidden
    pending: PendingSelection | PendingAcceptance | None = None
    plan: DraftPlan | None = None
    drafted: tuple[Drafted, ...] = ()

    def drafts(self, row: int) -> list[int]:
        """The drafts that a row verifies; waits for those of the drafter."""
        assert self.plan is not None
        width, copy = self.plan.widths[row], self.plan.copies[row]
        if copy or not width:
            return copy
        lane = self.plan.lanes[row]
        drafted = next(d for d in self.drafted if lane in d.lanes)
        ids: list[int] = drafted.pending.read()[drafted.lanes.index(lane), :width].tolist()
        return ids


@dataclass(frozen=True)
class Draw:
    """What a flight has drawn: row i was given tokens first[i] .. first[i] + counts[i] - 1 of the
    selection."""

    selection: Selection
    first: list[int]
    counts: list[int]


class Rank:
    """Tables of all lanes, and the forwards over them. One thread calls it.

    Per lane: tokens in K/V and state as far as they are settled (`frontier`) and once all forwards
    that are ordered are done (`ordered`), rotary offset, page ids, recurrent slot. Where rounds run
    ahead a decode round reads one slot of a lane and writes its partner, so that the state before
    it stays until it is settled; `Sequence.state_slot` names the settled one. The token that a lane
    drew last is known to the backend.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, plan: MemoryPlan) -> None:
        self.backend = backend
        self.spec = spec
        self.runs_ahead = backend.runs_ahead
        num_lanes = plan.num_rows
        self._num_lanes = num_lanes
        self._verified: Flight | None = None  # the round that was read last, if it verified
        self._ahead: Drafted | None = None  # drafts that no round has verified
        per_lane = 2 if self.runs_ahead or plan.max_recorded else 1
        assert plan.num_slots >= per_lane * num_lanes, "a lane lacks its second slot"
        self.goes_on = per_lane == 2 and not _has_rings(backend)
        self.frontier = np.zeros(num_lanes, np.int32)
        self.ordered = np.zeros(num_lanes, np.int32)
        self._rope_delta = np.zeros(num_lanes, np.int32)
        self._slots = np.zeros(num_lanes, np.int32)
        self._pages = np.zeros((num_lanes, plan.max_pages_per_row), np.int32)
        self._requests: list[Request | None] = [None] * num_lanes
        self._sequences: list[Sequence | None] = [None] * num_lanes
        self._sampling = SamplingTable(num_lanes)
        self._shared: tuple[object, WorkItems | None] = (None, None)
        self._table: tuple[object, I32 | None] = (None, None)
        self._plain: Flight | None = None  # the last round, if a plain one can go on from it
        self._left = 0  # rounds before one of its rows comes to another block or page
        lanes = np.arange(num_lanes, dtype=np.int32)
        self._other = np.concatenate((lanes + np.int32(num_lanes), lanes))  # slot of a lane

    def open_lane(self, lane: int, request: Request, sequence: Sequence) -> None:
        """A request enters `lane` with the memory of `sequence`."""
        self._requests[lane], self._sequences[lane] = request, sequence
        if self._ahead is not None and lane in self._ahead.lanes:
            self._ahead = None
        self._sampling.assign(lane, request.sampling)
        self._slots[lane] = sequence.slot
        self.set_pages(lane, sequence.pages)
        self.frontier[lane] = self.ordered[lane] = sequence.cached_tokens
        self._rope_delta[lane] = request.prompt.rope_delta
        self.backend.reset_rows([lane])

    def set_pages(self, lane: int, pages: list[int], *, first: int = 0) -> None:
        """The pages of a lane have changed from page `first` on; where that is not 0, pages have
        come that no complete block has."""
        self._pages[lane, first : len(pages)] = pages[first:]
        self._table, self._plain = (None, None), None
        if not first:
            self._shared = (None, None)

    def prefill(self, pieces: tuple[Piece, ...]) -> Flight:
        """Order one chunk, a piece of each of its prompts, or two. States are settled at once; they
        stay in their slots, but the second piece of a prompt leaves the state before it there and
        writes the partner. The prompts that it ends want their first token drawn."""
        lanes = np.array([piece.lane for piece in pieces], np.int32)
        again = np.flatnonzero(lanes[1:] == lanes[:-1]) + 1
        state_in = self._slots[lanes]
        state_out = state_in.copy()
        state_out[again] = self._partners(state_in[again])
        stops = np.array([piece.stop for piece in pieces], np.int32)
        row_indptr = np.cumsum([0, *(piece.num_columns for piece in pieces)], dtype=np.int32)
        ends = np.flatnonzero([piece.last for piece in pieces])
        drawn = tuple(lanes[ends].tolist())
        selection = None
        if drawn:
            columns = row_indptr[1:][ends] - np.int32(1)
            selection = self._sampling.select(drawn, columns, stops[ends], purpose=Purpose.PROMPT)
        batch = ForwardBatch(
            phase=Phase.PREFILL,
            token_ids=np.concatenate(
                [self._prompt(p.lane).token_ids[p.start : p.stop] for p in pieces]
            ),
            positions=np.concatenate([_positions(self._prompt(p.lane), p) for p in pieces], axis=1),
            row_indptr=row_indptr,
            starts=np.array([piece.start for piece in pieces], np.int32),
            page_table=self._page_table(lanes, int(stops.max())),
            state_in=state_in,
            state_out=state_out,
            selection=selection,
        )
        hidden = self._order(lanes, batch, stops)
        self._keep_context(batch)
        self.frontier[lanes] = stops
        return Flight(drawn, batch, stops[ends], batch.state_out[ends], hidden)

    def settle_piece(self, lane: int) -> None:
        """A piece of a lane is ordered, and its snapshot taken: the cache may have exchanged pages,
        and the state is where the chunk leaves it."""
        sequence = self._sequences[lane]
        assert sequence is not None
        self.set_pages(lane, sequence.pages)
        sequence.state_slot = int(self._slots[lane])

    def _prompt(self, lane: int) -> PreparedPrompt:
        request = self._requests[lane]
        assert request is not None
        return request.prompt

    def decode(self, lanes: tuple[int, ...]) -> Flight:
        """Order a round that feeds the token that every lane drew last, and wants the next one."""
        self._ahead = None
        batch = self._next_round(lanes)
        assert batch.selection is not None
        stops = batch.selection.positions
        hidden = self._order(_of_lanes(lanes)[0], batch, stops)
        self._plain = Flight(lanes, batch, stops, batch.state_out, hidden)
        return self._plain

    def _next_round(self, lanes: tuple[int, ...]) -> ForwardBatch:
        """The batch of a plain round."""
        before = self._plain
        if before is not None and before.lanes == lanes and self._left > 0:
            self._left -= 1
            return before.batch.next_round()
        rows, ids, indptr, columns = _of_lanes(lanes)
        starts, slots = self.ordered.take(rows), self._slots.take(rows)
        partners = self._partners(slots) if self.runs_ahead else slots
        tokens = starts.tolist()
        page_table = self._round_pages(lanes, rows, max(tokens) + 1)
        self._left = min(
            page_table.shape[1] * PAGE_TOKENS - 1 - max(tokens),
            *(BLOCK_TOKENS - 1 - n % BLOCK_TOKENS for n in tokens),
        )
        stops = starts + np.int32(1)
        positions = np.empty((3, len(lanes)), np.int32)
        positions[:] = starts + self._rope_delta.take(rows)
        return ForwardBatch(
            phase=Phase.DECODE,
            token_ids=ids,
            positions=positions,
            row_indptr=indptr,
            starts=starts,
            page_table=page_table,
            state_in=slots,
            state_out=partners,
            items=self._items(lanes, page_table, starts, indptr),
            selection=self._sampling.select(lanes, columns, stops, purpose=Purpose.DECODE),
            chain=object(),
        )

    def _items(
        self, lanes: tuple[int, ...], page_table: I32, starts: I32, row_indptr: I32
    ) -> WorkItems:
        """Work items of a round; the same as long as no page comes and no row enters a block."""
        blocks = starts // BLOCK_TOKENS
        key = (lanes, blocks.tobytes())
        if row_indptr[-1] != len(starts):
            last = starts + (row_indptr[1:] - row_indptr[:-1] - np.int32(1))
            key = (lanes, np.concatenate((blocks, last // BLOCK_TOKENS)).tobytes())
        known, items = self._shared
        if items is None or known != key:
            items = work_items(page_table, starts, row_indptr)
            self._shared = (key, items)
        return items

    def verify(self, plan: DraftPlan) -> Flight:
        """Order a round that feeds what every lane drew last and drafts behind it. It is read
        before anything else is ordered for these lanes."""
        self._plain = None
        at, drafted = _of_columns(plan.lanes, plan.widths, self._num_lanes), self._draft(plan)
        rows, starts = at.rows, self.ordered[at.rows]
        token_ids = at.token_ids
        if any(plan.copies):
            token_ids = token_ids.copy()
            for first, copy in zip(at.row_indptr.tolist(), plan.copies):
                token_ids[first + 1 : first + 1 + len(copy)] = copy
        tokens = starts[at.row] + at.place
        positions = np.empty((3, len(tokens)), np.int32)
        positions[:] = tokens + self._rope_delta[at.lanes]
        stops, slots = starts + at.counts, self._slots[rows]
        page_table = self._round_pages(plan.lanes, rows, max(stops.tolist()))
        batch = ForwardBatch(
            phase=Phase.DECODE,
            token_ids=token_ids,
            positions=positions,
            row_indptr=at.row_indptr,
            starts=starts,
            page_table=page_table,
            state_in=slots,
            state_out=self._partners(slots),
            items=self._items(plan.lanes, page_table, starts, at.row_indptr),
            selection=self._sampling.verify(at.lanes, tokens + np.int32(1)),
            record=True,
        )
        hidden = self._order(rows, batch, stops)
        return Flight(plan.lanes, batch, stops, batch.state_out, hidden, plan=plan, drafted=drafted)

    def draft_ahead(self, flight: Flight, lanes: tuple[int, ...]) -> None:
        """Order drafts of lanes behind a round that is accepted and not read, as many as it
        verifies at most. The next round takes what it can use of them."""
        if lanes:
            assert flight.plan is not None
            rows = np.array([flight.lanes.index(lane) for lane in lanes], np.int32)
            most = max(flight.plan.widths[row] for row in rows)
            self._ahead = self._order_drafts(lanes, most, flight.batch.starts[rows], rows)

    def _draft(self, plan: DraftPlan) -> tuple[Drafted, ...]:
        """The drafts of a plan that the drafter makes: those that are there, and the others."""
        wanted = {
            lane: width
            for lane, width, copy in zip(plan.lanes, plan.widths, plan.copies)
            if width and not copy
        }
        known, self._ahead = self._ahead, None
        missing = tuple(
            lane
            for lane, width in wanted.items()
            if known is None or lane not in known.lanes or width > known.num_drafts
        )
        found = () if known is None else (known,)
        if not missing:
            return found
        most = max(wanted[lane] for lane in missing)
        return (self._order_drafts(missing, most, self.ordered[list(missing)]), *found)

    def _order_drafts(
        self, lanes: tuple[int, ...], num_drafts: int, starts: I32, rows: I32 | None = None
    ) -> Drafted:
        assert self.backend.speculation is not None
        places = np.array(lanes, np.int32)
        batch = DraftBatch(
            lanes=places,
            slots=self._slots[places],
            starts=starts,
            num_drafts=num_drafts,
            rows=rows,
            **self._sampling.draft(places),
        )
        return Drafted(lanes, num_drafts, self.backend.speculation.draft(batch))

    def _partners(self, slots: I32) -> I32:
        """The other slots of lanes."""
        return self._other.take(slots)

    def _keep_context(self, batch: ForwardBatch) -> None:
        """All columns of a batch that is not verified stay: tell the drafter."""
        speculation = self.backend.speculation
        if speculation is not None and speculation.max_drafts:
            speculation.keep(batch)

    def _order(self, lanes: I32, batch: ForwardBatch, stops: I32) -> Hidden:
        hidden = qwen.forward(self.spec, self.backend, batch)
        self.ordered[lanes], self._slots[lanes] = stops, batch.state_out
        return hidden

    def draw(self, flight: Flight, forced: list[int], mask: TokenMask | None) -> None:
        """Order the selection of a flight: row i takes `forced[i]` unless -1."""
        batch = flight.batch
        assert batch.selection is not None
        if mask is not None or max(forced) >= 0:
            ids = np.array(forced, np.int32)
            batch = replace(batch, selection=replace(batch.selection, forced=ids, mask=mask))
        flight.pending = self.backend.select(flight.hidden, batch)
        if batch.phase is Phase.DECODE:
            self._keep_context(batch)

    def accept(
        self, flight: Flight, limits: I32, forced: list[int], mask: TokenMask | None
    ) -> None:
        """Order the acceptance of a flight that verifies: row i may use limits[i] columns and takes
        `forced[i]`, unless -1, as its first token."""
        batch, speculation = flight.batch, self.backend.speculation
        assert batch.selection is not None
        assert speculation is not None
        if mask is not None or max(forced) >= 0:
            ids = batch.selection.forced.copy()
            ids[batch.row_indptr[:-1]] = forced
            batch = replace(batch, selection=replace(batch.selection, forced=ids, mask=mask))
        flight.pending = speculation.accept(flight.hidden, batch, limits)
        speculation.keep(batch)

    def read(self, flight: Flight) -> Draw:
        """Wait for what a flight has drawn."""
        assert flight.pending is not None
        drawn = flight.pending.read()
        self._verified = flight if flight.plan is not None else None
        if isinstance(drawn, Selection):
            rows = len(flight.lanes)
            return Draw(drawn, list(range(rows)), [1] * rows)
        counts = drawn.accepted + 1
        flight.stops = flight.batch.starts + counts
        self.ordered[list(flight.lanes)] = flight.stops
        return Draw(drawn.selection, flight.batch.row_indptr[:-1].tolist(), counts.tolist())

    def shorten(self, lane: int, num_tokens: int) -> int:
        """A request has ended. If the round that was read last verified drafts and gave it more
        than it took, its state becomes that after `num_tokens` tokens; returns the frontier."""
        flight = self._verified
        if flight is not None and lane in flight.lanes and self.frontier[lane] > num_tokens:
            assert self.backend.speculation is not None
            row, columns = flight.lanes.index(lane), np.full(len(flight.lanes), -1, np.int32)
            columns[row] = num_tokens - flight.batch.starts[row]
            self.backend.speculation.keep(flight.batch, columns)
            self.frontier[lane] = num_tokens
        return int(self.frontier[lane])

    def settle(self, flight: Flight, rows: list[int]) -> None:
        """These rows of a flight go on from it; the others have ended without it."""
        stops, slots = flight.stops.tolist(), flight.slots.tolist()
        for i in rows:
            lane = flight.lanes[i]
            sequence = self._sequences[lane]
            assert sequence is not None
            self.frontier[lane] = stops[i]
            sequence.state_slot = slots[i]

    def _round_pages(self, lanes: tuple[int, ...], rows: I32, num_tokens: int) -> I32:
        """The page table of a round; the same as long as no page comes."""
        known, table = self._table
        if table is None or known != lanes or table.shape[1] * PAGE_TOKENS < num_tokens:
            table = self._page_table(rows, num_tokens)
            self._table = (lanes, table)
        return table

    def _page_table(self, rows: I32, num_tokens: int) -> I32:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        return self._pages[:, :num_pages].take(rows, axis=0)


@cache
def _of_lanes(lanes: tuple[int, ...]) -> tuple[I32, I32, I32, I32]:
    """Rows, token ids, indptr and columns of a round: the same arrays for the same lanes, so that
    a backend sees that it has them."""
    rows, indptr = np.array(lanes, np.int32), np.arange(len(lanes) + 1, dtype=np.int32)
    return rows, ~rows, indptr, indptr[:-1]


class _Columns(NamedTuple):
    """What the columns of a round that verifies have by its lanes and widths alone: rows [B] of
    lanes, their columns, indptr [B + 1]; of columns [T] the row, its lane, the place in it, and the
    id that stands for the token there."""

    rows: I32
    counts: I32
    row_indptr: I32
    row: I32
    lanes: I32
    place: I32
    token_ids: I32


@lru_cache(64)
def _of_columns(lanes: tuple[int, ...], widths: tuple[int, ...], num_lanes: int) -> _Columns:
    """The same arrays for the same plan, so that a backend sees that it has them."""
    rows, counts = np.array(lanes, np.int32), np.array(widths, np.int32) + np.int32(1)
    row_indptr = np.cumsum([0, *counts], dtype=np.int32)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    place = np.arange(len(row), dtype=np.int32) - row_indptr[row]
    token_ids = ~(place * np.int32(num_lanes) + rows[row])
    return _Columns(rows, counts, row_indptr, row, rows[row], place, token_ids)


def _has_rings(backend: Backend) -> bool:
    """Whether a slot also holds what a drafter knows, which stays behind where the state moves."""
    return backend.speculation is not None and backend.speculation.max_drafts > 0


def _positions(prompt: PreparedPrompt, piece: Piece) -> I32:
    """Rotary positions of a piece, [3, T]."""
    if prompt.positions is not None:
        return prompt.positions[:, piece.start : piece.stop]
    return np.tile(np.arange(piece.start, piece.stop, dtype=np.int32), (3, 1))
