"""Work items partition every row's blocks and are shared exactly where pages are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ginfer.engine.work_items import work_items
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.batch import WorkItems

BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
Shares = dict[tuple[int, int], tuple[int, ...]]  # (row, block) -> rows that read it together


def sharing_tree(
    rng: np.random.Generator, rows: int, most: int, width: int = 20
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(page_table, starts, row_indptr) of rows of up to `most` pages and `width` columns, many of
    which begin with complete pages of another; ids are below rows * most, absent ones -1."""
    fresh = iter(rng.permutation(rows * most).tolist())
    widths = rng.integers(1, width + 1, rows)
    starts = [int(rng.integers(0, most * PAGE_TOKENS - w + 1)) for w in widths]
    table = np.full((rows, most), -1, np.int32)
    for row in range(rows):
        parent = int(rng.integers(0, row)) if row and rng.random() < 0.9 else row
        most_common = min(starts[row], starts[parent]) // PAGE_TOKENS if parent != row else 0
        common = most_common if rng.random() < 0.5 else int(rng.integers(0, most_common + 1))
        table[row, :common] = table[parent, :common]
        for page in range(common, -(-(starts[row] + int(widths[row])) // PAGE_TOKENS)):
            table[row, page] = next(fresh)
    return table, np.array(starts, np.int32), np.cumsum([0, *widths]).astype(np.int32)


def naive_shares(table: np.ndarray, starts: np.ndarray, indptr: np.ndarray) -> Shares:
    """Compare every pair of rows, block by block."""
    shares = {}
    for a in range(len(starts)):
        for block in range(-(-int(starts[a] + indptr[a + 1] - indptr[a]) // BLOCK_TOKENS)):
            end = (block + 1) * BLOCK_PAGES
            tokens = end * PAGE_TOKENS
            shares[a, block] = tuple(
                b
                for b in range(len(starts))
                if b == a
                or (
                    tokens <= min(starts[a], starts[b])
                    and table[a, :end].tolist() == table[b, :end].tolist()
                )
            )
    return shares


def shares_of(items: WorkItems) -> Shares:
    """What items say; a block of a row that is in two items is an error."""
    shares: Shares = {}
    for i, (first, last) in enumerate(items.blocks.tolist()):
        rows = tuple(items.rows[items.indptr[i] : items.indptr[i + 1]].tolist())
        assert first < last
        assert rows == tuple(sorted(set(rows)))
        for key in ((row, block) for row in rows for block in range(first, last)):
            assert key not in shares
            shares[key] = rows
    return shares


@pytest.mark.parametrize("rows", range(1, 9))
def test_rows_share_exactly_the_blocks_with_equal_pages(rows: int) -> None:
    rng = np.random.default_rng(rows)
    shared = 0
    for _ in range(60):
        tree = sharing_tree(rng, rows, int(rng.integers(2, 60)))
        items = work_items(*tree)
        want = naive_shares(*tree)
        assert shares_of(items) == want
        assert items.num_items <= 2 * rows - 1
        assert items.rows.size <= rows * (rows + 3) // 2 - 1
        shared += any(len(group) > 1 for group in want.values())
    assert rows == 1 or shared > 10


def test_bounds_are_reached_by_rows_that_leave_one_after_the_other() -> None:
    table = np.tile(np.arange(64, dtype=np.int32), (8, 1))
    for i in range(7):
        table[i + 1 :, 4 * (i + 1) :] += 64
    items = work_items(table, np.full(8, 4000, np.int32), np.arange(9, dtype=np.int32))
    assert (items.num_items, items.rows.size) == (15, 43)
    assert items.blocks.dtype == items.indptr.dtype == items.rows.dtype == np.int32


def test_equal_rows_share_only_what_was_complete_before_the_batch() -> None:
    table = np.zeros((2, 8), np.int32)
    one = np.arange(3, dtype=np.int32)
    for start, complete in ((255, 0), (256, 1), (511, 1)):
        shares = shares_of(work_items(table, np.array([start, 511], np.int32), one))
        assert [len(shares[1, block]) for block in range(2)] == [1 + (complete > 0), 1]


def test_stale_page_ids_behind_a_row_are_not_read() -> None:
    table = np.zeros((2, 40), np.int32)
    table[1, 4:] = 7
    starts = np.array([300, 2500], np.int32)
    items = work_items(table, starts, np.arange(3, dtype=np.int32))
    assert shares_of(items)[0, 0] == (0, 1)
    assert shares_of(items)[1, 1] == (1,)


@pytest.mark.parametrize("shared", [0, 2048, 4090])
def test_eight_rows_of_4096_pages_take_microseconds(shared: int) -> None:
    table = np.random.default_rng(0).permutation(8 * 4096).astype(np.int32).reshape(8, 4096)
    table[:, :shared] = table[0, :shared]
    starts, indptr = np.full(8, 4096 * 64 - 1, np.int32), np.arange(9, dtype=np.int32)
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        work_items(table, starts, indptr)
        best = min(best, time.perf_counter() - began)
    assert best < 1e-3  # 60 us on two quiet cores; the aim is 100
