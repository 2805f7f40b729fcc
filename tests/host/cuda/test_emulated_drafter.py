"""The drafter's kernels with emulated threads, against float64 and the CPU image."""

from dataclasses import replace

import pytest

from ginfer.backend import MemoryPlan
from ginfer.cuda.backend import CudaBackend
from ginfer.cuda.drafter.weights import context_nbytes, upload_drafter
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.queue import Queue
from ginfer.cuda.runtime.stream import Stream
from ginfer.cuda.weights import ALIGNMENT, VECTORS_NBYTES
from ginfer.engine.memory import page_nbytes
from ginfer.errors import ArtifactError, ConfigError
from ginfer.models.dflash2 import QWEN_DEMO_DRAFTER
from ginfer.sizes import align_up
from scripts.random_models import MODELS
from tests.drafter_cases import (
    check_block_attention,
    check_candidates,
    check_context,
    check_convolutions,
    check_paths,
    check_silu_up,
    check_tap,
)
from tests.drafter_world import DrafterPair, random_drafter
from tests.host.cuda import emulated_device
from tests.host.cuda.emulator import Emulator

TARGET = MODELS[0]


@pytest.fixture
def run():
    return Emulator(0)


def test_taps_lie_side_by_side(run):
    check_tap(run, 3, 64)
    check_tap(run, 66, 64)


def test_context_keeps_what_is_used_of_the_last_window(run):
    check_context(
        run, (2, 2, 16, 24), [(1, 500, 5, 3), (0, 250, 40, 37), (2, 7, 2, 0), (3, 9, 1, -1)]
    )


@pytest.mark.parametrize(("B", "S"), [(2, 8), (3, 1), (1, 3)])
def test_convolutions_and_the_norm_behind(run, B, S):
    check_convolutions(run, B, S, 128)


def test_silu_of_the_gate_times_up(run):
    check_silu_up(run, 3, 192)


def test_block_attention_over_rings_and_itself(run):
    check_block_attention(run, (4, 1), 8, [(1, 300), (0, 5)], (128, 192))


@pytest.mark.parametrize("V", [16, 130, 4100])
def test_candidates_are_the_best_ids(run, V):
    check_candidates(run, V)


def test_paths_are_those_of_the_cpu_image_from_the_scores_on(run):
    check_paths(run, 2, 3, 300, 64)


SPEC = replace(
    QWEN_DEMO_DRAFTER,
    num_layers=1,
    hidden_size=TARGET.hidden_size,
    vocab_size=TARGET.vocab_size,
    mask_id=250,
    tapped_layers=(0, 1),
    mlp_width=128,
    window=128,
    selector_rank=24,
)


@pytest.fixture
def queue(monkeypatch):
    driver = emulated_device.install(monkeypatch)
    return Queue(emulated_device.Image(driver), Stream())


def test_drafts_are_those_of_the_cpu_image(queue):
    tensors = random_drafter(TARGET, SPEC, "q4")
    pair = DrafterPair(TARGET, SPEC, tensors, queue=queue, num_sms=2, max_tokens=512)
    pair.extend_prompt([(1, 0, 2), (0, 0, 1)])
    pair.extend([(1, 2, 4, 3)], on_device=True)
    for used in (None, [3]):  # known to the host, or to the device alone
        equal, total = pair.check([1], [5], 2, used=used)
        assert equal == total
    pair.check_that_waiting_changes_nothing([1, 0], 5, 2)
    pair.close()


def test_what_lacks_or_has_no_kernel_is_named(queue):
    tensors = random_drafter(TARGET, SPEC, "q4")
    lost = [t for t in tensors if t.name != "dflash2/layers/0/self_attn/k_proj"]
    with pytest.raises(ArtifactError, match="k_proj is missing"):
        upload_drafter(SPEC, lost, queue.stream, lambda _: None)
    with pytest.raises(ConfigError, match="heads of 128 dims"):
        upload_drafter(replace(SPEC, head_dim=64), tensors, queue.stream, lambda _: None)


def test_the_ledger_counts_every_arena_that_is_taken(queue, monkeypatch):
    taken, asked, real = [], [], Arena.__init__

    def note(arena, nbytes, name):
        real(arena, nbytes, name)
        taken.append(arena)
        asked.append(nbytes)

    monkeypatch.setattr(Arena, "__init__", note)
    spec = TARGET.spec
    image = CudaBackend(spec, graphs=False, speculates=True, drafter=SPEC)
    drafts = random_drafter(TARGET, SPEC, "q4")
    image.load([*TARGET.packed(), *drafts], lambda _: None)
    plan = MemoryPlan(
        num_rows=2,
        num_units=4,
        unit_nbytes=page_nbytes(spec),
        num_slots=4,
        max_columns=8,
        max_pages_per_row=2,
        max_recorded=8,
    )
    image.allocate(plan)
    assert [arena.name for arena in taken] == ["weights", "weights", "memory of requests"]
    ledger = image.ledger()
    assert sum(ledger.values()) == sum(arena.taken_nbytes for arena in taken)
    copied = [t for t in drafts if t.name.endswith(("k_proj", "v_proj"))]
    payload = sum(align_up(t.data.nbytes, ALIGNMENT) for t in (*drafts, *copied))
    assert asked[1] == payload + VECTORS_NBYTES, "k and v are there twice, nothing else"
    assert sum(t.data.nbytes for t in copied) <= context_nbytes(SPEC)
    image.close()
