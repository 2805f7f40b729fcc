"""Units of work of prefill attention over thread blocks: none waits for one that comes late."""

import pytest

from ginfer.cuda.attention.prefill_launch import MAX_BLOCKS, columns_of_item, spread
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
def test_items_fill_tiles_of_rows(capability, M):
    columns = columns_of_item(capability, M)
    assert columns >= 8
    if capability == "90a":
        assert 128 - M < columns * M <= 128
