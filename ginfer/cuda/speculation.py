"""CudaSpeculation: verification, acceptance and folds as the speculation part of the backend.

A forward that records leaves what each GDN layer's recurrence read in memory of its own, layer by
layer, and no slot changes but the histories of `state_out`, which the fold overwrites. Acceptance
and fold follow on the same stream; how many columns a row used stays on the device. A drafter, if
there is one, takes what the tapped layers leave, in graphs of forwards as in eager ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.batch import Phase
from ginfer.cuda.drafter.drafter import Target, draft_rows
from ginfer.cuda.drafter.drafting import DecodeColumns, Drafting, drafting_nbytes
from ginfer.cuda.gdn.fold import FoldLayers, FoldRows, Recorded, gdn_fold
from ginfer.cuda.gdn.step import NOWHERE
from ginfer.cuda.runtime.memory import copy_on_device, set_bytes
from ginfer.cuda.sampling.acceptance import Drafts
from ginfer.cuda.tables import Tables, tables_nbytes
from ginfer.spec import LayerKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.batch import DraftBatch, ForwardBatch, PendingDrafts
    from ginfer.cuda.blocks import Blocks
    from ginfer.cuda.drafter.weights import DrafterWeights
    from ginfer.cuda.frame import Frame, Staged
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.sampling.selector import PendingRows, Selector
    from ginfer.cuda.slots import Slots
    from ginfer.cuda.weights import Model
    from ginfer.spec import DrafterSpec, ModelSpec

    I32 = NDArray[np.int32]

MAX_RECORDED = 128  # columns of a forward that verifies drafts
NARROW = 8  # columns per row up to which every number of columns is a graph; then 16
PADDING = 128  # columns behind the last record, for what a linear operator rounds up


def _record_sizes(spec: ModelSpec, plan: MemoryPlan) -> tuple[int, int, int]:
    """Bytes of a layer's records: mix, convolved, ab."""
    g, T = spec.gdn, plan.max_recorded
    mix, X = g.conv_channels + g.value_width, g.conv_channels
    return T * mix * 2, T * X * 2, T * 2 * g.num_v_heads * 4


def speculation_nbytes(
    spec: ModelSpec, plan: MemoryPlan, drafter: DrafterSpec | None = None
) -> dict[str, int]:
    """Bytes on the device, by use, rings aside."""
    if not plan.max_recorded:
        return {}
    return {**_own_nbytes(spec, plan), **(drafting_nbytes(drafter, plan) if drafter else {})}


def _own_nbytes(spec: ModelSpec, plan: MemoryPlan) -> dict[str, int]:
    g, layers = spec.gdn, len(spec.layers_of(LayerKind.GATED_DELTANET))
    padding = PADDING * 2 * (g.conv_channels + g.value_width)
    return {
        **{
            f"recorded {name}": layers * size + padding
            for name, size in zip(("mix", "convolved", "ab"), _record_sizes(spec, plan))
        },
        "fold gates": layers * 2 * g.num_v_heads * 4,
        "fold rows": 2 * plan.num_rows * 4,
        "fold columns": tables_nbytes({"columns": plan.num_rows}),
    }


def recorded_shapes(lanes: int, max_recorded: int) -> list[tuple[int, int]]:
    """(rows, columns) of the verification forwards that are graphs."""
    return [
        (B, T)
        for B in range(1, lanes + 1)
        for T in sorted({*range(B + 1, NARROW * B + 1), *(range(9, 17) if B == 1 else (16 * B,))})
        if max_recorded >= T
    ]


class Parts(NamedTuple):
    """What a backend has that speculation works on."""

    blocks: Blocks
    selector: Selector
    slots: Slots
    model: Model
    frame: Frame


