"""ForwardBatch and Selection: what a forward takes, and what comes back.

Legend: T columns (tokens) of the batch, B rows (sequences), R columns whose logits are wanted, P
pages of the longest row.
All arrays are C-contiguous NumPy arrays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
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

    token_ids: [T] int32. positions: [3, T] int32, rotary positions of the axes T, H, W.
    row_indptr: [B + 1] int32. starts: [B] int32, tokens of the row that are already in K/V and
    state; column i of row b is token number starts[b] + i. page_table: [B, P] int32, page ids;
    page j of a row holds its tokens 64 j .. 64 j + 63.
    state_in, state_out: [B] int32, recurrent slots read and written (may be equal).
    items: how decode attention shares reads between rows; None: every row reads its own.
    selection: None when no logits are wanted (a chunk that does not end its prompt).
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

    @property
    def num_columns(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.starts)


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
