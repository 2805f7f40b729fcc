"""Runs a model program on the CPU image for one row, and shows logits and hidden norms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase, SelectionBatch
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import page_nbytes
from ginfer.models import qwen
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS, LayerKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ginfer.backend import PackedTensor
    from ginfer.spec import ModelSpec

F32 = np.float32


class Program:
    """One row on its own backend. Positions, pages and the slot follow from what was run."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[PackedTensor], *, max_tokens: int, chunk: int
    ) -> None:
        self.spec, self.chunk = spec, chunk
        pages = div_ceil(max_tokens, PAGE_TOKENS)
        self.backend = CpuBackend(spec)
        self.backend.load(tensors, lambda _: None)
        self.backend.allocate(
            MemoryPlan(
                num_rows=1,
                num_units=pages,
                unit_nbytes=page_nbytes(spec),
                num_slots=1,
                max_columns=chunk,
                max_pages_per_row=pages,
            )
        )
        # Not the identity, so that a page table that is ignored shows.
        self.page_table = np.roll(np.arange(pages, dtype=np.int32), 1)[None]
        self.length = 0

    def reset(self) -> None:
        """Forget the row."""
        self.backend.clear_slot(0)
        self.backend.reset_rows([0])
        self.length = 0

    def prefill(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Run a prompt from the start; logits of its last position, [legal ids]."""
        return self.prefill_logits(ids, [len(ids) - 1])[0]

    def prefill_logits(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Run a prompt from the start; logits at ascending positions, [positions, legal ids]."""
        self.reset()
        rows = []
        for start in range(0, len(ids), self.chunk):
            batch = self.batch(Phase.PREFILL, ids[start : start + self.chunk])
            qwen.forward(self.spec, self.backend, batch)
            inside = [p - start for p in positions if 0 <= p - start < batch.num_columns]
            rows += self._logits(batch, inside)
        return np.stack(rows)

    def decode(self, token_id: int) -> NDArray[np.float32]:
        """Append one token; logits after it, [legal ids]."""
        batch = self.batch(Phase.DECODE, [token_id])
        qwen.forward(self.spec, self.backend, batch)
        return self._logits(batch, [0])[0]

    def hidden_norms(self, ids: Sequence[int]) -> list[float]:
        """Norms at the last position of a prompt of one chunk: embedding, layers but the last, and
        the last layer after the final norm (the input of the head)."""
        self.reset()
        backend, batch = self.backend, self.batch(Phase.PREFILL, ids)
        hidden = backend.embed(batch)
        norms = [np.linalg.norm(hidden[-1])]
        for i, kind in enumerate(self.spec.layers):
            gated = kind is LayerKind.GATED_DELTANET
            (backend.gdn_block if gated else backend.attention_block)(hidden, i, batch)
            backend.mlp_block(hidden, i, batch)
            norms.append(np.linalg.norm(hidden[-1]))
        self._select(hidden, batch, [len(ids) - 1])
        norms[-1] = np.linalg.norm(backend._head._normed[0])
        return [float(norm) for norm in norms]

    def batch(self, phase: Phase, ids: Sequence[int]) -> ForwardBatch:
        """The next tokens of the row as a batch without selection."""
        start, T = self.length, len(ids)
        self.length += T
        zero = np.zeros(1, np.int32)
        return ForwardBatch(
            phase=phase,
            token_ids=np.array(ids, np.int32),
            positions=np.tile(np.arange(start, start + T, dtype=np.int32), (3, 1)),
            row_indptr=np.array([0, T], np.int32),
            starts=np.array([start], np.int32),
            page_table=self.page_table,
            state_in=zero,
            state_out=zero,
        )

    def _logits(self, batch: ForwardBatch, columns: Sequence[int]) -> list[NDArray[np.float32]]:
        hidden = self.backend._view("hidden", batch.num_columns, self.spec.hidden_size)
        rows = []
        for column in columns:
            self._select(hidden, batch, [column])
            logits = self.backend._head._logits[0]
            rows.append(logits[: self.spec.num_token_ids].copy())
        return rows

    def _select(
        self, hidden: NDArray[np.float32], batch: ForwardBatch, columns: Sequence[int]
    ) -> None:
        R = len(columns)
        selection = SelectionBatch(
            columns=np.array(columns, np.int32),
            rows=np.zeros(R, np.int32),
            temperature=np.zeros(R, F32),
            top_k=np.zeros(R, np.int32),
            top_p=np.ones(R, F32),
            min_p=np.zeros(R, F32),
            presence=np.zeros(R, F32),
            frequency=np.zeros(R, F32),
            seeds=np.zeros(R, np.uint64),
            positions=np.zeros(R, np.int32),
            purposes=np.zeros(R, np.int32),
            forced=np.full(R, -1, np.int32),
            bias_indptr=np.zeros(R + 1, np.int32),
            bias_ids=np.zeros(0, np.int32),
            bias_values=np.zeros(0, F32),
        )
        self.backend.select(hidden, replace(batch, selection=selection))
