"""Head of a model on the CPU image: logits, selection, and what lanes have drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import Selection
from ginfer.cpu import sampling
from ginfer.cpu.linear import linear
from ginfer.cpu.norm import rms_norm
from ginfer.cpu.stage import slice_draws, stage_draws
from ginfer.env import FaultFile
from ginfer.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.batch import SelectionBatch
    from ginfer.cpu.weights import Model
    from ginfer.spec import ModelSpec

    F32 = NDArray[np.float32]
    I32 = NDArray[np.int32]


def make_chosen(R: int, num_top: int) -> sampling.Chosen:
    """Results of R columns that are not chosen yet."""
    return sampling.Chosen(
        np.zeros(R, np.int32),
        np.zeros(R, np.float32),
        np.zeros((R, num_top), np.int32),
        np.zeros((R, num_top), np.float32),
        np.zeros(R, np.bool_),
    )


class Head:
    """counts: [lanes, legal ids] int32, tokens given so far. tokens: [1 + drafts, lanes] int32,
    what a lane drew last, then its drafts: what a batch calls ~n is tokens.flat[n]."""

    def __init__(
        self, spec: ModelSpec, model: Model, *, num_lanes: int, num_drafts: int, threads: int
    ) -> None:
        self._spec, self._model = spec, model
        self.num_rows = max(num_lanes, 16)  # columns whose logits are held at once
        self._normed = np.zeros((self.num_rows, spec.hidden_size), np.float32)
        self._logits = np.zeros((self.num_rows, spec.vocab_size), np.float32)
        self.counts = np.zeros((num_lanes, spec.num_token_ids), np.int32)
        self.tokens = np.zeros((1 + num_drafts, num_lanes), np.int32)
        self.scratch = sampling.make_scratch(threads, spec.num_token_ids)
        self._faults = FaultFile()

    @property
    def nbytes(self) -> int:
        """Bytes of buffers, counts aside."""
        arrays = (self._normed, self._logits, self.tokens, *self.scratch)
        return sum(a.nbytes for a in arrays)

    def clear(self) -> None:
        """Forget what was drawn."""
        for array in (self._normed, self._logits, self.counts, self.tokens):
            array.fill(0)

    def resolve(self, ids: I32) -> None:
        """Put the tokens that only we know in the place of their negative names."""
        known = ids < 0
        assert ids.min(initial=0) >= -self.tokens.size
        ids[known] = self.tokens.reshape(-1)[~ids[known]]
        assert ids.max(initial=0) < self._spec.vocab_size  # kernels do not check

    def logits(self, hidden: F32, columns: I32) -> F32:
        """Logits of at most `num_rows` columns of the stream, [R, V]."""
        R = len(columns)
        x, logits = self._normed[:R], self._logits[:R]
        rms_norm(x, hidden[columns], self._model.final_norm, np.float32(self._spec.norm_eps))
        linear(logits, x, self._model.head)
        self._fail_if_asked(logits)
        return logits

    def _fail_if_asked(self, logits: F32) -> None:
        """Test hook: make a row of logits NaN, or end the engine, as a file says."""
        kind, row = self._faults.take()
        if kind == "nan":
            logits[row] = np.nan
        elif kind == "trap":
            raise DeviceError("a fault that was asked for", context_lost=True)

    def select(self, hidden: F32, wanted: SelectionBatch) -> Selection:
        """Choose a token for each wanted column, and count it."""
        draws, R = stage_draws(wanted), len(wanted.columns)
        assert draws.forced.max(initial=-1) < self._spec.num_token_ids
        chosen = make_chosen(R, max(wanted.num_top, 0))
        for r0 in range(0, R, self.num_rows):
            r1 = min(R, r0 + self.num_rows)
            logits = self.logits(hidden, wanted.columns[r0:r1])
            part = sampling.Chosen(*(array[r0:r1] for array in chosen))
            sampling.select_rows(
                part, logits, slice_draws(draws, r0, r1), self.counts, self.scratch
            )
        sound = chosen.finite
        lanes, ids = draws.rows[sound], chosen.token_ids[sound]
        np.add.at(self.counts, (lanes, ids), 1)
        self.tokens[0, lanes] = ids
        return Selection(**chosen._asdict())
