"""CudaBackend: the Backend protocol over the kernels of this package, on one GPU.

Activations are BF16, the residual stream included; sums are FP32. K/V is BF16 in pages, recurrent
state FP32. Decode rounds of one column per row are graphs, captured at start for every number of
rows, and so are those that verify drafts, for the numbers of columns that are worth it: `embed`
replays the whole forward, and `replayed` says so. Other batches, and all of them without graphs,
are launched one by one; the bits are the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ginfer.backend import PackedTensor, Room
from ginfer.batch import Phase
from ginfer.cuda.blocks import Blocks
from ginfer.cuda.chunk_times import ChunkTimes
from ginfer.cuda.drafter.drafter import draft_rows
from ginfer.cuda.drafter.weights import check_shapes, context_nbytes, upload_drafter
from ginfer.cuda.frame import Frame, Staged, table_words
from ginfer.cuda.norm import RowNorm, rms_norm
from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.elastic import ElasticMemory
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.memory import Arena, Slice, set_bytes
from ginfer.cuda.runtime.queue import Queue
from ginfer.cuda.runtime.stream import Stream
from ginfer.cuda.sampling.selector import Pending, Selector, selector_nbytes
from ginfer.cuda.slots import Slots, memory_nbytes, slot_nbytes
from ginfer.cuda.speculation import (
    MAX_RECORDED,
    CudaSpeculation,
    Parts,
    recorded_shapes,
    speculation_nbytes,
)
from ginfer.cuda.tables import tables_nbytes
from ginfer.cuda.weights import Model, arena_nbytes, upload
from ginfer.env import FaultFile
from ginfer.errors import ConfigError
from ginfer.sizes import GIB, MIB, human_bytes
from ginfer.spec import DrafterSpec, LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ginfer.backend import MemoryPlan
    from ginfer.batch import I32, ForwardBatch
    from ginfer.cuda.round_clock import RoundClock

DRAFTER = "dflash2/"  # how the tensors of a drafter are called
MAX_SELECTED = 128  # columns whose logits are wanted at a time
RESERVE_NBYTES = 1 * GIB  # graphs, kernels and the driver's own pools


def most_selected(plan: MemoryPlan, drafter: DrafterSpec | None = None) -> int:
    """Most columns whose logits are wanted at a time, drafts of a drafter among them."""
    drafts = draft_rows(drafter, plan.num_rows) if drafter else 0
    return min(max(plan.num_rows, plan.max_recorded, drafts, 8), MAX_SELECTED)


def request_parts(
    spec: ModelSpec, plan: MemoryPlan, drafter: DrafterSpec | None = None
) -> dict[str, int]:
    """Bytes of everything that `allocate` takes for a plan."""
    selected = most_selected(plan, drafter)
    tables = map(tables_nbytes, table_words(spec, plan, selected).values())
    return {
        **memory_nbytes(spec, plan, drafter),
        **Blocks.nbytes(spec, plan, selected),
        "tables": sum(tables),
        **selector_nbytes(spec, plan, selected, drafter.max_drafts if drafter else 0),
        **speculation_nbytes(spec, plan, drafter),
    }


def parts_nbytes(parts: Mapping[str, int]) -> int:
    """Bytes of all parts in one arena, with what their alignment costs."""
    return sum(parts.values()) + 4 * MIB + len(parts) * 1024


class CudaBackend:
    """One model on one GPU. clock: measures gaps between rounds, where a benchmark sets one."""

    name = "cuda"
    runs_ahead = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        graphs: bool = True,
        speculates: bool = False,
        drafter: DrafterSpec | None = None,
        elastic: bool = False,
    ) -> None:
        """speculates: its rounds can, with a drafter or without. elastic: units of the arena can be
        given back to the driver."""
        a, g = spec.attention, spec.gdn
        if (a.head_dim, a.rotary_dim, g.k_head_dim, g.v_head_dim) != (256, 64, 128, 128):
            raise ConfigError("the CUDA image has kernels for heads of 256 and 128 dims only")
        self._spec, self._drafter = spec, drafter if speculates else None
        if self._drafter is not None:
            check_shapes(self._drafter)
        self._wants_graphs, self._is_elastic = graphs, elastic
        self._device = Device()
        capability = native_capability(self._device.info.capability)
        self._free_nbytes = self._device.free_nbytes()  # before anything is taken
        with ExitStack() as held:
            held.callback(self._device.close)
            image = Image.open(
                capability, kernels_of(capability), device_capability=self._device.info.capability
            )
            held.callback(image.close)
            self._queue = Queue(image, Stream())
            held.callback(self._queue.stream.close)
            self._chunks = ChunkTimes(self._queue.stream)
            held.callback(self._chunks.close)
            self._held = held.pop_all()
        self.speculation: CudaSpeculation | None = None
        if speculates:
            self.speculation = CudaSpeculation(spec, self._drafter, queue=self._queue)
        self._kernels_nbytes = self._taken()
        self._weights_nbytes = self._graphs_nbytes = 0
        self._model: Model | None = None
        self._memory: Arena | None = None
        self._elastic: ElasticMemory | None = None
        self._graphs: dict[tuple[int, int, bool], Graph] = {}  # rows, columns, whether it records
        self.replayed = self._closed = False
        self._known_ids = self._in_order = np.zeros(0, np.int32)  # what checks have passed
        self.clock: RoundClock | None = None
        self._faults = FaultFile()

    def _taken(self) -> int:
        """Device memory that is gone since the start, whoever took it."""
        return max(self._free_nbytes - self._device.free_nbytes(), 0)

    def room(self, weights_nbytes: int, host_nbytes: int) -> Room:
        """What is free beside the weights and a reserve."""
        free, weights = self._device.free_nbytes(), arena_nbytes(weights_nbytes)
        ring = 0
        if self._drafter is not None:
            weights += arena_nbytes(context_nbytes(self._drafter))
            ring = self._drafter.ring_nbytes
        if weights + RESERVE_NBYTES > free:
            raise ConfigError(
                f"the weights need {human_bytes(weights + RESERVE_NBYTES)} of GPU memory, "
                f"{human_bytes(free)} are free; end what else runs on this GPU or use a larger one",
                param="package",
            )
        return Room(
            nbytes=free - weights - RESERVE_NBYTES,
            host_nbytes=host_nbytes,
            slot_nbytes=slot_nbytes(self._spec) + ring,
            slots_per_lane=2 if self.runs_ahead or self.speculation else 1,
            max_recorded=MAX_RECORDED if self.speculation else 0,
            prefill_chunk=8192,
            plentiful=True,
            cost=lambda plan: parts_nbytes(request_parts(self._spec, plan, self._drafter)),
        )

    def load(self, tensors: Iterable[PackedTensor], progress: Callable[[int], None]) -> None:
        """Upload the weights. Raises ArtifactError naming what is missing, ConfigError when they do
        not fit."""
        self._device.use()
        ours, drafts = list[PackedTensor](), list[PackedTensor]()
        for tensor in tensors:
            (drafts if tensor.name.startswith(DRAFTER) else ours).append(tensor)
        self._model = upload(self._spec, ours, self._queue.stream, progress)
        self._hold_weights(self._model.arena)
        if self._drafter is not None:
            self._load_drafter(drafts, progress, sum(t.data.nbytes for t in ours))

    def _load_drafter(
        self, tensors: list[PackedTensor], progress: Callable[[int], None], done: int
    ) -> None:
        assert self.speculation is not None
        assert self._drafter is not None
        weights = upload_drafter(
            self._drafter, tensors, self._queue.stream, lambda n: progress(done + n)
        )
        self._hold_weights(weights.arena)
        self.speculation.load(weights, self._device.info.num_sms)

    def _hold_weights(self, arena: Arena) -> None:
        self._weights_nbytes += arena.taken_nbytes
        self._held.callback(arena.close)

    def allocate(self, plan: MemoryPlan) -> None:
        """Take and zero all memory, then capture the graphs of decode rounds."""
        assert self._model is not None, "load comes first"
        self._device.use()
        spec, drafter, queue = self._spec, self._drafter, self._queue
        selected = most_selected(plan, drafter)
        self._num_lanes, sms = plan.num_rows, self._device.info.num_sms
        parts = request_parts(spec, plan, drafter)
        hold, units = self._held.callback, None
        if self._is_elastic:
            arena = parts.pop("arena")
            self._elastic = ElasticMemory(arena, queue.stream, ordinal=self._device.ordinal)
            hold(self._elastic.close)
            units = self._elastic.slice(arena)
        self._memory = memory = Arena(parts_nbytes(parts), "memory of requests")
        hold(memory.close)
        self._slots = Slots(spec, plan, memory, queue.stream, drafter=drafter, units=units)
        hold(self._slots.close)
        words = table_words(spec, plan, selected)
        self._frame = Frame(spec, plan, memory, words=words, queue=queue, num_sms=sms)
        hold(self._frame.close)
        most = drafter.max_drafts if drafter else 0
        self._selector = Selector(
            spec, plan, memory, selected=selected, queue=queue, max_drafts=most
        )
        self._num_tokens = (1 + most) * plan.num_rows  # that the device knows
        hold(self._selector.close)
        self._blocks = Blocks(spec, plan, self._model, queue=queue, num_sms=sms)
        tables = (self._frame, self._selector.tokens)
        self._blocks.allocate(memory, tables, self._slots, selected=selected)
        if self.speculation is not None and plan.max_recorded:
            pieces = Parts(self._blocks, self._selector, self._slots, self._model, self._frame)
            self.speculation.allocate(memory, plan, pieces)
            hold(self.speculation.close)
        queue.stream.synchronize()
        before = self._taken()
        if self._wants_graphs:
            self._capture_all(plan)
            queue.stream.synchronize()
        self._graphs_nbytes = self._taken() - before
        queue.image.seal()

    def _capture_all(self, plan: MemoryPlan) -> None:
        """The graphs of decode rounds and selections."""
        for B in range(1, plan.num_rows + 1):
            self._capture(self._frame.decode_round(B), f"decode round of {B}")
        for B, T in recorded_shapes(plan.num_rows, plan.max_recorded):
            self._capture(
                self._frame.recorded_round(B, T), f"verification of {B} rows, {T} columns"
            )
        self._selector.capture(self._blocks.logits)
        if self.speculation is not None and plan.max_recorded:
            self.speculation.capture()

    def _capture(self, staged: Staged, name: str) -> None:
        """The graph of a decode batch, all of whose logits are wanted."""

        def work() -> None:
            self._blocks.embed(staged, Phase.DECODE)
            for i in range(len(self._spec.layers)):
                self._mixer(i, staged, Phase.DECODE)
                self._mlp(i, staged, Phase.DECODE)
            self._blocks.head(staged, staged.T)

        graph = Graph(self._queue.stream, work, name=name)
        self._graphs[staged.B, staged.T, staged.record] = graph
        self._held.callback(graph.close)

    def _mixer(self, layer_idx: int, staged: Staged, phase: Phase) -> None:
        gated = self._spec.layers[layer_idx] is LayerKind.GATED_DELTANET
        (self._blocks.gdn if gated else self._blocks.attention)(layer_idx, staged, phase)

    def _mlp(self, layer_idx: int, staged: Staged, phase: Phase) -> None:
        self._blocks.mlp(layer_idx, staged, phase)
        if self.speculation is not None:
            self.speculation.tap(layer_idx, staged.T, phase)

    def _is_round(self, staged: Staged, batch: ForwardBatch) -> bool:
        """Whether a graph computes this batch: a decode batch, all columns selected in order."""
        T, s = batch.num_columns, batch.selection
        if (
            s is None
            or batch.phase is not Phase.DECODE
            or (batch.num_rows, T, batch.record) not in self._graphs
            or not (batch.record or staged.apart)
        ):
            return False
        if s.columns is not self._in_order:  # the same arrays come again
            if s.columns.tolist() != list(range(len(s.columns))):
                return False
            self._in_order = s.columns
        return len(s.columns) == T

    def _check(self, ids: I32) -> None:
        """Token ids are of the vocabulary, or known to the device: kernels do not check."""
        if ids is not self._known_ids:
            least, most = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
            assert -self._num_tokens <= least <= most < self._spec.vocab_size
            self._known_ids = ids

    def embed(self, batch: ForwardBatch) -> Staged:
        """Stage the batch; compute the embedding rows, or with a graph everything up to the
        logits."""
        self._device.use()
        self._check(batch.token_ids)
        staged = self._frame.fill(batch)
        if batch.phase is Phase.PREFILL:
            self._chunks.begin()
        if self.clock is not None:
            self.clock.forward_begins()
        self.replayed = self._is_round(staged, batch)
        if self.speculation is not None:
            self.speculation.begin(staged, batch, replayed=self.replayed)
        if self.replayed:
            self._graphs[batch.num_rows, batch.num_columns, batch.record].replay()
        else:
            self._blocks.embed(staged, batch.phase)
        return staged

    def attention_block(self, hidden: Staged, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += attention(norm(hidden)); appends the columns' K and V first."""
        self._blocks.attention(layer_idx, hidden, batch.phase)

    def gdn_block(self, hidden: Staged, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += gated_deltanet(norm(hidden)); slots state_in are read, state_out written."""
        self._blocks.gdn(layer_idx, hidden, batch.phase)

    def mlp_block(self, hidden: Staged, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += mlp(norm(hidden))."""
        self._mlp(layer_idx, hidden, batch.phase)
        if batch.phase is Phase.PREFILL and layer_idx == len(self._spec.layers) - 1:
            self._chunks.end()

    def chunk_times(self) -> list[float]:
        """Seconds of the prefill forwards that have ended and were not told before."""
        if self._chunks.is_idle:
            return []
        self._device.use()
        return self._chunks.take()

    def select(self, hidden: Staged, batch: ForwardBatch) -> Pending:
        """Final norm, head and selection of the wanted columns; counts the chosen tokens."""
        s = batch.selection
        assert s is not None
        if not self.replayed:
            self._blocks.head(hidden, len(s.columns))
        self._fail_if_asked()
        self._selector.select(self._blocks.logits, s)
        if self.clock is not None:
            self.clock.draw_ends()
        return self._selector.answers()

    def _fail_if_asked(self) -> None:
        """Test hook: make the logits of a row NaN, or lose the context, as a file says."""
        kind, row = self._faults.take()
        if kind == "nan":
            nbytes = self._spec.vocab_size * 4
            set_bytes(Slice(self._blocks.logits + row * nbytes, nbytes), 0xFF, self._queue.stream)
        elif kind == "trap":
            how = RowNorm(self._spec.norm_eps, False)
            rms_norm(self._queue, 8, 8, 8, shape=(1, self._spec.hidden_size), how=how)

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Zero the token counts of lanes."""
        self._device.use()
        self._selector.reset(rows)

    def clear_slot(self, slot: int) -> None:
        """Zero a recurrent slot."""
        self._device.use()
        self._slots.clear(slot)

    def _use_slots(self) -> None:
        """Before slots move: the drafter's context lies beside them."""
        self._device.use()
        if self.speculation is not None:
            self.speculation.catch_up()

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent slots, (destination, source) each, one after the other."""
        self._use_slots()
        for target, source in pairs:
            self._slots.copy(target, source)

    def save_state(self, slot: int, units: Sequence[int]) -> None:
        """Copy a recurrent slot to arena units."""
        self._use_slots()
        self._slots.save(slot, units)

    def load_state(self, units: Sequence[int], slot: int) -> None:
        """Copy a snapshot to a recurrent slot."""
        self._use_slots()
        self._slots.load(units, slot)

    def load_parked_state(self, host_units: Sequence[int], slot: int) -> None:
        """Copy a parked snapshot to a recurrent slot."""
        self._use_slots()
        self._slots.load_parked(host_units, slot)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a K/V page."""
        self._device.use()
        self._slots.copy_page(source, target)

    def park_pages(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages to host pages."""
        self._device.use()
        self._slots.park(pages, host_pages, pages=True)

    def unpark_pages(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to pages."""
        self._device.use()
        self._slots.unpark(host_pages, pages, pages=True)

    def park_units(self, units: Sequence[int], host_units: Sequence[int]) -> None:
        """Copy units to host units."""
        self._device.use()
        self._slots.park(units, host_units, pages=False)

    def unpark_units(self, host_units: Sequence[int], units: Sequence[int]) -> None:
        """Copy host units to units."""
        self._device.use()
        self._slots.unpark(host_units, units, pages=False)

    def give_back(self, units: Sequence[int]) -> None:
        """Hand units back to the driver, where memory is elastic; what they held is lost."""
        if self._elastic is not None:
            self._device.use()
            self._elastic.give_back(self._slots.unit_nbytes, units)

    def take_back(self) -> None:
        """Have the whole arena again."""
        if self._elastic is not None:
            self._device.use()
            self._elastic.take_back()

    def ledger(self) -> dict[str, int]:
        """Bytes on the device by use, as the driver counts them; parking is host memory."""
        assert self._memory is not None
        named = {name: self._memory.ledger[name] for name in ("arena", "slots", "counts")}
        workspace = self._memory.taken_nbytes - sum(named.values())
        if self._elastic is not None:
            named["arena"] += self._elastic.taken_nbytes
        return {
            "weights": self._weights_nbytes,
            **named,
            "workspace": workspace,
            "kernels": self._kernels_nbytes,
            "graphs": self._graphs_nbytes,
            "parking": self._slots.parking_nbytes,
        }

    def close(self) -> None:
        """Wait for all work, then free graphs, memory, kernels and the context."""
        if self._closed:
            return
        self._closed = True
        self._device.use()
        self._queue.stream.synchronize()
        self._held.close()
