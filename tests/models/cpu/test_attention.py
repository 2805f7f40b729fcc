"""Attention of the CPU image: oracle, block and page borders, poison, independence of the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ginfer.batch import ForwardBatch, Phase
from ginfer.engine.work_items import work_items
from ginfer.spec import KvCodec
from tests.host.engine.test_work_items import sharing_tree
from tests.models.cpu.kernels import BF16_NAN, PAGE, Attention, batch_of
from tests.oracles.attention import attention, round_bf16
from tests.oracles.norm import rms_norm, sigmoid
from tests.oracles.rope import rotate
from tests.tolerances import ATTENTION_F32

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
SHAPES = [(1, 1, 32), (3, 1, 256), (4, 2, 64), (6, 1, 48), (5, 5, 40)]


def _inputs(a: Attention, T: int, seed: int = 0) -> np.ndarray:
    r = np.random.default_rng(seed)
    return r.standard_normal((T, 2 * (a.H + a.G) * a.D)).astype(np.float32)


def _pages(rows: int, per_row: int, total: int, seed: int = 1) -> np.ndarray:
    """Fragmented page table: a random choice of different pages."""
    return np.random.default_rng(seed).permutation(total)[: rows * per_row].reshape(rows, per_row)


def _oracle(a: Attention, qkgv: np.ndarray, start: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Expected output for columns that follow `start` tokens; k, v: the whole history."""
    T, width = qkgv.shape[0], a.H * a.D
    positions = np.tile(np.arange(start, start + T), (3, 1))
    q = rms_norm(qkgv[:, :width].reshape(-1, a.D), a.w_q, 1e-6).reshape(T, a.H, a.D)
    q = rotate(q, positions, 1e4, a.sections)
    gate = qkgv[:, width + a.G * a.D : 2 * width + a.G * a.D]
    out = attention(q, k, v, start, a.D**-0.5).reshape(T, width)
    return out * sigmoid(gate)


def _expected_kv(a: Attention, qkgv: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    T, width, kv = qkgv.shape[0], a.H * a.D, a.G * a.D
    positions = np.tile(np.arange(start, start + T), (3, 1))
    k = rms_norm(qkgv[:, width : width + kv].reshape(-1, a.D), a.w_k, 1e-6)
    k = rotate(k.reshape(T, a.G, a.D), positions, 1e4, a.sections)
    return k, round_bf16(qkgv[:, 2 * width + kv :]).reshape(T, a.G, a.D)


@pytest.mark.parametrize(("H", "G", "D"), SHAPES)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 131])
def test_prefill_from_nothing_follows_the_oracle(H: int, G: int, D: int, T: int) -> None:
    a = Attention(H, G, D, pages=5)
    pages, qkgv = _pages(1, 3, 5), _inputs(a, T)
    out = a.run(batch_of(PREFILL, [T], [0], pages), qkgv)
    k, v = a.history(pages, 0, T)
    want_k, want_v = _expected_kv(a, qkgv, 0)
    np.testing.assert_array_equal(v, want_v)
    np.testing.assert_allclose(k, want_k, rtol=2**-8, atol=1e-6)
    ATTENTION_F32.check(out, _oracle(a, qkgv, 0, k, v))


def _quantised(x: np.ndarray) -> np.ndarray:
    """BF16 values [..., D] through INT8 codes with an F16 scale per 64 dims."""
    out = np.zeros_like(x)
    for d in range(0, x.shape[-1], 64):
        part = x[..., d : d + 64]
        top = np.abs(part).max(-1, keepdims=True)
        scale = (top / 127).astype(np.float16).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(scale > 0, np.rint(part * (np.float32(1) / scale)), 0)
        out[..., d : d + 64] = codes.clip(-127, 127) * scale
    return out


@pytest.mark.parametrize(("H", "G", "D"), [(2, 1, 32), (3, 1, 256), (4, 2, 80)])
@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_int8_pages_hold_what_the_codec_says(phase: Phase, H: int, G: int, D: int) -> None:
    a = Attention(H, G, D, pages=8, codec=KvCodec.INT8)
    pages, T = _pages(1, 5, 8), 261
    qkgv = _inputs(a, T)
    qkgv[7] *= 1e-3
    qkgv[9, (H + G) * D :] = 0
    a.run(batch_of(PREFILL, [T - 3], [0], pages), qkgv[:-3])
    out = a.run(batch_of(phase, [3], [T - 3], pages), qkgv[-3:])
    k, v = a.history(pages, 0, T)
    want_k, want_v = _expected_kv(a, qkgv, 0)
    np.testing.assert_array_equal(v, _quantised(want_v.astype(np.float32)))
    off = np.abs(k - _quantised(round_bf16(want_k).astype(np.float32)))
    assert (off <= 1.01 * np.nanmax(a._factors())).all()
    assert np.mean(off > 0) < 0.02  # where rounding to BF16 went the other way
    k, v = (round_bf16(x.astype(np.float32)) for x in (k, v))
    ATTENTION_F32.check(out, _oracle(a, qkgv[-3:], T - 3, k, v))


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_packed_rows_with_histories_follow_the_oracle(phase: Phase) -> None:
    a = Attention(3, 1, 64, pages=40)
    lengths, starts = [1, 70, 3, 1], [0, 100, 255, 320]
    pages = _pages(4, 6, 40)
    first = batch_of(PREFILL, starts, [0] * 4, pages)
    a.run(first, _inputs(a, sum(starts), seed=5))
    qkgv = _inputs(a, sum(lengths), seed=6)
    out = a.run(batch_of(phase, lengths, starts, pages), qkgv)
    for row, t in enumerate(np.cumsum([0, *lengths[:-1]])):
        columns = slice(t, t + lengths[row])
        k, v = a.history(pages, row, starts[row] + lengths[row])
        ATTENTION_F32.check(out[columns], _oracle(a, qkgv[columns], starts[row], k, v), str(row))


