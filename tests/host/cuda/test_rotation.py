"""Rotations of rotary positions: those of the table have the bits of the formula."""

import numpy as np
import pytest

from ginfer.cuda.rotation import RUN, Rotations, rope_frequencies
from ginfer.models.qwen import QWEN_27B

SPEC = QWEN_27B.spec
NUM = 10 * RUN


def formula(positions):
    axes, frequencies = rope_frequencies(SPEC)
    angles = positions.astype(np.float64)[axes].T * frequencies
    return np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)


def text(*places):
    return np.tile(np.array(places, np.int32), (3, 1))


@pytest.mark.parametrize(
    "positions",
    [
        text(0),
        text(RUN - 1, RUN, RUN + 1),
        text(*range(5, 3 * RUN)),
        text(NUM - 1, NUM, 0),
        text(-1, 3),
        np.random.default_rng(1).integers(0, NUM, (3, 20), np.int32),
    ],
)
def test_rows_have_the_bits_of_the_formula(positions):
    rotations, T = Rotations(SPEC, NUM), positions.shape[1]
    for _ in range(2):  # the second time they are known
        rows = np.full((T, SPEC.attention.rotary_dim), np.nan, np.float32)
        rotations.fill(rows, positions)
        assert (rows == formula(positions)).all()


def test_a_run_is_computed_once(monkeypatch):
    rotations, computed = Rotations(SPEC, NUM), []
    real = rotations._compute
    monkeypatch.setattr(
        rotations, "_compute", lambda rows, at: (computed.append(len(at)), real(rows, at))
    )
    rows = np.empty((2, SPEC.attention.rotary_dim), np.float32)
    for place in range(2 * RUN):
        rotations.fill(rows, text(place, place + RUN))
    assert computed == [RUN] * 3
