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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ginfer.batch import ForwardBatch, Selection
    from ginfer.formats import Layout, StorageFormat

Hidden = Any


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A tensor of the package as it lies in the file: `data` is a read-only uint8 view of its
    payload."""

    name: str
    shape: tuple[int, ...]
    format: StorageFormat
    layout: Layout
    data: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a backend allocates at start. Nothing is allocated afterwards.

    num_rows: lanes that can decode together. num_pages: K/V pages of 64 tokens. num_slots:
    recurrent slots.
    max_columns: largest T of a forward. max_pages_per_row: largest P.
    """

    num_rows: int
    num_pages: int
    num_slots: int
    max_columns: int
    max_pages_per_row: int


class Backend(Protocol):
    """Block-level operations of one rank. Not thread-safe: one thread calls it. All methods return
    when the work is done or ordered; only `select` gives values to the host."""

    name: str

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

    def select(self, hidden: Hidden, batch: ForwardBatch) -> Selection:
        """Final norm, head and exact selection for `batch.selection`; adds the chosen tokens to
        their rows' counts."""

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Zero the token counts of lanes that start a new request."""

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero recurrent slots (the state before the first token)."""

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent slots: (destination, source) each."""

    def ledger(self) -> dict[str, int]:
        """Bytes held, by use: weights, kv, state, workspace, counts."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
