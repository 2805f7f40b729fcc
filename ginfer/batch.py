"""ForwardBatch and Selection: what a forward takes, and what comes back.

Legend: T columns (tokens) of the batch, B rows (sequences), R columns whose logits are wanted, P
pages of the longest row.
All arrays are C-contiguous NumPy arrays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ginfer.sizes import div_ceil
from ginfer.spec import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I32 = NDArray[np.int32]
    F32 = NDArray[np.float32]


class Phase(StrEnum):
    """Which numeric family computes the columns."""

    PREFILL = "prefill"
    DECODE = "decode"


class Purpose:
    """Purpose numbers of the counter RNG (a part of every draw's key)."""

    PROMPT = 0  # the token after the prompt
    DECODE = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    DRAFT = 5


class TokenMask(Protocol):
    """Legal ids of R rows, [R, ceil(vocab / 32)] uint32, bit set = legal. `np.asarray` of it waits
    for rows that are still being computed, so a backend converts it once, at its selection."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The mask as an array."""


@dataclass(frozen=True, kw_only=True)
class SelectionBatch:
    """How to choose one token for each of R columns. Temperature 0 is greedy.

    columns: [R] int32, index of the column in the batch. rows: [R] int32, lane whose counts apply.
    temperature, top_p, min_p, presence, frequency: [R] float32. top_k: [R] int32, 0 = no limit.
    seeds: [R] uint64. positions: [R] int32, logical position of the token being drawn. purposes:
    [R] int32.
    forced: [R] int32, token id to take whatever the logits say, or -1.
    bias_indptr: [R + 1] int32 into bias_ids (int32) and bias_values (float32).
    mask: None when no row is constrained.
    num_top: largest number of top logprobs that any row wants; -1 when none wants logprobs.
    """

    columns: I32
    rows: I32
    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    presence: F32
    frequency: F32
    seeds: NDArray[np.uint64]
    positions: I32
    purposes: I32
    forced: I32
    bias_indptr: I32
    bias_ids: I32
    bias_values: F32
    mask: TokenMask | None = None
    num_top: int = -1


@dataclass(frozen=True, kw_only=True)
class WorkItems:
    """Decode attention as I items: a run of 256-key blocks, and the rows that read it in common.

    Every block of every row is in exactly one item. Rows of one item have the same pages in its
    blocks, and those are complete before the batch. B rows never need more than 2 B - 1 items and
    B (B + 3) / 2 - 1 entries of `rows` (15 and 43 for 8 rows), however long they are.
    blocks: [I, 2] int32, first and last + 1 block. indptr: [I + 1] int32 into rows. rows: int32,
    ascending in an item.
    """

    blocks: I32
    indptr: I32
    rows: I32

    @property
    def num_items(self) -> int:
        """I."""
        return len(self.blocks)


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One forward over B rows. Row b owns columns row_indptr[b] .. row_indptr[b + 1].

    token_ids: [T] int32; ~l, a negative number, is the token that lane l drew last, which the
    backend knows. positions: [3, T] int32, rotary positions of the axes T, H, W.
    row_indptr: [B + 1] int32. starts: [B] int32, tokens of the row that are already in K/V and
    state; column i of row b is token number starts[b] + i. page_table: [B, P] int32, page ids;
    page j of a row holds its tokens 64 j .. 64 j + 63.
    state_in, state_out: [B] int32, recurrent slots read and written (may be equal).
    items: how decode attention shares reads between rows; None: every row reads its own.
    selection: None when no logits are wanted (a chunk that does not end its prompt).
    record: a decode batch keeps its raw recurrent inputs, so that a fold can set slots state_out to
    the state after fewer columns; state_in is then another slot and stays as it is.
    """

    phase: Phase
    token_ids: I32
    positions: I32
    row_indptr: I32
    starts: I32
    page_table: I32
    state_in: I32
    state_out: I32
    items: WorkItems | None = None
    selection: SelectionBatch | None = None
    record: bool = False

    @property
    def num_columns(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.starts)


class WorkUnits:
    """What kernels of decode attention read: units of work, in arrays that never move.

    A unit is a block of 256 keys and at most `group` columns that read it together and have keys in
    it. units: [capacity, 3] int32, place in members, columns, block; those of many columns first.
    count: [1] int32, units that count. members: int32, columns, ascending in a unit. first:
    [T + 1] int32, blocks of the columns before: the partial of column t and block j has number
    first[t] + j. The arrays are consecutive parts of `storage`: first, members, count, units.
    """

    def __init__(self, num_rows: int, num_columns: int, num_blocks: int, *, group: int) -> None:
        """Room for batches of up to these rows and columns, and blocks of a row."""
        capacity = (num_rows + num_columns // group) * num_blocks
        sizes = (num_columns + 1, num_rows * num_columns, 1, 3 * capacity)
        self.storage = np.zeros(sum(sizes), np.int32)
        self.first, self.members, self.count, units = np.split(
            self.storage, np.cumsum(sizes[:-1]).tolist()
        )
        self.units = units.reshape(capacity, 3)
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        self._columns = np.arange(num_columns, dtype=np.int32)
        self._group = group

    def fill(self, batch: ForwardBatch) -> None:
        """Describe a decode batch. What exceeds the room is our own fault."""
        indptr, starts = batch.row_indptr.tolist(), batch.starts.tolist()
        self.count[0] = place = 0
        for begin, end, rows in _reads(batch, indptr, starts):
            head = place
            for row in rows:
                width = indptr[row + 1] - indptr[row]
                self.members[place : place + width] = self._columns[indptr[row] : indptr[row + 1]]
                place += width
            whole = end if len(rows) > 1 else min(end, starts[rows[0]] // BLOCK_TOKENS + 1)
            self._add(head, place, begin, whole)
            for block in range(whole, end):  # the first columns of the row end before it
                self._add(head + block * BLOCK_TOKENS - starts[rows[0]], place, block, block + 1)
        tokens = self._columns[: indptr[-1]] + np.repeat(
            batch.starts - batch.row_indptr[:-1], np.diff(batch.row_indptr)
        )
        np.cumsum(tokens // BLOCK_TOKENS + 1, out=self.first[1 : indptr[-1] + 1])

    def _add(self, head: int, tail: int, begin: int, end: int) -> None:
        """Units of the blocks begin .. end - 1 for members[head:tail]."""
        for place in range(head, tail, self._group):
            count = int(self.count[0])
            units = self.units[count : count + end - begin]
            units[:, 0] = place
            units[:, 1] = min(self._group, tail - place)
            units[:, 2] = self._blocks[begin:end]
            self.count[0] += end - begin


def _reads(
    batch: ForwardBatch, indptr: list[int], starts: list[int]
) -> list[tuple[int, int, list[int]]]:
    """(first block, last + 1 block, rows) of the work items, those of many rows first."""
    if batch.items is None:
        tokens = [start + b - a for start, a, b in zip(starts, indptr[:-1], indptr[1:])]
        return [(0, div_ceil(n, BLOCK_TOKENS), [row]) for row, n in enumerate(tokens)]
    cuts, rows = batch.items.indptr.tolist(), batch.items.rows.tolist()
    runs = zip(batch.items.blocks.tolist(), cuts[:-1], cuts[1:])
    items = [(begin, end, rows[a:b]) for (begin, end), a, b in runs]
    return sorted(items, key=lambda item: -len(item[2]))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen tokens of R columns.

    token_ids: [R] int32. logprobs: [R] float32, log-softmax of the raw logits over legal ids at
    the chosen token.
    top_ids, top_logprobs: [R, num_top], best first, ties to the lower id (num_top = 0 columns when
    nothing was wanted).
    finite: [R] bool, False when the logits of the column had a NaN or infinity; its token is then
    meaningless.
    """

    token_ids: I32
    logprobs: F32
    top_ids: I32
    top_logprobs: F32
    finite: NDArray[np.bool_]

    def read(self) -> Selection:
        """A selection that is complete is its own promise."""
        return self


class PendingSelection(Protocol):
    """A selection that is ordered; its values may still be on their way."""

    def read(self) -> Selection:
        """Wait for the values. A backend keeps those of its last two selections."""
