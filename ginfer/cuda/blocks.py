"""Blocks of the forward pass: which kernels, on which buffers, in which order.

Activations between kernels are row-major BF16; what decode linear kernels read is in fragment order
instead. They also compute the head of a prompt's last column; everything else of a prompt is
prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ginfer.batch import Phase
from ginfer.cuda.attention.append import append
from ginfer.cuda.attention.decode_launch import DecodeAttention, attention_decode, decode_kernel
from ginfer.cuda.attention.decode_launch import DecodeScratch as AttentionScratch
from ginfer.cuda.attention.expand import attention_expand
from ginfer.cuda.attention.pages import PageShape
from ginfer.cuda.attention.prefill_launch import (
    TOTALS_NBYTES,
    PrefillAttention,
    attention_prefill,
)
from ginfer.cuda.embedding import embedding
from ginfer.cuda.frame import most_chunks, most_expanded, most_partials
from ginfer.cuda.gdn.chunk import gdn_chunks
from ginfer.cuda.gdn.column import LEAST_ROWS, gdn_column
from ginfer.cuda.gdn.conv import Channels, conv
from ginfer.cuda.gdn.prepare import WITHIN_NBYTES
from ginfer.cuda.gdn.step import GdnInputs, GdnLayer, gdn_step
from ginfer.cuda.linear.decode_few_launch import NormedRows, linear_decode_rows, takes_rows
from ginfer.cuda.linear.decode_launch import DecodeLinear, DecodeScratch, linear_decode
from ginfer.cuda.linear.decode_launch import scratch_nbytes as linear_scratch_nbytes
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.prefill_launch import (
    LinearPrefillPlan,
    PrefillLinear,
    PrefillTokens,
    linear_prefill,
    token_maps,
)
from ginfer.cuda.norm import RowNorm, rms_norm
from ginfer.cuda.runtime.memory import set_bytes
from ginfer.cuda.runtime.tensor_map import NBYTES as MAP_NBYTES
from ginfer.cuda.runtime.tensor_map import place_tensor_maps
from ginfer.cuda.weights import matrix_shapes
from ginfer.sizes import align_up
from ginfer.spec import LayerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ginfer.backend import MemoryPlan
    from ginfer.cuda.attention.append import Columns
    from ginfer.cuda.frame import Frame, Staged
    from ginfer.cuda.gdn.fold import Recorded
    from ginfer.cuda.runtime.memory import Arena, Slice
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.slots import Slots
    from ginfer.cuda.weights import Layer, Matrix, Model
    from ginfer.spec import ModelSpec

Result = tuple[int, "Matrix", Epilogue]  # of a linear operator: address, matrix, epilogue
TOKEN_PADDING = 128  # rows beyond T that a fragment-ordered buffer may have
MAPS_NBYTES = 64 * MAP_NBYTES


@dataclass(frozen=True)
class Activations:
    """Inputs of linear operators: address of [T, K] BF16 in either order, and the tensor maps of
    the row-major view by tile width."""

    address: int
    maps: Mapping[int, int]


class Buffers(NamedTuple):
    """Addresses of activations. inner: q, k, gate, v, or q, k, v, z; ab: gates of GDN, FP32;
    within: what its chunks need beside the state."""

    hidden: int
    normed: Activations
    inner: int
    ab: int
    convolved: int
    within: int
    attended: Activations  # these two share one buffer
    gated: Activations
    mlp: Activations
    selected: Activations
    logits: int


class Blocks:
    """Launches of one model's blocks on one queue. records, nowhere: where forwards that record
    leave the inputs of GDN layers, and slots [B] that nobody writes."""

    records: Recorded
    nowhere: int

    def __init__(
        self, spec: ModelSpec, plan: MemoryPlan, model: Model, *, queue: Queue, num_sms: int
    ) -> None:
        self._spec, self._plan, self._model = spec, plan, model
        self._queue, self._sms = queue, num_sms
        kinds = (LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTANET)
        self._index = {i: n for kind in kinds for n, i in enumerate(spec.layers_of(kind))}
        self.logits = self.hidden = 0

    @staticmethod
    def nbytes(spec: ModelSpec, plan: MemoryPlan, selected: int) -> dict[str, int]:
        """Bytes of every buffer; `selected`: most columns whose logits are wanted at a time."""
        a, g, T = spec.attention, spec.gdn, plan.max_columns + TOKEN_PADDING
        inner = max(2 * (a.q_width + a.kv_width), g.conv_channels + g.value_width)
        partials = most_partials(plan)
        scratch = [linear_scratch_nbytes(N, K) for N, K in matrix_shapes(spec)]
        return {
            "hidden": T * spec.hidden_size * 2,
            "normed": T * spec.hidden_size * 2,
            "inner": T * inner * 2,
            "ab": T * 2 * g.num_v_heads * 4,
            "convolved": T * g.conv_channels * 2,
            "mixed": T * max(a.q_width, g.value_width) * 2,
            "mlp": T * max(spec.mlp_width * 2, g.value_width * 4),  # results of GDN chunks, FP32
            "within": most_chunks(plan) * g.num_v_heads * WITHIN_NBYTES,
            "selected": (selected + TOKEN_PADDING) * spec.hidden_size * 2,
            "logits": selected * spec.vocab_size * 4,
            "partials": partials * a.q_width * 4,
            "expanded": most_expanded(plan) * PageShape(1, a.num_kv_heads, a.head_dim).page_nbytes,
            "stats": partials * a.num_q_heads * 8,
            "totals": TOTALS_NBYTES,
            "slices": max(workspace for workspace, _ in scratch),
            "counters": align_up(max(counters for _, counters in scratch), 256),
            "maps": MAPS_NBYTES,
        }

    def allocate(
        self, memory: Arena, tables: tuple[Frame, int], slots: Slots, *, selected: int
    ) -> None:
        """Take the buffers and zero them. tables: those of batches, and the address of the id that
        each lane drew last."""
        spec, a, g = self._spec, self._spec.attention, self._spec.gdn
        (self._frame, self._tokens), self._slots = tables, slots
        sizes = self.nbytes(spec, self._plan, selected)
        parts = {name: memory.take(n, name, alignment=1024) for name, n in sizes.items()}
        for part in parts.values():
            set_bytes(part, 0, self._queue.stream)
        self._queue.stream.synchronize()
        at = {name: part.address for name, part in parts.items()}
        widths = {
            "normed": (parts["normed"], spec.hidden_size),
            "attended": (parts["mixed"], a.q_width),
            "gated": (parts["mixed"], g.value_width),
            "mlp": (parts["mlp"], spec.mlp_width),
            "selected": (parts["selected"], spec.hidden_size),
        }
        inputs = self._inputs(widths, parts["maps"])
        self._buffers = Buffers(
            hidden=at["hidden"],
            inner=at["inner"],
            ab=at["ab"],
            convolved=at["convolved"],
            within=at["within"],
            logits=at["logits"],
            **inputs,
        )
        self.logits, self.hidden, self._expanded = at["logits"], at["hidden"], at["expanded"]
        self._slices = DecodeScratch(workspace=at["slices"], counters=at["counters"])
        self._totals = at["totals"]
        self._attention_scratch = AttentionScratch(at["partials"], at["stats"], *self._frame.work)

    def _inputs(
        self, buffers: Mapping[str, tuple[Slice, int]], room: Slice
    ) -> dict[str, Activations]:
        """Inputs of linear operators in buffers of so many columns, with their tensor maps."""
        found: dict[str, dict[int, int]] = {name: {} for name in buffers}
        if self._queue.early:
            views = {
                (name, tile): view
                for name, (part, K) in buffers.items()
                for tile, view in token_maps(part.address, rows=part.nbytes // (2 * K), K=K).items()
            }
            places = place_tensor_maps(list(views.values()), room)
            for (name, tile), place in zip(views, places, strict=True):
                found[name][tile] = place
        return {n: Activations(part.address, found[n]) for n, (part, _) in buffers.items()}

    def _fragments(self, phase: Phase) -> bool:
        return phase is Phase.DECODE

    def _norm(self, weight: int, T: int, phase: Phase) -> None:
        """normed = norm of the residual stream."""
        b, C = self._buffers, self._spec.hidden_size
        how = RowNorm(self._spec.norm_eps, self._fragments(phase))
        rms_norm(self._queue, b.normed.address, b.hidden, weight, shape=(T, C), how=how)

    def _normed(self, norm: int, results: tuple[Result, ...], *, T: int, phase: Phase) -> None:
        """Linear operators on the norm of the residual stream."""
        b, C = self._buffers, self._spec.hidden_size
        if self._fragments(phase) and takes_rows(self._queue, T, C):
            rows = NormedRows(x=b.hidden, factors=norm, eps=self._spec.norm_eps, T=T)
            self._linear_rows(rows, results)
            return
        self._norm(norm, T, phase)
        for y, matrix, epilogue in reversed(results):  # the weights of the large one hide the small
            self._linear(y, b.normed, matrix, epilogue=epilogue, T=T, phase=phase)

    def _linear_rows(self, rows: NormedRows, results: tuple[Result, ...]) -> None:
        """One decode launch: norm, a matrix, and a small one beside it."""
        (y, matrix, epilogue), *others = results
        linear = (self._decode(matrix, epilogue), self._slices)
        beside = None
        for other_y, other, how in others:
            beside = (self._decode(other, how), other_y)
        linear_decode_rows(self._queue, y, rows, linear=linear, beside=beside)

    def _decode(self, matrix: Matrix, epilogue: Epilogue) -> DecodeLinear:
        w, fmt, N, K = matrix.address, matrix.fmt, matrix.N, matrix.K
        return DecodeLinear(w=w, fmt=fmt, N=N, K=K, epilogue=epilogue, num_sms=self._sms)

    def _linear(
        self, y: int, x: Activations, matrix: Matrix, *, epilogue: Epilogue, T: int, phase: Phase
    ) -> None:
        """y = x W^T with an epilogue."""
        image, stream = self._queue.image, self._queue.stream
        if self._fragments(phase):
            linear = (self._decode(matrix, epilogue), self._slices)
            linear_decode(image, stream, y, x.address, T=T, linear=linear)
            return
        prefill = PrefillLinear(
            w=matrix.address,
            fmt=matrix.fmt,
            N=matrix.N,
            K=matrix.K,
            epilogue=epilogue,
            num_sms=self._sms,
        )
        tokens = PrefillTokens(x=x.address, T=T, maps=x.maps)
        plan = image.plans.find("linear_prefill", LinearPrefillPlan, prefill.shape(T))
        linear_prefill(image, stream, y, tokens=tokens, linear=prefill, plan=plan)

    def embed(self, staged: Staged, phase: Phase) -> None:
        """hidden = embedding rows."""
        e, b = self._model.embedding, self._buffers
        table, shape = (e.address, e.fmt, e.stride), (staged.T, self._spec.hidden_size)
        ids = (staged.tables["ids"], self._tokens)
        embedding(self._queue, b.hidden, ids, table=table, shape=shape)

    def attention(self, layer_idx: int, staged: Staged, phase: Phase) -> None:
        """hidden += attention(norm(hidden))."""
        w, b, a, T = self._model.layers[layer_idx], self._buffers, self._spec.attention, staged.T
        assert w.heads is not None
        kv = (self._slots.units.address, self._index[layer_idx], self._slots.pages)
        columns, queue = self._frame.columns(staged.tables), self._queue
        inner = (b.inner, w.inner, Epilogue.STORE_BF16)
        self._normed(w.input_norm, (inner,), T=T, phase=phase)
        append(queue, b.inner, kv, T=T, columns=columns, norms=(w.heads, a.num_q_heads))
        if phase is Phase.PREFILL:
            items = PrefillAttention(
                items=staged.tables["queries"],
                num_items=staged.num_queries,
                H=a.num_q_heads,
                scale=a.scale,
                totals=self._totals,
                num_sms=self._sms,
            )
            kv, columns = self._opened(staged, kv, columns)
            attention_prefill(
                queue, b.attended.address, b.inner, kv=kv, columns=columns, shape=items
            )
        else:
            kernel = decode_kernel(queue.image.capability, staged.tiles, kv[2].packed)
            grid = self._sms * queue.image[kernel].occupancy()
            shape = DecodeAttention(
                T, a.num_q_heads, grid, staged.tiles, a.scale, self._fragments(phase)
            )
            tables = (columns, self._attention_scratch)
            attention_decode(queue, b.attended.address, b.inner, kv=kv, tables=tables, shape=shape)
        self._add(b.attended, w.output, T, phase)

    def _opened(
        self, staged: Staged, kv: tuple[int, int, PageShape], columns: Columns
    ) -> tuple[tuple[int, int, PageShape], Columns]:
        """The layer's pages of a prefill batch in BF16, and the tables that find them there."""
        pages, out = kv[2], self._expanded
        if not pages.packed:
            return kv, columns
        ids, count = staged.tables["to_open"], staged.num_expanded
        attention_expand(self._queue, out, kv=kv, ids=ids, count=count)
        return (out, 0, PageShape(1, pages.G, pages.D)), self._frame.expanded_columns(staged.tables)

    def _add(self, x: Activations, matrix: Matrix, T: int, phase: Phase) -> None:
        """hidden += x W^T."""
        to = self._buffers.hidden
        self._linear(to, x, matrix, epilogue=Epilogue.ADD_BF16, T=T, phase=phase)

    def gdn(self, layer_idx: int, staged: Staged, phase: Phase) -> None:
        """hidden += gated_deltanet(norm(hidden))."""
        w, b, g, T = self._model.layers[layer_idx], self._buffers, self._spec.gdn, staged.T
        assert w.a_b is not None
        index, W = self._index[layer_idx], w.inner.N
        mix, ab, convolved = b.inner, b.ab, b.convolved
        if staged.record:
            mix, ab, convolved = self.records.layer(index)
        results = ((mix, w.inner, Epilogue.STORE_BF16), (ab, w.a_b, Epilogue.STORE_F32))
        self._normed(w.input_norm, results, T=T, phase=phase)
        queue, to, layer = self._queue, b.gated.address, self._gdn_layer(w, index)
        channels = Channels(g.conv_channels, W, w.taps, self._slots.history(index))
        runs, inputs = staged.row_runs, GdnInputs(convolved, mix, ab)
        if staged.apart and staged.B >= LEAST_ROWS:
            gdn_column(queue, to, inputs, T=T, tables=(runs[0], layer, channels))
        else:
            for rows in runs:
                conv(queue, convolved, mix, rows=rows, channels=channels)
            if phase is Phase.PREFILL:
                chunks = staged.chunks(within=b.within, results=b.mlp.address)
                gdn_chunks(queue, to, inputs, T=T, tables=(runs, layer, chunks))
            else:
                (rows,) = runs
                if staged.record:
                    rows = replace(rows, state_out=self.nowhere)
                gdn_step(queue, to, inputs, T=T, tables=(rows, layer))
        self._add(b.gated, w.output, T, phase)

    def _gdn_layer(self, w: Layer, index: int) -> GdnLayer:
        g, state = self._spec.gdn, self._slots.state(index)
        heads = (g.num_k_heads, g.num_v_heads)
        return GdnLayer(state, w.gates, w.norm, *heads, w.inner.N, self._spec.norm_eps)

    def mlp(self, layer_idx: int, staged: Staged, phase: Phase) -> None:
        """hidden += down(silu(gate(x)) * up(x)), x = norm(hidden)."""
        w, b, T = self._model.layers[layer_idx], self._buffers, staged.T
        gate_up = (b.mlp.address, w.gate_up, Epilogue.SILU_UP)
        self._normed(w.post_norm, (gate_up,), T=T, phase=phase)
        self._add(b.mlp, w.down, T, phase)

    def head(self, staged: Staged, R: int) -> None:
        """Logits of the columns that the batch wants."""
        b, C, phase = self._buffers, self._spec.hidden_size, Phase.DECODE
        columns = staged.tables["columns"]
        if takes_rows(self._queue, R, C):
            norm, eps = self._model.final_norm, self._spec.norm_eps
            rows = NormedRows(x=b.hidden, factors=norm, eps=eps, T=R, columns=columns)
            self._linear_rows(rows, ((b.logits, self._model.head, Epilogue.STORE_F32),))
            return
        how = RowNorm(self._spec.norm_eps, self._fragments(phase), columns)
        to = b.selected.address
        rms_norm(self._queue, to, b.hidden, self._model.final_norm, shape=(R, C), how=how)
        logits, head = b.logits, self._model.head
        self._linear(logits, b.selected, head, epilogue=Epilogue.STORE_F32, T=R, phase=phase)
