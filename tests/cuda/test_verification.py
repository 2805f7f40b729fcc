"""Verification on the GPU: columns, tokens and the state that is left are those of plain decode."""

from dataclasses import replace

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.batch import DraftBatch, Phase, Purpose
from ginfer.cuda.backend import CudaBackend
from ginfer.engine.memory import page_nbytes
from ginfer.models import qwen
from ginfer.models.dflash2 import QWEN_DEMO_DRAFTER
from ginfer.spec import KvCodec
from tests.cuda.test_backend import WIDE
from tests.drafter_world import random_drafter
from tests.host.cuda.test_emulated_backend import batch as one_batch
from tests.verification_cases import Verification

WIDTHS = (8, 3, 16)


def open_image(codec, *, graphs, drafter=None):
    image = CudaBackend(WIDE.spec, graphs=graphs, speculates=True, drafter=drafter)
    own = random_drafter(WIDE, drafter, "q4") if drafter else []
    image.load([*WIDE.packed(), *own], lambda _: None)
    plan = MemoryPlan(
        num_rows=3,
        num_units=40,
        unit_nbytes=page_nbytes(WIDE.spec, codec),
        num_slots=6,
        max_columns=256,
        max_pages_per_row=8,
        max_recorded=48,
        kv=codec,
    )
    image.allocate(plan)
    return image


@pytest.mark.parametrize(
    ("codec", "graphs"), [(KvCodec.BF16, True), (KvCodec.BF16, False), (KvCodec.INT8, True)]
)
def test_columns_and_state_after_every_accepted_length_are_plain_decode(codec, graphs):
    image = open_image(codec, graphs=graphs)
    pages = np.arange(24, dtype=np.int32).reshape(3, 8)[::-1].tolist()
    prompts = [WIDE.prompt(n) for n in (5, 250, 64)]
    v = Verification(WIDE.spec, image, prompts, pages, rounds=17)
    for n in range(16):
        right = [min(n, 7), n % 3, n]
        one = v.verify(WIDTHS, right)
        v.shorten(one, [right[0] // 2, -1, right[2]])
    v.verify((4, 1, 2), (3, 0, 1), fillers=1)
    image.close()


DRAFTER = replace(
    QWEN_DEMO_DRAFTER,
    hidden_size=WIDE.hidden_size,
    vocab_size=WIDE.vocab_size,
    mask_id=250,
    tapped_layers=(0, 1, 3),
    mlp_width=256,
    window=256,
)
LANES, ROUNDS = 3, 9
LENGTHS = (5, 250, 64)


def draws(batch, positions, temperature):
    """The selection of a batch whose columns are all wanted, with a seed per row."""
    T, i32 = batch.num_columns, lambda v: np.full(T, v, np.int32)
    row = np.repeat(np.arange(batch.num_rows, dtype=np.int32), np.diff(batch.row_indptr))
    whole = one_batch(Phase.DECODE, [0] * T, [1] * T, [0] * T, [[0]] * T).selection
    return replace(
        whole,
        rows=row,
        temperature=np.full(T, temperature, np.float32),
        top_k=i32(50),
        presence=np.full(T, 0.3, np.float32),
        seeds=row.astype(np.uint64) + 5,
        positions=np.array(positions, np.int32),
        purposes=i32(Purpose.DECODE),
        num_top=-1,
    )


class Rows:
    """Rows of an image after their prompts; `plain` and `drafted` give their next tokens."""

    def __init__(self, image, temperature):
        self.image, self.temperature = image, temperature
        self.pages = np.arange(24, dtype=np.int32).reshape(3, 8)
        self.starts, self.slots = np.array(LENGTHS), np.arange(LANES, dtype=np.int32)
        image.reset_rows(range(LANES))
        for row, n in enumerate(LENGTHS):
            image.clear_slot(row)
            one = one_batch(Phase.PREFILL, WIDE.prompt(n), [n], [0], self.pages[row : row + 1])
            slot = np.array([row], np.int32)
            one.selection.rows[:] = row
            one = replace(one, state_in=slot, state_out=slot)
            image.select(qwen.forward(WIDE.spec, image, one), one).read()
            image.speculation.keep(one)

    def _batch(self, ids, lengths, record):
        one = one_batch(Phase.DECODE, ids, lengths, self.starts.tolist(), self.pages)
        place = np.concatenate([np.arange(n) for n in lengths])
        positions = place + 1 + np.repeat(self.starts, lengths)
        out = np.where(self.slots < LANES, self.slots + LANES, self.slots - LANES)
        one = replace(one, selection=draws(one, positions, self.temperature), record=record)
        return replace(one, state_in=self.slots, state_out=out.astype(np.int32))

    def plain(self):
        one = self._batch([~row for row in range(LANES)], [1] * LANES, False)
        got = self.image.select(qwen.forward(WIDE.spec, self.image, one), one)
        self.image.speculation.keep(one)
        self.starts, self.slots = self.starts + 1, one.state_out
        return got.read().token_ids.tolist()

    def drafted(self, widths, copies):
        """A round of widths[b] drafts; copies[b]: those of row b that the host gives, or None."""
        speculation = self.image.speculation
        lanes = np.arange(LANES, dtype=np.int32)
        drafts = DraftBatch(
            lanes=lanes,
            slots=self.slots,
            starts=self.starts.astype(np.int32),
            temperature=np.full(LANES, self.temperature, np.float32),
            seeds=lanes.astype(np.uint64) + 5,
            num_drafts=min(max(widths), 7),
        )
        speculation.draft(drafts)
        ids = []
        for b, n in enumerate(widths):
            known = [~((j + 1) * LANES + b) for j in range(n)]
            ids += [~b, *(known if copies[b] is None else copies[b][:n])]
        lengths = [n + 1 for n in widths]
        one = self._batch(ids, lengths, True)
        hidden = qwen.forward(WIDE.spec, self.image, one)
        pending = speculation.accept(hidden, one, np.array(lengths, np.int32))
        speculation.keep(one)
        got = pending.read()
        first = one.row_indptr[:-1]
        self.starts, self.slots = self.starts + got.accepted + 1, one.state_out
        tokens = got.selection.token_ids
        return [tokens[f : f + n + 1].tolist() for f, n in zip(first, got.accepted)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_any_kind_change_no_token_of_greedy_and_seeded_rows(temperature):
    image = open_image(KvCodec.BF16, graphs=True, drafter=DRAFTER)
    rows = Rows(image, temperature)
    plain = list(zip(*(rows.plain() for _ in range(16 * ROUNDS))))
    rows, got = Rows(image, temperature), [[] for _ in range(LANES)]
    for step in range(ROUNDS):
        widths = [(7, 3, 1, 7)[(step + b) % 4] for b in range(LANES)]
        copies = [None] * LANES
        b = step % LANES
        copies[b], widths[b] = list(plain[b][len(got[b]) :][:15]), 15
        if step % 2:
            copies[b][5] = (copies[b][5] + 1) % WIDE.num_token_ids
        taken = rows.drafted(widths, copies)
        assert len(taken[b]) == (6 if step % 2 else 16)
        got = [all_of_them + tokens for all_of_them, tokens in zip(got, taken)]
    assert all(tokens == list(plain[b][: len(tokens)]) for b, tokens in enumerate(got))
    image.close()
