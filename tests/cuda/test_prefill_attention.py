"""Prefill attention of sm_90a on the GPU: float64 oracles, cuts, company, thread blocks that share
a row."""

from dataclasses import replace

import numpy as np
import pytest

from ginfer.cuda.attention.prefill_wgmma import BLOCK_TILES
from tests.attention_cases import check_append, check_attention, make_cache
from tests.cuda.test_blocks import OnDevice
from tests.prefill_cases import attention_prefill_wgmma


@pytest.fixture
def run(image, stream, memory, capability):
    if capability != "90a":
        pytest.skip("the kernel needs wgmma")
    return OnDevice(image, stream, memory)


def attend(run, cache, **how):
    return attention_prefill_wgmma(run, cache, block_tiles=BLOCK_TILES, **how)


@pytest.mark.parametrize("heads", [(3, 1), (24, 4), (16, 1)], ids=str)
@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(65, 65), (7, 3)], [(300, 200), (64, 64)], [(2050, 3)], [(4200, 25)]]
)
def test_rows_against_the_oracle(run, heads, rows):
    cache = make_cache(len(rows) * rows[0][0], heads, rows)
    check_append(run, cache)
    check_attention(cache, attend(run, cache))


def test_cuts_of_a_prompt_grids_and_shares_change_no_bit(run):
    whole = make_cache(9, (6, 1), [(6200, 200)])
    check_append(run, whole)
    want = attend(run, whole)
    for how in ({"grid": 1}, {"grid": 3}, {"split": 2}, {"split": 4}, {"split": 9}):
        assert (attend(run, whole, **how) == want).all(), how
    for cut in (1, 64, 131):
        parts = [
            attend(run, replace(whole, row=whole.row[s], token=whole.token[s], qkgv=whole.qkgv[s]))
            for s in (slice(0, cut), slice(cut, 200))
        ]
        assert (np.concatenate(parts) == want).all(), cut
