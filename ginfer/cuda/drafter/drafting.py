"""Drafting: what a backend calls of its drafter, round by round.

Drafts are graphs, captured at start for every number of rows and of drafts. The tables of a draft
and of a forward's context are sent when they are ordered; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import Phase
from ginfer.cuda.drafter.context import ContextColumns
from ginfer.cuda.drafter.drafter import MAX_ASIDE, Drafter, drafter_nbytes
from ginfer.cuda.drafter.prompt import PromptContext, prompt_nbytes
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.memory import PinnedBuffer, copy_to_host
from ginfer.cuda.runtime.stream import Event
from ginfer.cuda.tables import Tables, tables_nbytes
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.batch import DraftBatch, ForwardBatch
    from ginfer.cuda.drafter.drafter import Target
    from ginfer.cuda.drafter.weights import DrafterWeights
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.spec import DrafterSpec

    I32 = NDArray[np.int32]


def _table_words(lanes: int) -> dict[str, int]:
    return dict.fromkeys(("ring", "first", "used"), lanes)


def _aside_words() -> dict[str, int]:
    """Of columns that were set aside, each of which is a row of its own."""
    return dict.fromkeys(("row", "token", "ring", "used"), MAX_ASIDE)


def max_tokens(plan: MemoryPlan) -> int:
    """Tokens of a sequence at most."""
    return plan.max_pages_per_row * PAGE_TOKENS


def drafting_nbytes(d: DrafterSpec, plan: MemoryPlan) -> dict[str, int]:
    """Bytes of everything that `Drafting.allocate` takes, by use."""
    lanes = plan.num_rows
    return {
        **drafter_nbytes(d, lanes, max_tokens(plan)),
        **prompt_nbytes(d, lanes, plan.max_columns),
        "drafter rows": tables_nbytes(_table_words(lanes)) + tables_nbytes(_aside_words()),
    }


@dataclass(frozen=True)
class DecodeColumns:
    """Addresses of the tables of a decode forward: row [T] and token [T] of its columns."""

    row: int
    token: int


class PendingTokens:
    """Implements `PendingDrafts`: tokens [drafts][lanes] that a copy brings to pinned memory."""

    def __init__(self, most: int, lanes: int) -> None:
        self._host, self._event = PinnedBuffer(most * lanes * 4), Event()
        self._tokens = self._host.bytes.view(np.int32).reshape(most, lanes)
        self._lanes, self._num_drafts = np.zeros(0, np.int32), 0

    def order(self, tokens: int, batch: DraftBatch, *, queue: Queue) -> None:
        """Copy the drafts of a batch, from an address."""
        self._event.synchronize()
        self._lanes, self._num_drafts = batch.lanes, batch.num_drafts
        nbytes = self._tokens[: batch.num_drafts].nbytes
        copy_to_host(self._host.host, tokens, nbytes, stream=queue.stream)
        self._event.record(queue.stream)

    def read(self) -> I32:
        """Wait for the ids, [B, num_drafts] int32."""
        self._event.synchronize()
        return np.ascontiguousarray(self._tokens[: self._num_drafts, self._lanes].T)

    def close(self) -> None:
        """Free the pinned memory once the copy is done."""
        self._event.synchronize()
        self._event.close()
        self._host.close()


class Drafting:
    """A drafter, the context of its lanes, and its drafts."""

    def __init__(
        self, d: DrafterSpec, weights: DrafterWeights, *, queue: Queue, num_sms: int
    ) -> None:
        self._d, self._queue = d, queue
        self._drafter = Drafter(d, weights, queue=queue, num_sms=num_sms)
        self._prompt = PromptContext(d, weights, queue=queue, num_sms=num_sms)
        self._graphs: dict[tuple[int, int], Graph] = {}
        self.max_drafts = d.max_drafts

    def allocate(
        self, memory: Arena, plan: MemoryPlan, target: Target, columns: DecodeColumns
    ) -> None:
        """Take the memory of `drafting_nbytes`. columns: tables of decode forwards."""
        self._lanes, self._columns = plan.num_rows, columns
        drafter, queue, lanes = self._drafter, self._queue, plan.num_rows
        drafter.allocate(memory, target, lanes=lanes, max_tokens=max_tokens(plan))
        self._prompt.allocate(
            memory,
            drafter.rings,
            drafter.key_norms,
            hidden=target.hidden,
            lanes=lanes,
            max_columns=plan.max_columns,
        )
        self._rows = Tables(_table_words(lanes), memory, queue.stream)
        self._aside = Tables(_aside_words(), memory, queue.stream)
        self._places = np.zeros((2, MAX_ASIDE), np.int32)  # rings and tokens of what is set aside
        self._num_aside = 0
        self._tokens = target.tokens + 4 * lanes  # of the first drafts
        self._answers = tuple(PendingTokens(self.max_drafts, lanes) for _ in range(2))

    @property
    def drafted(self) -> tuple[int, int]:
        """Addresses of what drafts were drawn from: ids and units [lanes][max_drafts][16] u32."""
        return self._drafter.drafted.ids, self._drafter.drafted.units

    def capture(self) -> None:
        """The graphs of drafts."""
        for B in range(1, self._lanes + 1):
            for n in range(1, self.max_drafts + 1):
                work, name = partial(self._drafter.propose, B, n), f"{n} drafts of {B}"
                self._graphs[B, n] = Graph(self._queue.stream, work, name=name)

    def begin(self, batch: ForwardBatch) -> None:
        """A forward begins."""
        if batch.phase is Phase.PREFILL:
            self._prompt.begin(batch)

    def tap(self, layer_idx: int, T: int, phase: Phase) -> None:
        """Take the stream of T columns behind a layer, if it is tapped."""
        if phase is Phase.PREFILL:
            self._prompt.tap(layer_idx)
        else:
            self._drafter.tap(layer_idx, T)

    def keep(self, batch: ForwardBatch, used: I32 | int | None) -> None:
        """Make columns of the last forward context: of row b its first used[b], nothing where that
        is not positive; or as many as [B] i32 at an address say. None: all, of prompts in any case;
        a plain round leaves it to `catch_up`."""
        if batch.phase is Phase.PREFILL:
            self.catch_up()
            self._prompt.extend()
            return
        if used is None:
            self._set_aside(batch)
            return
        rows, columns = self._rows, self._columns
        rows.begin()
        rows.fill("ring", (batch.state_out % self._lanes).astype(np.int32))
        rows.fill("first", batch.starts.astype(np.int32, copy=False))
        if not isinstance(used, int):
            rows.fill("used", used.astype(np.int32, copy=False))
        rows.send()
        counts = used if isinstance(used, int) else rows["used"]
        tables = (columns.row, columns.token, rows["ring"], rows["first"], counts)
        self._drafter.extend(ContextColumns(*tables), batch.num_columns)

    def _set_aside(self, batch: ForwardBatch) -> None:
        """Have the columns of a plain round wait for others: alone each costs as much as many."""
        B = batch.num_rows
        assert batch.num_columns == B
        if self._num_aside + B > MAX_ASIDE:
            self.catch_up()
        n = self._num_aside
        self._drafter.set_aside(n, B)
        self._places[0, n : n + B] = batch.state_out % self._lanes
        self._places[1, n : n + B] = batch.starts
        self._num_aside = n + B

    def catch_up(self) -> None:
        """Make context of what was set aside: before rings are read or moved, and before a lane
        gets another sequence."""
        n, self._num_aside = self._num_aside, 0
        if not n:
            return
        tables = self._aside
        tables.begin()
        tables.fill("row", np.arange(n, dtype=np.int32))
        tables.fill("token", self._places[1, :n])
        tables.fill("ring", self._places[0, :n])
        tables.fill("used", np.ones(n, np.int32))
        tables.send()
        names = ("row", "token", "ring", "token", "used")
        self._drafter.extend(ContextColumns(*(tables[name] for name in names)), n, aside=True)

    def draft(self, batch: DraftBatch) -> PendingTokens:
        """Order drafts; they stay with their lanes."""
        self.catch_up()
        self._drafter.fill(batch)
        graph = self._graphs.get((batch.num_rows, batch.num_drafts))
        if graph is None:
            self._drafter.propose(batch.num_rows, batch.num_drafts)
        else:
            graph.replay()
        pending, other = self._answers
        self._answers = (other, pending)
        pending.order(self._tokens, batch, queue=self._queue)
        return pending

    def close(self) -> None:
        """Free graphs and pinned memory."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs = {}
        self._drafter.close()
        self._prompt.close()
        self._rows.close()
        self._aside.close()
        for pending in self._answers:
            pending.close()
