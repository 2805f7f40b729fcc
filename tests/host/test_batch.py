"""Units of decode attention: a column reads each of its blocks once, in arrays that never move."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ginfer.batch import ForwardBatch, Phase, WorkItems, WorkUnits
from ginfer.engine.work_items import work_items
from ginfer.spec import BLOCK_TOKENS
from tests.host.engine.test_work_items import BLOCK_PAGES, sharing_tree


def decode_batch(
    table: np.ndarray, starts: np.ndarray, indptr: np.ndarray, items: WorkItems | None
) -> ForwardBatch:
    """A decode batch of which only the tables matter."""
    T, rows = int(indptr[-1]), np.arange(len(starts), dtype=np.int32)
    return ForwardBatch(
        phase=Phase.DECODE,
        token_ids=np.zeros(T, np.int32),
        positions=np.zeros((3, T), np.int32),
        row_indptr=indptr,
        starts=starts,
        page_table=table,
        state_in=rows,
        state_out=rows,
        items=items,
    )


def check(units: WorkUnits, batch: ForwardBatch, group: int) -> int:
    """Assert that the units are the batch's; return the size of the largest."""
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_indptr))
    tokens = np.arange(batch.num_columns) + (batch.starts - batch.row_indptr[:-1])[rows]
    blocks = tokens // BLOCK_TOKENS + 1
    np.testing.assert_array_equal(units.first[: len(rows) + 1], np.cumsum([0, *blocks]))
    missing = {(t, block) for t, n in enumerate(blocks.tolist()) for block in range(n)}
    for place, count, block in units.units[: units.count[0]].tolist():
        columns = units.members[place : place + count]
        assert 1 <= count <= group
        assert (np.diff(columns) > 0).all()
        pages = batch.page_table[rows[columns], block * BLOCK_PAGES : (block + 1) * BLOCK_PAGES]
        assert (pages == pages[0]).all()
        if len(set(rows[columns].tolist())) > 1:
            assert tokens[columns].min() >= (block + 1) * BLOCK_TOKENS
        missing -= (done := {(t, block) for t in columns.tolist()} & missing)
        assert len(done) == count, "a column reads a block twice, or one that it does not have"
    assert not missing
    return int(units.units[: units.count[0], 1].max())


@pytest.mark.parametrize("group", [1, 8, 16])
def test_columns_read_each_of_their_blocks_once(group: int) -> None:
    rng = np.random.default_rng(group)
    units = WorkUnits(8, 8 * 20, 15, group=group)
    where, largest = units.storage.ctypes.data, 0
    for _ in range(60):
        tree = sharing_tree(rng, int(rng.integers(1, 9)), 60)
        for items in (work_items(*tree), None):
            batch = decode_batch(*tree, items)
            units.fill(batch)
            largest = max(largest, check(units, batch, group))
    assert largest == group
    parts = (units.first, units.members, units.count, units.units)
    assert [p.ctypes.data for p in parts] == where_of(where, [p.size for p in parts])


def where_of(start: int, sizes: list[int]) -> list[int]:
    """Addresses of int32 arrays that lie one after the other."""
    return [start + 4 * n for n in np.cumsum([0, *sizes[:-1]]).tolist()]


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (8, 1), (8, 7), (8, 16), (5, 25)])
def test_the_largest_batches_fit(rows: int, width: int) -> None:
    units = WorkUnits(rows, rows * width, 32, group=8)
    table = np.tile(np.arange(128, dtype=np.int32), (rows, 1))
    for shared in (0, 4):
        for i in range(rows - 1):  # rows leave one after the other, or share nothing
            table[i + 1 :, shared * (i + 1) :] += 128
        starts = np.full(rows, 128 * 64 - width, np.int32)
        indptr = np.arange(0, rows * width + 1, width, dtype=np.int32)
        batch = decode_batch(table, starts, indptr, work_items(table, starts, indptr))
        units.fill(batch)
        check(units, batch, 8)
        table = np.tile(np.arange(128, dtype=np.int32), (rows, 1))


def test_filling_eight_rows_of_1024_blocks_takes_microseconds() -> None:
    units = WorkUnits(8, 128, 1024, group=8)
    table = np.arange(8 * 4096, dtype=np.int32).reshape(8, 4096)
    starts, indptr = np.full(8, 4096 * 64 - 1, np.int32), np.arange(9, dtype=np.int32)
    batch = decode_batch(table, starts, indptr, work_items(table, starts, indptr))
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        units.fill(batch)
        best = min(best, time.perf_counter() - began)
    assert units.count[0] == 8 * 1024
    assert best < 2e-3  # 70 us on two quiet cores
