"""Verification in the decode family: 16 columns per row, and the fold of what was accepted."""

from __future__ import annotations

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import page_nbytes
from ginfer.models import qwen
from ginfer.spec import LayerKind
from scripts.random_models import MODELS

MODEL = MODELS[2]  # five layers, one of them attention; 2 key heads, 2 value heads
PAGES, COLUMNS, PROMPTS = 4, 16, (61, 90)  # the first row verifies across a page's border


class Rows:
    """Two rows with two recurrent slots each; `plain` decodes, `verify` records and folds."""

    def __init__(self) -> None:
        spec = self.spec = MODEL.spec
        self.backend = CpuBackend(spec, speculates=True)
        self.backend.load(MODEL.packed(), lambda _: None)
        self.backend.allocate(
            MemoryPlan(
                num_rows=2,
                num_units=2 * PAGES,
                unit_nbytes=page_nbytes(spec),
                num_slots=6,
                max_columns=128,
                max_pages_per_row=PAGES,
                max_recorded=2 * COLUMNS,
            )
        )
        self.pages = np.arange(2 * PAGES, dtype=np.int32).reshape(2, PAGES)
        self.lengths, self.slots = [0, 0], [4, 5]
        for row, n in enumerate(PROMPTS):
            self._run(Phase.PREFILL, [row], [MODEL.prompt(n)], self.slots[row : row + 1])

    def prefilled(self) -> None:
        """Back to the prompts, of which each row has its own."""
        self.lengths, self.slots = list(PROMPTS), [0, 2]
        self.backend.copy_slots([(0, 4), (2, 5)])

    def plain(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """One token of each row after the other; hidden rows [n, C] of each."""
        out: list[list[np.ndarray]] = [[], []]
        for ids in zip(*tokens):
            hidden = self._run(Phase.DECODE, [0, 1], [np.array([i]) for i in ids], self.slots)
            for row in (0, 1):
                out[row].append(hidden[row].copy())
                self.lengths[row] += 1
        return [np.array(rows) for rows in out]

    def verify(self, tokens: list[np.ndarray], kept: list[int]) -> list[np.ndarray]:
        """All columns at once, of which `kept` stay; hidden rows [n, C] of each row."""
        other = [slot ^ 1 for slot in self.slots]
        hidden = self._run(Phase.DECODE, [0, 1], tokens, other, record=True)
        assert self.backend.speculation is not None
        parts = np.split(hidden.copy(), np.cumsum([len(t) for t in tokens])[:-1])
        self.backend.speculation.keep(self.batch, np.array(kept, np.int32))
        self.slots = other
        self.lengths = [n + k for n, k in zip(self.lengths, kept)]
        return parts

    def state(self) -> list[np.ndarray]:
        """Recurrent state and history of both rows."""
        names = ("state", "history")
        return [self.backend._buffers[n][:, self.slots].copy() for n in names]

    def _run(
        self,
        phase: Phase,
        rows: list[int],
        tokens: list[np.ndarray],
        state_out: list[int],
        *,
        record: bool = False,
    ) -> np.ndarray:
        starts = [self.lengths[row] for row in rows]
        places = [s + np.arange(len(t)) for s, t in zip(starts, tokens)]
        batch = ForwardBatch(
            phase=phase,
            token_ids=np.concatenate(tokens).astype(np.int32),
            positions=np.tile(np.concatenate(places).astype(np.int32), (3, 1)),
            row_indptr=np.cumsum([0, *map(len, tokens)]).astype(np.int32),
            starts=np.array(starts, np.int32),
            page_table=self.pages[rows],
            state_in=np.array([self.slots[row] for row in rows], np.int32),
            state_out=np.array(state_out, np.int32),
            record=record,
        )
        self.batch = batch
        qwen.forward(self.spec, self.backend, batch)
        hidden: np.ndarray = self.backend._view("hidden", batch.num_columns, self.spec.hidden_size)
        return hidden


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


def _tokens(n: int) -> list[np.ndarray]:
    ids = MODEL.prompt(2 * n)
    return [ids[:n], ids[n:]]


def test_every_accepted_length_is_sequential_decode_bit_for_bit(rows: Rows) -> None:
    tokens, after = _tokens(COLUMNS), _tokens(3)
    rows.prefilled()
    start = rows.state()
    hidden, states = [np.zeros((0, MODEL.hidden_size), np.float32)] * 2, [start]
    for i in range(COLUMNS):
        step = rows.plain([t[i : i + 1] for t in tokens])
        hidden = [np.concatenate([a, b]) for a, b in zip(hidden, step)]
        states.append(rows.state())
    assert not np.array_equal(states[3][0], states[4][0])
    for kept in range(COLUMNS + 1):
        rows.prefilled()
        got = rows.verify(tokens, [kept, COLUMNS - kept])
        for a, b in zip(got, hidden):
            np.testing.assert_array_equal(a, b)
        for part, now in enumerate(rows.state()):
            np.testing.assert_array_equal(now[:, 0], states[kept][part][:, 0])
            np.testing.assert_array_equal(now[:, 1], states[COLUMNS - kept][part][:, 1])
        if kept in (0, 1, 7):  # what was rejected is overwritten before it is read
            drafted = rows.plain(after)
            rows.prefilled()
            rows.plain([tokens[0][:kept], tokens[1][:kept]])
            want = rows.plain(after)
            np.testing.assert_array_equal(drafted[0], want[0])


def test_rows_of_different_widths_verify_together(rows: Rows) -> None:
    tokens = _tokens(COLUMNS)
    rows.prefilled()
    want = rows.plain(tokens)
    rows.prefilled()
    got = rows.verify([tokens[0][:5], tokens[1]], [2, 16])
    np.testing.assert_array_equal(got[0], want[0][:5])
    np.testing.assert_array_equal(got[1], want[1])


def test_verification_leaves_the_committed_slots_alone(rows: Rows) -> None:
    rows.prefilled()
    before, slots = rows.state(), list(rows.slots)
    rows.verify(_tokens(8), [3, 0])
    for name, old in zip(("state", "history"), before):
        np.testing.assert_array_equal(rows.backend._buffers[name][:, slots], old)
    for now, old in zip(rows.state(), before):
        np.testing.assert_array_equal(now[:, 1], old[:, 1])  # nothing of the second row was kept
        assert not np.array_equal(now[:, 0], old[:, 0])


def test_the_model_under_test_has_both_mixers() -> None:
    assert {LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTANET} == set(MODEL.spec.layers)
