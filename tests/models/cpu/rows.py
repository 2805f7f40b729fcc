"""Drives a CpuBackend by rows through the public protocol: prefill and decode with selections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.backend import MemoryPlan, PackedTensor
from ginfer.batch import ForwardBatch, Phase, Selection, SelectionBatch
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import page_nbytes
from ginfer.formats import Q4G64_F16S, TILE_N, W8G32_F16S, Layout, StorageFormat
from ginfer.models.qwen import forward
from scripts.pack import codecs
from tests.oracles.formats import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """New tokens of one row of a batch."""

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int = 0
    slot_out: int | None = None


def greedy(columns: Sequence[int], **changes: Any) -> SelectionBatch:
    """A greedy selection of columns; `changes` replace its arrays."""
    R = len(columns)
    zero = np.zeros(R, np.float32)
    values: dict[str, Any] = {
        "columns": np.array(columns, np.int32),
        "rows": np.zeros(R, np.int32),
        "temperature": zero,
        "top_k": np.zeros(R, np.int32),
        "top_p": zero + 1,
        "min_p": zero,
        "presence": zero,
        "frequency": zero,
        "seeds": np.zeros(R, np.uint64),
        "positions": np.zeros(R, np.int32),
        "purposes": np.zeros(R, np.int32),
        "forced": np.full(R, -1, np.int32),
        "bias_indptr": np.zeros(R + 1, np.int32),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
    }
    return SelectionBatch(**{**values, **changes})


def batch_of(
    phase: Phase, parts: Sequence[Part], selection: SelectionBatch | None = None
) -> ForwardBatch:
    """A batch of rows; the page table is padded with page 0."""
    width = max(len(p.pages) for p in parts)
    tokens = np.concatenate([p.start + np.arange(len(p.ids)) for p in parts]).astype(np.int32)
    outs = [p.slot if p.slot_out is None else p.slot_out for p in parts]
    return ForwardBatch(
        phase=phase,
        token_ids=np.concatenate([np.array(p.ids, np.int32) for p in parts]),
        positions=np.tile(tokens, (3, 1)),
        row_indptr=np.cumsum([0, *(len(p.ids) for p in parts)]).astype(np.int32),
        starts=np.array([p.start for p in parts], np.int32),
        page_table=np.array([[*p.pages, *[0] * (width - len(p.pages))] for p in parts], np.int32),
        state_in=np.array([p.slot for p in parts], np.int32),
        state_out=np.array(outs, np.int32),
        selection=selection,
    )


class Rig:
    """A backend with 8 lanes, 24 pages and 8 slots."""

    def __init__(self, spec: ModelSpec, tensors: Sequence[PackedTensor], **plan: int) -> None:
        self.spec, self.backend = spec, CpuBackend(spec)
        self.backend.load(tensors, lambda _: None)
        sizes = {
            "num_rows": 8,
            "num_units": 24,
            "unit_nbytes": page_nbytes(spec),
            "num_slots": 8,
            "max_columns": 512,
            "max_pages_per_row": 24,
        }
        self.backend.allocate(MemoryPlan(**{**sizes, **plan}))

    def run(
        self, phase: Phase, parts: Sequence[Part], columns: Sequence[int] = (), **changes: Any
    ) -> Selection | None:
        """Forward; a selection of `columns`, with log probabilities of every legal id."""
        wanted = {"num_top": self.spec.num_token_ids, **changes}
        selection = greedy(columns, **wanted) if len(columns) else None
        return self.forward(batch_of(phase, parts, selection))

    def forward(self, batch: ForwardBatch) -> Selection | None:
        """Forward, and the selection that the batch wants."""
        hidden = forward(self.spec, self.backend, batch)
        return self.backend.select(hidden, batch).read() if batch.selection is not None else None

    def bits(self) -> dict[str, np.ndarray]:
        """Copies of K/V, state and history."""
        buffers = {name: self.backend._buffers[name].copy() for name in ("state", "history")}
        return {"kv": self.backend._kv.bits.copy(), **buffers}


def logprobs(selection: Selection) -> np.ndarray:
    """[R, legal ids] in the order of ids."""
    out = np.empty_like(selection.top_logprobs)
    np.put_along_axis(out, selection.top_ids, selection.top_logprobs, axis=1)
    return out


def quantised(tensors: Sequence[PackedTensor]) -> list[PackedTensor]:
    """The tensors in the formats of the groupwise-int profile (narrow matrices stay BF16)."""
    return [_quantised(t) for t in tensors]


def _quantised(t: PackedTensor) -> PackedTensor:
    if t.layout is Layout.CONTIGUOUS or "a_b_projection" in t.name:
        return t
    head = t.name in ("text/token_embedding", "text/output_head")
    fmt: StorageFormat = W8G32_F16S if head else Q4G64_F16S
    values = decode(t.format, t.layout, t.shape, t.data)
    blocks = [values[i : i + TILE_N] for i in range(0, len(values), TILE_N)]
    data = np.concatenate([codecs.encode(fmt, t.layout, b).view(np.uint8).ravel() for b in blocks])
    return PackedTensor(name=t.name, shape=t.shape, format=fmt, layout=t.layout, data=data)
