"""Kernels between the linear operators on the GPU: float64 oracles, company, grids, long tables."""

import numpy as np
import pytest

from ginfer.cuda.attention.decode_launch import SMALL, decode_kernel, large_tiles
from ginfer.cuda.attention.prefill import form_of
from ginfer.cuda.gdn.chunk import form_of as chunk_form
from ginfer.cuda.runtime.queue import starts_early
from tests.acceptance_cases import check_acceptance, random_verification
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
    check_selection,
    gdn_chunks,
    gdn_step,
    make_gdn,
    random_draws,
)

HEADS = [(3, 1), (24, 4)]  # query and K/V heads of both models
GDN_HEADS = [(2, 6), (16, 48)]


class OnDevice:
    """Runs launches on copies of the arrays, between canaries, and brings the results back."""

    def __init__(self, image, stream, memory):
        self.image, self.stream, self.memory = image, stream, memory
        self.early = int(starts_early(image.capability))

    def __call__(self, item, grid, *arguments):
        arrays = [a if isinstance(a, np.ndarray) else None for a in arguments]
        placed = [a if a is None else self.memory.put(a) for a in arrays]
        values = [v if p is None else p.address for v, p in zip(arguments, placed)]
        self.image.launch(item, (grid,), self.stream, *values, dependent=bool(self.early))
        self.stream.synchronize()
        for array, place in zip(arrays, placed):
            if array is not None:
                array[...] = place.read()
        self.memory.restart()


@pytest.fixture
def run(image, stream, memory):
    return OnDevice(image, stream, memory)


@pytest.mark.parametrize("fmt", ["W8G32_F16S", "BF16"])
@pytest.mark.parametrize("C", [32, 384, 5120])
def test_embedding(run, fmt, C):
    check_embedding(run, fmt, C)


@pytest.mark.parametrize("C", [64, 384, 5120])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 64, 65, 128])
def test_rms_norm(run, T, C):
    check_rms_norm(run, T, C)


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 65, 255, 256, 257, 1000])
def test_decode_attention_at_borders(run, heads, tokens, packed, capability):
    cache = make_cache(tokens, heads, [(tokens, 1), (3, 1)], packed=packed)
    check_append(run, cache)
    item, group = decode_kernel(capability, SMALL, packed), 16 // (heads[0] // heads[1])
    check_attention(cache, attention_decode(run, cache, item, group=group, grid=264, grain=1))


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups_units_and_grids_change_no_bit(run, heads, packed, capability):
    rows = [(1330, 1), (1325, 2), (1290, 1), (1284, 20)]
    cache = make_cache(7, heads, rows, shared=16, packed=packed)
    check_append(run, cache)
    tiles = large_tiles(capability, packed)
    few, many = (decode_kernel(capability, n, packed) for n in (SMALL, tiles))
    group = 16 * tiles // (heads[0] // heads[1])
    want = attention_decode(run, cache, few, group=1, grid=1, grain=1)
    check_attention(cache, want)
    for grid, grain in ((3, 4), (132, 1), (264, 4)):
        how = {"grid": grid, "grain": grain}
        assert (attention_decode(run, cache, many, group=group, **how) == want).all()
        assert (attention_decode(run, cache, few, group=2, **how) == want).all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_pages_of_codes_are_opened_for_prefill(run, heads):
    check_expand(run, make_cache(9, heads, [(300, 1), (65, 1)], packed=True))


def test_decode_attention_over_a_long_history(run, capability):
    cache = make_cache(8, (3, 1), [(16_001, 1)])
    check_append(run, cache)
    item = decode_kernel(capability, SMALL)
    check_attention(cache, attention_decode(run, cache, item, group=1, grid=132, grain=4))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (64, 64), (65, 65), (300, 200), (2049, 3)])
def test_prefill_attention(run, heads, tokens, n, capability):
    cache = make_cache(tokens, heads, [(tokens, n)])
    check_append(run, cache)
    check_attention(cache, attention_prefill(run, cache, form=form_of(capability)))


def test_chunking_of_a_prompt_changes_no_bit(run, capability):
    whole = make_cache(9, (3, 1), [(4200, 200)])
    check_append(run, whole)
    form = form_of(capability)
    want = attention_prefill(run, whole, form=form)
    for cut in (1, 64, 131):
        parts = []
        for span in (slice(0, cut), slice(cut, 200)):
            fields = {n: getattr(whole, n)[span].copy() for n in ("row", "token", "qkgv")}
            part = type(whole)(**{**vars(whole), **fields})
            parts.append(attention_prefill(run, part, form=form))
        assert (np.concatenate(parts) == want).all()


@pytest.mark.parametrize("heads", GDN_HEADS, ids=str)
def test_conv_and_gdn_step(run, heads):
    lengths, slots = [1, 16, 3, 2], [(0, 0), (1, 5), (2, 2), (3, 4)]
    it = make_gdn(10, heads, lengths, slots)
    convolved, before = check_conv(run, it), it.state.copy()
    check_gdn(it, convolved, before, gdn_step(run, it, convolved))


