"""Backend protocol: the blocks that a model program calls, and the memory that it lives in.

A backend fuses as it likes inside a block. It owns all device memory: weights, K/V pages,
recurrent slots, token counts.
Which page or slot belongs to whom is decided by `ginfer.cache`; a backend obeys the tables of the
batch.

`Hidden` is opaque to callers: the residual stream of the batch, valid until the next `embed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ginfer.spec import KvCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ginfer.batch import (
        I32,
        DraftBatch,
        ForwardBatch,
        PendingAcceptance,
        PendingDrafts,
        PendingSelection,
    )
    from ginfer.formats import Layout, StorageFormat

Hidden = Any


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A tensor of the package as it lies in the file: `data` is a read-only uint8 view of its
    payload. read: fills a buffer with the payload's bytes from an offset on, past the mapping, and
    may be called from several threads; None where there is no file."""

    name: str
    shape: tuple[int, ...]
    format: StorageFormat
    layout: Layout
    data: NDArray[np.uint8]
    read: Callable[[memoryview, int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a backend allocates at start. Nothing is allocated afterwards.

    num_rows: lanes that can decode together. num_units: units of the arena, `unit_nbytes` each; K/V
    pages of 64 tokens and snapshots of recurrent state lie in it. num_park_units: host memory for
    units that leave the arena. num_slots: recurrent slots, two per lane where rounds run ahead.
    max_columns: largest T of a forward. max_pages_per_row: largest P. kv: what pages hold; where it
    is not BF16, the rows of a prefill batch have at most P + num_rows pages together.
    max_recorded: largest T of a forward that records (speculation), 0 without; drafter rings of a
    backend that has a drafter: one per lane, of `DrafterSpec.ring_tokens` tokens.
    """

    num_rows: int
    num_units: int
    unit_nbytes: int
    num_slots: int
    max_columns: int
    max_pages_per_row: int
    num_park_units: int = 0
    max_recorded: int = 0
    kv: KvCodec = KvCodec.BF16


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a backend has for a memory plan, weights aside.

    nbytes: memory that plans may take. host_nbytes: host memory that parking may take. slot_nbytes:
    one recurrent slot, and the drafter ring that is saved with it: a snapshot. slots_per_lane: two
    where rounds run ahead or speculate. max_recorded: most columns of a forward that records, 0
    without speculation. prefill_chunk: columns of a prefill forward from which on it is no faster.
    plentiful: the memory is the engine's own, so that automatic K/V takes all of it. cost: bytes of
    `nbytes` that a plan takes.
    """

    nbytes: int
    host_nbytes: int
    slot_nbytes: int
    slots_per_lane: int
    max_recorded: int = 0
    prefill_chunk: int
    plentiful: bool
    cost: Callable[[MemoryPlan], int]


class Speculation(Protocol):
    """Drafts, their verification, and what a round leaves behind. Part of a backend: the same
    thread calls it, methods return when the work is ordered.

    A speculative round over B rows, n_b drafts each:
        draft(...)                      of the rows whose drafts the drafter makes
        hidden = forward(batch)         decode, record, n_b + 1 columns per row
        accept(hidden, batch, limits)   in place of `select`
        keep(batch)                     frontier, state and drafter context after what was accepted
    No step needs values of another on the host. Where the host then takes fewer tokens than were
    accepted (the request ends inside), `keep(batch, columns)` sets the row back before its state is
    saved. Rounds without drafts are `select` and `keep(batch)`, prefill chunks `keep(batch)`.

    A drafter's context lies in rings, one per lane, that belong to recurrent slots: slot s has ring
    s % num_rows, so that both slots of a lane share one. Token p of a row lies at
    p % `DrafterSpec.ring_tokens`; rows at and behind the frontier mean nothing. `save_state`,
    `load_state`, `load_parked_state` and `copy_slots` move a slot with its ring.

    max_drafts: most drafts of `draft`, 0 without a drafter.
    """

    max_drafts: int

    def draft(self, batch: DraftBatch) -> PendingDrafts:
        """Order `num_drafts` drafts for each row, after the token that its lane drew last. They
        stay with the lane, with what they were drawn from, until its next `draft`. Behind `accept`
        and `keep` of a round they need not wait for its values (`DraftBatch.rows`)."""

    def accept(self, hidden: Hidden, batch: ForwardBatch, limits: I32) -> PendingAcceptance:
        """Final norm and head of all columns, then per row, from its first column on: choose the
        column's token by `batch.selection` (R = T, columns 0 .. T - 1; `forced` and `mask` may
        differ from those that `embed` saw), and go on while it equals the token of the next column,
        the draft. Row b ends at column limits[b] - 1 at the latest (1 .. its columns); no draft
        follows that one.

        A column of purpose DECODE is coupled: it chooses as `select` does. One of purpose ACCEPT
        follows the rejection rule: a draft is accepted when u q(draft) < p(draft), else the token
        is drawn from max(p - q, 0) (p where that is nothing), and behind the last draft from p;
        purposes are ACCEPT, CORRECTION, BONUS. It is coupled at temperature 0 and where a token is
        forced. q of a draft of `draft` is what it was drawn from, of one that the host gave 1.

        Penalties of a column see the counts of its lane and the row's tokens before it. Adds the
        chosen tokens to the counts, keeps the last one as what the lane drew last, and remembers
        how many columns each row used. A column that is not finite ends its row."""

    def keep(self, batch: ForwardBatch, columns: I32 | None = None) -> None:
        """Make columns of the last forward the past of their rows: row b its first columns[b], none
        where that is 0, left as it is where that is -1; None: those that the last `accept` used
        where the batch records, else all.

        Where the batch records, slots `state_out`, which mean nothing until then, become the
        state after those columns, bit for bit that of decoding just these one by one; `state_in`
        stays. The target's streams behind the tapped layers become drafter context of those
        columns. May be called again with other columns until the next forward."""


class Backend(Protocol):
    """Block-level operations of one rank. Not thread-safe: one thread calls it. All methods return
    when the work is done or ordered; only what `select` returns gives values to the host.

    runs_ahead: work is ordered and done later, so that the next round is worth ordering before the
    values of this one are known. speculation: None where rounds cannot speculate or shall not.
    replayed: the last `embed` has computed all layers, so that their blocks are not to be called.
    """

    name: str
    runs_ahead: bool
    speculation: Speculation | None
    replayed: bool

    def room(self, weights_nbytes: int, host_nbytes: int) -> Room:
        """What is there for a plan before `load` of so many bytes, on a host with `host_nbytes` of
        free memory. Raises ConfigError with both numbers when the weights do not fit."""

    def load(self, tensors: Iterable[PackedTensor], progress: Callable[[int], None]) -> None:
        """Take the weights; `progress` receives the bytes taken so far. Payloads are used as they
        are."""

    def allocate(self, plan: MemoryPlan) -> None:
        """Allocate and zero everything that `plan` names, and prepare every kernel; called once,
        after load."""

    def embed(self, batch: ForwardBatch) -> Hidden:
        """Start a forward: stage the batch's tables and return the embedding rows of its tokens."""

    def attention_block(self, hidden: Hidden, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += attention(norm(hidden)); appends K and V of the batch's columns to their pages
        first."""

    def gdn_block(self, hidden: Hidden, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += gated_deltanet(norm(hidden)); reads slots `state_in`, writes slots
        `state_out`."""

    def mlp_block(self, hidden: Hidden, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += mlp(norm(hidden))."""

    def chunk_times(self) -> list[float]:
        """Seconds of the prefill forwards that have ended and were not told before, in order."""

    def select(self, hidden: Hidden, batch: ForwardBatch) -> PendingSelection:
        """Final norm, head and exact selection for `batch.selection`, whose `forced` and `mask` may
        differ from those that `embed` saw; adds the chosen tokens to their rows' counts and keeps
        them as what their lanes drew last."""

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Zero the token counts of lanes that start a new request."""

    def clear_slot(self, slot: int) -> None:
        """Zero a recurrent slot (the state before the first token)."""

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent slots: (destination, source) each."""

    def save_state(self, slot: int, units: Sequence[int]) -> None:
        """Copy a recurrent slot into arena units: a snapshot."""

    def load_state(self, units: Sequence[int], slot: int) -> None:
        """Copy a snapshot into a recurrent slot."""

    def load_parked_state(self, host_units: Sequence[int], slot: int) -> None:
        """Copy a parked snapshot into a recurrent slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a K/V page."""

    def park_pages(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages to host pages, one by one. The parking space has the arena's geometry."""

    def unpark_pages(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to pages, one by one."""

    def park_units(self, units: Sequence[int], host_units: Sequence[int]) -> None:
        """Copy units to host units, one by one."""

    def unpark_units(self, host_units: Sequence[int], units: Sequence[int]) -> None:
        """Copy host units to units, one by one."""

    def give_back(self, units: Sequence[int]) -> None:
        """Hand units that hold nothing back to the system, until `take_back`."""

    def take_back(self) -> None:
        """Have the whole arena again."""

    def ledger(self) -> dict[str, int]:
        """Bytes held, by use: weights, arena, slots, parking, workspace, counts."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
