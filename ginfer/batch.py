"""ForwardBatch and Selection: what a forward takes, and what comes back.

Legend: T columns (tokens) of the batch, B rows (sequences), R columns whose logits are wanted, P
pages of the longest row.
All arrays are C-contiguous NumPy arrays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ginfer.sizes import div_ceil
from ginfer.spec import BLOCK_TOKENS, SPAN_BLOCKS

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
    DECODE = 1  # also of every column of a row that is verified with an explicit seed
    ACCEPT = 2  # of the columns of a row that is verified without one
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

    def at(self, positions: I32) -> SelectionBatch:
        """The same choices at other positions, without the time of a constructor."""
        moved = object.__new__(SelectionBatch)
        moved.__dict__.update(self.__dict__, positions=positions)
        return moved


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

    token_ids: [T] int32; ~n, a negative number, is a token that the backend knows: of lane
    n % num_rows the one that it drew last (n // num_rows = 0) or draft 1, 2 .. of its last `draft`
    (n // num_rows), num_rows being the lanes of the memory plan.
    positions: [3, T] int32, rotary positions of the axes T, H, W.
    row_indptr: [B + 1] int32. starts: [B] int32, tokens of the row that are already in K/V and
    state; column i of row b is token number starts[b] + i. page_table: [B, P] int32, page ids;
    page j of a row holds its tokens 64 j .. 64 j + 63.
    state_in, state_out: [B] int32, recurrent slots read and written (may be equal). A prefill row
    that reads the slot that the row before it writes goes on where that one ends, see `row_runs`.
    items: how decode attention shares reads between rows; None: every row reads its own.
    selection: None when no logits are wanted (a chunk that does not end its prompt).
    record: a decode batch of at most `max_recorded` columns, 16 per row, keeps its raw recurrent
    inputs, so that `Speculation.keep` can set slots state_out to the state after some of the
    columns; state_in is then another slot and stays as it is.
    chain: rounds that go on from each other have the same one, see `next_round`.
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
    chain: object = None

    @property
    def num_columns(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.starts)

    def next_round(self) -> ForwardBatch:
        """The plain round that goes on where this one ends, as long as no row comes to another page
        or block, without the time of constructors. Every row is a token on and reads the slot that
        it has written; all else is as it was."""
        stops, moved = self.starts + np.int32(1), object.__new__(ForwardBatch)
        assert self.selection is not None
        moved.__dict__.update(
            self.__dict__,
            positions=self.positions + np.int32(1),
            starts=stops,
            state_in=self.state_out,
            state_out=self.state_in,
            selection=self.selection.at(stops + np.int32(1)),
        )
        return moved

    @property
    def row_runs(self) -> list[tuple[int, int]]:
        """(first, last + 1) of the rows that recurrent blocks compute together, one run after the
        other: a row that goes on from the row before it begins a run."""
        cuts = np.flatnonzero(self.state_in[1:] == self.state_out[:-1]) + 1
        return list(pairwise([0, *cuts.tolist(), self.num_rows]))


@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """Rows whose drafts a drafter makes, all of them `num_drafts`, 1 .. `max_drafts`.

    lanes: [B] int32; the anchor is the token that a lane drew last. slots: [B] int32, recurrent
    slots of the rows: they say where the context lies. starts: [B] int32, tokens of context: the
    index of the anchor, which is the position that the drafter turns it by. temperature: [B]
    float32, 0 takes the best path. seeds: [B] uint64; draft j = 1, 2 .. is drawn with position
    starts + j and purpose DRAFT.
    rows: [B] int32, or None: behind `accept` of a round, before its values are known, the row of
    that round; the columns that it used come on top of starts.
    """

    lanes: I32
    slots: I32
    starts: I32
    temperature: F32
    seeds: NDArray[np.uint64]
    num_drafts: int
    rows: I32 | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lanes)


class WorkUnits:
    """What kernels of decode attention read: units of work, in arrays that never move.

    A unit is a run of `grain` blocks of 256 keys, one or a span, and at most `group` columns that
    read it together and have keys in its first block. units: [capacity, 3] int32, place in members,
    columns, first block; those of many columns first. header: [2] int32, units that count, and the
    grain. members: int32, columns, ascending in a unit. first: [T + 1] int32, runs of the columns
    before: the partial of column t and run i has number first[t] + i. The arrays are consecutive
    parts of `storage`: first, members, header, units.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        num_blocks: int,
        *,
        group: int,
        workers: int = 1,
        num_partials: int = 1 << 30,
    ) -> None:
        """Room for batches of up to these rows and columns, and blocks of a row; `workers` take
        units in turns, there is space for so many partials."""
        capacity = (num_rows + num_columns // group) * num_blocks
        sizes = (num_columns + 1, num_rows * num_columns, 2, 3 * capacity)
        self.storage = np.zeros(sum(sizes), np.int32)
        self.first, self.members, self.header, units = np.split(
            self.storage, np.cumsum(sizes[:-1]).tolist()
        )
        self.units = units.reshape(capacity, 3)
        self.header[1] = SPAN_BLOCKS
        self._columns = np.arange(num_columns, dtype=np.int32)
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        self._group, self._workers, self._num_partials = group, workers, num_partials

    @property
    def used(self) -> int:
        """Words of `storage` up to the last unit that counts."""
        return len(self.storage) - 3 * (len(self.units) - int(self.header[0]))

    def fill(self, batch: ForwardBatch) -> None:
        """Describe a decode batch. What exceeds the room is our own fault."""
        indptr, starts = batch.row_indptr.tolist(), batch.starts.tolist()
        shared = _shared_reads(batch)
        T, rows = indptr[-1], list(zip(starts, indptr, indptr[1:]))
        self.members[:T] = self._columns[:T]
        tokens = self._columns[:T] + np.repeat(
            batch.starts - batch.row_indptr[:-1], np.diff(batch.row_indptr)
        )
        blocks = tokens // BLOCK_TOKENS + 1
        grain = self._grain(shared, rows, blocks)
        np.cumsum((blocks + (grain - 1)) // grain, out=self.first[1 : T + 1])
        self.header[:] = 0, grain
        place, done = T, [0] * len(rows)
        gaps: list[tuple[int, int, int]] = []  # (row, first run, last + 1) that it reads alone
        for begin, end, together in shared:
            begin, end = div_ceil(begin, grain), end // grain
            if begin >= end:
                continue
            head = place
            for row in together:
                gaps.append((row, done[row], begin))
                done[row] = end
                _, a, b = rows[row]
                self.members[place : place + b - a] = self._columns[a:b]
                place += b - a
            self._add(head, place, begin, end)
        for row, begin, end in gaps:
            self._add(rows[row][1], rows[row][2], begin, end)
        for (start, a, b), begin in zip(rows, done):
            self._add_tail(start, a, b, begin)

    def _grain(
        self,
        shared: list[tuple[int, int, list[int]]],
        rows: list[tuple[int, int, int]],
        blocks: I32,
    ) -> int:
        """The blocks of a unit that cost least: rounds of all workers, a unit as long as its blocks
        and 5 % per column and block that it writes."""
        units, partials = 0, int(blocks.sum())
        alone = [div_ceil(start + b - a, BLOCK_TOKENS) for start, a, b in rows]
        for begin, end, together in shared:
            columns = sum(rows[row][2] - rows[row][1] for row in together)
            units += (end - begin) * div_ceil(columns, self._group)
            for row in together:
                alone[row] -= end - begin
        units += sum(n * div_ceil(b - a, self._group) for n, (_, a, b) in zip(alone, rows))
        written = 0.05 * partials / units
        single = div_ceil(units, self._workers) * (1 + written)
        span = div_ceil(units, self._workers * SPAN_BLOCKS) * (SPAN_BLOCKS + written / SPAN_BLOCKS)
        return 1 if single < span and partials <= self._num_partials else SPAN_BLOCKS

    def _add_tail(self, start: int, a: int, b: int, begin: int) -> None:
        """Units of the runs from `begin` on for the columns a .. b - 1 of a row, which follow
        `start` tokens: those that end before a run are not in it."""
        keys = int(self.header[1]) * BLOCK_TOKENS
        whole, end = start // keys + 1, div_ceil(start + b - a, keys)
        self._add(a, b, begin, min(whole, end))
        for run in range(max(whole, begin), end):
            self._add(a + run * keys - start, b, run, run + 1)

    def _add(self, head: int, tail: int, begin: int, end: int) -> None:
        """Units of the runs begin .. end - 1 for members[head:tail], neighbours for neighbouring
        groups, which find what they read in the cache."""
        if begin >= end:
            return
        groups, (count, grain) = div_ceil(tail - head, self._group), self.header.tolist()
        stop = count + (end - begin) * groups
        for i in range(groups):
            place = head + i * self._group
            units = self.units[count + i : stop : groups]
            units[:, 0] = place
            units[:, 1] = min(self._group, tail - place)
            units[:, 2] = self._blocks[begin * grain : end * grain : grain]
        self.header[0] = stop


def _shared_reads(batch: ForwardBatch) -> list[tuple[int, int, list[int]]]:
    """(first block, last + 1 block, rows) of the work items of several rows, from the left; of
    equal ones those of many rows first."""
    if batch.items is None:
        return []
    cuts, rows = batch.items.indptr.tolist(), batch.items.rows.tolist()
    runs = zip(batch.items.blocks.tolist(), cuts, cuts[1:])
    return sorted((begin, end, rows[a:b]) for (begin, end), a, b in runs if b - a > 1)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen tokens of R columns.

    token_ids: [R] int32. logprobs: [R] float32, log-softmax of the raw logits over legal ids at
    the chosen token; NaN from a backend that was not asked for any.
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


class PendingDrafts(Protocol):
    """Drafts that are ordered. Nobody needs to read them but for grammars."""

    def read(self) -> I32:
        """Wait for the token ids, [B, num_drafts] int32."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of the drafts of B rows, R columns in all.

    accepted: [B] int32; row b was given the tokens of its first accepted[b] + 1 columns.
    selection: of R columns; those behind a row's last token mean nothing. A row whose last column
    is not finite has no token there.
    """

    accepted: I32
    selection: Selection

    def read(self) -> Acceptance:
        """An acceptance that is complete is its own promise."""
        return self


class PendingAcceptance(Protocol):
    """An acceptance that is ordered; its values may still be on their way."""

    def read(self) -> Acceptance:
        """Wait for the values. A backend keeps those of its last two acceptances."""
