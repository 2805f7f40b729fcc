"""A drafter of the CUDA image beside that of the CPU image: the same weights, taps and drafts."""

from dataclasses import replace

import numpy as np
from numba import get_num_threads

from ginfer.backend import MemoryPlan
from ginfer.batch import DraftBatch, ForwardBatch, Phase
from ginfer.cpu.drafter import CpuDrafter
from ginfer.cpu.selector import Anchors
from ginfer.cpu.weights import bind
from ginfer.cuda.drafter.drafter import Target, draft_rows
from ginfer.cuda.drafter.drafting import DecodeColumns, Drafting, drafting_nbytes
from ginfer.cuda.drafter.weights import upload_drafter
from ginfer.cuda.runtime.memory import Arena, Slice
from ginfer.cuda.weights import upload
from ginfer.sizes import MIB
from ginfer.spec import PAGE_TOKENS
from scripts.make_fixture import drafter_shapes, random_arrays
from scripts.pack.codecs import bf16_bits
from scripts.random_models import packed_drafter
from tests.device_cases import from_fragments
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import Bound

HIDDEN = Bound(2.5e-2, 2e-2, 4e-2)  # BF16 between all operators against float32
LANES = 3


def random_drafter(target, spec, weights):
    """Tensors of a random drafter: norms around 1, convolutions that mix."""
    arrays = random_arrays(drafter_shapes(spec), seed=3)
    for name, array in arrays.items():
        if array.ndim == 1:
            array += 1
        if name.endswith("base_kernel"):
            array *= 8
        if name.endswith("codebook"):
            array *= 4
    contract = replace(target.contract, drafter=spec)
    return packed_drafter(contract, arrays, f"groupwise-int-dflash2-{weights}")


def _batch(phase, rows):
    """(batch, lane and token of its columns) of rows (lane, first token, columns, ..) each."""
    i32 = lambda values: np.array(list(values), np.int32)  # noqa: E731
    indptr = i32(np.cumsum([0, *(r[2] for r in rows)]))
    token = i32(np.concatenate([np.arange(r[1], r[1] + r[2]) for r in rows]))
    batch = ForwardBatch(
        phase=phase,
        token_ids=np.zeros(len(token), np.int32),
        positions=np.zeros((3, len(token)), np.int32),
        row_indptr=indptr,
        starts=i32(r[1] for r in rows),
        page_table=np.zeros((len(rows), 1), np.int32),
        state_in=i32(r[0] for r in rows),
        state_out=i32(r[0] + LANES for r in rows),
    )
    return batch, np.repeat(batch.state_in, np.diff(indptr)), token


