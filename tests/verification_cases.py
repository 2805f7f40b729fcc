"""Verification on a CUDA image against its plain decode, bit for bit; small random models."""

from dataclasses import replace

import numpy as np

from ginfer.batch import Phase, Purpose
from ginfer.cuda.runtime.memory import PinnedBuffer, copy_to_host
from ginfer.models import qwen
from tests.host.cuda.test_emulated_backend import batch, run


def slot_bytes(image, slot):
    """State and history of a recurrent slot."""
    parts = list(image._slots.parts(slot))
    host = PinnedBuffer(sum(nbytes for _, nbytes in parts))
    at = host.host
    for address, nbytes in parts:
        copy_to_host(at, address, nbytes, stream=image._queue.stream)
        at += nbytes
    image._queue.stream.synchronize()
    found = host.bytes.copy()
    host.close()
    return found


class Verification:
    """Rows 0 .. B - 1 with slots of the same numbers, B .. keep their state after the prompts."""

    def __init__(self, spec, image, prompts, pages, *, rounds):
        self.spec, self.image, self.B, self.pages = spec, image, len(prompts), pages
        B, self.lengths = self.B, [len(p) for p in prompts]
        for row, prompt in enumerate(prompts):
            image.clear_slot(row)
            one = batch(Phase.PREFILL, prompt, [len(prompt)], [0], pages[row : row + 1])
            one.selection.rows[:] = row
            slot = np.array([row], np.int32)
            last = run(spec, image, replace(one, state_in=slot, state_out=slot))
            self.anchors = [*(self.anchors if row else ()), int(last.token_ids[0])]
        image.copy_slots([(B + row, row) for row in range(B)])
        self.plain, self.states = [], [self._slots()]
        ids = self.anchors
        for i in range(rounds):
            starts = [n + i for n in self.lengths]
            got = run(spec, image, batch(Phase.DECODE, ids, [1] * B, starts, pages))
            self.plain.append(got)
            self.states.append(self._slots())
            ids = got.token_ids.tolist()

    def _slots(self):
        return [slot_bytes(self.image, row) for row in range(self.B)]

    def verify(self, widths, right, *, fillers=0):
        """A round of widths[b] columns per row, of whose drafts the first right[b] are those of
        plain decode; `fillers` more columns per row that do not count."""
        spec, image, B = self.spec, self.image, self.B
        image.reset_rows(range(B))
        ids, lengths = [], [n + fillers for n in widths]
        for b, n in enumerate(lengths):
            true = [int(self.plain[i].token_ids[b]) for i in range(n - 1)]
            wrong = [(t + 1) % spec.num_token_ids for t in true]
            ids += [self.anchors[b], *true[: right[b]], *wrong[right[b] :]]
        one = batch(Phase.DECODE, ids, lengths, self.lengths, self.pages)
        T, lanes = len(ids), np.repeat(np.arange(B, dtype=np.int32), lengths)
        s = batch(Phase.DECODE, ids, [1] * T, [0] * T, [[0]] * T).selection
        s = replace(s, rows=lanes, purposes=np.full(T, Purpose.DECODE, np.int32))
        slots = np.arange(B, dtype=np.int32)
        one = replace(one, selection=s, record=True, state_in=slots + B, state_out=slots)
        hidden = qwen.forward(spec, image, one)
        pending = image.speculation.accept(hidden, one, np.array(widths, np.int32))
        image.speculation.keep(one)
        got = pending.read()
        assert got.accepted.tolist() == list(right)
        for b, first in enumerate(one.row_indptr[:-1]):
            for i in range(right[b] + 1):
                want, at = self.plain[i], first + i
                assert got.selection.finite[at]
                for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
                    mine, other = getattr(got.selection, name)[at], getattr(want, name)[b]
                    assert (mine == other).all(), (b, i, name)
        for b, n in enumerate(right):
            assert (slot_bytes(image, b) == self.states[n + 1][b]).all(), (b, n)
        return one

    def shorten(self, one, columns):
        """The state of plain decode after fewer columns."""
        before = self._slots()
        self.image.speculation.keep(one, np.array(columns, np.int32))
        for b, n in enumerate(columns):
            want = before[b] if n < 0 else self.states[n][b]
            assert (slot_bytes(self.image, b) == want).all(), (b, n)
