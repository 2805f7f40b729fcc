"""Frame: the tables of a forward at fixed device addresses, filled from a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.batch import Phase, WorkUnits
from ginfer.cuda.attention.append import Columns
from ginfer.cuda.attention.decode_launch import SMALL, decode_kernel, large_tiles
from ginfer.cuda.attention.prefill_launch import query_items
from ginfer.cuda.gdn.chunk import Chunks
from ginfer.cuda.gdn.conv import Rows
from ginfer.cuda.gdn.prepare import CHUNK
from ginfer.cuda.rotation import Rotations
from ginfer.cuda.sampling.keys import MOST_PATH
from ginfer.cuda.tables import Tables
from ginfer.sizes import div_ceil
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS, SPAN_BLOCKS, KvCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.batch import ForwardBatch, WorkItems
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.tables import Group
    from ginfer.spec import ModelSpec

MAX_DECODE_COLUMNS = 128
LEAST_PARTIALS = 4096
LEAST_QUERIES = 8  # columns of a work item of prefill attention


def most_blocks(plan: MemoryPlan) -> int:
    """Blocks of decode attention in a row at most."""
    return div_ceil(plan.max_pages_per_row * PAGE_TOKENS, BLOCK_TOKENS)


def most_expanded(plan: MemoryPlan) -> int:
    """Pages of a prefill batch at most, where they are opened before they are read."""
    return 0 if plan.kv is KvCodec.BF16 else plan.max_pages_per_row + plan.num_rows


def most_partials(plan: MemoryPlan) -> int:
    """Partials of decode attention at most: of every span, or of so many blocks that there is work
    for everyone."""
    blocks = most_blocks(plan)
    spans = max(plan.num_rows, plan.max_recorded) * div_ceil(blocks, SPAN_BLOCKS)
    return max(spans, min(plan.num_rows * blocks, LEAST_PARTIALS))


def table_words(spec: ModelSpec, plan: MemoryPlan, selected: int) -> dict[Phase, dict[str, int]]:
    """Words of each table at most; `selected`: most columns whose logits are wanted at a time."""
    P, T, opened = plan.max_pages_per_row, plan.max_columns, most_expanded(plan)

    def of_columns(T: int, B: int) -> dict[str, int]:
        return {
            "token": T,  # what changes from round to round comes first
            "state_in": B,
            "state_out": B,
            "rope": T * spec.attention.rotary_dim,
            "ids": T,
            "row": T,
            "indptr": B + 1,
            "columns": selected,
            "pages": B * P,
        }

    units, B = work_units(spec, plan, SMALL).storage.size, most_rows(plan)
    return {
        Phase.PREFILL: {
            **of_columns(T, B),
            "queries": 2 * (div_ceil(T, LEAST_QUERIES) + B),
            "chunks": 2 * most_chunks(plan),
            "chunk_indptr": B + 1,
            "to_open": opened,
            "opened": B * P if opened else 0,
        },
        Phase.DECODE: {**of_columns(decode_columns(plan), plan.num_rows), "units": units},
    }


def most_rows(plan: MemoryPlan) -> int:
    """Rows of a prompt batch at most: a prompt may take two, one that goes on from the other."""
    return 2 * plan.num_rows


def most_chunks(plan: MemoryPlan) -> int:
    """Chunks of GDN in a prompt batch at most: a row may begin and end inside one."""
    return plan.max_columns // CHUNK + 2 * plan.num_rows


def decode_columns(plan: MemoryPlan) -> int:
    """Most columns of a decode batch."""
    return min(plan.max_columns, MAX_DECODE_COLUMNS)


def work_units(spec: ModelSpec, plan: MemoryPlan, tiles: int, *, num_blocks: int = 1) -> WorkUnits:
    """Room for the units of decode attention, of `tiles` tiles of 16 rows, for a grid of so many
    thread blocks."""
    a = spec.attention
    return WorkUnits(
        plan.num_rows,
        decode_columns(plan),
        most_blocks(plan),
        group=16 * tiles * a.num_kv_heads // a.num_q_heads,
        workers=max(num_blocks // a.num_kv_heads, 1),
        num_partials=most_partials(plan),
    )


@dataclass(frozen=True)
class Staged:
    """What the host knows of a batch, and its tables: columns, rows, the longest row, query items,
    chunks of GDN, tiles of 16 rows of a decode unit, pages to open; whether it records; whether
    rows are of one column each and read other recurrent slots than any writes; runs of rows: first,
    last + 1, the longest of them; without any all are one."""

    tables: Tables
    T: int
    B: int
    longest: int
    num_queries: int = 0
    num_chunks: int = 0
    tiles: int = SMALL
    num_expanded: int = 0
    record: bool = False
    apart: bool = False
    runs: tuple[tuple[int, int, int], ...] = ()

    @property
    def row_runs(self) -> list[Rows]:
        """Tables of GDN of the rows that are computed together, one run after the other."""
        names = ("indptr", "state_in", "state_out")
        return [
            Rows(
                **{name: self.tables[name] + 4 * first for name in names},
                B=end - first,
                longest=longest,
                first=first,
            )
            for first, end, longest in self.runs or ((0, self.B, self.longest),)
        ]

    def chunks(self, *, within: int, results: int) -> Chunks:
        """Tables and workspaces of GDN in chunks."""
        at, num = self.tables, self.num_chunks
        return Chunks(at["chunks"], at["chunk_indptr"], within=within, results=results, num=num)


class Frame:
    """Tables of one forward, in two sets: those of prefill and those of decode rounds, which are
    short and lie close together."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: MemoryPlan,
        memory: Arena,
        *,
        words: dict[Phase, dict[str, int]],
        queue: Queue,
        num_sms: int,
    ) -> None:
        self._spec, self._plan = spec, plan
        capability = queue.image.capability
        packed = plan.kv is KvCodec.INT8
        self._tiles = large_tiles(capability, packed)
        occupancy = queue.image[decode_kernel(capability, self._tiles, packed)].occupancy()
        self._units = work_units(spec, plan, self._tiles, num_blocks=num_sms * occupancy)
        a = spec.attention
        self._query_items = partial(query_items, capability, a.num_q_heads // a.num_kv_heads)
        self.tables = {phase: Tables(sizes, memory, queue.stream) for phase, sizes in words.items()}
        self._rotations = Rotations(spec, plan.max_pages_per_row * PAGE_TOKENS)
        columns = np.arange(most_rows(plan), dtype=np.int32)
        self._columns = [columns[:B] for B in range(len(columns) + 1)]
        self._rounds = [
            Staged(self.tables[Phase.DECODE], B, B, 1, tiles=self._decode_tiles(B), apart=True)
            for B in range(len(columns) + 1)
        ]
        self._changes: dict[tuple[int, int], Group] = {}
        self._described: tuple[WorkItems, NDArray[np.int32], bytes] | None = None  # by work units
        self._laid_out: tuple[Any, ...] = (None, None, None, 0)  # what `_lay_out` has found
        self._last: tuple[object, Staged] = (None, self._rounds[0])  # chain and tables of a round

    def columns(self, tables: Tables) -> Columns:
        """Tables of attention."""
        return Columns(
            row=tables["row"],
            token=tables["token"],
            pages=tables["pages"],
            rope=tables["rope"],
            P=self._plan.max_pages_per_row,
        )

    def expanded_columns(self, tables: Tables) -> Columns:
        """As `columns`, with the pages in the order in which they were opened."""
        return replace(self.columns(tables), pages=tables["opened"])

    def _fill_expanded(self, tables: Tables, batch: ForwardBatch) -> int:
        """Which pages of a prefill batch to open, and where its rows find them."""
        ends = batch.starts + np.diff(batch.row_indptr)
        counts = (ends + (PAGE_TOKENS - 1)) // PAGE_TOKENS
        P, total = self._plan.max_pages_per_row, int(counts.sum())
        assert total <= most_expanded(self._plan), "rows of a prefill batch are too long together"
        tables.fill("to_open", np.concatenate([p[:n] for p, n in zip(batch.page_table, counts)]))
        opened = tables.words("opened", batch.num_rows * P).reshape(-1, P)
        opened[:] = (np.cumsum(counts) - counts)[:, None] + np.arange(P)
        return total

    def fill(self, batch: ForwardBatch) -> Staged:
        """Send the tables of a batch, the columns whose logits it wants among them; of a decode
        batch those that the arrays of the one before have not put there."""
        chain, last = self._last
        if chain is not None and batch.chain is chain:
            last.tables.begin()
            self._fill_changes(batch, batch.starts)
            last.tables.send()
            return last
        tables, T, B = self.tables[batch.phase], batch.num_columns, batch.num_rows
        staged = self.decode_round(B)
        row, token = self._columns[B], batch.starts
        if T != B or batch.phase is Phase.PREFILL:
            row, place, longest = self._lay_out(batch.row_indptr)
            token = batch.starts[row] + place
            staged = Staged(tables, T, B, longest, tiles=self._decode_tiles(T))
        elif not slots_apart(batch):
            staged = replace(staged, apart=False)
        if batch.record:
            staged = self.recorded_round(B, T)
        tables.begin()
        self._fill_changes(batch, token)
        tables.keep("ids", batch.token_ids)
        tables.keep("row", row)
        tables.keep("indptr", batch.row_indptr)
        if batch.selection is not None:
            tables.keep("columns", batch.selection.columns)
        if not tables.keeps("pages", batch.page_table):
            P = self._plan.max_pages_per_row
            pages = tables.words("pages", B * P).reshape(B, P)
            pages[:, : batch.page_table.shape[1]] = batch.page_table
        if batch.phase is Phase.DECODE:
            self._fill_units(tables, batch)
            self._last = batch.chain, staged
        else:
            staged = self._fill_prefill(staged, batch, token)
        tables.send()
        return staged

    def _fill_changes(self, batch: ForwardBatch, token: NDArray[np.int32]) -> None:
        """The tables that no batch has from the one before."""
        group = self._changing(batch.phase, batch.num_columns, batch.num_rows)
        tokens, state_in, state_out, rope = self.tables[batch.phase].words_of(group)
        tokens[:] = token
        state_in[:] = batch.state_in
        state_out[:] = batch.state_out
        self._rotations.fill(rope, batch.positions)

    def _changing(self, phase: Phase, T: int, B: int) -> Group:
        """Views of those tables; those of rounds are looked up once."""
        found = self._changes.get((T, B)) if phase is Phase.DECODE else None
        if found is None:
            rows, rope = ((B,), np.int32), (T, self._spec.attention.rotary_dim)
            found = self.tables[phase].group(
                ("token", (T,), np.int32),
                ("state_in", *rows),
                ("state_out", *rows),
                ("rope", rope, np.float32),
            )
            if phase is Phase.DECODE:
                self._changes[T, B] = found
        return found

    def _lay_out(self, row_indptr: NDArray[np.int32]) -> tuple[Any, Any, int]:
        """Row of each column and its place in it, [T] int32, and the longest row; the same arrays
        for the same indptr."""
        if self._laid_out[0] is not row_indptr:
            lengths = np.diff(row_indptr)
            row = np.repeat(self._columns[len(lengths)], lengths)
            place = np.arange(len(row), dtype=np.int32) - row_indptr[row]
            self._laid_out = row_indptr, row, place, int(lengths.max(initial=0))
        _, row, place, longest = self._laid_out
        return row, place, longest

    def _fill_prefill(
        self, staged: Staged, batch: ForwardBatch, token: NDArray[np.int32]
    ) -> Staged:
        """The tables that only prefill has."""
        tables, num_expanded, lengths = staged.tables, 0, np.diff(batch.row_indptr)
        queries = self._query_items(batch.row_indptr, token)
        tables.fill("queries", queries)
        if self._plan.kv is KvCodec.INT8:
            num_expanded = self._fill_expanded(tables, batch)
        chunks, chunk_indptr = chunks_of(batch.row_indptr, batch.starts)
        tables.fill("chunks", chunks)
        tables.fill("chunk_indptr", chunk_indptr)
        return replace(
            staged,
            num_queries=len(queries),
            num_chunks=len(chunks),
            num_expanded=num_expanded,
            runs=tuple(
                (first, end, int(lengths[first:end].max())) for first, end in batch.row_runs
            ),
        )

    def _fill_units(self, tables: Tables, batch: ForwardBatch) -> None:
        """Work units; those of a round over the same items and blocks as the one before stay."""
        blocks = (batch.starts // BLOCK_TOKENS).tobytes()
        known, self._described = self._described, None
        if batch.items is not None and (batch.num_columns == batch.num_rows or _in_a_block(batch)):
            self._described = batch.items, batch.row_indptr, blocks
            same = known is not None and known[2] == blocks
            if known is not None and same and all(map(is_, known[:2], self._described)):
                return
        self._units.fill(batch)
        most = most_partials(self._plan)
        assert self._units.first[batch.num_columns] <= most, "more columns than expected"
        tables.fill("units", self._units.storage[: self._units.used])

    def decode_round(self, B: int) -> Staged:
        """What `fill` returns for a decode batch of B rows of one column whose slots are apart."""
        return self._rounds[B]

    def recorded_round(self, B: int, T: int) -> Staged:
        """What `fill` returns for a batch of B rows of T columns that records."""
        tables, tiles = self.tables[Phase.DECODE], self._decode_tiles(T)
        return Staged(tables, T, B, MOST_PATH, tiles=tiles, record=True)

    def _decode_tiles(self, T: int) -> int:
        """The least size of units that holds T columns, or the largest."""
        a = self._spec.attention
        return SMALL if T * a.num_q_heads <= 16 * SMALL * a.num_kv_heads else self._tiles

    @property
    def work(self) -> tuple[int, int, int]:
        """Addresses of the parts of WorkUnits: units from the header on, members, first."""
        units, at = self._units, self.tables[Phase.DECODE]["units"]
        members = at + units.first.nbytes
        return members + units.members.nbytes, members, at

    def close(self) -> None:
        """Free the pinned memory."""
        for tables in self.tables.values():
            tables.close()


def _in_a_block(batch: ForwardBatch) -> bool:
    """Whether no row's columns cross from a block of attention to the next."""
    last = batch.starts + (batch.row_indptr[1:] - batch.row_indptr[:-1] - np.int32(1))
    return bool((last // BLOCK_TOKENS == batch.starts // BLOCK_TOKENS).all())


def slots_apart(batch: ForwardBatch) -> bool:
    """Whether no recurrent slot is both read and written."""
    return set(batch.state_in.tolist()).isdisjoint(batch.state_out.tolist())


def chunks_of(
    indptr: NDArray[np.int32], starts: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(first column, columns) of the pieces between absolute multiples of 64 of the rows, and where
    each row's begin, [B + 1]."""
    chunks: list[tuple[int, int]] = []
    ends = [0]
    for (first, end), start in zip(pairwise(indptr.tolist()), starts.tolist()):
        cuts = [first, *range(first + CHUNK - start % CHUNK, end, CHUNK), end]
        chunks += [(a, b - a) for a, b in pairwise(cuts)]
        ends.append(len(chunks))
    return np.array(chunks, np.int32).reshape(-1, 2), np.array(ends, np.int32)
