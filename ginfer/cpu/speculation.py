"""CpuSpeculation: drafts, acceptance and folds on the CPU image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.batch import Acceptance, Phase, Purpose, Selection
from ginfer.cpu import gdn, sampling
from ginfer.cpu.acceptance import ONE_Q, Drafts, accept_rows
from ginfer.cpu.drafter import CpuDrafter
from ginfer.cpu.head import make_chosen
from ginfer.cpu.selector import Anchors
from ginfer.cpu.stage import slice_draws, stage_draws
from ginfer.spec import LayerKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan, PackedTensor
    from ginfer.batch import DraftBatch, ForwardBatch
    from ginfer.cpu.gdn import Rows
    from ginfer.cpu.head import Head
    from ginfer.cpu.weights import Model
    from ginfer.spec import DrafterSpec, ModelSpec

    F32 = NDArray[np.float32]
    I32 = NDArray[np.int32]
    U16 = NDArray[np.uint16]


class _Drafted:
    """Drafts that are complete."""

    def __init__(self, token_ids: I32) -> None:
        self._token_ids = token_ids

    def read(self) -> I32:
        """The ids."""
        return self._token_ids


class CpuSpeculation:
    """Implements `Speculation`; without a drafter, drafts come from the host alone.

    mixes, gatings: [GDN layers, recorded columns, ...] float32, the raw recurrent inputs of the
    last forward that recorded. Of that forward: slots `state_out` hold the state after _held[b]
    columns, and _known[b] columns are drafter context.
    """

    def __init__(self, spec: ModelSpec, drafter: DrafterSpec | None) -> None:
        self._spec, self._drafter_spec = spec, drafter
        self.max_drafts = drafter.max_drafts if drafter else 0
        g = spec.gdn
        self._shape = gdn.Shape(g.num_k_heads, g.num_v_heads, g.k_head_dim, g.v_head_dim)
        self._layers = spec.layers_of(LayerKind.GATED_DELTANET)
        self._drafter: CpuDrafter | None = None
        self._used = self._held = self._known = np.zeros(0, np.int32)
        self._follows = False  # the forward is a plain round that nothing was kept of

    def load(self, model: Model, tensors: list[PackedTensor]) -> None:
        """Take the target and the tensors of the drafter. Raises ArtifactError."""
        self._model = model
        if self._drafter_spec is not None:
            self._drafter = CpuDrafter(self._drafter_spec, model, self._spec.num_token_ids)
            self._drafter.load(tensors)

    def allocate(self, plan: MemoryPlan, head: Head, threads: int) -> U16:
        """Allocate and zero everything; the rings, [layers, lanes, 2, tokens, width]."""
        self._head, self._lanes = head, plan.num_rows
        layers, R, g = len(self._layers), plan.max_recorded, self._spec.gdn
        self.mixes = np.zeros((layers, R, g.conv_channels), np.float32)
        self.gatings = np.zeros((layers, R, 2 * g.num_v_heads), np.float32)
        K = self._drafter_spec.num_candidates if self._drafter_spec else 1
        self._ids = np.zeros((self.max_drafts, plan.num_rows, K), np.int32)
        self._units = np.zeros((self.max_drafts, plan.num_rows, K), np.uint32)
        if self._drafter is None:
            return np.zeros((0, plan.num_rows, 2, 0, 0), np.uint16)
        self._drafter.allocate(
            num_lanes=plan.num_rows, max_columns=plan.max_columns, threads=threads
        )
        return self._drafter.rings

    def share(self, state: F32, history: F32, scratch: F32) -> None:
        """The recurrent slots, and scratch of the kernels."""
        self._state, self._history, self._scratch = state, history, scratch

    @property
    def nbytes(self) -> int:
        """Bytes of buffers, rings aside."""
        own = sum(a.nbytes for a in (self.mixes, self.gatings, self._ids, self._units))
        return own + (self._drafter.nbytes - self._drafter.rings.nbytes if self._drafter else 0)

    # -- what a forward leaves here ---------------------------------------------------------------

    def begin(self, batch: ForwardBatch, rows: Rows) -> None:
        """A forward begins."""
        self._rows, self._used = rows, batch.row_indptr[1:] - batch.row_indptr[:-1]
        self._held, self._known = self._used, np.zeros(batch.num_rows, np.int32)
        self._follows = batch.phase is Phase.DECODE and not batch.record
        if self._drafter is not None:
            self._drafter.begin(batch.num_columns, follows=self._follows)

    def record(self, index: int, mix: F32, gates: F32) -> None:
        """Keep the raw recurrent inputs of a GDN layer; mix may have more columns."""
        T = len(mix)
        self.mixes[index, :T], self.gatings[index, :T] = mix[:, : self.mixes.shape[2]], gates

    def tap(self, hidden: F32, layer_idx: int) -> None:
        """Keep the stream behind a layer, if the drafter wants it."""
        if self._drafter is not None:
            self._drafter.tap(hidden, layer_idx)

    # -- the protocol -----------------------------------------------------------------------------

    def draft(self, batch: DraftBatch) -> _Drafted:
        """Propose drafts for rows of lanes, and keep them."""
        assert self._drafter is not None
        n, lanes = batch.num_drafts, batch.lanes
        used = 0 if batch.rows is None else self._used[batch.rows]
        anchors = Anchors(
            self._head.tokens[0, lanes],
            np.array(batch.starts + used, np.int32),
            np.array(batch.temperature, np.float32),
            np.array(batch.seeds, np.uint64),
        )
        paths = self._drafter.propose(anchors, (batch.slots % self._lanes).astype(np.int32), n)
        self._head.tokens[1 : 1 + n, lanes] = paths.token_ids.T
        self._ids[:n, lanes] = paths.ids.swapaxes(0, 1)
        self._units[:n, lanes] = paths.units.swapaxes(0, 1)
        return _Drafted(paths.token_ids)

    def accept(self, hidden: F32, batch: ForwardBatch, limits: I32) -> Acceptance:
        """Accept a prefix of each row's drafts, choose the token behind it, and count them."""
        wanted, head = batch.selection, self._head
        assert wanted is not None
        draws, drafts = stage_draws(wanted), self._drafts(batch, limits)
        indptr, B = drafts.indptr, batch.num_rows
        chosen, accepted = make_chosen(int(indptr[-1]), max(wanted.num_top, 0)), self._used.copy()
        b0 = 0
        while b0 < B:
            b1 = b0 + int(np.searchsorted(indptr[b0:] - indptr[b0], head.num_rows, "right")) - 1
            r0, r1 = int(indptr[b0]), int(indptr[b1])
            logits = head.logits(hidden, np.arange(r0, r1, dtype=np.int32))
            accept_rows(
                sampling.Chosen(*(array[r0:r1] for array in chosen)),
                accepted[b0:b1],
                logits,
                slice_draws(draws, r0, r1),
                Drafts(
                    indptr[b0 : b1 + 1] - indptr[b0],
                    drafts.coupled[b0:b1],
                    *(array[r0:r1] for array in drafts[2:]),
                ),
                head.counts,
                head.scratch,
            )
            b0 = b1
        self._used = accepted + 1
        last = indptr[:-1] + accepted
        sound = chosen.finite[last]
        head.tokens[0, draws.rows[last[sound]]] = chosen.token_ids[last[sound]]
        return Acceptance(accepted=accepted, selection=Selection(**chosen._asdict()))

    def keep(self, batch: ForwardBatch, columns: I32 | None = None) -> None:
        """Fold, and extend the drafter's context; only what is not so already."""
        wanted = self._used if columns is None else np.array(columns, np.int32)
        if batch.record:
            fold = np.where((wanted >= 0) & (wanted != self._held), wanted, np.int32(-1))
            if (fold >= 0).any():
                self._fold(fold)
                self._held = np.where(fold >= 0, fold, self._held)
        if self._drafter is not None:
            if self._follows and columns is None:
                self._drafter.follow(batch.state_out % self._lanes, batch.starts)
                self._known = wanted
            else:
                self._extend(self._drafter, batch, wanted)
                self._known = np.maximum(self._known, wanted)
            self._follows = False

    def catch_up(self) -> None:
        """Have all drafter context in the rings, before they move."""
        if self._drafter is not None:
            self._drafter.catch_up()

    # -- inside -----------------------------------------------------------------------------------

    def _drafts(self, batch: ForwardBatch, limits: I32) -> Drafts:
        """What the columns of a batch are verified against."""
        indptr, names = batch.row_indptr.astype(np.int32), batch.token_ids
        T, K = len(names), self._ids.shape[2]
        following = np.full(T, -1, np.int32)
        following[:-1] = names[1:]
        place = np.arange(T) - np.repeat(indptr[:-1], np.diff(indptr))
        drafted = place + 1 < np.repeat(limits, np.diff(indptr))
        learned = drafted & (following < 0)
        tokens = np.where(drafted, following, 0).astype(np.int32)
        self._head.resolve(tokens)
        tokens[~drafted] = -1
        ids, units = np.full((T, K), -1, np.int32), np.zeros((T, K), np.uint32)
        ids[:, 0], units[drafted, 0] = tokens, ONE_Q
        step, lanes = np.divmod(~following[learned], self._lanes)
        ids[learned], units[learned] = self._ids[step - 1, lanes], self._units[step - 1, lanes]
        assert batch.selection is not None
        coupled = batch.selection.purposes[indptr[:-1]] == Purpose.DECODE
        return Drafts(indptr, coupled, tokens, ids, units)

    def _fold(self, columns: I32) -> None:
        T = int(self._rows.indptr[-1])
        for index, i in enumerate(self._layers):
            inputs = (self.mixes[index, :T], self.gatings[index, :T])
            memory = (self._state[index], self._history[index])
            weights = self._model.layers[i].gdn
            gdn.gdn_fold(*inputs, *memory, self._rows, columns, weights, self._shape, self._scratch)

    def _extend(self, drafter: CpuDrafter, batch: ForwardBatch, columns: I32) -> None:
        """Columns _known[b] .. columns[b] - 1 of each row become context."""
        assert self._drafter_spec is not None
        first = np.maximum(self._known, columns - self._drafter_spec.ring_tokens)
        counts = np.maximum(columns - first, 0)
        total = int(counts.sum())
        if not total:
            return
        place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        place += np.repeat(first, counts)
        drafter.extend(
            (place + np.repeat(batch.row_indptr[:-1], counts)).astype(np.int32),
            np.repeat(batch.state_out % self._lanes, counts).astype(np.int32),
            (place + np.repeat(batch.starts, counts)).astype(np.int32),
        )
