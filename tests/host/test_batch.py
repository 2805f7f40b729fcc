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
    """Assert that the units are the batch's; return columns of the largest."""
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_indptr))
    tokens = np.arange(batch.num_columns) + (batch.starts - batch.row_indptr[:-1])[rows]
    num_units, grain = units.header.tolist()
    keys = grain * BLOCK_TOKENS
    runs = tokens // keys + 1
    np.testing.assert_array_equal(units.first[: len(rows) + 1], np.cumsum([0, *runs]))
    missing = {(t, run) for t, n in enumerate(runs.tolist()) for run in range(n)}
    for place, count, block in units.units[:num_units].tolist():
        columns = units.members[place : place + count]
        assert 1 <= count <= group
        assert (np.diff(columns) > 0).all()
        assert block % grain == 0
        pages = batch.page_table[rows[columns], block * BLOCK_PAGES : (block + grain) * BLOCK_PAGES]
        assert (pages == pages[0]).all()
        if len(set(rows[columns].tolist())) > 1:
            assert tokens[columns].min() >= (block + grain) * BLOCK_TOKENS
        missing -= (done := {(t, block // grain) for t in columns.tolist()} & missing)
        assert len(done) == count, "a column reads a run twice, or one that it does not have"
    assert not missing
    assert units.used == 3 * num_units + sum(
        part.size for part in (units.first, units.members, units.header)
    )
    return int(units.units[:num_units, 1].max())


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("workers", [1, 30])
def test_columns_read_each_of_their_blocks_once(group: int, workers: int) -> None:
    rng = np.random.default_rng(group)
    units = WorkUnits(8, 8 * 20, 15, group=group, workers=workers)
    where, largest, grains = units.storage.ctypes.data, 0, set()
    for _ in range(60):
        tree = sharing_tree(rng, int(rng.integers(1, 9)), 60)
        for items in (work_items(*tree), None):
            batch = decode_batch(*tree, items)
            units.fill(batch)
            largest = max(largest, check(units, batch, group))
            grains.add(int(units.header[1]))
    assert largest == group
    assert grains == {1, 4}
    parts = (units.first, units.members, units.header, units.units)
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


def test_few_units_are_blocks_unless_there_is_no_room_for_their_partials() -> None:
    table = np.arange(80, dtype=np.int32).reshape(1, 80)
    batch = decode_batch(table, np.array([5000], np.int32), np.arange(2, dtype=np.int32), None)
    found = []
    for workers, num_partials in ((32, 20), (32, 19), (1, 1000)):
        units = WorkUnits(1, 1, 20, group=8, workers=workers, num_partials=num_partials)
        units.fill(batch)
        check(units, batch, 8)
        found.append(units.header.tolist())
    assert found == [[20, 1], [5, 4], [5, 4]]


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
    assert units.header.tolist() == [8 * 256, 4]
    assert best < 2e-3  # 70 us on two quiet cores
