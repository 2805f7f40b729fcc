"""Tables of a forward: chunks of GDN lie on absolute multiples of 64, wherever a row begins, and a
round that goes on from the one before has the tables that it has alone."""

import ctypes
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.backend import MemoryPlan
from ginfer.batch import Phase
from ginfer.cuda.frame import Frame, chunks_of, most_chunks, table_words
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.queue import Queue
from ginfer.cuda.runtime.stream import Stream
from ginfer.engine.rank import Rank
from ginfer.engine.work_items import work_items
from ginfer.spec import PAGE_TOKENS
from scripts.random_models import MODELS, RandomModel
from tests.engines import ids_prompt, make_request
from tests.host.cuda.emulated_device import Image, install

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=8)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ROWS)
def test_chunks_cover_rows_between_multiples_of_64(rows):
    lengths, starts = np.array(rows, np.int32).T
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    chunks, ends = chunks_of(indptr, starts)
    assert len(ends) == len(rows) + 1
    assert ends[-1] == len(chunks)
    plan = MemoryPlan(
        num_rows=len(rows),
        num_units=1,
        unit_nbytes=1,
        num_slots=1,
        max_columns=int(indptr[-1]),
        max_pages_per_row=1,
    )
    assert len(chunks) <= most_chunks(plan)
    for b, start in enumerate(starts.tolist()):
        found = chunks[ends[b] : ends[b + 1]]
        columns = np.concatenate([np.arange(t, t + count) for t, count in found])
        assert (columns == np.arange(indptr[b], indptr[b + 1])).all()
        pages = [(np.arange(t, t + k) - indptr[b] + start) // 64 for t, k in found.tolist()]
        assert all(len(set(page.tolist())) == 1 for page in pages)
        assert len({int(page[0]) for page in pages}) == len(pages)


class Tables:
    """A backend that checks every round: its batch is what the lanes say, and its tables on the
    device are the same going on from the rounds before and alone."""

    runs_ahead, replayed, speculation = True, True, None

    def __init__(self, monkeypatch, spec, plan):
        self._queue = Queue(Image(install(monkeypatch)), Stream())
        self._spec, self._plan, self.chains, self.rank = spec, plan, [], Rank(spec, self, plan)
        self._frame = self._make(Arena(4 << 20, "test"))

    def _make(self, memory):
        words = table_words(self._spec, self._plan, self._plan.num_rows)
        return Frame(self._spec, self._plan, memory, words=words, queue=self._queue, num_sms=2)

    def reset_rows(self, lanes):
        pass

    def _check(self, batch):
        rank, lanes, width = self.rank, batch.selection.rows, batch.page_table.shape[1]
        starts, table = rank.ordered[lanes], rank._pages[lanes]
        assert width * PAGE_TOKENS > starts.max()
        for got, want in (
            (batch.starts, starts),
            (batch.positions, np.tile(starts, (3, 1))),
            (batch.selection.positions, starts + 1),
            (batch.state_in, rank._slots[lanes]),
            (batch.state_out, (rank._slots[lanes] + 3) % 6),
            (batch.page_table, table[:, :width]),
            *zip(vars(batch.items).values(), items_of(table, starts, batch.row_indptr)),
        ):
            assert np.array_equal(got, want)

    def embed(self, batch):
        self._check(batch)
        memory = Arena(4 << 20, "test")
        fresh = self._make(memory)
        staged, alone = self._frame.fill(batch), fresh.fill(replace(batch, chain=None))
        assert replace(staged, tables=None) == replace(alone, tables=None)
        B, width = batch.num_rows, batch.page_table.shape[1]
        counts = {"token": B, "state_in": B, "state_out": B, "ids": B, "row": B, "indptr": B + 1}
        counts |= {"rope": B * self._spec.attention.rotary_dim, "columns": B}
        counts |= {"units": fresh._units.used, "pages": B * self._plan.max_pages_per_row}
        for name, count in counts.items():
            got, want = (
                on_device(f.tables[Phase.DECODE][name], count) for f in (self._frame, fresh)
            )
            if name == "pages":
                got, want = (a.reshape(B, -1)[:, :width] for a in (got, want))
            if name == "units":
                got, want = (described(fresh._units, a, B) for a in (got, want))
            assert np.array_equal(got, want), name
        fresh.close()
        memory.close()
        self.chains.append(batch.chain)
        return staged


def items_of(page_table, starts, indptr):
    """Values of the items of a round."""
    return vars(work_items(page_table, starts, indptr)).values()


def described(units, words, T):
    """What words of a table of units say: runs of the columns, the grain, each unit's columns."""
    sizes = np.cumsum([len(units.first), len(units.members), 2])
    first, members, header, rest = np.split(words, sizes)
    found = [
        [block, *members[place : place + columns]]
        for place, columns, block in rest.reshape(-1, 3)[: header[0]].tolist()
    ]
    return [int(n) for part in ([*first[: T + 1]], [header[1]], *found) for n in part]


def on_device(address, count):
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).copy()


def test_rounds_that_go_on_have_the_tables_of_rounds_alone(monkeypatch):
    plan = MemoryPlan(
        num_rows=3,
        num_units=64,
        unit_nbytes=1 << 12,
        num_slots=6,
        max_columns=8,
        max_pages_per_row=24,
    )
    backend = Tables(monkeypatch, RandomModel(**asdict(MODELS[0])).spec, plan)
    rank, pages, spare = backend.rank, {}, iter(range(64))
    shared = [next(spare) for _ in range(8)]

    def enter(lane, start, num_own):
        pages[lane] = [*shared, *(next(spare) for _ in range(num_own))]
        memory = SimpleNamespace(slot=lane, state_slot=lane, pages=pages[lane], cached_tokens=start)
        rank.open_lane(lane, make_request(ids_prompt(range(start))), memory)

    enter(0, 540, 1)  # gets pages one by one
    enter(1, 575, 8)
    enter(2, 700, 8)  # the longest at first
    for n in range(420):
        if n == 200:
            enter(2, 515, 1)
        lanes = (0, 2) if 100 <= n < 200 else (0, 1, 2)
        for lane in lanes:
            known = len(pages[lane])
            if rank.ordered[lane] + 1 > known * PAGE_TOKENS:
                pages[lane].append(next(spare))
                rank.set_pages(lane, pages[lane], first=known)
        rank.decode(lanes)
    assert rank.ordered.tolist() == [960, 895, 735]
    assert len(set(backend.chains)) < 40
