"""Kernels of the decode and prefill families with emulated threads, against the oracles."""

import numpy as np
import pytest

from ginfer.cuda.attention.decode import attention_decode_kernel
from ginfer.cuda.attention.decode_bulk import attention_decode_bulk_kernel
from ginfer.cuda.attention.decode_wgmma import attention_decode_wgmma_kernel
from tests.attention_cases import (
    attention_decode,
    attention_prefill,
    check_append,
    check_attention,
    check_expand,
    make_cache,
)
from tests.device_cases import (
    check_conv,
    check_embedding,
    check_fold,
    check_gdn,
    check_gdn_column,
    check_rms_norm,
    gdn_step,
    make_gdn,
)
from tests.host.cuda.emulator import Emulator, emulated


@pytest.fixture(params=[0, 1], ids=["plain", "early"])
def run(request):
    return Emulator(request.param)


@pytest.fixture
def plain():
    return Emulator(0)


@pytest.mark.parametrize("fmt", ["W8G32_F16S", "BF16"])
def test_embedding(run, fmt):
    check_embedding(run, fmt, 384)


@pytest.mark.parametrize(("T", "C"), [(1, 8), (9, 384), (66, 64)])
def test_rms_norm(run, T, C):
    check_rms_norm(run, T, C)


DECODE = {
    "bulk": lambda tiles, *how: attention_decode_bulk_kernel(tiles, 3, *how),
    "copies": attention_decode_kernel,
    "wgmma": lambda tiles, packed, early: attention_decode_wgmma_kernel(early),
}


@pytest.fixture(params=DECODE)
def decode(request):
    return DECODE[request.param]


def test_decode_attention_over_shared_pages_and_tails(run, decode):
    packed = run.early == 1 and decode is not DECODE["wgmma"]
    cache = make_cache(1, (3, 1), [(261, 1), (258, 2)], shared=4, packed=packed)
    check_append(run, cache)
    item = decode(1, packed, run.early)
    check_attention(cache, attention_decode(run, cache, item, group=5, grid=2, grain=1))


def test_pages_of_codes_are_opened_for_prefill(plain):
    check_expand(plain, make_cache(3, (1, 1), [(130, 1), (65, 1)], packed=True))


def test_neither_groups_nor_units_change_a_bit(plain, decode):
    cache = make_cache(2, (2, 1), [(257, 2)])
    check_append(plain, cache)
    alone = attention_decode(plain, cache, decode(1, 0, 0), group=1, grid=1, grain=1)
    check_attention(cache, alone)
    together = attention_decode(plain, cache, decode(2, 0, 0), group=9, grid=1, grain=4)
    assert (together == alone).all()


@pytest.mark.parametrize("form", [(2, 1), (4, 2)])
def test_prefill_attention_over_several_blocks(plain, form, monkeypatch):
    module = emulated("ginfer.cuda.attention.prefill")
    monkeypatch.setattr(module, "BLOCK_TILES", 1)
    cache = make_cache(3, (2, 1), [(131, 5)])
    check_append(plain, cache)
    check_attention(cache, attention_prefill(plain, cache, form=form))


def test_conv_in_place_and_over_pieces(plain):
    it = make_gdn(4, (1, 2), [1, 2, 70], [(0, 0), (1, 2), (3, 3)])
    check_conv(plain, it)


def test_gdn_step(run):
    it = make_gdn(5, (1, 2), [2, 1], [(1, 1), (0, 2)])
    convolved, before = check_conv(run, it), it.state.copy()
    check_gdn(it, convolved, before, gdn_step(run, it, convolved))


def test_rows_of_one_column_have_the_bits_of_conv_and_step(run):
    check_gdn_column(run, (1, 2), 2)


def test_gdn_steps_one_by_one_are_the_steps_at_once(plain):
    it, other = (make_gdn(6, (1, 1), [3], [(0, 0)]) for _ in range(2))
    convolved = check_conv(plain, it)
    together = gdn_step(plain, it, convolved)
    mix, ab, parts = other.mix, other.ab, []
    other.indptr = np.array([0, 1], np.int32)
    for t in range(3):
        other.mix, other.ab = mix[t : t + 1].copy(), ab[t : t + 1].copy()
        parts.append(gdn_step(plain, other, convolved[t : t + 1].copy()))
    assert (np.concatenate(parts) == together).all()
    assert (other.state == it.state).all()


def test_a_row_that_is_verified_leaves_its_slots(plain):
    it = make_gdn(7, (1, 1), [1], [(0, 0)])
    convolved, before = check_conv(plain, it), it.state.copy()
    it.state_out = np.array([-1], np.int32)
    gdn_step(plain, it, convolved)
    assert (it.state == before).all()


def test_fold_of_some_columns_is_steps_over_just_these(plain):
    check_fold(plain, (1, 2), [2, 1, 1], [1, 0, -1])


@pytest.mark.long
def test_fold_of_more_columns_than_wait_at_a_time():
    check_fold(Emulator(1), (1, 1), [11], [10], L=1)
