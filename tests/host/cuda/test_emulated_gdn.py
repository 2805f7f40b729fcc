"""Gated DeltaNet in chunks with emulated threads, against the oracle."""

import numpy as np
import pytest

from tests.device_cases import check_conv, check_gdn, gdn_chunks, make_gdn
from tests.host.cuda.emulator import Emulator


@pytest.fixture
def run():
    return Emulator(0)


def test_chunks_that_begin_and_end_anywhere(run):
    it = make_gdn(8, (1, 1), [63], [(0, 1)])
    convolved, before = check_conv(run, it), it.state.copy()
    check_gdn(it, convolved, before, gdn_chunks(run, it, convolved, [3]))


@pytest.mark.long
def test_a_cut_at_a_multiple_of_64_changes_no_bit(run):
    it, other = (make_gdn(9, (1, 1), [66], [(0, 0)]) for _ in range(2))
    convolved = check_conv(run, it)
    whole = gdn_chunks(run, it, convolved, [0])
    mix, ab, parts = other.mix, other.ab, []
    for first, end in ((0, 64), (64, 66)):
        other.mix, other.ab = mix[first:end].copy(), ab[first:end].copy()
        other.indptr = np.array([0, end - first], np.int32)
        parts.append(gdn_chunks(run, other, convolved[first:end].copy(), [first]))
    assert (np.concatenate(parts) == whole).all()
    assert (other.state == it.state).all()