@pytest.mark.parametrize("heads", GDN_HEADS, ids=str)
def test_rows_of_one_column_have_the_bits_of_conv_and_step(run, heads):
    check_gdn_column(run, heads, 8)


def test_conv_over_pieces(run):
    check_conv(run, make_gdn(11, (2, 6), [200, 1, 64, 65], [(0, 0), (1, 2), (3, 3), (4, 4)]))


@pytest.mark.parametrize("heads", GDN_HEADS, ids=str)
def test_gdn_chunks_at_their_borders(run, heads, capability):
    lengths, starts = [1, 63, 64, 65, 200, 130], [0, 64, 0, 7, 63, 128]
    it = make_gdn(13, heads, lengths, [(0, 0), (1, 6), (2, 2), (3, 7), (4, 4), (5, 8)])
    convolved, before = check_conv(run, it), it.state.copy()
    out = gdn_chunks(run, it, convolved, starts, form=chunk_form(capability))
    check_gdn(it, convolved, before, out)


def test_chunks_of_a_prompt_change_no_bit_of_gdn(run, capability):
    form, n = chunk_form(capability), 1030
    it = make_gdn(14, (2, 6), [n], [(0, 0)])
    convolved, state = check_conv(run, it), it.state.copy()
    want, mix, ab = gdn_chunks(run, it, convolved, [0], form=form), it.mix, it.ab
    left = it.state.copy()
    for size in (64, 128, 640):
        it.state, parts = state.copy(), []
        for first in range(0, n, size):
            span = slice(first, min(first + size, n))
            it.mix, it.ab = mix[span].copy(), ab[span].copy()
            it.indptr = np.array([0, len(it.mix)], np.int32)
            parts.append(gdn_chunks(run, it, convolved[span].copy(), [first], form=form))
        assert (np.concatenate(parts) == want).all()
        assert (it.state == left).all()


def test_a_prompt_alone_is_itself_in_company_in_gdn(run, capability):
    form = chunk_form(capability)
    it = make_gdn(15, (2, 6), [100, 150], [(0, 0), (1, 1)])
    convolved, state = check_conv(run, it), it.state.copy()
    want = gdn_chunks(run, it, convolved, [0, 64], form=form)
    left, it.state = it.state, state
    it.mix, it.ab, it.indptr = it.mix[100:].copy(), it.ab[100:].copy(), np.array([0, 150], np.int32)
    it.state_in = it.state_out = np.array([1], np.int32)
    alone = gdn_chunks(run, it, convolved[100:].copy(), [64], form=form)
    assert (alone == want[100:]).all()
    assert (it.state[1] == left[1]).all()


def test_a_row_alone_is_itself_in_company(run):
    it = make_gdn(12, (2, 6), [4, 4, 4], [(0, 0), (1, 1), (2, 2)])
    other = make_gdn(12, (2, 6), [4, 4, 4], [(0, 0), (1, 1), (2, 2)])
    together = gdn_step(run, it, check_conv(run, it))
    other.mix, other.ab = other.mix[4:8].copy(), other.ab[4:8].copy()
    other.indptr = np.array([0, 4], np.int32)
    other.state_in = other.state_out = np.array([1], np.int32)
    alone = gdn_step(run, other, check_conv(run, other))
    assert (alone == together[4:8]).all()
    assert (other.state[1] == it.state[1]).all()


@pytest.mark.parametrize("heads", GDN_HEADS, ids=str)
def test_columns_of_a_row_are_steps_one_by_one(run, heads):
    it, other = (make_gdn(15, heads, [16], [(0, 0)]) for _ in range(2))
    convolved = check_conv(run, it)
    together, mix, ab = gdn_step(run, it, convolved), other.mix, other.ab
    other.indptr = np.array([0, 1], np.int32)
    for t in range(16):
        other.mix, other.ab = mix[t : t + 1].copy(), ab[t : t + 1].copy()
        alone = gdn_step(run, other, convolved[t : t + 1].copy())
        assert (alone == together[t : t + 1]).all()
    assert (other.state == it.state).all()


@pytest.mark.parametrize("heads", GDN_HEADS, ids=str)
def test_fold_of_some_columns_is_steps_over_just_these(run, heads):
    for first in range(8):
        check_fold(
            run, heads, [8, 16, 5, 8], [first + 1, 2 * first + 2, max(first - 3, -1), 8 - first]
        )


@pytest.mark.parametrize(("V", "seeds"), [(37, 8), (4111, 8), (248_077, 3)])
def test_choices_equal_those_of_the_cpu_image(run, V, seeds):
    for seed in range(seeds):
        logits, batch, counts = random_draws(seed, V, 8, masked=seed % 2 == 0)
        if seed == 1:
            logits[2, V // 2] = float("inf")
        check_selection(run, logits, batch, counts, V)


@pytest.mark.parametrize(("V", "seeds"), [(37, 8), (4111, 8), (248_077, 4)])
def test_rows_go_as_far_as_on_the_cpu_image(run, V, seeds):
    for seed in range(seeds):
        v = random_verification(seed, V, [5, 3, 16, 8, 1, 2], masked=seed % 3 == 2)
        if seed == 1:
            v.logits[6, 5] = float("nan")
        check_acceptance(run, v, V, blocks=16)
