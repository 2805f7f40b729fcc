"""Drafter: the launches of a DFlash2 drafter beside its target, and the memory that they work in.

The target's forward hands over the streams behind the tapped layers (`tap`). What it has verified
becomes context (`extend`): one product of all taps, a norm, one product to k and v of all layers,
the append to the rings. Taps of plain rounds are set aside and become context together. A block of
an anchor and masks then proposes drafts for B rows (`propose`), between two linear operators one
kernel. All of it can be captured: rows, positions, seeds lie in tables at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.drafter.anchors import anchors
from ginfer.cuda.drafter.attention import (
    BlockRows,
    Heads,
    Partials,
    block_attention,
    partials_nbytes,
)
from ginfer.cuda.drafter.candidates import CandidateShape, candidates, pieces_nbytes
from ginfer.cuda.drafter.candidates import K as NUM_CANDIDATES
from ginfer.cuda.drafter.context import (
    ContextColumns,
    KeyNorms,
    Rings,
    TapShape,
    append_context,
    tap,
)
from ginfer.cuda.drafter.conv import BlockShape, Convolution, NextNorm, finish, mix, silu_up
from ginfer.cuda.drafter.order import angle_tables
from ginfer.cuda.drafter.path import Drafted, Drawing, draft_path
from ginfer.cuda.drafter.weights import check_shapes, matrix_shapes
from ginfer.cuda.embedding import embedding
from ginfer.cuda.linear.decode_launch import DecodeLinear, DecodeScratch, linear_decode
from ginfer.cuda.linear.decode_launch import scratch_nbytes as linear_scratch_nbytes
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.norm import RowNorm, rms_norm
from ginfer.cuda.runtime.memory import copy_on_device, set_bytes
from ginfer.cuda.tables import Tables, tables_nbytes
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from ginfer.batch import DraftBatch
    from ginfer.cuda.drafter.weights import DrafterLayer, DrafterWeights, Sublayer
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.weights import Matrix
    from ginfer.spec import DrafterSpec

MAX_COLUMNS = 128  # of a block of all rows, and of a decode forward
MAX_ASIDE = MAX_COLUMNS  # columns that are set aside


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a drafter uses of its target: embedding and head, number of legal rows of the head;
    addresses of the residual stream [T, C] BF16, of logits [rows of drafts][rows of the head] FP32,
    of tokens [1 + most drafts][lanes] u32, in whose row 0 lies what each lane drew last, of the
    lanes' rings, and of how many columns each row of the last acceptance used, i32. ids: 0, or of a
    head over a shortlist the address of the ascending ids of its rows, u32."""

    embedding: Matrix
    head: Matrix
    num_token_ids: int
    hidden: int
    logits: int
    tokens: int
    rings: int
    used: int
    ids: int = 0


def draft_rows(d: DrafterSpec, lanes: int) -> int:
    """Most rows of logits that a draft of all lanes needs."""
    return lanes * d.max_drafts


def _table_words(d: DrafterSpec, lanes: int) -> dict[str, int]:
    return {
        "starts": lanes,
        "rows": lanes,
        "seeds": 2 * lanes,
        "temperature": lanes,
        "lanes": lanes,
        "ring": lanes,
        "ids": lanes * d.block_size,
    }


def buffer_nbytes(d: DrafterSpec, lanes: int) -> dict[str, int]:
    """Bytes of every buffer."""
    T, C, drafts = MAX_COLUMNS, d.hidden_size, draft_rows(d, lanes)
    heads = (d.num_q_heads, d.num_kv_heads)
    values, stats = partials_nbytes(lanes, d.block_size, heads, d.window)
    scratch = [linear_scratch_nbytes(N, K) for N, K in matrix_shapes(d)]
    scratch.append(linear_scratch_nbytes(d.vocab_size, C))
    return {
        "taps": T * d.tap_width * 2,
        "aside": MAX_ASIDE * d.tap_width * 2,
        "packed": T * d.tap_width * 2,
        "context": T * d.num_layers * 2 * d.kv_width * 2,
        **dict.fromkeys(("hidden", "normed", "mixed", "results"), T * C * 2),
        "coef": T * d.conv_coefficients * 4,
        "qkv": T * (d.q_width + 2 * d.kv_width) * 2,
        "attended": T * d.q_width * 2,
        "gate_up": T * d.mlp_width * 4,
        "mlp": T * d.mlp_width * 2,
        "rank": T * d.selector_rank * 4,
        "positions": align_up(4 * lanes, 256),
        "partials": values,
        "stats": stats,
        "pieces": pieces_nbytes(drafts, d.vocab_size),
        "best": drafts * NUM_CANDIDATES * 8,
        "ids": lanes * d.max_drafts * NUM_CANDIDATES * 4,
        "units": lanes * d.max_drafts * NUM_CANDIDATES * 4,
        "slices": max(workspace for workspace, _ in scratch),
        "counters": align_up(max(counters for _, counters in scratch), 256),
    }


