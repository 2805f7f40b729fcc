"""The drafter's kernels with emulated threads, against float64 and the CPU image."""

import pytest

from tests.drafter_cases import (
    check_block_attention,
    check_candidates,
    check_context,
    check_convolutions,
    check_paths,
    check_silu_up,
    check_tap,
)
from tests.host.cuda.emulator import Emulator


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
