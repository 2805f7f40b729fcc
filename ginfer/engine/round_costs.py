"""Costs of decode rounds, measured before an engine serves: rows, columns, drafts.

Rounds over empty pages, timed from their order to their values; the first of all does not count, of
a few more the best, and none counts more than one of more columns or rows. A round that verifies
costs more than a plain one however few its drafts are. Between measured ones seconds are linear in
the rows of a round and in its columns.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import DraftBatch, ForwardBatch, Phase, Purpose, SelectionBatch
from ginfer.engine.cost_table import CostTable
from ginfer.models import qwen

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.backend import Backend, MemoryPlan
    from ginfer.spec import ModelSpec

ROWS = (1, 2, 4, 8)
WIDTHS = (2, 4, 16)  # columns of a row that verifies
REPEATS, ENOUGH_S = 3, 0.1  # a round that was measured for so long is not repeated
_START = 32  # tokens before the measured ones


def measure_costs(spec: ModelSpec, backend: Backend, plan: MemoryPlan) -> CostTable:
    """The table of an engine that has allocated `plan` and serves nobody. What it leaves in pages,
    slots and counts is overwritten or cleared by who gets them."""
    probe = _Probe(spec, backend, plan)
    for width in (1, 2):
        probe.round_s(1, width)
    rows = sorted({min(B, plan.num_rows) for B in (*ROWS, plan.num_rows)})
    plain = _rising({B: probe.round_s(B, 1) for B in rows})
    verify = {
        B: _down_to(
            B + 1,
            {B * n: probe.round_s(B, n) for n in WIDTHS if B * n <= plan.max_recorded},
            plain[B],
        )
        for B in rows
    }
    draft = _rising({B: probe.draft_s(B) for B in rows})
    columns = tuple(sorted({n for costs in verify.values() for n in costs}))
    known = {
        B: np.interp(columns, list(costs), list(costs.values())) for B, costs in verify.items()
    }
    every = range(1, plan.num_rows + 1)

    def between(values: dict[int, float]) -> tuple[float, ...]:
        return tuple(np.interp(every, rows, [values[B] for B in rows]).tolist())

    by_columns = [between({B: float(known[B][i]) for B in rows}) for i in range(len(columns))]
    return CostTable(
        columns=columns,
        plain_round_s=between(plain),
        verify_s=tuple(zip(*by_columns)),
        draft_s=between(draft),
    )


def _down_to(least: int, costs: dict[int, float], plain_s: float) -> dict[int, float]:
    """Costs by columns, none above that of more columns, continued to `least` columns along the
    first slope, where they are not below a plain round."""
    rising = _rising(costs)
    (first, cost), *more = rising.items()
    if first > least:
        second, above = more[0] if more else (first + 1, cost)
        slope = (above - cost) / (second - first)
        rising = {least: cost - slope * (first - least), **rising}
    return {n: max(seconds, plain_s) for n, seconds in rising.items()}


class _Probe:
    """Rounds of rows that have nothing but pages."""

    def __init__(self, spec: ModelSpec, backend: Backend, plan: MemoryPlan) -> None:
        assert backend.speculation is not None
        self._spec, self._backend, self._plan = spec, backend, plan
        self._speculation = backend.speculation

    def round_s(self, num_rows: int, width: int) -> float:
        """Seconds of a round of `width` columns per row, 1 for a plain one."""
        batch = self._batch(num_rows, width)
        limits = np.full(num_rows, width, np.int32)

        def plain() -> None:
            pending = self._backend.select(qwen.forward(self._spec, self._backend, batch), batch)
            self._speculation.keep(batch)
            pending.read()

        def verified() -> None:
            hidden = qwen.forward(self._spec, self._backend, batch)
            pending = self._speculation.accept(hidden, batch, limits)
            self._speculation.keep(batch)
            pending.read()

        return _best(plain if width == 1 else verified)

    def draft_s(self, num_rows: int) -> float:
        """Seconds of all drafts of a block."""
        if not self._speculation.max_drafts:
            return 0.0
        rows = np.arange(num_rows, dtype=np.int32)
        batch = DraftBatch(
            lanes=rows,
            slots=rows,
            starts=np.full(num_rows, _START, np.int32),
            temperature=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
            num_drafts=self._speculation.max_drafts,
        )
        return _best(lambda: self._speculation.draft(batch).read())

    def _batch(self, num_rows: int, width: int) -> ForwardBatch:
        B, T, plan = num_rows, num_rows * width, self._plan
        rows = np.arange(B, dtype=np.int32)
        ints, floats = np.zeros(T, np.int32), np.zeros(T, np.float32)
        place = np.tile(np.arange(_START, _START + width, dtype=np.int32), B)
        moved = rows + plan.num_rows if plan.num_slots >= 2 * plan.num_rows else rows
        return ForwardBatch(
            phase=Phase.DECODE,
            token_ids=ints,
            positions=place[None].repeat(3, 0),
            row_indptr=np.arange(0, T + 1, width, dtype=np.int32),
            starts=np.full(B, _START, np.int32),
            page_table=rows[:, None].copy(),
            state_in=rows,
            state_out=moved if width > 1 or self._backend.runs_ahead else rows,
            record=width > 1,
            selection=SelectionBatch(
                columns=np.arange(T, dtype=np.int32),
                rows=np.repeat(rows, width),
                temperature=floats,
                top_k=ints,
                top_p=floats + 1,
                min_p=floats,
                presence=floats,
                frequency=floats,
                seeds=np.zeros(T, np.uint64),
                positions=place + 1,
                purposes=ints + Purpose.DECODE,
                forced=ints - 1,
                bias_indptr=np.zeros(T + 1, np.int32),
                bias_ids=np.zeros(0, np.int32),
                bias_values=np.zeros(0, np.float32),
            ),
        )


def _rising(costs: dict[int, float]) -> dict[int, float]:
    """No cost above that of more: what disturbs a measurement only adds to it."""
    least = np.minimum.accumulate(list(costs.values())[::-1])[::-1]
    return dict(zip(costs, least.tolist()))


def _best(round_: Callable[[], object]) -> float:
    """Seconds of the quickest of a few."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH_S:
        began = perf_counter()
        round_()
        times.append(perf_counter() - began)
    return min(times)