@pytest.mark.parametrize("length", [255, 256, 257, 2047, 2048, 2049, 4200])
def test_block_borders_follow_the_oracle_in_both_families(length: int) -> None:
    a = Attention(2, 1, 32, pages=70)
    pages = _pages(1, 66, 70)
    qkgv = _inputs(a, length + 1)
    out = a.run(batch_of(PREFILL, [length], [0], pages), qkgv[:length])
    k, v = a.history(pages, 0, length)
    tail = slice(length - 3, length)
    ATTENTION_F32.check(out[tail], _oracle(a, qkgv[tail], length - 3, k, v), "prefill")
    last = a.run(batch_of(DECODE, [1], [length], pages), qkgv[length:])
    k, v = a.history(pages, 0, length + 1)
    ATTENTION_F32.check(last, _oracle(a, qkgv[length:], length, k, v), "decode")


@pytest.mark.parametrize("cuts", [[128], [64, 640], [1, 2, 3], [300, 301, 2048], [777]])
def test_prefill_gives_the_same_bits_for_any_cut(cuts: list[int]) -> None:
    T = 2200
    whole, parts = Attention(3, 1, 64, pages=36), Attention(3, 1, 64, pages=36)
    qkgv, pages = _inputs(whole, T), _pages(1, 36, 36)
    want = whole.run(batch_of(PREFILL, [T], [0], pages), qkgv)
    got = []
    for t0, t1 in zip([0, *cuts], [*cuts, T]):
        got.append(parts.run(batch_of(PREFILL, [t1 - t0], [t0], pages), qkgv[t0:t1]))
    np.testing.assert_array_equal(np.concatenate(got), want)
    np.testing.assert_array_equal(parts.kv, whole.kv)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_a_row_has_the_same_bits_alone_and_in_company(phase: Phase) -> None:
    lengths, starts = [5, 1, 66, 2], [300, 0, 63, 511]
    pages = _pages(4, 10, 40)
    together, alone = Attention(4, 2, 48, pages=40), Attention(4, 2, 48, pages=40)
    past, new = _inputs(together, sum(starts), seed=2), _inputs(together, sum(lengths), seed=3)
    for a in (together, alone):
        a.run(batch_of(PREFILL, starts, [0] * 4, pages), past)
    want = together.run(batch_of(phase, lengths, starts, pages), new)
    for row, t in enumerate(np.cumsum([0, *lengths[:-1]])):
        columns = slice(t, t + lengths[row])
        batch = batch_of(phase, [lengths[row]], [starts[row]], pages[row : row + 1])
        np.testing.assert_array_equal(alone.run(batch, new[columns]), want[columns])


def test_decode_columns_have_the_same_bits_one_by_one() -> None:
    pages = _pages(1, 10, 12)
    together, single = Attention(3, 1, 64, pages=12), Attention(3, 1, 64, pages=12)
    past, new = _inputs(together, 250, seed=2), _inputs(together, 9, seed=3)
    for a in (together, single):
        a.run(batch_of(PREFILL, [250], [0], pages), past)
    want = together.run(batch_of(DECODE, [9], [250], pages), new)
    for i in range(9):
        got = single.run(batch_of(DECODE, [1], [250 + i], pages), new[i : i + 1])
        np.testing.assert_array_equal(got, want[i : i + 1])


