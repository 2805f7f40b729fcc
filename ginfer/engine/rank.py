"""Rank: the loop's view of one backend, lanes in and chosen tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import ForwardBatch, Phase, Purpose
from ginfer.engine.sampler import SamplingTable
from ginfer.engine.work_items import work_items
from ginfer.models import qwen
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.backend import Backend, MemoryPlan
    from ginfer.batch import I32, Selection, TokenMask
    from ginfer.cache import Sequence
    from ginfer.engine.request import Request
    from ginfer.engine.round import PrefillUnit
    from ginfer.spec import ModelSpec


class Rank:
    """Tables of all lanes, and the forwards over them. One thread calls it.

    Per lane: tokens in K/V and state (`frontier`), the drawn token that is not in them yet, rotary
    offset, page ids, recurrent slot.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, plan: MemoryPlan) -> None:
        self.backend = backend
        self.spec = spec
        num_lanes = plan.num_rows
        self.frontier = np.zeros(num_lanes, np.int32)
        self._next_token = np.zeros(num_lanes, np.int32)
        self._rope_delta = np.zeros(num_lanes, np.int32)
        self._slots = np.zeros(num_lanes, np.int32)
        self._pages = np.zeros((num_lanes, plan.max_pages_per_row), np.int32)
        self._requests: list[Request | None] = [None] * num_lanes
        self._sampling = SamplingTable(num_lanes)

    def open_lane(self, lane: int, request: Request, sequence: Sequence) -> None:
        """A request enters `lane` with the memory of `sequence`."""
        self._requests[lane] = request
        self._sampling.assign(lane, request.sampling)
        self._slots[lane] = sequence.slot
        self.set_pages(lane, sequence.pages)
        self.frontier[lane] = sequence.cached_tokens
        self._rope_delta[lane] = request.prompt.rope_delta
        self.backend.reset_rows([lane])

    def set_pages(self, lane: int, pages: list[int]) -> None:
        """The pages of a lane have changed."""
        self._pages[lane, : len(pages)] = pages

    def prefill(
        self, unit: PrefillUnit, forced: int, mask: TokenMask | None = None
    ) -> Selection | None:
        """Compute one chunk; when it ends the prompt, draw the first token (`forced` unless -1)."""
        lane, start, stop = unit.lane, unit.start, unit.stop
        request = self._requests[lane]
        assert request is not None
        prompt, lanes = request.prompt, np.array([lane], np.int32)
        if prompt.positions is None:
            positions = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
        else:
            positions = np.ascontiguousarray(prompt.positions[:, start:stop])
        selection = None
        if unit.last:
            selection = self._sampling.select(
                (lane,),
                np.array([stop - start - 1], np.int32),
                np.array([stop], np.int32),
                purpose=Purpose.PROMPT,
                forced=np.array([forced], np.int32),
                mask=mask,
            )
        batch = ForwardBatch(
            phase=Phase.PREFILL,
            token_ids=prompt.token_ids[start:stop],
            positions=positions,
            row_indptr=np.array([0, stop - start], np.int32),
            starts=self.frontier[lanes],
            page_table=self._page_table(lanes, stop),
            state_in=self._slots[lanes],
            state_out=self._slots[lanes],
            selection=selection,
        )
        result = qwen.forward(self.spec, self.backend, batch)
        self.frontier[lane] = stop
        if result is not None:
            self._next_token[lane] = result.token_ids[0]
        return result

    def decode(
        self, lanes: tuple[int, ...], forced: list[int], mask: TokenMask | None = None
    ) -> Selection:
        """Feed the last token of every lane and draw the next one (`forced[i]` unless -1)."""
        rows = np.array(lanes, np.int32)
        columns = np.arange(len(lanes) + 1, dtype=np.int32)
        starts = self.frontier[rows]
        slots = self._slots[rows]
        page_table = self._page_table(rows, int(starts.max()) + 1)
        batch = ForwardBatch(
            phase=Phase.DECODE,
            token_ids=self._next_token[rows],
            positions=np.tile(starts + self._rope_delta[rows], (3, 1)),
            row_indptr=columns,
            starts=starts,
            page_table=page_table,
            state_in=slots,
            state_out=slots,
            items=work_items(page_table, starts, columns),
            selection=self._sampling.select(
                lanes,
                columns[:-1],
                starts + np.int32(1),
                purpose=Purpose.DECODE,
                forced=np.array(forced, np.int32),
                mask=mask,
            ),
        )
        result = qwen.forward(self.spec, self.backend, batch)
        assert result is not None
        self.frontier[rows] += 1
        self._next_token[rows] = result.token_ids
        return result

    def _page_table(self, rows: I32, num_tokens: int) -> I32:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        return self._pages[:, :num_pages].take(rows, axis=0)
