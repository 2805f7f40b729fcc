"""Context of prompts: taps of a prefill forward, in rows, on the prefill linear operators.

Of a row the last tokens that a ring holds become context; what lies before them nobody sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.drafter.context import (
    ContextColumns,
    KeyNorms,
    TapShape,
    append_context,
    tap,
)
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
from ginfer.cuda.tables import Tables, tables_nbytes

if TYPE_CHECKING:
    from ginfer.batch import ForwardBatch
    from ginfer.cuda.drafter.context import Rings
    from ginfer.cuda.drafter.weights import DrafterWeights
    from ginfer.cuda.runtime.memory import Arena, Slice
    from ginfer.cuda.runtime.queue import Queue
    from ginfer.cuda.weights import Matrix
    from ginfer.spec import DrafterSpec

MAPS_NBYTES = 32 * MAP_NBYTES


def _table_words(lanes: int, max_columns: int) -> dict[str, int]:
    return {
        **dict.fromkeys(("columns", "row", "token"), max_columns),
        **dict.fromkeys(("ring", "first", "used"), lanes),
    }


def _buffer_nbytes(d: DrafterSpec, max_columns: int) -> dict[str, int]:
    return {
        "taps": max_columns * d.tap_width * 2,
        "results": max_columns * d.hidden_size * 2,
        "normed": max_columns * d.hidden_size * 2,
        "context": max_columns * d.num_layers * 2 * d.kv_width * 2,
        "maps": MAPS_NBYTES,
    }


def prompt_nbytes(d: DrafterSpec, lanes: int, max_columns: int) -> dict[str, int]:
    """Bytes of everything that a PromptContext takes, by use."""
    sizes = _buffer_nbytes(d, max_columns)
    sizes["tables"] = tables_nbytes(_table_words(lanes, max_columns))
    return {f"drafter prompt {name}": n for name, n in sizes.items()}


class PromptContext:
    """Taps of a prefill forward and what becomes of them."""

    def __init__(
        self, d: DrafterSpec, weights: DrafterWeights, *, queue: Queue, num_sms: int
    ) -> None:
        self._d, self._w, self._queue, self._sms = d, weights, queue, num_sms
        self._T = 0

    def allocate(
        self,
        memory: Arena,
        rings: Rings,
        norms: KeyNorms,
        *,
        hidden: int,
        lanes: int,
        max_columns: int,
    ) -> None:
        """Take the buffers. hidden: address of the target's stream [max_columns, C] BF16."""
        d, stream = self._d, self._queue.stream
        sizes = _buffer_nbytes(d, max_columns)
        parts = {
            name: memory.take(n, f"drafter prompt {name}", alignment=1024)
            for name, n in sizes.items()
        }
        for part in parts.values():
            set_bytes(part, 0, stream)
        stream.synchronize()
        self._at = {name: part.address for name, part in parts.items()}
        self._rings, self._norms, self._hidden, self._lanes = rings, norms, hidden, lanes
        self._tables = Tables(_table_words(lanes, max_columns), memory, stream)
        self._maps: dict[str, dict[int, int]] = {"taps": {}, "normed": {}}
        if self._queue.early:
            self._place_maps(parts, {"taps": d.tap_width, "normed": d.hidden_size})

    def _place_maps(self, parts: dict[str, Slice], widths: dict[str, int]) -> None:
        views = {
            (name, tile): view
            for name, K in widths.items()
            for tile, view in token_maps(
                parts[name].address, rows=parts[name].nbytes // (2 * K), K=K
            ).items()
        }
        places = place_tensor_maps(list(views.values()), parts["maps"])
        for (name, tile), place in zip(views, places, strict=True):
            self._maps[name][tile] = place

    def begin(self, batch: ForwardBatch) -> None:
        """A prefill forward begins: which of its columns become context, of which rings."""
        counts = np.diff(batch.row_indptr)
        kept = np.minimum(counts, self._d.window)
        self._T = T = int(kept.sum())
        row = np.repeat(np.arange(batch.num_rows, dtype=np.int32), kept)
        place = np.arange(T, dtype=np.int32) - np.repeat(np.cumsum(kept) - kept, kept)
        place += np.repeat(counts - kept, kept)
        tables = self._tables
        tables.begin()
        tables.fill("columns", (place + batch.row_indptr[:-1][row]).astype(np.int32))
        tables.fill("row", row)
        tables.fill("token", (place + batch.starts[row]).astype(np.int32))
        tables.fill("ring", (batch.state_out % self._lanes).astype(np.int32))
        tables.fill("first", batch.starts.astype(np.int32))
        tables.fill("used", counts.astype(np.int32))
        tables.send()

    def tap(self, layer_idx: int) -> None:
        """Take the stream behind a layer, if it is tapped."""
        d = self._d
        if layer_idx in d.tapped_layers:
            place, columns = (
                d.tapped_layers.index(layer_idx) * d.hidden_size,
                self._tables["columns"],
            )
            shape = TapShape(self._T, d.hidden_size, d.tap_width, fragments=False, columns=columns)
            tap(self._queue, self._at["taps"], self._hidden, place=place, shape=shape)

    def extend(self) -> None:
        """Make the tapped columns context."""
        d, at, T, queue = self._d, self._at, self._T, self._queue
        self._linear("results", "taps", self._w.fc)
        how, norm = RowNorm(d.norm_eps), self._w.hidden_norm
        rms_norm(queue, at["normed"], at["results"], norm, shape=(T, d.hidden_size), how=how)
        self._linear("context", "normed", self._w.context)
        names = ("row", "token", "ring", "first", "used")
        columns = ContextColumns(*(self._tables[name] for name in names))
        append_context(queue, self._rings, at["context"], T=T, columns=columns, norms=self._norms)

    def _linear(self, y: str, x: str, matrix: Matrix) -> None:
        image, stream = self._queue.image, self._queue.stream
        linear = PrefillLinear(
            w=matrix.address, fmt=matrix.fmt, N=matrix.N, K=matrix.K, num_sms=self._sms
        )
        tokens = PrefillTokens(x=self._at[x], T=self._T, maps=self._maps[x])
        plan = image.plans.find("linear_prefill", LinearPrefillPlan, linear.shape(self._T))
        linear_prefill(image, stream, self._at[y], tokens=tokens, linear=linear, plan=plan)

    def close(self) -> None:
        """Free the pinned memory."""
        self._tables.close()
