"""CpuDrafter: a DFlash2 drafter beside a target model, on the target's embedding and head.

The target's forward hands over the streams behind the tapped layers; what it has verified becomes
context (`extend`), of which every layer keeps K and V in a ring per lane. That waits until many
columns have come or the rings are wanted (`catch_up`): one by one they would cost a tenth of plain
rounds. A block of an anchor and masks then proposes drafts for all lanes at once (`propose`); it
leaves no trace. No column depends on others than its own row's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.cpu import dflash
from ginfer.cpu.linear import LinearWeight, embedding_rows, linear
from ginfer.cpu.norm import rms_norm
from ginfer.cpu.rope import inverse_frequencies, rope_table
from ginfer.cpu.selector import Anchors, Codebooks, Paths, select_paths
from ginfer.cpu.weights import TensorTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ginfer.backend import PackedTensor
    from ginfer.cpu.weights import Model
    from ginfer.spec import DrafterSpec

    F32 = NDArray[np.float32]
    I32 = NDArray[np.int32]


WAITING = 32  # columns of each lane that wait to become context


class _Conv(NamedTuple):
    base: F32  # [side, tap, C]
    projection: LinearWeight


class _Layer(NamedTuple):
    input_norm: F32
    q: LinearWeight
    k: LinearWeight
    v: LinearWeight
    o: LinearWeight
    q_norm: F32
    k_norm: F32
    attention_conv: _Conv
    post_norm: F32
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight
    mlp_conv: _Conv


def _conv(table: TensorTable, path: str, d: DrafterSpec) -> _Conv:
    C = d.hidden_size
    return _Conv(
        table.vector(f"{path}/base_kernel", 2, 2, C),
        table.matrix(f"{path}/kernel_projection", d.conv_coefficients, C),
    )


def _layer(table: TensorTable, i: int, d: DrafterSpec) -> _Layer:
    path, C = f"dflash2/layers/{i}", d.hidden_size
    return _Layer(
        input_norm=table.vector(f"{path}/input_layernorm", C),
        q=table.matrix(f"{path}/self_attn/q_proj", d.q_width, C),
        k=table.matrix(f"{path}/self_attn/k_proj", d.kv_width, C),
        v=table.matrix(f"{path}/self_attn/v_proj", d.kv_width, C),
        o=table.matrix(f"{path}/self_attn/o_proj", C, d.q_width),
        q_norm=table.vector(f"{path}/self_attn/q_norm", d.head_dim),
        k_norm=table.vector(f"{path}/self_attn/k_norm", d.head_dim),
        attention_conv=_conv(table, f"{path}/attention_conv", d),
        post_norm=table.vector(f"{path}/post_attention_layernorm", C),
        gate=table.matrix(f"{path}/mlp/gate_proj", d.mlp_width, C),
        up=table.matrix(f"{path}/mlp/up_proj", d.mlp_width, C),
        down=table.matrix(f"{path}/mlp/down_proj", C, d.mlp_width),
        mlp_conv=_conv(table, f"{path}/mlp_conv", d),
    )


class CpuDrafter:
    """One drafter on this machine's cores."""

    def __init__(self, spec: DrafterSpec, model: Model, num_token_ids: int) -> None:
        """model: the target's bound weights. num_token_ids: its legal ids."""
        self._spec, self._model, self._legal = spec, model, num_token_ids
        self._eps = np.float32(spec.norm_eps)
        scale = np.float32(spec.head_dim**-0.5)
        self._heads = dflash.Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, scale)
        self._inv_freq = inverse_frequencies(spec.rope_theta, spec.head_dim // 2)
        self._axes = np.zeros(spec.head_dim // 2, np.int32)

    def load(self, tensors: Iterable[PackedTensor]) -> None:
        """Bind the drafter's tensors where they lie. Raises ArtifactError naming what is
        missing."""
        d, C = self._spec, self._spec.hidden_size
        table = TensorTable({t.name: t for t in tensors})
        selector = "dflash2/candidate_selector"
        self._fc = table.matrix("dflash2/fc", C, d.tap_width)
        self._hidden_norm = table.vector("dflash2/hidden_norm", C)
        self._layers = [_layer(table, i, d) for i in range(d.num_layers)]
        self._norm = table.vector("dflash2/norm", C)
        self._projection = table.matrix(f"{selector}/hidden_projection", d.selector_rank, C)
        self._codebooks = Codebooks(
            table.bits(f"{selector}/predecessor_codebook", d.vocab_size, d.selector_rank),
            table.bits(f"{selector}/successor_codebook", d.vocab_size, d.selector_rank),
        )
        table.check()

    def allocate(self, *, num_lanes: int, max_columns: int, threads: int) -> None:
        """Allocate and zero rings and buffers. max_columns: of a forward of the target."""
        d, waiting = self._spec, num_lanes * max(WAITING, self._spec.block_size)
        T = max(max_columns, waiting)
        columns = {
            "taps": d.tap_width,
            "hidden": d.hidden_size,
            "normed": d.hidden_size,
            "mixed": d.hidden_size,
            "q": d.q_width,
            "attended": d.q_width,
            "k": d.kv_width,
            "v": d.kv_width,
            "gate": d.mlp_width,
            "up": d.mlp_width,
            "coef": d.conv_coefficients,
            "cos": d.head_dim // 2,
            "sin": d.head_dim // 2,
            "rank": d.selector_rank,
        }
        self._buffers = {name: np.zeros(T * width, np.float32) for name, width in columns.items()}
        self._buffers["waiting"] = np.zeros(waiting * d.tap_width, np.float32)
        self._waiting = self._view("waiting", waiting, d.tap_width)
        self._places = np.zeros((2, waiting), np.int32)  # their lanes and tokens
        self._num_waiting, self._follows = 0, False
        C, layers = d.hidden_size, d.tapped_layers
        self._parts = {layer: slice(i * C, (i + 1) * C) for i, layer in enumerate(layers)}
        drafts = num_lanes * d.max_drafts
        self._buffers["logits"] = np.zeros(drafts * d.vocab_size, np.float32)
        self.rings = np.zeros((d.num_layers, num_lanes, 2, d.ring_tokens, d.kv_width), np.uint16)
        keys = d.window + d.block_size
        self._spaces = np.zeros((threads, 2, keys, d.head_dim), np.float32)
        self._scores = np.zeros((threads, keys), np.float32)
        self._candidates = np.zeros((threads, d.num_candidates), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of rings and buffers."""
        scratch = self._spaces.nbytes + self._scores.nbytes + self._candidates.nbytes
        scratch += self._places.nbytes
        return self.rings.nbytes + scratch + sum(a.nbytes for a in self._buffers.values())

    def _view(self, name: str, T: int, N: int) -> F32:
        view: F32 = self._buffers[name][: T * N].reshape(T, N)
        return view

    def begin(self, num_columns: int, *, follows: bool) -> None:
        """A forward of the target begins. follows: `follow` will make all its columns context."""
        if follows and self._num_waiting + num_columns > len(self._waiting):
            self.catch_up()
        self._follows = follows

    def tap(self, hidden: F32, layer_idx: int) -> None:
        """Take the stream behind a layer of the target, [T, C], if it is tapped."""
        part = self._parts.get(layer_idx)
        if part is not None:
            self._taps(len(hidden))[:, part] = hidden

    def _taps(self, T: int) -> F32:
        """Where the taps of the last forward lie, [T, tap width]."""
        if self._follows:
            return self._waiting[self._num_waiting : self._num_waiting + T]
        return self._view("taps", T, self._spec.tap_width)

    def _angles(self, tokens: I32) -> tuple[F32, F32]:
        F = self._axes.size
        cos, sin = self._view("cos", len(tokens), F), self._view("sin", len(tokens), F)
        rope_table(cos, sin, tokens.reshape(1, -1), self._axes, self._inv_freq)
        return cos, sin

    def follow(self, lanes: I32, tokens: I32) -> None:
        """Make all columns of the last forward context of their lanes, token by token."""
        first, last = self._num_waiting, self._num_waiting + len(lanes)
        self._places[0, first:last], self._places[1, first:last] = lanes, tokens
        self._num_waiting, self._follows = last, False

    def extend(self, columns: I32, lanes: I32, tokens: I32) -> None:
        """Make columns of the last forward context of their lanes. All: [n] int32; tokens: indices
        in the sequences, ascending in a lane, each exactly once."""
        taps = self._taps(int(columns.max()) + 1)[columns]
        if self._num_waiting + len(columns) > len(self._waiting):
            self.catch_up()
        if len(columns) > len(self._waiting):
            self._append(taps, lanes, tokens)
        else:
            first = self._num_waiting
            self._waiting[first : first + len(columns)] = taps
            self.follow(lanes, tokens)

    def catch_up(self) -> None:
        """Have all context in the rings: before they are read or copied, and before a lane gets
        another sequence."""
        T, self._num_waiting = self._num_waiting, 0
        if T:
            lanes, tokens = self._places[:, :T]
            self._append(self._waiting[:T], lanes, tokens)

    def _append(self, taps: F32, lanes: I32, tokens: I32) -> None:
        """K and V of columns, [n, tap width], to the rings."""
        d, T = self._spec, len(taps)
        context = self._view("hidden", T, d.hidden_size)
        normed = self._view("normed", T, d.hidden_size)
        linear(context, taps, self._fc)
        rms_norm(normed, context, self._hidden_norm, self._eps)
        cos, sin = self._angles(tokens)
        k, v = self._view("k", T, d.kv_width), self._view("v", T, d.kv_width)
        for layer, ring in zip(self._layers, self.rings):
            linear(k, normed, layer.k)
            linear(v, normed, layer.v)
            dflash.prepare_heads(k, layer.k_norm, cos, sin, d.head_dim, self._eps)
            dflash.append_context(ring, k, v, lanes, tokens)

    def propose(self, anchors: Anchors, lanes: I32, num_drafts: int) -> Paths:
        """Draft num_drafts tokens, 1 .. block_size - 1, after each anchor; the context of its lane
        ends before the anchor's position."""
        d, B, S = self._spec, len(lanes), num_drafts + 1
        assert 1 <= num_drafts <= d.max_drafts
        self.catch_up()
        ids = np.full((B, S), d.mask_id, np.int32)
        ids[:, 0] = anchors.token_ids
        hidden = self._view("hidden", B * S, d.hidden_size)
        embedding_rows(hidden, ids.reshape(-1), self._model.embedding)
        places = anchors.positions[:, None] + np.arange(S, dtype=np.int32)
        angles = self._angles(np.ascontiguousarray(places, np.int32).reshape(-1))
        for layer, ring in zip(self._layers, self.rings):
            self._attention(hidden, layer, ring, lanes, anchors.positions, angles)
            self._mlp(hidden, layer, S)
        return self._select(hidden, anchors, num_drafts)

    def _mixed(self, hidden: F32, norm: F32, conv: _Conv, S: int) -> tuple[F32, F32]:
        """(input of a sublayer, coefficients): norm, then the convolution before it."""
        T, C = hidden.shape
        x, coef = self._view("normed", T, C), self._view("coef", T, conv.projection.N)
        rms_norm(x, hidden, norm, self._eps)
        linear(coef, x, conv.projection)
        mixed = self._view("mixed", T, C)
        dflash.convolve(mixed, x, coef, conv.base, dflash.BEFORE, S, False)
        return mixed, coef

    def _attention(
        self,
        hidden: F32,
        layer: _Layer,
        ring: NDArray[np.uint16],
        lanes: I32,
        lengths: I32,
        angles: tuple[F32, F32],
    ) -> None:
        d, T, S = self._spec, len(hidden), len(hidden) // len(lanes)
        x, coef = self._mixed(hidden, layer.input_norm, layer.attention_conv, S)
        q, out = self._view("q", T, d.q_width), self._view("attended", T, d.q_width)
        k, v = self._view("k", T, d.kv_width), self._view("v", T, d.kv_width)
        for y, weight in ((q, layer.q), (k, layer.k), (v, layer.v)):
            linear(y, x, weight)
        for y, norm in ((q, layer.q_norm), (k, layer.k_norm)):
            dflash.prepare_heads(y, norm, *angles, d.head_dim, self._eps)
        spaces = (d.window, self._spaces, self._scores)
        dflash.attend_blocks(out, q, k, v, ring, lanes, lengths, self._heads, *spaces)
        linear(x, out, layer.o)
        base = layer.attention_conv.base
        dflash.convolve(hidden, x, coef, base, dflash.AFTER, S, True)

    def _mlp(self, hidden: F32, layer: _Layer, S: int) -> None:
        d, T = self._spec, len(hidden)
        x, coef = self._mixed(hidden, layer.post_norm, layer.mlp_conv, S)
        gate, up = self._view("gate", T, d.mlp_width), self._view("up", T, d.mlp_width)
        linear(gate, x, layer.gate)
        linear(up, x, layer.up)
        dflash.silu_times(gate, up)
        linear(x, gate, layer.down)
        dflash.convolve(hidden, x, coef, layer.mlp_conv.base, dflash.AFTER, S, True)

    def _select(self, hidden: F32, anchors: Anchors, num_drafts: int) -> Paths:
        d, C = self._spec, self._spec.hidden_size
        B = len(hidden) // (num_drafts + 1)
        rows = hidden.reshape(B, num_drafts + 1, C)[:, 1:].reshape(-1, C)
        x = self._view("normed", len(rows), C)
        rms_norm(x, np.ascontiguousarray(rows), self._norm, self._eps)
        logits = self._view("logits", len(rows), d.vocab_size)
        linear(logits, x, self._model.head)
        rank = self._view("rank", len(rows), d.selector_rank)
        linear(rank, x, self._projection)
        shape = (B, num_drafts, d.num_candidates)
        paths = Paths(
            np.zeros(shape[:2], np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.uint32)
        )
        select_paths(paths, logits, rank, anchors, self._codebooks, self._legal, self._candidates)
        return paths
