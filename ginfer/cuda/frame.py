"""Frame: the tables of a forward at fixed device addresses, filled from a batch.

Kernels and captured graphs keep the addresses; a batch only changes what lies there. A table is
copied from pinned memory as far as the batch fills it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.batch import Phase
from ginfer.cuda.attention.append import Columns
from ginfer.cuda.attention.decode import BLOCK_TILES
from ginfer.cuda.attention.decode_launch import SMALL, WorkItems, large_tiles, work_items
from ginfer.cuda.attention.prefill import form_of
from ginfer.cuda.gdn.conv import Rows
from ginfer.cuda.runtime.memory import PinnedBuffer, Slice, copy_to_device
from ginfer.cuda.runtime.stream import Event
from ginfer.cuda.sampling.launch import DRAW, draw_records
from ginfer.sizes import align_up, div_ceil

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.batch import ForwardBatch, SelectionBatch
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.spec import ModelSpec

ALIGNMENT = 256
MAX_BIAS = 1024  # entries per row
LEAST_QUERIES = 32  # columns of a work item of prefill attention


def rope_frequencies(spec: ModelSpec) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Position axis and frequency of each pair of dims; frequencies are FP32 numbers."""
    a = spec.attention
    F = a.rotary_dim // 2
    axes = np.zeros(F, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * a.mrope_sections[axis] : 3] = axis
    frequencies = (a.rope_theta ** (-np.arange(F) / F)).astype(np.float32)
    return axes, frequencies.astype(np.float64)


def most_partials(plan: MemoryPlan) -> int:
    """Partials of decode attention for one column of every row at most."""
    return plan.num_rows * div_ceil(plan.max_pages_per_row, BLOCK_TILES)


def table_sizes(spec: ModelSpec, plan: MemoryPlan, selected: int) -> dict[str, int]:
    """Bytes of each table at most."""
    T, B, P = plan.max_columns, plan.num_rows, plan.max_pages_per_row
    blocks = most_partials(plan)
    words = {
        **dict.fromkeys(("ids", "row", "token"), T),
        "indptr": B + 1,
        "state_in": B,
        "state_out": B,
        "rope": T * spec.attention.rotary_dim,
        "pages": B * P,
        "items": 1 + 3 * blocks,
        "lists": blocks * B,
        "first": T + 1,
        "queries": 2 * (div_ceil(T, LEAST_QUERIES) + B),
        "columns": selected,
        "draws": selected * DRAW.itemsize // 4,
        "mask": selected * div_ceil(spec.num_token_ids, 32),
        "bias_ids": selected * MAX_BIAS + 1,
        "bias_values": selected * MAX_BIAS + 1,
    }
    return {name: align_up(n * 4, ALIGNMENT) for name, n in words.items()}


@dataclass
class Staged:
    """What the host knows of the batch in the frame: columns, rows, the longest row, query items,
    tiles of 16 rows of a decode item."""

    T: int
    B: int
    longest: int
    num_queries: int = 0
    tiles: int = SMALL


