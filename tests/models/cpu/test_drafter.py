"""The drafter of the CPU image against its float64 oracle, and its own equalities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numba import get_num_threads

from ginfer.cpu.drafter import CpuDrafter
from ginfer.cpu.selector import Anchors
from ginfer.cpu.weights import bind
from ginfer.errors import ArtifactError
from ginfer.spec import DrafterSpec
from scripts.make_fixture import drafter_shapes, random_arrays
from scripts.random_models import MODELS, packed_drafter
from tests.oracles.drafter import DrafterOracle
from tests.tolerances import Bound

TARGET = MODELS[0]
WINDOW, TOKENS, CHUNK = 40, 110, 192
NEAR = 2e-3  # scores nearer than this may fall either way in float32
HIDDEN = Bound(5e-4, 1e-4, 5e-4)  # float32 against float64; context rounds to BF16 near its ties


def spec_of(block_size):
    return DrafterSpec(
        num_layers=2,
        hidden_size=TARGET.hidden_size,
        vocab_size=TARGET.vocab_size,
        mlp_width=176,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=48,
        rope_theta=1e6,
        norm_eps=1e-6,
        window=WINDOW,
        block_size=block_size,
        mask_id=250,
        tapped_layers=(0, 1, 3),
        conv_group=16,
        selector_rank=24,
        num_candidates=16,
    )


def drafter_tensors(spec, weights):
    """Random weights: norms around 1, convolutions that mix."""
    arrays = random_arrays(drafter_shapes(spec), seed=3)
    for name, array in arrays.items():
        if array.ndim == 1:
            array += 1
        if name.endswith("base_kernel"):
            array *= 8
        if name.endswith("codebook"):
            array *= 4
    contract = replace(TARGET.contract, drafter=spec)
    return packed_drafter(contract, arrays, f"groupwise-int-dflash2-{weights}")


class World:
    """A drafter with `lanes` lanes, its oracle, and random streams of the target."""

    def __init__(self, block_size=8, weights="q4", lanes=3):
        self.spec = spec_of(block_size)
        text, tensors = TARGET.packed(), drafter_tensors(self.spec, weights)
        model = bind(TARGET.spec, text, lambda _: None)
        self.drafter = CpuDrafter(self.spec, model, TARGET.num_token_ids)
        self.drafter.load(tensors)
        self.drafter.allocate(num_lanes=lanes, max_columns=CHUNK, threads=get_num_threads())
        self.drafter.rings[:] = 0x7FC0  # NaN: what was not written must not be read
        for buffer in self.drafter._buffers.values():
            buffer[:] = np.nan
        ends = [t for t in text if t.name in ("text/token_embedding", "text/output_head")]
        self.oracle = DrafterOracle(self.spec, [*tensors, *ends], TARGET.num_token_ids)
        r = np.random.default_rng(5)
        shape = (lanes, TOKENS, self.spec.tap_width)
        self.streams = r.standard_normal(shape).astype(np.float32)

    def extend(self, lanes, start, stop, keep=None):
        """The target runs tokens start .. stop of lanes; the first `keep` become context."""
        C, n = self.spec.hidden_size, stop - start
        keep = n if keep is None else keep
        hidden = np.concatenate([self.streams[lane, start:stop] for lane in lanes])
        for i in range(TARGET.num_layers):
            at = self.spec.tapped_layers.index(i) if i in self.spec.tapped_layers else None
            stream = np.full((len(hidden), C), np.nan, np.float32)
            if at is not None:
                stream = np.ascontiguousarray(hidden[:, at * C : (at + 1) * C])
            self.drafter.tap(stream, i)
        columns = [k * n + i for k in range(len(lanes)) for i in range(keep)]
        tokens = [start + i for _ in lanes for i in range(keep)]
        owners = [lane for lane in lanes for _ in range(keep)]
        self.drafter.extend(*(np.array(a, np.int32) for a in (columns, owners, tokens)))

    def propose(self, lanes, lengths, num_drafts, temperature=0.0):
        """(paths, final hidden states [lanes, num_drafts, C])."""
        anchors = Anchors(
            np.array([7 + lane for lane in lanes], np.int32),
            np.array(lengths, np.int32),
            np.full(len(lanes), temperature, np.float32),
            np.arange(len(lanes)).astype(np.uint64) * np.uint64(7),
        )
        paths = self.drafter.propose(anchors, np.array(lanes, np.int32), num_drafts)
        C = self.spec.hidden_size
        hidden = self.drafter._view("normed", len(lanes) * num_drafts, C).copy()
        return paths, hidden.reshape(len(lanes), num_drafts, C)

    def check(self, lane, length, paths, hidden, row):
        """Compare one row of a proposal with the oracle."""
        context = self.oracle.context(self.streams[lane, :length].astype(np.float64))
        n = hidden.shape[1]
        want = self.oracle.block(7 + lane, n, context)
        HIDDEN.check(hidden[row], want, f"lane {lane}, {length} tokens of context")
        path, scores = self.oracle.path(7 + lane, want)
        for got, expected, score in zip(paths.token_ids[row].tolist(), path, scores):
            if got != expected:
                assert score[expected] - score.get(got, -np.inf) < NEAR
                return
        assert set(paths.ids[row, 0].tolist()) == set(scores[0])


@pytest.mark.parametrize(
    ("block_size", "weights"), [(8, "q4"), (16, "q4w8"), (8, "w8")], ids=lambda v: str(v)
)
def test_blocks_are_the_oracle_s_for_every_width_and_context(block_size, weights):
    world = World(block_size, weights)
    lengths = [0, 0, 0]
    for step in (1, 2, 30, 8, 60):  # before, at and beyond the window
        world.extend([0, 1, 2], lengths[0], lengths[0] + step)
        lengths = [n + step for n in lengths]
        for num_drafts in (1, block_size // 2, block_size - 1):
            paths, hidden = world.propose([2, 0], lengths[:2], num_drafts)
            for row, lane in enumerate((2, 0)):
                world.check(lane, lengths[0], paths, hidden, row)


def test_a_row_is_the_same_alone_in_company_and_however_its_context_came():
    one, many = World(), World()
    for start in range(0, 96, 48):
        one.extend([1], start, start + 48)
    start = 0
    for step in (1, 7, 40, 8, 8, 8, 8, 16):
        many.extend([0, 1, 2], start, start + step)
        start += step
    for temperature in (0.0, 0.8):
        alone, x = one.propose([1], [96], 7, temperature)
        company, y = many.propose([1, 0, 2], [96, 96, 96], 7, temperature)
        np.testing.assert_array_equal(x[0], y[0])
        for a, b in zip(alone, company):
            np.testing.assert_array_equal(a[0], b[0])


def test_rejected_columns_leave_no_trace_in_the_context():
    clean, drafted = World(), World()
    clean.extend([0], 0, 60)
    drafted.extend([0], 0, 57)
    drafted.propose([0], [57], 7)
    drafted.extend([0], 57, 65, keep=3)  # of eight verified columns three are accepted
    for world in (clean, drafted):
        world.drafter.catch_up()
    np.testing.assert_array_equal(clean.drafter.rings[:, 0], drafted.drafter.rings[:, 0])


def test_sampled_drafts_are_a_function_of_seed_and_position():
    world = World()
    world.extend([0, 1, 2], 0, 20)
    first, _ = world.propose([0, 1, 2], [20] * 3, 7, 1.0)
    again, _ = world.propose([0, 1, 2], [20] * 3, 7, 1.0)
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert (first.token_ids < TARGET.num_token_ids).all()
    assert (first.units.sum(axis=2) == 1 << 24).all()


def test_a_package_without_a_tensor_of_the_drafter_is_refused_by_name():
    world = World()
    tensors = [t for t in drafter_tensors(world.spec, "w8") if not t.name.endswith("1/mlp/up_proj")]
    with pytest.raises(ArtifactError, match="dflash2/layers/1/mlp/up_proj is missing"):
        world.drafter.load(tensors)
