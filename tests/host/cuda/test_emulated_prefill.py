"""Prefill attention of sm_90a with emulated warpgroups, instruction by instruction."""

import numpy as np
import pytest

from ginfer.cuda.attention.pages import TILE
from tests import attention_cases
from tests.attention_cases import check_append, check_attention, make_cache
from tests.device_cases import normal
from tests.host.cuda.emulator import Emulator
from tests.prefill_cases import attention_prefill_wgmma


@pytest.fixture
def run():
    return Emulator(1)


def test_rows_of_several_lengths_over_few_thread_blocks(run):
    cache = make_cache(1, (6, 1), [(75, 22), (3, 3)])
    check_append(run, cache)
    check_attention(cache, attention_prefill_wgmma(run, cache, block_tiles=32, grid=2))


def test_blocks_of_keys_by_several_thread_blocks_change_no_bit(run):
    cache = make_cache(2, (2, 1), [(150, 9)])
    check_append(run, cache)
    want = attention_prefill_wgmma(run, cache, block_tiles=1)
    check_attention(cache, want)
    assert (attention_prefill_wgmma(run, cache, block_tiles=1, split=3) == want).all()


def test_a_column_alone_is_itself_in_company(run):
    cache = make_cache(3, (3, 1), [(68, 5)])
    check_append(run, cache)
    want = attention_prefill_wgmma(run, cache, block_tiles=1)
    for name in ("row", "token", "qkgv"):
        setattr(cache, name, getattr(cache, name)[3:4].copy())
    assert (attention_prefill_wgmma(run, cache, block_tiles=1) == want[3:4]).all()


def test_heads_of_128_dims(run, monkeypatch):
    monkeypatch.setattr(attention_cases, "D", 128)
    cache = make_cache(4, (4, 1), [(70, 3)])
    rng = np.random.default_rng(4)
    for t in cache.token:  # what append would write
        for value in range(2):
            page, slot = divmod(int(t), TILE)
            at = cache.plane(cache.pages[0, page], value, 0)[slot]
            cache.kv.reshape(-1)[at] = normal(rng, 128)[0]
    check_attention(cache, attention_prefill_wgmma(run, cache, block_tiles=1))