def test_append_touches_only_its_own_tokens_and_layer() -> None:
    a = Attention(2, 2, 32, pages=4)
    pages = np.array([[2, 0]])
    a.run(batch_of(PREFILL, [70], [0], pages), _inputs(a, 70))
    before = a.kv.copy()
    a.run(batch_of(DECODE, [1], [70], pages), _inputs(a, 1, seed=9))
    changed = np.argwhere(before != a.kv)
    assert set(changed[:, 0]) == {0}  # the second page of the row
    assert set(changed[:, 1]) == {1}
    index = changed[:, 4]
    token = np.where(changed[:, 2] == 0, index % PAGE, index // a.D)
    assert set(token) == {70 - PAGE}


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_nan_stays_in_its_row(phase: Phase) -> None:
    a = Attention(2, 1, 32, pages=4)
    qkgv = _inputs(a, 4)
    qkgv[2] = np.nan
    out = a.run(batch_of(phase, [2, 1, 1], [0, 0, 0], _pages(3, 1, 4)), qkgv)
    assert np.isnan(out[2]).all()
    assert np.isfinite(out[[0, 1, 3]]).all()


def test_decode_merges_from_the_left_whatever_the_order_of_threads() -> None:
    a = Attention(1, 1, 32, pages=20)
    pages, qkgv = _pages(1, 18, 20), _inputs(a, 1101)
    a.run(batch_of(PREFILL, [1100], [0], pages), qkgv[:1100])
    runs = [a.run(batch_of(DECODE, [1], [1100], pages), qkgv[1100:]) for _ in range(5)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def _sharing(a: Attention, rows: int, seed: int) -> ForwardBatch:
    """A decode batch of rows over shared pages; K/V holds values exactly where tokens are."""
    r = np.random.default_rng(seed)
    table, starts, indptr = sharing_tree(r, rows, a.pages // rows, width=1 + seed % 20)
    values = r.standard_normal(a.kv.shape, np.float32)
    a.kv[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
    keys, tokens = a.kv[:, 1, 0].reshape(a.pages, a.G, a.D, PAGE), a.kv[:, 1, 1]
    for row, start in enumerate(starts.tolist()):
        for page in table[row, start // PAGE :][table[row, start // PAGE :] >= 0]:
            first = start % PAGE if page == table[row, start // PAGE] else 0
            keys[page, :, :, first:] = BF16_NAN
            tokens[page, :, first * a.D :] = BF16_NAN
    batch = batch_of(DECODE, np.diff(indptr).tolist(), starts.tolist(), table)
    return replace(batch, items=work_items(table, starts, indptr))


@pytest.mark.parametrize("rows", range(1, 9))
def test_rows_over_shared_pages_have_the_bits_of_each_alone(rows: int) -> None:
    groups = set()
    for seed, pages in enumerate((4, 8, 20, 20, 40, 80)):
        a = Attention(3, 1, 32, pages=pages * rows)
        batch = _sharing(a, rows, seed=10 * rows + seed)
        groups |= set(np.diff(batch.items.indptr).tolist())
        qkgv = _inputs(a, batch.num_columns, seed=seed)
        got = a.run(batch, qkgv)
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(a.run(replace(batch, items=None), qkgv), got)
        for row, (t0, t1) in enumerate(pairwise(batch.row_indptr.tolist())):
            for first, last in {(t0, t1), (t0, t0 + 1), (t1 - 1, t1)}:
                start = [int(batch.starts[row]) + first - t0]
                alone = batch_of(DECODE, [last - first], start, batch.page_table[row : row + 1])
                np.testing.assert_array_equal(a.run(alone, qkgv[first:last]), got[first:last])
    assert max(groups) >= min(rows, 4)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_units_of_spans_have_the_bits_of_units_of_blocks(rows: int) -> None:
    for seed, pages in enumerate((15, 17, 33, 50)):
        a = Attention(4, 2, 32, pages=pages * rows)
        batch = _sharing(a, rows, seed=10 * rows + seed)
        qkgv, outs = _inputs(a, batch.num_columns, seed=seed), []
        for a.workers, a.num_partials, grain in ((10_000, 1 << 30, 1), (1, 1, 4)):
            assert a.staged(batch).work.grain == grain
            outs.append(a.run(batch, qkgv))
        np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("cuts", [(1,), (5, 6, 90), (64,)])
def test_waves_have_the_bits_of_one_wave(cuts: tuple[int, ...]) -> None:
    a = Attention(4, 2, 32, pages=160)
    batch = _sharing(a, 8, seed=19)
    T, qkgv = batch.num_columns, _inputs(a, batch.num_columns)
    assert T > 32
    assert batch.items.rows.size > 8  # some of them read together
    borders = [0, *(cut for cut in cuts if cut < T), T]
    waves = tuple(pairwise(borders))
    np.testing.assert_array_equal(a.run(batch, qkgv, waves), a.run(batch, qkgv))


def test_nan_of_a_row_stays_out_of_the_rows_that_share_its_pages() -> None:
    a = Attention(3, 1, 32, pages=30)
    pages = np.tile(np.arange(10), (3, 1))
    pages[:, 8:] = 10 + np.arange(6).reshape(3, 2)
    a.run(batch_of(PREFILL, [550], [0], pages[:1]), _inputs(a, 550))
    a.kv[pages[1:, 8]] = a.kv[pages[0, 8]]
    batch = batch_of(DECODE, [1, 1, 1], [550] * 3, pages)
    batch = replace(batch, items=work_items(pages, batch.starts, batch.row_indptr))
    assert batch.items.num_items == 4
    qkgv = _inputs(a, 3, seed=4)
    want = a.run(batch, qkgv)
    qkgv[1] = np.nan
    got = a.run(batch, qkgv)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
