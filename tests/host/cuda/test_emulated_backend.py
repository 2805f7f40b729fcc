"""The CUDA image against the CPU image on a small random model, with emulated threads."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase, SelectionBatch
from ginfer.cpu.backend import CpuBackend
from ginfer.cuda.backend import CudaBackend
from ginfer.cuda.frame import slots_apart
from ginfer.engine.memory import page_nbytes
from ginfer.models import qwen
from ginfer.spec import LayerKind
from scripts.random_models import MODELS, RandomModel
from tests.host.cuda.emulated_device import install


class TwoLayers(RandomModel):
    """One layer of each kind."""

    @property
    def contract(self):
        whole = super().contract
        layers = (LayerKind.GATED_DELTANET, LayerKind.FULL_ATTENTION)
        return replace(whole, spec=replace(whole.spec, layers=layers))


def selection(columns, rows, positions):
    R = len(columns)
    i32 = lambda *v: np.array(v, np.int32)  # noqa: E731
    f32 = lambda v: np.full(R, v, np.float32)  # noqa: E731
    return SelectionBatch(
        columns=i32(*columns),
        rows=i32(*rows),
        temperature=f32(0.0),
        top_k=np.zeros(R, np.int32),
        top_p=f32(1.0),
        min_p=f32(0.0),
        presence=f32(0.0),
        frequency=f32(0.0),
        seeds=np.zeros(R, np.uint64),
        positions=i32(*positions),
        purposes=np.zeros(R, np.int32),
        forced=np.full(R, -1, np.int32),
        bias_indptr=np.zeros(R + 1, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        num_top=4,
    )


def batch(phase, ids, lengths, starts, pages):
    """Rows with slot and lane equal to their index; the last column of each is selected."""
    B = len(lengths)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    token = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths)])
    slots = np.arange(B, dtype=np.int32)
    return ForwardBatch(
        phase=phase,
        token_ids=np.array(ids, np.int32),
        positions=np.tile(token.astype(np.int32), (3, 1)),
        row_indptr=indptr,
        starts=np.array(starts, np.int32),
        page_table=np.array(pages, np.int32),
        state_in=slots,
        state_out=slots,
        selection=selection(indptr[1:] - 1, slots, np.array(starts) + lengths),
    )


def run(spec, image, batch):
    """The selection of a batch."""
    return image.select(qwen.forward(spec, image, batch), batch).read()


@pytest.fixture
def pair(monkeypatch):
    """(spec, CPU image, emulated CUDA image) with the same weights."""
    install(monkeypatch)
    model = TwoLayers(**asdict(MODELS[0]))
    spec, images = model.spec, []
    plan = MemoryPlan(
        num_rows=2,
        num_units=4,
        unit_nbytes=page_nbytes(spec),
        num_slots=4,
        max_columns=8,
        max_pages_per_row=2,
    )
    for image in (CpuBackend(spec), CudaBackend(spec, graphs=False)):
        image.load(model.packed(), lambda _: None)
        image.allocate(plan)
        images.append(image)
    yield spec, *images
    for image in images:
        image.close()
        image.close()


def test_slots_are_apart_where_none_is_both_read_and_written():
    one = batch(Phase.DECODE, [1, 2], [1, 1], [4, 4], [[0], [1]])
    assert not slots_apart(one)
    assert not slots_apart(replace(one, state_out=one.state_in[::-1].copy()))
    assert slots_apart(replace(one, state_out=one.state_in + np.int32(2)))


def test_prompts_and_rounds_equal_the_cpu_image_within_bf16(pair):
    spec, *images = pair
    pages = [[2, 1], [0, 3]]
    prompt = batch(Phase.PREFILL, [5, 9, 200, 31], [3, 1], [0, 3], pages[:1] * 2)
    one_slot = np.zeros(2, np.int32)  # so that the second row goes on from the first
    other_slots = np.array([2, 3], np.int32)
    batches = (
        replace(prompt, state_in=one_slot, state_out=one_slot),
        batch(Phase.DECODE, [17, 40], [1, 1], [4, 0], pages),
        replace(batch(Phase.DECODE, [~1, ~0], [1, 1], [5, 1], pages), state_out=other_slots),
        replace(batch(Phase.DECODE, [3, 77], [1, 1], [6, 2], pages), state_in=other_slots),
    )
    for one in batches:
        want, got = (run(spec, image, one) for image in images)
        assert got.finite.all()
        for r in range(len(want.token_ids)):
            mine = dict(zip(got.top_ids[r].tolist(), got.top_logprobs[r].tolist()))
            theirs = dict(zip(want.top_ids[r].tolist(), want.top_logprobs[r].tolist()))
            shared = mine.keys() & theirs.keys()
            assert got.token_ids[r] == want.token_ids[r]
            assert len(shared) >= 3
            assert all(abs(mine[i] - theirs[i]) < 0.2 for i in shared)
    for image in images:
        ledger = image.ledger()
        assert min(ledger[name] for name in ("weights", "arena", "slots", "counts")) > 0
