"""Rank: the loop's view of one backend, lanes in and chosen tokens out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import ForwardBatch, Phase, Purpose
from ginfer.engine.sampler import SamplingTable
from ginfer.engine.work_items import work_items
from ginfer.models import qwen
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.backend import Backend, Hidden, MemoryPlan
    from ginfer.batch import I32, PendingSelection, Selection, TokenMask, WorkItems
    from ginfer.cache import Sequence
    from ginfer.engine.chunk_plan import Piece
    from ginfer.engine.request import Request
    from ginfer.prompt import PreparedPrompt
    from ginfer.spec import ModelSpec


@dataclass(eq=False)
class Flight:
    """A forward that is ordered, and its selection once it is drawn. lanes: of the R rows that draw
    a token. stops, slots: [R] int32, their tokens in K/V and state after it, and where that is."""

    lanes: tuple[int, ...]
    batch: ForwardBatch
    stops: I32
    slots: I32
    hidden: Hidden
    pending: PendingSelection | None = None


class Rank:
    """Tables of all lanes, and the forwards over them. One thread calls it.

    Per lane: tokens in K/V and state as far as they are settled (`frontier`) and as far as forwards
    are ordered, rotary offset, page ids, recurrent slot. Where rounds run ahead a decode round
    reads one slot of a lane and writes its partner, so that the state before it stays until it is
    settled; `Sequence.state_slot` names the settled one. The token that a lane drew last is known
    to the backend.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, plan: MemoryPlan) -> None:
        self.backend = backend
        self.spec = spec
        self.runs_ahead = backend.runs_ahead
        num_lanes = plan.num_rows
        self._partner = num_lanes if self.runs_ahead else 0
        assert plan.num_slots >= num_lanes + self._partner, "a lane lacks its second slot"
        self.frontier = np.zeros(num_lanes, np.int32)
        self._ordered = np.zeros(num_lanes, np.int32)
        self._rope_delta = np.zeros(num_lanes, np.int32)
        self._slots = np.zeros(num_lanes, np.int32)
        self._pages = np.zeros((num_lanes, plan.max_pages_per_row), np.int32)
        self._requests: list[Request | None] = [None] * num_lanes
        self._sequences: list[Sequence | None] = [None] * num_lanes
        self._sampling = SamplingTable(num_lanes)
        self._shared: tuple[object, WorkItems | None] = (None, None)

    def open_lane(self, lane: int, request: Request, sequence: Sequence) -> None:
        """A request enters `lane` with the memory of `sequence`."""
        self._requests[lane], self._sequences[lane] = request, sequence
        self._sampling.assign(lane, request.sampling)
        self._slots[lane] = sequence.slot
        self.set_pages(lane, sequence.pages)
        self.frontier[lane] = self._ordered[lane] = sequence.cached_tokens
        self._rope_delta[lane] = request.prompt.rope_delta
        self.backend.reset_rows([lane])

    def set_pages(self, lane: int, pages: list[int]) -> None:
        """The pages of a lane have changed."""
        self._pages[lane, : len(pages)] = pages
        self._shared = (None, None)

    def ordered(self, lane: int) -> int:
        """Tokens of a lane that are in K/V and state once all ordered forwards are done."""
        return int(self._ordered[lane])

    def prefill(self, pieces: tuple[Piece, ...]) -> Flight:
        """Order one chunk, a piece of each of its prompts. States stay in their slots and are
        settled at once. The prompts that it ends want their first token drawn."""
        lanes = np.array([piece.lane for piece in pieces], np.int32)
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
            starts=self._ordered[lanes],
            page_table=self._page_table(lanes, int(stops.max())),
            state_in=self._slots[lanes],
            state_out=self._slots[lanes],
            selection=selection,
        )
        hidden = self._order(lanes, batch, stops)
        self.frontier[lanes] = stops
        return Flight(drawn, batch, stops[ends], batch.state_out[ends], hidden)

    def _prompt(self, lane: int) -> PreparedPrompt:
        request = self._requests[lane]
        assert request is not None
        return request.prompt

    def decode(self, lanes: tuple[int, ...]) -> Flight:
        """Order a round that feeds the token that every lane drew last, and wants the next one."""
        rows = np.array(lanes, np.int32)
        columns = np.arange(len(lanes) + 1, dtype=np.int32)
        starts, slots = self._ordered[rows], self._slots[rows]
        partners = (slots + self._partner) % (2 * self._partner) if self._partner else slots
        page_table = self._page_table(rows, int(starts.max()) + 1)
        stops = starts + np.int32(1)
        batch = ForwardBatch(
            phase=Phase.DECODE,
            token_ids=~rows,
            positions=(starts + self._rope_delta[rows])[None].repeat(3, 0),
            row_indptr=columns,
            starts=starts,
            page_table=page_table,
            state_in=slots,
            state_out=partners,
            items=self._items(lanes, page_table, starts),
            selection=self._sampling.select(lanes, columns[:-1], stops, purpose=Purpose.DECODE),
        )
        return Flight(lanes, batch, stops, partners, self._order(rows, batch, stops))

    def _items(self, lanes: tuple[int, ...], page_table: I32, starts: I32) -> WorkItems:
        """Work items of a round; the same as long as no page comes and no row enters a block."""
        key = (lanes, (starts // BLOCK_TOKENS).tobytes())
        known, items = self._shared
        if items is None or known != key:
            items = work_items(page_table, starts, np.arange(len(lanes) + 1, dtype=np.int32))
            self._shared = (key, items)
        return items

    def _order(self, lanes: I32, batch: ForwardBatch, stops: I32) -> Hidden:
        hidden = qwen.forward(self.spec, self.backend, batch)
        self._ordered[lanes], self._slots[lanes] = stops, batch.state_out
        return hidden

    def draw(self, flight: Flight, forced: list[int], mask: TokenMask | None) -> None:
        """Order the selection of a flight: row i takes `forced[i]` unless -1."""
        batch = flight.batch
        assert batch.selection is not None
        if mask is not None or max(forced) >= 0:
            ids = np.array(forced, np.int32)
            batch = replace(batch, selection=replace(batch.selection, forced=ids, mask=mask))
        flight.pending = self.backend.select(flight.hidden, batch)

    def read(self, flight: Flight) -> Selection:
        """Wait for what a flight has drawn."""
        assert flight.pending is not None
        return flight.pending.read()

    def settle(self, flight: Flight, rows: list[int]) -> None:
        """These rows of a flight go on from it; the others have ended without it."""
        for i in rows:
            lane = flight.lanes[i]
            sequence = self._sequences[lane]
            assert sequence is not None
            self.frontier[lane] = flight.stops[i]
            sequence.state_slot = int(flight.slots[i])

    def _page_table(self, rows: I32, num_tokens: int) -> I32:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        return self._pages[:, :num_pages].take(rows, axis=0)


def _positions(prompt: PreparedPrompt, piece: Piece) -> I32:
    """Rotary positions of a piece, [3, T]."""
    if prompt.positions is not None:
        return prompt.positions[:, piece.start : piece.stop]
    return np.tile(np.arange(piece.start, piece.stop, dtype=np.int32), (3, 1))
