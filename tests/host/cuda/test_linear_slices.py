"""How K is cut: fixed for the models' shapes, legal for every shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ginfer.cuda.linear.decode_launch import (
    COUNTERS_NBYTES,
    SMS,
    column_tiles,
    k_runs,
    k_slices,
    scratch_nbytes,
)
from ginfer.sizes import div_ceil


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((34816, 5120), (264, 10)),
        ((16384, 5120), (128, 1)),
        ((14336, 5120), (112, 1)),
        ((5120, 17408), (0, 3)),
        ((5120, 6144), (0, 3)),
        ((248320, 5120), (1940, 1)),
        ((96, 5120), (0, 10)),
        ((128, 64), (1, 1)),
    ],
)
def test_slices_of_real_shapes_are_part_of_the_numbers(shape, want):
    assert k_slices(*shape) == want


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((34816, 5120), (264, 80)),
        ((16384, 5120), (128, 0)),
        ((14336, 5120), (112, 0)),
        ((5120, 17408), (0, 132)),
        ((5120, 6144), (0, 120)),
        ((248320, 5120), (1940, 0)),
        ((96, 5120), (0, 10)),
        ((128, 64), (1, 0)),
    ],
)
def test_runs_of_real_shapes_are_part_of_the_numbers(shape, want):
    assert k_runs(*shape) == want


@given(N=st.integers(1, 300_000), K=st.integers(1, 40_000))
def test_runs_are_legal_for_every_shape(N, K):
    """A run has at least a step and at most a row block, so that it crosses one border at most."""
    whole, runs = k_runs(N, K)
    cut, steps = div_ceil(N, 128) - whole, div_ceil(K, 256)
    assert cut >= 0
    assert cut <= runs <= cut * steps
    assert runs * cut * steps < 1 << 32
    assert cut == 0 or runs >= 2 * cut or runs == SMS
    assert scratch_nbytes(N, K)[0] >= (runs + cut - 1) * 64 * 128 * 4


@given(N=st.integers(1, 300_000), K=st.integers(1, 40_000))
def test_slices_are_legal_for_every_shape(N, K):
    whole, slices = k_slices(N, K)
    blocks, steps = div_ceil(N, 128), div_ceil(K, 256)
    assert 0 <= whole <= blocks
    assert 1 <= slices <= steps
    assert (slices == 1) == (whole == blocks)
    _, counted = scratch_nbytes(N, K)
    assert counted >= COUNTERS_NBYTES + (blocks - whole) * slices * 64 * 128 * 4 * (slices > 1)
    assert 4 * (blocks - whole) <= COUNTERS_NBYTES


def test_the_narrowest_launch_that_holds_the_tokens():
    assert [column_tiles(T) for T in (1, 8, 9, 16, 17, 32, 33, 64)] == [1, 1, 2, 2, 4, 4, 8, 8]