class CudaSpeculation:
    """Implements `Speculation`; without a drafter, drafts come from the host alone."""

    def __init__(self, spec: ModelSpec, drafter: DrafterSpec | None, *, queue: Queue) -> None:
        self._spec, self.drafter, self._queue = spec, drafter, queue
        self.max_drafts = drafter.max_drafts if drafter else 0
        self._drafting: Drafting | None = None

    def most_selected(self, plan: MemoryPlan) -> int:
        """Rows of logits that a round needs."""
        drafts = draft_rows(self.drafter, plan.num_rows) if self.drafter else 0
        return max(plan.max_recorded, drafts)

    def load(self, weights: DrafterWeights, num_sms: int) -> None:
        """Take the drafter's weights."""
        assert self.drafter is not None
        self._drafting = Drafting(self.drafter, weights, queue=self._queue, num_sms=num_sms)

    def allocate(self, memory: Arena, plan: MemoryPlan, parts: Parts) -> None:
        """Take the memory of `speculation_nbytes`."""
        spec, g, queue = self._spec, self._spec.gdn, self._queue
        self._parts, self._lanes = parts, plan.num_rows
        taken = {}
        for name, nbytes in _own_nbytes(spec, plan).items():
            if name != "fold columns":
                taken[name] = memory.take(nbytes, "speculation", alignment=256)
                set_bytes(taken[name], 0, queue.stream)
        at = {name: part.address for name, part in taken.items()}
        mix, convolved, ab = _record_sizes(spec, plan)
        self.recorded = Recorded(
            mix=at["recorded mix"],
            convolved=at["recorded convolved"],
            ab=at["recorded ab"],
            W=g.conv_channels + g.value_width,
            mix_nbytes=mix,
            convolved_nbytes=convolved,
            ab_nbytes=ab,
        )
        layers = spec.layers_of(LayerKind.GATED_DELTANET)
        gates, nbytes = at["fold gates"], 2 * g.num_v_heads * 4
        for n, i in enumerate(layers):
            source = parts.model.layers[i].gates
            copy_on_device(gates + n * nbytes, source, nbytes, stream=queue.stream)
        rows = taken["fold rows"]
        self.nowhere, self._used = rows.address, rows.address + 4 * plan.num_rows
        set_bytes(rows.part(0, 4 * plan.num_rows), NOWHERE & 0xFF, queue.stream)
        parts.blocks.records, parts.blocks.nowhere = self.recorded, self.nowhere
        self._layers = FoldLayers(
            state=parts.slots.state(0),
            history=parts.slots.history(0),
            gates=gates,
            L=len(layers),
            HK=g.num_k_heads,
            HV=g.num_v_heads,
            slots=plan.num_slots,
        )
        self._columns = Tables({"columns": plan.num_rows}, memory, queue.stream)
        if self._drafting is not None:
            tables = parts.frame.tables[Phase.DECODE]
            target = Target(
                embedding=parts.model.embedding,
                head=parts.model.head,
                num_token_ids=spec.num_token_ids,
                hidden=parts.blocks.hidden,
                logits=parts.blocks.logits,
                tokens=parts.selector.tokens,
                rings=parts.slots.rings.address,
                used=self._used,
            )
            columns = DecodeColumns(tables["row"], tables["token"])
            self._drafting.allocate(memory, plan, target, columns)

    def capture(self) -> None:
        """The graphs of drafts."""
        if self._drafting is not None:
            self._drafting.capture()

    def begin(self, staged: Staged, batch: ForwardBatch, *, replayed: bool) -> None:
        """A forward begins; replayed: up to its logits at once."""
        self._staged, self._replayed = staged, replayed
        if self._drafting is not None:
            self._drafting.begin(batch)

    def tap(self, layer_idx: int, T: int, phase: Phase) -> None:
        """The stream behind a layer is there."""
        if self._drafting is not None:
            self._drafting.tap(layer_idx, T, phase)

    def draft(self, batch: DraftBatch) -> PendingDrafts:
        """Order drafts of lanes; they stay there."""
        assert self._drafting is not None, "drafts without a drafter"
        return self._drafting.draft(batch)

    def accept(self, hidden: Staged, batch: ForwardBatch, limits: I32) -> PendingRows:
        """Accept a prefix of each row's drafts, choose the token behind it, and count them."""
        wanted, blocks = batch.selection, self._parts.blocks
        assert wanted is not None
        if not self._replayed:
            blocks.head(hidden, batch.num_columns)
        names, units = self._drafting.drafted if self._drafting else (0, 0)
        drafts = Drafts(
            ids=hidden.tables["ids"],
            names=names,
            units=units,
            indptr=hidden.tables["indptr"],
            columns=self._used,
            lanes=self._lanes,
            most=max(self.max_drafts, 1),
            B=batch.num_rows,
        )
        rows = (batch.row_indptr, limits)
        return self._parts.selector.accept(blocks.logits, wanted, drafts, rows)

    def keep(self, batch: ForwardBatch, columns: I32 | None = None) -> None:
        """Fold: slots state_out after the columns of each row that count; and extend the drafter's
        context."""
        if batch.record:
            self._fold(batch, columns)
        if self._drafting is not None:
            used = columns if columns is not None else self._used if batch.record else None
            self._drafting.keep(batch, used)

    def catch_up(self) -> None:
        """Have all drafter context in the rings, before they move."""
        if self._drafting is not None:
            self._drafting.catch_up()

    def _fold(self, batch: ForwardBatch, columns: I32 | None) -> None:
        counts = self._used
        if columns is not None:
            self._columns.begin()
            self._columns.fill("columns", columns.astype(np.int32, copy=False))
            self._columns.send()
            counts = self._columns["columns"]
        tables = self._staged.tables
        rows = FoldRows(
            tables["indptr"], tables["state_in"], tables["state_out"], counts, batch.num_rows
        )
        gdn_fold(self._queue, self.recorded, rows=rows, layers=self._layers)

    def close(self) -> None:
        """Free graphs and pinned memory."""
        self._columns.close()
        if self._drafting is not None:
            self._drafting.close()
