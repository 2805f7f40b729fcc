"""Sampling state per lane, gathered into the SelectionBatch of a round."""

from __future__ import annotations

import secrets
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.batch import Purpose, SelectionBatch

if TYPE_CHECKING:
    from ginfer.batch import I32
    from ginfer.engine.request import SamplingParams

_FLOATS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}


class SamplingTable:
    """Parameters of the request in each lane. What stays equal from round to round is gathered
    once per set of lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._floats = {name: np.zeros(num_lanes, np.float32) for name in _FLOATS}
        self._top_k = np.zeros(num_lanes, np.int32)
        self._seeds = np.zeros(num_lanes, np.uint64)
        self._num_top = np.full(num_lanes, -1, np.int32)
        self._coupled = np.zeros(num_lanes, np.bool_)
        self._bias: list[tuple[tuple[int, float], ...]] = [()] * num_lanes
        self._gathered: dict[tuple[tuple[int, ...], int], SelectionBatch] = {}  # by purpose, too
        self._verified: tuple[I32 | None, dict[str, Any]] = (None, {})  # by these very lanes

    def assign(self, lane: int, params: SamplingParams) -> None:
        """A request enters the lane. Without a seed it gets a fresh one of 64 bits."""
        for name, attribute in _FLOATS.items():
            self._floats[name][lane] = getattr(params, attribute)
        self._top_k[lane] = params.top_k
        self._seeds[lane] = secrets.randbits(64) if params.seed is None else params.seed
        self._coupled[lane] = params.seed is not None or params.temperature == 0
        self._num_top[lane] = -1 if params.logprobs is None else params.logprobs
        self._bias[lane] = params.logit_bias
        self._gathered.clear()
        self._verified = (None, {})

    def select(
        self,
        lanes: tuple[int, ...],
        columns: I32,
        positions: I32,
        *,
        purpose: int,
    ) -> SelectionBatch:
        """Free selection of one token per lane. columns: [R], where its logits come from;
        positions: [R], logical position of the token."""
        known = self._gathered.get((lanes, purpose))
        if known is None or known.columns is not columns:
            known = self._gathered[lanes, purpose] = SelectionBatch(
                columns=columns,
                positions=positions,
                purposes=_purposes(len(lanes), purpose),
                **self._gather(lanes),
            )
        return known.at(positions)

    def verify(self, lanes: I32, positions: I32) -> SelectionBatch:
        """Free selection in T columns of rows that verify drafts. lanes: [T], of the columns' rows;
        positions: [T], logical position of the column's token."""
        known, fixed = self._verified
        if known is not lanes:
            purposes = np.where(self._coupled[lanes], Purpose.DECODE, Purpose.ACCEPT)
            fixed = {
                "columns": np.arange(len(lanes), dtype=np.int32),
                "purposes": purposes.astype(np.int32),
                **self._gather(tuple(lanes.tolist())),
            }
            self._verified = (lanes, fixed)
        return SelectionBatch(positions=positions, **fixed)

    def draft(self, lanes: I32) -> dict[str, Any]:
        """How rows draw drafts: as they draw tokens, but the likeliest where a draft must equal
        what the row draws anyway."""
        return {
            "temperature": np.where(
                self._coupled[lanes], 0, self._floats["temperature"][lanes]
            ).astype(np.float32),
            "seeds": self._seeds[lanes],
        }

    def _gather(self, lanes: tuple[int, ...]) -> dict[str, Any]:
        rows = np.array(lanes, np.int32)
        bias = [self._bias[lane] for lane in lanes]
        pairs = [pair for row in bias for pair in row]
        return {
            "rows": rows,
            "top_k": self._top_k[rows],
            "seeds": self._seeds[rows],
            "forced": np.full(len(lanes), -1, np.int32),
            "num_top": int(self._num_top[rows].max()),
            "bias_indptr": np.cumsum([0, *map(len, bias)], dtype=np.int32),
            "bias_ids": np.array([i for i, _ in pairs], np.int32),
            "bias_values": np.array([v for _, v in pairs], np.float32),
            **{name: column[rows] for name, column in self._floats.items()},
        }


@cache
def _purposes(count: int, purpose: int) -> I32:
    return np.full(count, purpose, np.int32)