class DrafterPair:
    """Drafters of both images for a random target. tensors: of the drafter."""

    def __init__(self, model, spec, tensors, *, queue, num_sms, max_tokens):
        self.spec, self.queue, C = spec, queue, spec.hidden_size
        text = model.packed()
        self.cpu = CpuDrafter(spec, bind(model.spec, text, lambda _: None), model.num_token_ids)
        self.cpu.load(tensors)
        self.cpu.allocate(num_lanes=LANES, max_columns=128, threads=get_num_threads())
        weights = upload_drafter(spec, tensors, queue.stream, lambda _: None)
        self.model = upload(model.spec, text, queue.stream, lambda _: None)
        plan = MemoryPlan(
            num_rows=LANES,
            num_units=1,
            unit_nbytes=1,
            num_slots=2 * LANES,
            max_columns=128,
            max_pages_per_row=max_tokens // PAGE_TOKENS,
        )
        sizes, most = drafting_nbytes(spec, plan), spec.max_drafts
        logits = draft_rows(spec, LANES) * spec.vocab_size * 4
        rings = LANES * spec.ring_nbytes
        nbytes = sum(sizes.values()) + logits + rings + 128 * C * 2 + 2 * MIB
        self.memory = Arena(nbytes, "drafter")
        take = self.memory.take
        self.hidden = take(128 * C * 2, "hidden").array((128, C), np.uint16)
        self.tokens = take((1 + most) * LANES * 4, "tokens").array((1 + most, LANES), np.uint32)
        self.columns = take(8 * 128, "columns").array((2, 128), np.int32)
        self.used = take(4 * LANES, "used").array((LANES,), np.int32)
        shape = (LANES, spec.num_layers, 2, spec.ring_tokens, spec.kv_width)
        self.rings = take(rings, "rings").array(shape, np.uint16)
        target = Target(
            embedding=self.model.embedding,
            head=self.model.head,
            num_token_ids=model.num_token_ids,
            hidden=self.hidden.address,
            logits=take(logits, "logits").address,
            tokens=self.tokens.address,
            rings=self.rings.address,
            used=self.used.address,
        )
        self.cuda = Drafting(spec, weights, queue=queue, num_sms=num_sms)
        at = self.columns.address
        self.cuda.allocate(self.memory, plan, target, DecodeColumns(at, at + 4 * 128))
        self.arenas = (weights.arena, self.model.arena, self.memory)
        self.rng = np.random.default_rng(11)

    def extend(self, rows, *, on_device=False):
        """Decode rows of random streams: (lane, first token, columns, how many are used) each;
        on_device: the device knows how many, the host does not."""
        batch, lanes, token = _batch(Phase.DECODE, rows)
        T, table = len(token), np.zeros((2, 128), np.int32)
        table[0, :T], table[1, :T] = np.repeat(np.arange(len(rows)), [r[2] for r in rows]), token
        self.columns.write(table)
        used = np.array([r[3] for r in rows], np.int32)
        if on_device:
            self.used.write(np.pad(used, (0, LANES - len(used))))
        self._run(batch)
        self.cuda.keep(batch, self.used.address if on_device else used)
        self.queue.stream.synchronize()
        kept = [c for n, c in zip(used, batch.row_indptr) for c in range(c, c + n)]
        kept = np.array(kept, np.int32)
        self.cpu.extend(kept, lanes[kept], token[kept])

    def follow(self, rows, *, waits=True):
        """A plain round of random streams: (lane, token) each. waits: its columns are set aside."""
        batch, lanes, token = _batch(Phase.DECODE, [(lane, at, 1, 1) for lane, at in rows])
        table = np.zeros((2, 128), np.int32)
        table[:, : len(rows)] = np.arange(len(rows)), token
        self.columns.write(table)
        self._run(batch)
        self.cuda.keep(batch, None if waits else np.ones(len(rows), np.int32))
        self.queue.stream.synchronize()
        self.cpu.extend(np.arange(len(rows), dtype=np.int32), lanes, token)

    def check_that_waiting_changes_nothing(self, lanes, start, count):
        """Rounds whose columns are set aside, and the same rounds whose are not."""
        kept = []
        for waits in (False, True):
            self.rings.write(np.zeros(self.rings.shape, np.uint16))
            self.rng = np.random.default_rng(1)
            for step in range(count):
                self.follow([(lane, start + step) for lane in lanes], waits=waits)
            self.cuda.catch_up()
            self.queue.stream.synchronize()
            kept.append(self.rings.read())
        assert kept[0].any(axis=-1).sum() == len(lanes) * count * 2 * self.spec.num_layers
        assert (kept[0] == kept[1]).all()

    def extend_prompt(self, rows):
        """Prompts: (lane, first token, columns) each."""
        batch, lanes, token = _batch(Phase.PREFILL, rows)
        self._run(batch)
        self.cuda.keep(batch, batch.starts)
        self.queue.stream.synchronize()
        self.cpu.extend(np.arange(len(token), dtype=np.int32), lanes, token)

    def _run(self, batch):
        """A forward of random streams."""
        self.cuda.begin(batch)
        T = batch.num_columns
        for layer in range(max(self.spec.tapped_layers) + 1):
            values = self.rng.standard_normal((128, self.spec.hidden_size)).astype(np.float32)
            bits = bf16_bits(values)
            self.hidden.write(bits)
            self.cuda.tap(layer, T, batch.phase)
            self.queue.stream.synchronize()
            self.cpu.tap(np.ascontiguousarray(bf16_to_f32(bits)[:T]), layer)

    def propose(self, lanes, starts, num_drafts, temperature=0.0, *, used=None):
        """(drafts of the CUDA image, paths of the CPU image, hidden states of both) of rows. used:
        columns of each start that only the device knows."""
        d, B, N = self.spec, len(lanes), num_drafts
        tokens = np.zeros(self.tokens.shape, np.uint32)
        tokens[0] = 7 + np.arange(LANES)
        self.tokens.write(tokens)
        seeds = np.arange(B).astype(np.uint64) * np.uint64(7)
        heat = np.full(B, temperature, np.float32)
        i32 = lambda a: np.array(a, np.int32)  # noqa: E731
        rows, known = None, i32(starts)
        if used is not None:
            rows, known = i32(lanes), known - i32(used)
            self.used.write(np.bincount(lanes, used, LANES).astype(np.int32))
        batch = DraftBatch(
            lanes=i32(lanes),
            slots=i32(lanes) + LANES,
            starts=known,
            temperature=heat,
            seeds=seeds,
            num_drafts=N,
            rows=rows,
        )
        drafts = self.cuda.draft(batch).read()
        assert (drafts == self.tokens.read()[1 : 1 + N, lanes].T).all()
        place = Slice(self.cuda._drafter._at["normed"], 128 * d.hidden_size * 2)
        normed = place.array((128 * d.hidden_size,), np.uint16).read()
        got = bf16_to_f32(from_fragments(normed, B * N, d.hidden_size))
        anchors = Anchors(i32([7 + lane for lane in lanes]), i32(starts), heat, seeds)
        paths = self.cpu.propose(anchors, i32(lanes), N)
        want = self.cpu._view("normed", B * N, d.hidden_size).copy()
        return drafts, paths, got, want

    def check(self, lanes, starts, num_drafts, *, used=None):
        """Compare a greedy draft; returns how many of its tokens were equal."""
        drafts, paths, got, want = self.propose(lanes, starts, num_drafts, used=used)
        HIDDEN.check(got, want, f"{starts} tokens of context")
        assert (drafts >= 0).all()
        return int((drafts == paths.token_ids).sum()), drafts.size

    def close(self):
        self.cuda.close()
        for arena in self.arenas:
            arena.close()
