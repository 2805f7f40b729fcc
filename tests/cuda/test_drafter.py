"""The drafter's kernels on the GPU, and a drafter beside that of the CPU image."""

from dataclasses import replace

import pytest

from ginfer.cuda.runtime.queue import Queue
from ginfer.models.dflash2 import QWEN_DEMO_DRAFTER
from scripts.random_models import MODELS
from tests.cuda.test_blocks import OnDevice
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

SHAPES = [(4, 1), (32, 8)]  # query and K/V heads of both drafters


@pytest.fixture
def run(image, stream, memory):
    return OnDevice(image, stream, memory)


@pytest.mark.parametrize("C", [64, 384, 5120])
@pytest.mark.parametrize("T", [1, 8, 65, 128])
def test_taps_lie_side_by_side(run, T, C):
    check_tap(run, T, C)


@pytest.mark.parametrize(
    "form", [(3, 1, 2048, 2112), (5, 8, 2048, 2112), (2, 2, 128, 192)], ids=str
)
def test_context_keeps_what_is_used_of_the_last_window(run, form):
    check_context(run, form, [(1, 5000, 8, 3), (0, 250_000, 9, 9), (2, 7, 2, 0), (3, 9, 1, -1)])
    check_context(run, (*form[:2], 128, 192), [(0, 100, 300, 299)])


@pytest.mark.parametrize("C", [384, 5120, 6656])
@pytest.mark.parametrize(("B", "S"), [(1, 8), (8, 8), (8, 16), (3, 5)])
def test_convolutions_and_the_norm_behind(run, B, S, C):
    check_convolutions(run, B, S, C)


@pytest.mark.parametrize("width", [768, 17408])
@pytest.mark.parametrize("T", [8, 128])
def test_silu_of_the_gate_times_up(run, T, width):
    check_silu_up(run, T, width)


@pytest.mark.parametrize("S", [2, 8, 16])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_block_attention_over_rings_and_itself(run, heads, S):
    rows = [(1, 5000), (0, 0), (2, 127), (4, 2048), (3, 129)]
    check_block_attention(run, heads, S, rows, (2048, 2112))


def test_a_block_has_the_same_attention_in_any_company(run):
    rows = [(1, 3000), (0, 700), (2, 1)]
    together = check_block_attention(run, (32, 8), 8, rows, (2048, 2112))
    again = check_block_attention(run, (32, 8), 8, rows, (2048, 2112))
    assert (together == again).all()


@pytest.mark.parametrize("V", [16, 4111, 248_077])
def test_candidates_are_the_best_ids(run, V):
    check_candidates(run, V)


@pytest.mark.parametrize(("N", "R"), [(1, 64), (7, 256), (15, 256)])
def test_paths_are_those_of_the_cpu_image_from_the_scores_on(run, N, R):
    check_paths(run, 8, N, 5000, R)


@pytest.mark.parametrize("weights", ["q4", "w8"])
def test_drafts_are_those_of_the_cpu_image(image, stream, device, weights):
    target = MODELS[0]
    spec = replace(
        QWEN_DEMO_DRAFTER,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        mask_id=250,
        tapped_layers=(0, 1, 3),
        mlp_width=256,
        window=256,
    )
    pair = DrafterPair(
        target,
        spec,
        random_drafter(target, spec, weights),
        queue=Queue(image, stream),
        num_sms=device.info.num_sms,
        max_tokens=1024,
    )
    pair.cuda.capture()
    equal = total = 0
    at = 50
    pair.extend_prompt([(0, 0, at), (2, 0, at)])
    for step in (1, 2, 30, 8, 40, 40, 40, 40, 40, 40, 40, 40):
        pair.extend([(0, at, step, step), (2, at, step + 1, step)], on_device=step == 40)
        at += step
        for num_drafts in (1, 7):
            same, all_of_them = pair.check([2, 0], [at, at], num_drafts)
            equal, total = equal + same, total + all_of_them
    assert equal >= 0.8 * total
    for temperature in (0.0, 0.8):  # alone is in company, and eager is a graph
        drafts, _, hidden, _ = pair.propose([2, 0], [at, at], 7, temperature)
        alone, _, own, _ = pair.propose([2], [at], 7, temperature)
        assert (hidden[:7] == own).all()
        assert (drafts[0] == alone[0]).all()
        graphs, pair.cuda._graphs = pair.cuda._graphs, {}
        eager, _, again, _ = pair.propose([2, 0], [at, at], 7, temperature)
        pair.cuda._graphs = graphs
        assert (eager == drafts).all()
        assert (again == hidden).all()
        behind, _, own, _ = pair.propose([2, 0], [at, at], 7, temperature, used=[3, 1])
        assert (behind == drafts).all()
        assert (own == hidden).all()
    pair.check_that_waiting_changes_nothing([0, 2], at, 70)  # more than can be set aside at a time
    pair.close()
