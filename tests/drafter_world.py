"""A drafter of the CUDA image beside that of the CPU image: the same weights, taps and drafts."""

from dataclasses import replace

import numpy as np
from numba import get_num_threads

from ginfer.batch import DraftBatch, ForwardBatch, Phase
from ginfer.cpu.drafter import CpuDrafter
from ginfer.cpu.selector import Anchors
from ginfer.cpu.weights import bind
from ginfer.cuda.drafter.context import ContextColumns
from ginfer.cuda.drafter.drafter import Drafter, Target, draft_rows, drafter_nbytes
from ginfer.cuda.drafter.prompt import PromptContext, prompt_nbytes
from ginfer.cuda.drafter.weights import upload_drafter
from ginfer.cuda.runtime.memory import Arena, Slice
from ginfer.cuda.weights import upload
from ginfer.sizes import MIB
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


def _columns(rows):
    """(lane, row, token) of columns, [T] int32 each, and where rows begin."""
    indptr = np.cumsum([0, *(n for _, _, n, _ in rows)])
    row = np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(indptr))
    token = np.concatenate([np.arange(first, first + n) for _, first, n, _ in rows])
    lanes = np.array([r[0] for r in rows], np.int32)
    return lanes[row], row, token.astype(np.int32), indptr


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
        sizes = {
            **drafter_nbytes(spec, LANES, max_tokens),
            **prompt_nbytes(spec, LANES, 128),
        }
        logits = draft_rows(spec, LANES) * spec.vocab_size * 4
        self.memory = Arena(sum(sizes.values()) + logits + 128 * C * 2 + 2 * MIB, "drafter")
        take = self.memory.take
        self.hidden = take(128 * C * 2, "hidden").array((128, C), np.uint16)
        self.tokens = take((1 + spec.max_drafts) * LANES * 4, "tokens").array(
            (1 + spec.max_drafts, LANES), np.uint32
        )
        tables = take(4 * (2 * 128 + 3 * LANES), "columns").array((2 * 128 + 3 * LANES,), np.int32)
        self.columns = tables
        target = Target(
            embedding=self.model.embedding,
            head=self.model.head,
            num_token_ids=model.num_token_ids,
            hidden=self.hidden.address,
            logits=take(logits, "logits").address,
            tokens=self.tokens.address,
        )
        self.cuda = Drafter(spec, weights, queue=queue, num_sms=num_sms)
        self.cuda.allocate(self.memory, target, lanes=LANES, max_tokens=max_tokens)
        self.prompt = PromptContext(spec, weights, queue=queue, num_sms=num_sms)
        self.prompt.allocate(
            self.memory,
            self.cuda.rings,
            self.cuda.key_norms,
            hidden=self.hidden.address,
            lanes=LANES,
            max_columns=128,
        )
        self.arenas = (weights.arena, self.model.arena, self.memory)
        self.rng = np.random.default_rng(11)

    def extend(self, rows):
        """Rows of random streams: (lane, first token, columns, how many are used) each."""
        T = sum(n for _, _, n, _ in rows)
        self._tap(T, lambda layer: self.cuda.tap(layer, T))
        lanes, row, token, indptr = _columns(rows)
        table = np.zeros(self.columns.shape, np.int32)
        table[:T], table[128 : 128 + T] = row, token
        for i, (lane, first, _, used) in enumerate(rows):
            table[[256 + i, 256 + LANES + i, 256 + 2 * LANES + i]] = lane, first, used
        self.columns.write(table)
        at = self.columns.address
        places = (256, 256 + LANES, 256 + 2 * LANES)
        self.cuda.extend(ContextColumns(at, at + 4 * 128, *(at + 4 * p for p in places)), T)
        self.queue.stream.synchronize()
        used = [c for (_, _, _, n), c in zip(rows, indptr) for c in range(c, c + n)]
        used = np.array(used, np.int32)
        self.cpu.extend(used, lanes[used], token[used])

    def extend_prompt(self, rows):
        """Prompts: (lane, first token, columns) each."""
        rows = [(*r, r[2]) for r in rows]
        lanes, row, token, indptr = _columns(rows)
        i32 = lambda values: np.array(list(values), np.int32)  # noqa: E731
        batch = ForwardBatch(
            phase=Phase.PREFILL,
            token_ids=np.zeros(len(row), np.int32),
            positions=np.zeros((3, len(row)), np.int32),
            row_indptr=indptr.astype(np.int32),
            starts=i32(r[1] for r in rows),
            page_table=np.zeros((len(rows), 1), np.int32),
            state_in=i32(r[0] for r in rows),
            state_out=i32(r[0] + LANES for r in rows),
        )
        self.prompt.begin(batch)
        self._tap(len(row), self.prompt.tap)
        self.prompt.extend()
        self.queue.stream.synchronize()
        self.cpu.extend(np.arange(len(row), dtype=np.int32), lanes, token)

    def _tap(self, T, tap):
        for layer in range(max(self.spec.tapped_layers) + 1):
            values = self.rng.standard_normal((128, self.spec.hidden_size)).astype(np.float32)
            bits = bf16_bits(values)
            self.hidden.write(bits)
            tap(layer)
            self.queue.stream.synchronize()
            self.cpu.tap(np.ascontiguousarray(bf16_to_f32(bits)[:T]), layer)

    def propose(self, lanes, starts, num_drafts, temperature=0.0):
        """(drafts of the CUDA image, paths of the CPU image, hidden states of both) of rows."""
        d, B, N = self.spec, len(lanes), num_drafts
        tokens = np.zeros(self.tokens.shape, np.uint32)
        tokens[0] = 7 + np.arange(LANES)
        self.tokens.write(tokens)
        seeds = np.arange(B).astype(np.uint64) * np.uint64(7)
        heat = np.full(B, temperature, np.float32)
        i32 = lambda a: np.array(a, np.int32)  # noqa: E731
        batch = DraftBatch(
            lanes=i32(lanes),
            slots=i32(lanes) + LANES,
            starts=i32(starts),
            temperature=heat,
            seeds=seeds,
            num_drafts=N,
        )
        self.cuda.fill(batch)
        self.cuda.propose(B, N)
        self.queue.stream.synchronize()
        normed = self.memory_of("normed", 128 * d.hidden_size)
        got = bf16_to_f32(from_fragments(normed, B * N, d.hidden_size))
        anchors = Anchors(i32([7 + lane for lane in lanes]), i32(starts), heat, seeds)
        paths = self.cpu.propose(anchors, i32(lanes), N)
        want = self.cpu._view("normed", B * N, d.hidden_size).copy()
        return self.tokens.read()[1 : 1 + N, lanes].T.astype(np.int32), paths, got, want

    def memory_of(self, name, count):
        """The start of a buffer of the drafter, as BF16 bits."""
        return Slice(self.cuda._at[name], 2 * count).array((count,), np.uint16).read()

    def check(self, lanes, starts, num_drafts):
        """Compare a greedy draft; returns how many of its tokens were equal."""
        drafts, paths, got, want = self.propose(lanes, starts, num_drafts)
        HIDDEN.check(got, want, f"{starts} tokens of context")
        assert (drafts >= 0).all()
        return int((drafts == paths.token_ids).sum()), drafts.size

    def close(self):
        self.cuda.close()
        self.prompt.close()
        for arena in self.arenas:
            arena.close()