def drafter_nbytes(d: DrafterSpec, lanes: int, max_tokens: int) -> dict[str, int]:
    """Bytes of everything that `allocate` takes, by use."""
    far, near = angle_tables(d.rope_theta, max_tokens + MAX_COLUMNS)
    return {
        **{f"drafter {name}": n for name, n in buffer_nbytes(d, lanes).items()},
        "drafter angles": far.nbytes + near.nbytes + 256,
        "drafter tables": tables_nbytes(_table_words(d, lanes)),
    }


class Drafter:
    """One drafter on one queue."""

    def __init__(
        self, d: DrafterSpec, weights: DrafterWeights, *, queue: Queue, num_sms: int
    ) -> None:
        check_shapes(d)
        assert d.num_candidates == NUM_CANDIDATES
        self._d, self._w, self._queue, self._sms = d, weights, queue, num_sms

    def allocate(self, memory: Arena, target: Target, *, lanes: int, max_tokens: int) -> None:
        """Take the buffers and zero them. max_tokens: of a sequence."""
        d, stream = self._d, self._queue.stream
        sizes = buffer_nbytes(d, lanes)
        parts = {name: memory.take(n, f"drafter {name}") for name, n in sizes.items()}
        for part in parts.values():
            set_bytes(part, 0, stream)
        self._at = {name: part.address for name, part in parts.items()}
        self._target, self._lanes = target, lanes
        tables = angle_tables(d.rope_theta, max_tokens + MAX_COLUMNS)
        places = [memory.take(a.nbytes, "drafter angles") for a in tables]
        for place, values in zip(places, tables, strict=True):
            place.array(values.shape, np.float32).write(values)
        self._angles = (places[0].address, places[1].address)
        self.key_norms = KeyNorms(self._w.k_norms, self._angles, d.norm_eps)
        self._tables = Tables(_table_words(d, lanes), memory, stream)
        self._scratch = DecodeScratch(workspace=self._at["slices"], counters=self._at["counters"])
        self.rings = Rings(target.rings, d.num_layers, d.num_kv_heads, d.ring_tokens, d.window)
        self.drafted = Drafted(
            target.tokens, self._at["ids"], self._at["units"], lanes, d.max_drafts
        )
        stream.synchronize()

    def _linear(
        self, y: str, x: str, matrix: Matrix, T: int, epilogue: Epilogue = Epilogue.STORE_BF16
    ) -> None:
        """y = x W^T between named buffers."""
        to = self._target.logits if y == "logits" else self._at[y]
        linear = DecodeLinear(
            w=matrix.address,
            fmt=matrix.fmt,
            N=matrix.N,
            K=matrix.K,
            epilogue=epilogue,
            num_sms=self._sms,
        )
        image, stream = self._queue.image, self._queue.stream
        linear_decode(image, stream, to, self._at[x], T=T, linear=(linear, self._scratch))

    def tap(self, layer_idx: int, T: int) -> None:
        """Take the stream of T columns of a decode forward behind a layer, if it is tapped."""
        d = self._d
        if layer_idx in d.tapped_layers:
            place = d.tapped_layers.index(layer_idx) * d.hidden_size
            shape = TapShape(T, d.hidden_size, d.tap_width, fragments=False)
            tap(self._queue, self._at["taps"], self._target.hidden, place=place, shape=shape)

    def set_aside(self, first: int, T: int) -> None:
        """Keep the taps of the T columns of the last decode forward, from place `first` on."""
        nbytes = self._d.tap_width * 2  # of a column
        to, stream = self._at["aside"] + first * nbytes, self._queue.stream
        copy_on_device(to, self._at["taps"], T * nbytes, stream=stream)

    def extend(self, columns: ContextColumns, T: int, *, aside: bool = False) -> None:
        """Make of the T columns of the last decode forward, or the first T that were set aside,
        those context that are used."""
        d, w, at = self._d, self._w, self._at
        packing = TapShape(T, d.tap_width, d.tap_width, fragments=True)
        tap(self._queue, at["packed"], at["aside" if aside else "taps"], place=0, shape=packing)
        self._linear("results", "packed", w.fc, T)
        how = RowNorm(d.norm_eps, fragments=True)
        shape = (T, d.hidden_size)
        rms_norm(self._queue, at["normed"], at["results"], w.hidden_norm, shape=shape, how=how)
        self._linear("context", "normed", w.context, T)
        kv, norms = at["context"], self.key_norms
        append_context(self._queue, self.rings, kv, T=T, columns=columns, norms=norms)

    def fill(self, batch: DraftBatch) -> None:
        """Send the tables of a draft."""
        d, tables, S = self._d, self._tables, batch.num_drafts + 1
        assert batch.num_rows * S <= MAX_COLUMNS
        tables.begin()
        tables.fill("starts", batch.starts)
        rows = tables.words("rows", batch.num_rows)
        rows[:] = -1 if batch.rows is None else batch.rows
        tables.fill("seeds", batch.seeds.view(np.int32))
        tables.fill("temperature", batch.temperature)
        tables.fill("lanes", batch.lanes)
        tables.fill("ring", batch.slots % np.int32(self._lanes))
        ids = tables.words("ids", batch.num_rows * S).reshape(-1, S)
        ids[:], ids[:, 0] = d.mask_id, ~batch.lanes
        tables.send()

    def propose(self, B: int, num_drafts: int) -> None:
        """Draft for the B rows that `fill` has described."""
        d, at, target, N = self._d, self._at, self._target, num_drafts
        shape = BlockShape(B, N + 1, d.hidden_size, d.conv_group)
        starts, rows = self._tables["starts"], self._tables["rows"]
        anchors(self._queue, at["positions"], starts, rows, target.used, B=B)
        e, C = target.embedding, d.hidden_size
        table, ids = (e.address, e.fmt, e.stride), (self._tables["ids"], target.tokens)
        embedding(self._queue, at["hidden"], ids, table=table, shape=(shape.T, C))
        how = RowNorm(d.norm_eps, fragments=True)
        first = self._w.layers[0].attention.norm
        rms_norm(self._queue, at["normed"], at["hidden"], first, shape=(shape.T, C), how=how)
        followers = [layer.attention.norm for layer in self._w.layers[1:]]
        for i, layer in enumerate(self._w.layers):
            self._attention(i, layer, shape)
            self._finish(layer.attention, NextNorm(layer.mlp.norm, d.norm_eps, shape.S), shape)
            self._mlp(layer, shape)
            norm, n = (followers[i], shape.S) if i < len(followers) else (self._w.norm, N)
            self._finish(layer.mlp, NextNorm(norm, d.norm_eps, n), shape)
        self._select(B, N)

    def _mix(self, sublayer: Sublayer, shape: BlockShape) -> Convolution:
        """mixed = the convolution of normed."""
        at = self._at
        self._linear("coef", "normed", sublayer.projection, shape.T, Epilogue.STORE_F32)
        conv = Convolution(at["coef"], sublayer.base)
        mix(self._queue, at["mixed"], at["normed"], conv=conv, shape=shape)
        return conv

    def _finish(self, sublayer: Sublayer, norm: NextNorm, shape: BlockShape) -> None:
        """hidden += the convolution of results; normed = what follows."""
        at = self._at
        conv, streams = Convolution(at["coef"], sublayer.base), (at["hidden"], at["results"])
        finish(self._queue, at["normed"], streams, conv=conv, norm=norm, shape=shape)

    def _attention(self, i: int, layer: DrafterLayer, shape: BlockShape) -> None:
        d, at, tables = self._d, self._at, self._tables
        self._mix(layer.attention, shape)
        self._linear("qkv", "mixed", layer.qkv, shape.T)
        rows = BlockRows(shape.B, shape.S, tables["ring"], at["positions"])
        heads = Heads(
            d.num_q_heads, d.num_kv_heads, layer.q_norm, layer.k_norm, self._angles, d.norm_eps
        )
        scratch = Partials(at["partials"], at["stats"])
        block_attention(
            self._queue,
            at["attended"],
            at["qkv"],
            (self.rings, i),
            rows=rows,
            heads=(heads, scratch),
        )
        self._linear("results", "attended", layer.output, shape.T)

    def _mlp(self, layer: DrafterLayer, shape: BlockShape) -> None:
        at, T = self._at, shape.T
        self._mix(layer.mlp, shape)
        self._linear("gate_up", "mixed", layer.gate_up, T)
        silu_up(self._queue, at["mlp"], at["gate_up"], shape=(T, self._d.mlp_width))
        self._linear("results", "mlp", layer.down, T)

    def _select(self, B: int, N: int) -> None:
        """Paths through the best ids of the normed columns."""
        at, tables, R = self._at, self._tables, B * N
        self._linear("rank", "normed", self._w.projection, R, Epilogue.STORE_F32)
        self._linear("logits", "normed", self._target.head, R, Epilogue.STORE_F32)
        target, pieces = self._target, at["pieces"]
        shape = CandidateShape(R, target.num_token_ids, target.head.N * 4)
        candidates(
            self._queue, at["best"], target.logits, pieces=pieces, ids=target.ids, shape=shape
        )
        drawing = Drawing(tables["lanes"], at["positions"], tables["temperature"], tables["seeds"])
        source = (at["best"], at["rank"])
        draft_path(
            self._queue, self.drafted, source, books=self._w.books, drawing=drawing, shape=(B, N)
        )

    def close(self) -> None:
        """Free the pinned memory; the rest belongs to arenas."""
        self._tables.close()
