"""Selector: selections as graphs, their tables, and their results on the way to the host.

A selection without best ids is a graph, captured at start: per number of rows, with a mask and
without, greedy and not, and for either place of results; others are launched one by one. Results
lie in pinned memory, which kernels write; two of them may be on their way. Records of draws are
sent when they change: positions that go on by one are counted on the device.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.batch import Acceptance, Selection
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.memory import PinnedBuffer, copy_to_host, set_bytes
from ginfer.cuda.runtime.stream import Event
from ginfer.cuda.sampling.acceptance import accept, verified_records
from ginfer.cuda.sampling.choose import RESULT_NBYTES
from ginfer.cuda.sampling.keys import REJECTS
from ginfer.cuda.sampling.launch import (
    DRAW,
    RESULT,
    SelectionScratch,
    SelectionShape,
    SelectionTables,
    best_ids,
    draw_records,
    key_values,
    logprob,
    scratch_nbytes,
    select,
)
from ginfer.cuda.tables import Tables, tables_nbytes
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.batch import SelectionBatch
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.sampling.acceptance import Drafts
    from ginfer.spec import ModelSpec

    I32 = NDArray[np.int32]

MAX_TOP = 32  # best ids per row
MAX_BIAS = 1024  # entries per row
_SAID = attrgetter(  # what requests say of draws; the same arrays come again
    *("rows", "top_k", "temperature", "presence", "frequency", "seeds", "top_p", "min_p"),
    *("bias_indptr", "purposes", "forced"),
)


def _table_words(V: int, selected: int) -> dict[str, int]:
    return {
        "draws": selected * DRAW.itemsize // 4,
        "bias_ids": selected * MAX_BIAS + 1,
        "bias_values": selected * MAX_BIAS + 1,
        "mask": selected * div_ceil(V, 32),
    }


def selector_nbytes(
    spec: ModelSpec, plan: MemoryPlan, selected: int, max_drafts: int = 0
) -> dict[str, int]:
    """Bytes on the device, by use; max_drafts: of a drafter."""
    V = spec.num_token_ids
    return {
        **scratch_nbytes(selected, V, MAX_TOP),
        "draw tables": tables_nbytes(_table_words(V, selected)),
        "counts": plan.num_rows * V * 4,
        "tokens": (1 + max_drafts) * plan.num_rows * 4,
        "results": selected * RESULT_NBYTES,
    }


class Pending:
    """Implements `PendingSelection`: results of at most R columns in pinned memory."""

    def __init__(self, R: int) -> None:
        self._host, self._event = PinnedBuffer(R * (RESULT_NBYTES + MAX_TOP * 8)), Event()
        results, top = np.split(self._host.bytes, [R * RESULT_NBYTES])
        self._results, self._top = results.view(RESULT), top.view(np.uint64)
        self._ids, self._sound = self._results["token"], self._results["sound"]
        self._shape, self._is_read = (0, 0), True

    @property
    def address(self) -> int:
        """Device address of the results."""
        return self._host.address

    def begin(self, R: int, num_top: int) -> None:
        """Make room for R results and R rows of num_top best ids; -1: no log-probabilities are
        wanted."""
        if not self._is_read:
            self._event.synchronize()
        self._shape, self._is_read = (R, num_top), False

    def order(self, top: int, queue: Queue, *, results: int = 0) -> None:
        """Behind the work that writes results, or copies of those at an address, and of best
        ids."""
        R, num_top = self._shape
        if results:
            copy_to_host(self._host.host, results, R * RESULT_NBYTES, stream=queue.stream)
        if num_top > 0:
            to = self._host.host + self._results.nbytes
            copy_to_host(to, top, R * num_top * 8, stream=queue.stream)
        self._event.record(queue.stream)

    def read(self) -> Selection:
        """Wait for the results, and turn keys and masses into log-probabilities."""
        self._event.synchronize()
        self._is_read = True
        R, num_top = self._shape
        ids, finite = self._ids[:R].copy(), self._sound[:R] != 0
        if num_top < 0:
            return Selection(token_ids=ids, finite=finite, **_no_logprobs(R))
        selection = Selection(
            token_ids=ids,
            logprobs=np.full(R, np.nan, np.float32),
            top_ids=np.full((R, num_top), -1, np.int32),
            top_logprobs=np.full((R, num_top), -np.inf, np.float32),
            finite=finite,
        )
        top = self._top[: R * num_top].reshape(R, num_top)
        _fill_logprobs(selection, self._results[:R], top)
        return selection

    def accepted(self, firsts: I32) -> I32:
        """Wait for the accepted drafts of rows, given their first columns."""
        self._event.synchronize()
        return np.array(self._results["accepted"][firsts], np.int32)

    def close(self) -> None:
        """Free the pinned memory once the work before it is done."""
        self._event.synchronize()
        self._event.close()
        self._host.close()


class PendingRows:
    """Implements `PendingAcceptance`."""

    def __init__(self, pending: Pending, firsts: I32) -> None:
        self._pending, self._firsts = pending, firsts

    def read(self) -> Acceptance:
        """Wait for the results."""
        selection = self._pending.read()
        return Acceptance(accepted=self._pending.accepted(self._firsts), selection=selection)


@cache
def _no_logprobs(R: int) -> dict[str, NDArray[Any]]:
    """What a selection of R rows has instead of log-probabilities that nobody wants."""
    none = np.full(R, np.nan, np.float32), np.zeros((R, 0), np.int32), np.zeros((R, 0), np.float32)
    for array in none:
        array.flags.writeable = False
    return dict(zip(("logprobs", "top_ids", "top_logprobs"), none))


def _fill_logprobs(selection: Selection, results: NDArray[Any], top: NDArray[np.uint64]) -> None:
    """Log-probabilities of the chosen and of the best ids of rows that are sound."""
    best, mass, sound = key_values(results["best"]), results["mass"], selection.finite
    chosen = results["logit"][sound]
    selection.logprobs[sound] = logprob(chosen, best[sound], mass[sound])
    for r in np.flatnonzero(sound).tolist() if top.size else ():
        ids, values = best_ids(top[r])
        selection.top_ids[r, : len(ids)] = ids
        selection.top_logprobs[r, : len(ids)] = logprob(values, best[r], mass[r])


class Selector:
    """Selections over the rows of one buffer of logits."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: MemoryPlan,
        memory: Arena,
        *,
        selected: int,
        queue: Queue,
        max_drafts: int = 0,
    ) -> None:
        self._queue, self._selected, self._lanes = queue, selected, plan.num_rows
        self._V, self._logits_nbytes = spec.num_token_ids, spec.vocab_size * 4
        sizes = selector_nbytes(spec, plan, selected, max_drafts)
        scratch = scratch_nbytes(selected, self._V, MAX_TOP)
        taken = {name: memory.take(n, "selection") for name, n in scratch.items()}
        self._scratch = SelectionScratch(**taken)
        self._tables = Tables(_table_words(self._V, selected), memory, queue.stream)
        self._counts = memory.take(sizes["counts"], "counts")
        self._tokens = memory.take(sizes["tokens"], "selection")
        self._results = memory.take(sizes["results"], "selection")
        for part in (self._counts, self._tokens):
            set_bytes(part, 0, queue.stream)
        self._answers, self._turn = (Pending(selected), Pending(selected)), 0
        self._graphs: dict[tuple[int, bool, bool], tuple[Graph, Graph]] = {}  # of either turn
        self._said: tuple[NDArray[Any] | None, ...] = (None,)  # by requests, of the records
        self._draws = np.zeros(0, DRAW)
        self._position = np.zeros(0, np.int32)
        self._there: tuple[object, bytes] = (None, b"")  # records on the device, their positions
        self._greedy = False

    @property
    def tokens(self) -> int:
        """Address of the id that each lane drew last, u32, and behind it [drafts][lanes] of a
        drafter."""
        return self._tokens.address

    def capture(self, logits: int) -> None:
        """The graphs of every number of lanes, with a mask and without, greedy and not."""
        flags = (False, True)
        for R, masked, greedy in product(range(1, self._lanes + 1), flags, flags):
            shape = SelectionShape(R, self._V, self._logits_nbytes, greedy=greedy)
            name = f"{'greedy ' * greedy}selection of {R}{' masked' * masked}"
            first, second = (
                Graph(
                    self._queue.stream,
                    partial(self._launch, logits, shape, pending.address, masked=masked),
                    name=name,
                )
                for pending in self._answers
            )
            self._graphs[R, masked, greedy] = first, second

    def _launch(self, logits: int, shape: SelectionShape, results: int, *, masked: bool) -> None:
        tables = self._addresses(results, masked=masked)
        select(self._queue, logits, tables=tables, scratch=self._scratch, shape=shape)

    def _addresses(self, results: int, *, masked: bool, ids: int = 0) -> SelectionTables:
        at = self._tables
        return SelectionTables(
            draws=at["draws"],
            mask=at["mask"] if masked else 0,
            bias_ids=at["bias_ids"],
            bias_values=at["bias_values"],
            counts=self._counts.address,
            results=results,
            tokens=self._tokens.address,
            ids=ids,
        )

    def select(self, logits: int, s: SelectionBatch) -> None:
        """Choose one id for each of R rows of logits, [R] FP32; waits for a mask that is still
        being computed."""
        R, num_top, masked = len(s.columns), max(s.num_top, 0), s.mask is not None
        assert self._selected >= R
        assert num_top <= MAX_TOP
        records, positions = self._records(s), s.positions.tobytes()
        if masked or self._there[0] is not records or self._there[1] != positions:
            self._send(s, records)
        self._there = records, (s.positions + np.int32(1)).tobytes()
        pending = self._answers[self._turn]
        pending.begin(R, s.num_top)
        greedy = s.num_top < 0 and self._greedy
        graphs = self._graphs.get((R, masked, greedy)) if num_top == 0 else None
        if graphs is None:
            shape = SelectionShape(R, self._V, self._logits_nbytes, num_top, greedy)
            self._launch(logits, shape, pending.address, masked=masked)
        else:
            graphs[self._turn].replay()

    def answers(self) -> Pending:
        """What `select` has just chosen, on its way to the host."""
        pending, self._turn = self._answers[self._turn], 1 - self._turn
        pending.order(self._scratch.top.address, self._queue)
        return pending

    def accept(
        self, logits: int, s: SelectionBatch, drafts: Drafts, rows: tuple[I32, I32]
    ) -> PendingRows:
        """Choose for the columns of rows that are verified and settle how far these go; rows:
        (indptr [B + 1], columns that count [B])."""
        R, num_top = len(s.columns), max(s.num_top, 0)
        records = verified_records(self._records(s), s, *rows)
        assert self._selected >= R
        assert num_top <= MAX_TOP
        self._send(s, records)
        shape = SelectionShape(
            R,
            self._V,
            self._logits_nbytes,
            num_top,
            greedy=s.num_top < 0 and self._greedy,
            rejects=bool((records["how"] & REJECTS).any()),
        )
        results, masked = self._results.address, s.mask is not None
        tables = self._addresses(results, masked=masked, ids=drafts.ids)
        accept(self._queue, logits, drafts, tables=tables, scratch=self._scratch, shape=shape)
        pending, self._turn = self._answers[self._turn], 1 - self._turn
        pending.begin(R, s.num_top)
        pending.order(self._scratch.top.address, self._queue, results=results)
        return PendingRows(pending, rows[0][:-1])

    def _send(self, s: SelectionBatch, records: NDArray[Any]) -> None:
        """Send the records of draws, and what they refer to."""
        self._there = None, b""
        self._position[:] = s.positions
        self._tables.begin()
        self._tables.fill("draws", records.view(np.int32))
        if len(s.bias_ids):
            self._tables.fill("bias_ids", s.bias_ids.astype(np.int32, copy=False))
            self._tables.fill("bias_values", s.bias_values.astype(np.float32, copy=False))
        if s.mask is not None:
            words = np.asarray(s.mask)[:, : div_ceil(self._V, 32)]
            self._tables.fill("mask", words)
        self._tables.send()

    def _records(self, s: SelectionBatch) -> NDArray[Any]:
        """The records of draws but for their positions; what requests say stays from round to
        round, in the same arrays."""
        said = _SAID(s)
        if not all(map(is_, said, self._said)):
            assert int(s.forced.max(initial=-1)) < self._V
            self._said, self._draws = said, draw_records(s)
            self._greedy, self._position = not s.temperature.any(), self._draws["position"]
        return self._draws

    def reset(self, lanes: Sequence[int]) -> None:
        """Zero the counts of lanes."""
        nbytes = self._V * 4
        for lane in lanes:
            set_bytes(self._counts.part(lane * nbytes, nbytes), 0, self._queue.stream)

    def close(self) -> None:
        """Free graphs and pinned memory."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.close()
        self._graphs = {}
        self._tables.close()
        for pending in self._answers:
            pending.close()
