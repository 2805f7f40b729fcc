"""Units of work of prefill attention over thread blocks: none waits for one that comes late."""

import numpy as np
import pytest

from ginfer.cuda.attention.prefill_launch import MAX_BLOCKS, query_items, spread
from ginfer.cuda.runtime.jit import CAPABILITIES


@pytest.mark.parametrize("num_sms", [1, 48, 132, 170])
def test_thread_blocks_that_share_a_unit_are_resident_together(num_sms):
    for units in range(1, 1000):
        grid, split = spread(units, num_sms)
        rest = units % grid
        assert 1 <= grid <= min(num_sms, MAX_BLOCKS)
        assert split >= 1
        if units < grid:
            assert units * split == grid
        elif rest:
            assert rest * split <= grid < rest * (split + 1)


def test_few_units_take_most_of_the_multiprocessors():
    assert spread(20, 132) == (120, 6)
    assert spread(66, 132) == (132, 2)
    assert spread(132, 132) == (132, 1)
    assert spread(384, 132) == (132, 1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("M", [3, 6, 16])
def test_items_hold_every_query_once_the_longest_histories_first(capability, M):
    indptr = np.array([0, 1, 1, 66, 258], np.int32)
    token = np.concatenate([np.arange(n) + at for n, at in ((1, 9), (65, 64), (192, 100))])
    items = query_items(capability, M, indptr, token.astype(np.int32))
    assert (np.diff(token[items[:, 0]]) <= 0).all()
    rows = []
    for t, what in items.tolist():
        if capability == "90a":
            first = t * M + (what >> 16)
            rows += range(first, first + (what & 0xFFFF))
        else:
            rows += range(t * M, (t + what) * M)
        assert len({int(i) for i in np.searchsorted(indptr, [t, rows[-1] // M], "right")}) == 1
    assert sorted(rows) == list(range(258 * M))
    if capability == "90a":
        assert len(items) == 1 + -(-65 * M // 128) + -(-192 * M // 128)
