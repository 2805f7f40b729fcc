"""CpuBackend: the Backend protocol over the Numba kernels of this package.

Activations are float32; K/V and recurrent state are those of `arena`. Both numeric families share
the linear operators, whose order does not depend on the number of columns.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numba import set_num_threads
from numba.np.ufunc.parallel import get_thread_count

from ginfer.backend import Room
from ginfer.batch import (
    DraftBatch,
    ForwardBatch,
    Phase,
    Purpose,
    Selection,
    SelectionBatch,
    WorkUnits,
)
from ginfer.cpu import attention, gdn
from ginfer.cpu.arena import Arena, slot_nbytes
from ginfer.cpu.head import Head
from ginfer.cpu.linear import embedding_rows, linear, linear_add, linear_silu_up
from ginfer.cpu.norm import rms_norm
from ginfer.cpu.rope import frequency_axes, inverse_frequencies, rope_table
from ginfer.cpu.speculation import CpuSpeculation
from ginfer.cpu.stage import Staged, rows_between, stage
from ginfer.cpu.weights import Model, bind
from ginfer.env import THREADS
from ginfer.errors import ConfigError
from ginfer.sizes import div_ceil
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS, LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan, PackedTensor
    from ginfer.spec import DrafterSpec

    F32 = NDArray[np.float32]


MAX_RECORDED = 128  # columns of a forward that verifies drafts


def thread_count(wanted: int | None) -> int:
    """Threads to use: the argument, else GINFER_THREADS, else all. Raises ConfigError."""
    available = get_thread_count()
    text = THREADS.read() if wanted is None else str(wanted)
    if not text:
        return int(available)
    if not text.isdigit() or not 1 <= int(text) <= available:
        raise ConfigError(f"threads = {text!r} is not between 1 and {available}", param="threads")
    return int(text)


def _dummy_batch(phase: Phase, T: int) -> ForwardBatch:
    """One row of T columns on slot 0 and page 0."""
    zero, R = np.zeros(1, np.int32), T if phase is Phase.DECODE else 1
    ints, floats = np.zeros(R, np.int32), np.zeros(R, np.float32)
    selection = SelectionBatch(
        columns=np.arange(R, dtype=np.int32),
        rows=ints,
        temperature=floats + 1,
        top_k=ints,
        top_p=floats + 1,
        min_p=floats,
        presence=floats,
        frequency=floats,
        seeds=np.zeros(R, np.uint64),
        positions=ints,
        purposes=ints + Purpose.ACCEPT,
        forced=ints - 1,
        bias_indptr=np.zeros(R + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        num_top=1,
    )
    return ForwardBatch(
        phase=phase,
        token_ids=np.zeros(T, np.int32),
        positions=np.zeros((3, T), np.int32),
        row_indptr=np.array([0, T], np.int32),
        starts=zero,
        page_table=np.zeros((1, 1), np.int32),
        state_in=zero,
        state_out=zero,
        selection=selection,
    )


class CpuBackend:
    """One model on this machine's cores."""

    name = "cpu"
    runs_ahead = replayed = False

    def __init__(
        self,
        spec: ModelSpec,
        *,
        threads: int | None = None,
        speculates: bool = False,
        drafter: DrafterSpec | None = None,
    ) -> None:
        """speculates: rounds may verify drafts, those of `drafter` where there is one."""
        self._spec, self._threads = spec, thread_count(threads)
        a, g = spec.attention, spec.gdn
        self._heads = attention.Heads(
            a.num_q_heads, a.num_kv_heads, a.head_dim, np.float32(a.scale)
        )
        self._shape = gdn.Shape(g.num_k_heads, g.num_v_heads, g.k_head_dim, g.v_head_dim)
        self._eps = np.float32(spec.norm_eps)
        self._axes = frequency_axes(a.mrope_sections)
        self._inv_freq = inverse_frequencies(a.rope_theta, a.rotary_dim // 2)
        kinds = (LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTANET)
        self._index = {i: n for kind in kinds for n, i in enumerate(spec.layers_of(kind))}
        self._model: Model | None = None
        self._buffers: dict[str, np.ndarray] = {}
        self._arena: Arena | None = None
        self._weight_nbytes = 0
        self._staged: Staged | None = None
        self._began, self._chunk_times = 0.0, list[float]()
        self._drafter_spec = drafter if speculates else None
        self.speculation = CpuSpeculation(spec, self._drafter_spec) if speculates else None

    def room(self, weights_nbytes: int, host_nbytes: int) -> Room:
        """Host memory; weights are mapped from their file."""
        slot = slot_nbytes(self._spec)
        ring = self._drafter_spec.ring_nbytes if self._drafter_spec else 0

        def cost(plan: MemoryPlan) -> int:
            nbytes = (plan.num_units + plan.num_park_units) * plan.unit_nbytes
            num_pages = nbytes // self._spec.page_nbytes(plan.kv)
            nbytes += num_pages * self._spec.scales_nbytes(plan.kv)
            return nbytes + plan.num_slots * slot + plan.num_rows * ring

        return Room(
            nbytes=host_nbytes,
            host_nbytes=host_nbytes,
            slot_nbytes=slot + ring,
            slots_per_lane=2 if self.runs_ahead or self.speculation else 1,
            max_recorded=MAX_RECORDED if self.speculation else 0,
            prefill_chunk=1024,
            plentiful=False,
            cost=cost,
        )

    def load(self, tensors: Iterable[PackedTensor], progress: Callable[[int], None]) -> None:
        """Bind the weights where they lie. Raises ArtifactError naming what is missing."""

        def taken(nbytes: int) -> None:
            self._weight_nbytes = nbytes
            progress(nbytes)

        drafter: list[PackedTensor] = []

        def of_target() -> Iterator[PackedTensor]:
            for tensor in tensors:
                if tensor.name.startswith("dflash2/"):
                    drafter.append(tensor)
                yield tensor

        self._model = bind(self._spec, of_target(), taken)
        if self.speculation is not None:
            self.speculation.load(self._model, drafter)

    def allocate(self, plan: MemoryPlan) -> None:
        """Allocate and zero all memory, then compile every kernel by small forwards on slot 0."""
        assert self._model is not None
        s, a, g = self._spec, self._spec.attention, self._spec.gdn
        T, F = plan.max_columns, a.rotary_dim // 2
        blocks = div_ceil(plan.max_pages_per_row * PAGE_TOKENS, BLOCK_TOKENS)
        self._partials = blocks * min(plan.num_rows, 8)
        self._units = WorkUnits(
            plan.num_rows, T, blocks, group=attention.GROUP, workers=self._threads
        )
        inner = max(2 * (a.q_width + a.kv_width), g.conv_channels + g.value_width)
        scratch = max(
            attention.prefill_scratch(self._heads),
            attention.decode_scratch(self._heads),
            gdn.gdn_scratch(self._shape),
        )
        floats: dict[str, tuple[int, ...]] = {
            "hidden": (T * s.hidden_size,),
            "normed": (T * s.hidden_size,),
            "inner": (T * inner,),
            "gates": (T * 2 * g.num_v_heads,),
            "convolved": (T * g.conv_channels,),
            "mixed": (T * max(a.q_width, g.value_width),),
            "mlp": (T * s.mlp_width,),
            "cos": (T * F,),
            "sin": (T * F,),
            "partials": (self._partials * a.q_width,),
            "stats": (2, self._partials * a.num_q_heads),
            "scratch": (self._threads, scratch),
        }
        self._buffers = {name: np.zeros(shape, np.float32) for name, shape in floats.items()}
        num_drafts = self.speculation.max_drafts if self.speculation else 0
        self._head = Head(
            s, self._model, num_lanes=plan.num_rows, num_drafts=num_drafts, threads=self._threads
        )
        rings = np.zeros((0, plan.num_rows, 2, 0, 0), np.uint16)
        if self.speculation is not None:
            rings = self.speculation.allocate(plan, self._head, self._threads)
        self._arena = arena = Arena(s, plan, rings)
        self._kv = arena.kv
        rooms = (self._threads, attention.room_elements(self._heads, arena.kv))
        self._rooms = np.zeros(rooms, np.uint16)
        self._buffers |= {"state": arena.state, "history": arena.history}
        if self.speculation is not None:
            self.speculation.share(arena.state, arena.history, self._buffers["scratch"])
        self._compile(plan)

    def _compile(self, plan: MemoryPlan) -> None:
        """Run each kernel once with the array types of serving; leave no trace."""
        for phase, T in ((Phase.PREFILL, 64), (Phase.PREFILL, 1), (Phase.DECODE, 1)):
            batch = _dummy_batch(phase, min(T, plan.max_columns))
            self.select(self._dummy_forward(batch), batch)
        if self.speculation is not None:
            self._compile_speculation(self.speculation)
        for name, buffer in self._buffers.items():
            if name in ("state", "history"):
                buffer[:, 0] = 0
            else:
                buffer.fill(0)
        for part in self._kv:
            part[:1] = 0
        self._head.clear()

    def _compile_speculation(self, speculation: CpuSpeculation) -> None:
        zero = np.zeros(1, np.int32)
        batch = replace(_dummy_batch(Phase.DECODE, 2), record=True)
        speculation.accept(self._dummy_forward(batch), batch, zero + 2)
        speculation.keep(batch, zero + 1)
        if speculation.max_drafts:
            greedy, seeds = np.zeros(1, np.float32), np.zeros(1, np.uint64)
            speculation.draft(
                DraftBatch(
                    lanes=zero,
                    slots=zero,
                    starts=zero + 1,
                    temperature=greedy,
                    seeds=seeds,
                    num_drafts=speculation.max_drafts,
                )
            )

    def _dummy_forward(self, batch: ForwardBatch) -> F32:
        hidden = self.embed(batch)
        for i, kind in enumerate(self._spec.layers):
            gated = kind is LayerKind.GATED_DELTANET
            (self.gdn_block if gated else self.attention_block)(hidden, i, batch)
            self.mlp_block(hidden, i, batch)
        return hidden

    def _view(self, name: str, T: int, N: int) -> F32:
        """The first T rows of N columns of a buffer."""
        view: F32 = self._buffers[name][: T * N].reshape(T, N)
        return view

    def _normed(self, hidden: F32, weight: F32) -> F32:
        x = self._view("normed", *hidden.shape)
        rms_norm(x, hidden, weight, self._eps)
        return x

    def embed(self, batch: ForwardBatch) -> F32:
        """Stage the batch; return the embedding rows of its tokens, [T, C]."""
        assert self._model is not None
        set_num_threads(self._threads)
        self._began = perf_counter()
        T, F = batch.num_columns, self._axes.size
        cos, sin = self._view("cos", T, F), self._view("sin", T, F)
        self._staged = stage(batch, cos, sin, self._units)
        ids = self._staged.token_ids
        self._head.resolve(ids)
        if self.speculation is not None:
            self.speculation.begin(batch, self._staged.rows)
        rope_table(cos, sin, self._staged.positions, self._axes, self._inv_freq)
        hidden = self._view("hidden", T, self._spec.hidden_size)
        embedding_rows(hidden, ids, self._model.embedding)
        return hidden

    def attention_block(self, hidden: F32, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += attention(norm(hidden)); appends the columns' K and V first."""
        assert self._model is not None
        assert self._staged is not None
        w, heads, T = self._model.layers[layer_idx], self._heads, len(hidden)
        columns, index = self._staged.columns, self._index[layer_idx]
        q = self._view("inner", T, w.inner.N)
        linear(q, self._normed(hidden, w.input_norm), w.inner)
        out = self._view("mixed", T, self._spec.attention.q_width)
        kv, scratch, rooms = self._kv, self._buffers["scratch"], self._rooms
        norms = (w.q_norm, w.k_norm)
        if batch.phase is Phase.PREFILL:
            items = self._staged.items
            attention.attention_prefill(
                out, q, kv, index, *norms, heads, columns, items, scratch, rooms, self._eps
            )
        else:
            attention.append_columns(q, kv, index, *norms, heads, columns, self._eps)
            work = self._staged.work
            spaces = (self._buffers["partials"], self._buffers["stats"], scratch, rooms)
            for wave in self._waves(T):
                attention.attention_decode(out, q, kv, index, heads, columns, work, wave, *spaces)
        linear_add(hidden, out, w.output)

    def _waves(self, T: int) -> list[tuple[int, int]]:
        """Runs of columns whose key blocks fit the partials."""
        first = self._units.first[: T + 1].tolist()
        waves, c0 = [], 0
        for t in range(1, len(first)):
            if first[t] - first[c0] > self._partials:
                waves.append((c0, t - 1))
                c0 = t - 1
        return [*waves, (c0, len(first) - 1)]

    def gdn_block(self, hidden: F32, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += gated_deltanet(norm(hidden)); slots state_in are read, state_out written."""
        assert self._model is not None
        assert self._staged is not None
        w, T, g = self._model.layers[layer_idx], len(hidden), self._spec.gdn
        assert w.a_b is not None
        index, rows, b = self._index[layer_idx], self._staged.rows, self._buffers
        x = self._normed(hidden, w.input_norm)
        mix, gates = self._view("inner", T, w.inner.N), self._view("gates", T, w.a_b.N)
        linear(mix, x, w.inner)
        linear(gates, x, w.a_b)
        if batch.record:
            assert self.speculation is not None
            self.speculation.record(index, mix, gates)
        out = self._view("mixed", T, g.value_width)
        state, history = b["state"][index], b["history"][index]
        inputs, how = (mix, gates, state, history), (w.gdn, self._shape, self._eps, b["scratch"])
        if batch.phase is Phase.PREFILL:
            convolved = self._view("convolved", T, g.conv_channels)
            for first, end in batch.row_runs:
                gdn.gdn_prefill(out, convolved, *inputs, rows_between(rows, first, end), *how)
        else:
            gdn.gdn_decode(out, *inputs, rows, *how)
        linear_add(hidden, out, w.output)

    def mlp_block(self, hidden: F32, layer_idx: int, batch: ForwardBatch) -> None:
        """hidden += down(silu(gate(x)) * up(x)), x = norm(hidden)."""
        assert self._model is not None
        w = self._model.layers[layer_idx]
        inner = self._view("mlp", len(hidden), self._spec.mlp_width)
        linear_silu_up(inner, self._normed(hidden, w.post_norm), w.gate_up)
        linear_add(hidden, inner, w.down)
        if self.speculation is not None:
            self.speculation.tap(hidden, layer_idx)
        if batch.phase is Phase.PREFILL and layer_idx == len(self._spec.layers) - 1:
            self._chunk_times.append(perf_counter() - self._began)

    def chunk_times(self) -> list[float]:
        """Seconds of the prefill forwards that were not told before."""
        times, self._chunk_times = self._chunk_times, []
        return times

    def select(self, hidden: F32, batch: ForwardBatch) -> Selection:
        """Final norm, head and selection of the wanted columns; counts the chosen tokens."""
        assert batch.selection is not None
        return self._head.select(hidden, batch.selection)

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Zero the token counts of lanes."""
        self._head.counts[list(rows)] = 0

    def clear_slot(self, slot: int) -> None:
        """Zero a recurrent slot."""
        self._settle_context()
        for name in ("state", "history"):
            self._buffers[name][:, slot] = 0

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent slots, (destination, source) each, one after the other."""
        self._settle_context()
        for target, source in pairs:
            self._memory.copy_slot(target, source)

    @property
    def _memory(self) -> Arena:
        assert self._arena is not None, "not allocated, or closed"
        return self._arena

    def _settle_context(self) -> None:
        """Before a slot changes or moves: the drafter's context lies beside it."""
        if self.speculation is not None:
            self.speculation.catch_up()

    def save_state(self, slot: int, units: Sequence[int]) -> None:
        """Copy a recurrent slot to arena units."""
        self._settle_context()
        self._memory.save_state(slot, units)

    def load_state(self, units: Sequence[int], slot: int) -> None:
        """Copy a snapshot to a recurrent slot."""
        self._settle_context()
        self._memory.load_state(units, slot)

    def load_parked_state(self, host_units: Sequence[int], slot: int) -> None:
        """Copy a parked snapshot to a recurrent slot."""
        self._settle_context()
        self._memory.load_parked_state(host_units, slot)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a K/V page."""
        self._memory.copy_page(source, target)

    def park_pages(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages to host pages."""
        self._memory.park_pages(pages, host_pages)

    def unpark_pages(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to pages."""
        self._memory.unpark_pages(host_pages, pages)

    def park_units(self, units: Sequence[int], host_units: Sequence[int]) -> None:
        """Copy units to host units."""
        self._memory.park_units(units, host_units)

    def unpark_units(self, host_units: Sequence[int], units: Sequence[int]) -> None:
        """Copy host units to units."""
        self._memory.unpark_units(host_units, units)

    def give_back(self, units: Sequence[int]) -> None:
        """Hand units back to the system."""
        self._memory.give_back(units)

    def take_back(self) -> None:
        """Have the whole arena again."""
        self._memory.take_back()

    def ledger(self) -> dict[str, int]:
        """Bytes by use. Weights are mapped, not copied."""
        sizes = {name: array.nbytes for name, array in self._buffers.items()}
        for view in ("state", "history"):
            sizes.pop(view, 0)
        return {
            "weights": self._weight_nbytes,
            "arena": self._memory.nbytes,
            "slots": self._memory.slots_nbytes,
            "drafter": self._memory.rings.nbytes,
            "parking": self._memory.parking_nbytes,
            "counts": self._head.counts.nbytes,
            "workspace": sum(sizes.values())
            + self._rooms.nbytes
            + self._head.nbytes
            + (self.speculation.nbytes if self.speculation else 0),
        }

    def close(self) -> None:
        """Drop weights and buffers."""
        self._model, self._staged = None, None
        self._buffers = {}
        self._arena = None
