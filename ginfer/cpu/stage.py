"""Stages a ForwardBatch for the kernels: tables of fixed type, columns, work items.

Kernels are compiled for writable C-contiguous arrays of the types below; whatever a caller passes
is copied into such arrays, so that no batch can make Numba compile while serving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.batch import Phase
from ginfer.cpu.attention import QUERIES, Columns, Work
from ginfer.cpu.gdn import Rows
from ginfer.cpu.sampling import Draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.batch import ForwardBatch, SelectionBatch, WorkUnits

    I32 = NDArray[np.int32]
    I64 = NDArray[np.int64]


class Staged(NamedTuple):
    """A batch as the kernels take it.

    items: [I, 2] prefill work items. work: of decode attention, in place.
    """

    token_ids: I32
    positions: I32
    columns: Columns
    rows: Rows
    items: I64
    work: Work


def _own(array: object, dtype: type) -> np.ndarray:
    return np.array(array, dtype=dtype, order="C")


def _query_items(indptr: I64, tokens: I64) -> I64:
    """Runs of at most 64 columns of a row, late ones (heavy) alternating with early ones."""
    items = [
        (t, min(t + QUERIES, end))
        for start, end in zip(indptr[:-1].tolist(), indptr[1:].tolist())
        for t in range(start, end, QUERIES)
    ]
    items.sort(key=lambda item: int(tokens[item[0]]))
    middle = (len(items) + 1) // 2
    mixed = [*items]
    mixed[0::2], mixed[1::2] = items[:middle], items[middle:][::-1]
    return np.array(mixed, np.int64).reshape(-1, 2)


def stage(batch: ForwardBatch, cos: np.ndarray, sin: np.ndarray, units: WorkUnits) -> Staged:
    """Copy the tables of a batch and derive columns and work. cos, sin: [T, F]; `units` of groups
    of at most GROUP columns is filled for decode."""
    indptr, starts = _own(batch.row_indptr, np.int64), _own(batch.starts, np.int64)
    row = np.repeat(np.arange(starts.size, dtype=np.int32), np.diff(indptr))
    token = np.arange(row.size) + (starts - indptr[:-1])[row]
    items = np.zeros((0, 2), np.int64)
    if batch.phase is Phase.PREFILL:
        items = _query_items(indptr, token)
    else:
        units.fill(batch)
    count, grain = units.header.tolist()
    return Staged(
        token_ids=_own(batch.token_ids, np.int32),
        positions=_own(batch.positions, np.int32),
        columns=Columns(row, token, _own(batch.page_table, np.int32), cos, sin),
        rows=Rows(indptr, starts, _own(batch.state_in, np.int32), _own(batch.state_out, np.int32)),
        items=items,
        work=Work(grain, units.units[:count], units.members, units.first),
    )


def rows_between(rows: Rows, first: int, end: int) -> Rows:
    """Rows first .. end - 1; their columns keep their numbers."""
    indptr, (starts, *slots) = rows.indptr[first : end + 1], rows[1:]
    return Rows(indptr, starts[first:end], *(slot[first:end] for slot in slots))


def stage_draws(s: SelectionBatch) -> Draws:
    """Copy a SelectionBatch."""
    floats = (s.temperature, s.top_p, s.min_p, s.presence, s.frequency)
    temperature, top_p, min_p, presence, frequency = (_own(v, np.float32) for v in floats)
    return Draws(
        rows=_own(s.rows, np.int32),
        temperature=temperature,
        top_k=_own(s.top_k, np.int32),
        top_p=top_p,
        min_p=min_p,
        presence=presence,
        frequency=frequency,
        seeds=_own(s.seeds, np.uint64),
        positions=_own(s.positions, np.int32),
        purposes=_own(s.purposes, np.int32),
        forced=_own(s.forced, np.int32),
        bias_indptr=_own(s.bias_indptr, np.int32),
        bias_ids=_own(s.bias_ids, np.int32),
        bias_values=_own(s.bias_values, np.float32),
        mask=np.zeros((0, 0), np.uint32) if s.mask is None else _own(s.mask, np.uint32),
    )


def slice_draws(draws: Draws, r0: int, r1: int) -> Draws:
    """Rows r0 .. r1 - 1."""
    whole = {"bias_ids", "bias_values", "bias_indptr"}
    parts = {
        name: value if name in whole or not len(value) else value[r0:r1]
        for name, value in draws._asdict().items()
    }
    return Draws(**{**parts, "bias_indptr": draws.bias_indptr[r0 : r1 + 1]})