class Frame:
    """Tables of one forward."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: MemoryPlan,
        memory: Arena,
        *,
        sizes: dict[str, int],
        queue: Queue,
    ) -> None:
        self._spec, self._plan, self._stream = spec, plan, queue.stream
        self._tiles = large_tiles(queue.image.capability)
        self._queries = 16 * form_of(queue.image.capability)[0]
        total = sum(sizes.values())
        device = memory.take(total, "tables")
        self._host = PinnedBuffer(total)
        self._copied = Event()
        self._tables: dict[str, tuple[Slice, int]] = {}
        at = 0
        for name, nbytes in sizes.items():
            self._tables[name] = (device.part(at, nbytes), at)
            at += nbytes
        self._axes, self._frequencies = rope_frequencies(spec)

    def address(self, name: str) -> int:
        """Device address of a table."""
        return self._tables[name][0].address

    @property
    def columns(self) -> Columns:
        """Tables of attention."""
        return Columns(
            row=self.address("row"),
            token=self.address("token"),
            pages=self.address("pages"),
            rope=self.address("rope"),
            P=self._plan.max_pages_per_row,
        )

    def rows(self, staged: Staged) -> Rows:
        """Tables of GDN."""
        return Rows(
            indptr=self.address("indptr"),
            state_in=self.address("state_in"),
            state_out=self.address("state_out"),
            B=staged.B,
            longest=staged.longest,
        )

    def wait(self) -> None:
        """Until the device has read what was filled last, so that it may be overwritten."""
        self._copied.synchronize()

    def _fill(self, name: str, values: NDArray[Any]) -> None:
        part, at = self._tables[name]
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        assert raw.nbytes <= part.nbytes, name
        if raw.nbytes:
            self._host.bytes[at : at + raw.nbytes] = raw
            copy_to_device(part.address, self._host.host + at, raw.nbytes, stream=self._stream)

    def fill(self, batch: ForwardBatch) -> Staged:
        """Copy the tables of a batch; waits for the copies of the batch before."""
        self.wait()
        T, B = batch.num_columns, batch.num_rows
        lengths = np.diff(batch.row_indptr)
        row = np.repeat(np.arange(B, dtype=np.int32), lengths)
        token = (np.arange(T) - batch.row_indptr[:-1][row] + batch.starts[row]).astype(np.int32)
        pages = np.zeros((B, self._plan.max_pages_per_row), np.int32)
        pages[:, : batch.page_table.shape[1]] = batch.page_table
        staged = Staged(T, B, int(lengths.max(initial=0)))
        tables: dict[str, NDArray[Any]] = {
            "ids": batch.token_ids.astype(np.int32),
            "row": row,
            "token": token,
            "indptr": batch.row_indptr.astype(np.int32),
            "state_in": batch.state_in.astype(np.int32),
            "state_out": batch.state_out.astype(np.int32),
            "rope": self._rope(batch.positions),
            "pages": pages,
        }
        if batch.phase is Phase.DECODE:
            staged.tiles = self._tiles if B > 1 or T > 1 else SMALL
            items = self._items(batch, row, token, staged.tiles)
            assert items.first[-1] <= most_partials(self._plan), "more columns than rows"
            tables["items"] = np.append(np.int32(len(items.items)), items.items.reshape(-1))
            tables["lists"], tables["first"] = items.lists, items.first
        else:
            queries = _query_items(batch.row_indptr, token, self._queries)
            staged.num_queries, tables["queries"] = len(queries), queries
        for name, values in tables.items():
            self._fill(name, values)
        self._copied.record(self._stream)
        return staged

    def _rope(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Cosines, then sines, of each column; the angles in float64."""
        angles = (positions[self._axes].astype(np.float64) * self._frequencies[:, None]).T
        return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def _items(
        self, batch: ForwardBatch, row: NDArray[np.int32], token: NDArray[np.int32], tiles: int
    ) -> WorkItems:
        a = self._spec.attention
        group = 16 * tiles // (a.num_q_heads // a.num_kv_heads)
        if batch.items is None or batch.num_columns != batch.num_rows:
            return work_items(row, token, batch.page_table, group=group)
        return expand_items(batch.items, token, group=group)

    def decode_round(self, B: int) -> Staged:
        """What `fill` returns for a decode batch of B rows of one column."""
        return Staged(B, B, 1, tiles=self._tiles if B > 1 else SMALL)

    def fill_columns(self, s: SelectionBatch) -> None:
        """Copy the columns whose logits are wanted."""
        self._fill("columns", s.columns.astype(np.int32))
        self._copied.record(self._stream)

    def fill_selection(self, s: SelectionBatch) -> None:
        """Copy the tables of a selection; waits for a mask that is still being computed."""
        self.wait()
        self._fill("draws", draw_records(s))
        self._fill("bias_ids", s.bias_ids.astype(np.int32))
        self._fill("bias_values", s.bias_values.astype(np.float32))
        if s.mask is not None:
            words = div_ceil(self._spec.num_token_ids, 32)
            self._fill("mask", np.asarray(s.mask)[:, :words])
        self._copied.record(self._stream)

    def close(self) -> None:
        """Free the pinned memory."""
        self.wait()
        self._copied.close()
        self._host.close()


def expand_items(items: Any, token: NDArray[np.int32], *, group: int) -> WorkItems:
    """Work items of single blocks from `batch.WorkItems`, whose runs of blocks are read by rows of
    one column each."""
    parts = [
        (at, min(group, end - at), first, last)
        for (first, last), (start, end) in zip(
            items.blocks.tolist(), pairwise(items.indptr.tolist())
        )
        for at in range(start, end, group)
    ]
    table = np.array(parts, np.int32).reshape(-1, 4)
    counts = table[:, 3] - table[:, 2]
    ends = np.cumsum(counts)
    block = np.arange(counts.sum()) - np.repeat(ends - counts - table[:, 2], counts)
    flat = np.column_stack([np.repeat(table[:, 0], counts), np.repeat(table[:, 1], counts), block])
    first = np.zeros(len(token) + 1, np.int32)
    np.cumsum(token // (64 * BLOCK_TILES) + 1, out=first[1:])
    return WorkItems(flat.astype(np.int32), items.rows.astype(np.int32), first)


def _query_items(
    indptr: NDArray[np.int32], token: NDArray[np.int32], most: int
) -> NDArray[np.int32]:
    """(first column, columns) of at most `most` columns of a row each, the longest histories
    first."""
    items = [
        (t, min(most, end - t))
        for start, end in pairwise(indptr.tolist())
        for t in range(start, end, most)
    ]
    items.sort(key=lambda item: -int(token[item[0]]))
    return np.array(items, np.int32).reshape(-1, 2)
