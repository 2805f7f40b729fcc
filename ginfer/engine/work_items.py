"""Work items of decode attention: which rows read which run of 256-key blocks together.

Rows that begin with the same complete pages form a tree: sorted by page ids, every group is a run
of neighbours, and two neighbours share what their tables have in common from the left. An edge of
the tree is an item.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import WorkItems
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.batch import I32

_BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS


def work_items(page_table: I32, starts: I32, row_indptr: I32) -> WorkItems:
    """The items of a decode batch; arguments as in `ForwardBatch`, every row with a column.

    Rows share block j if they have the same pages up to its end and all its tokens were there
    before the batch.
    """
    ends = -(-(starts + np.diff(row_indptr)) // BLOCK_TOKENS)
    whole = (starts // BLOCK_TOKENS).tolist()  # complete blocks of each row
    order, common = _neighbours(page_table, whole)
    edges = _edges(order, common, ends.tolist())
    indptr = np.zeros(len(edges) + 1, np.int32)
    np.cumsum([len(rows) for _, _, rows in edges], out=indptr[1:])
    return WorkItems(
        blocks=np.array([(first, last) for first, last, _ in edges], np.int32),
        indptr=indptr,
        rows=np.array([row for _, _, rows in edges for row in rows], np.int32),
    )


def _neighbours(page_table: I32, whole: list[int]) -> tuple[list[int], list[int]]:
    """(rows sorted by the pages of their complete blocks, blocks each shares with the next)."""
    if len(whole) == 1:
        return [0], []
    keys = [page_table[b, : n * _BLOCK_PAGES].tobytes() for b, n in enumerate(whole)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    heads = page_table[:, 0].tolist()
    common = []
    for a, b in pairwise(order):
        n = min(whole[a], whole[b]) * _BLOCK_PAGES if heads[a] == heads[b] else 0
        if n:
            differ = page_table[a, :n] != page_table[b, :n]
            at = int(differ.argmax())
            n = at if differ[at] else n
        common.append(n // _BLOCK_PAGES)
    return order, common


def _edges(
    order: list[int], common: list[int], ends: list[int]
) -> list[tuple[int, int, list[int]]]:
    """Edges of the tree, (first block, last + 1 block, rows), each after the edges above it."""
    edges: list[tuple[int, int, list[int]]] = []
    pending = [(0, len(order), 0)]  # rows order[lo:hi] share the blocks before `depth`
    while pending:
        lo, hi, depth = pending.pop()
        below = min(common[lo : hi - 1], default=ends[order[lo]])
        if below > depth:
            edges.append((depth, below, sorted(order[lo:hi])))
        if hi - lo > 1:
            cuts = [lo, *(i + 1 for i in range(lo, hi - 1) if common[i] == below), hi]
            pending += [(a, b, below) for a, b in pairwise(cuts)]
    return edges
