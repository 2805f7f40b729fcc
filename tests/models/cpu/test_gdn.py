"""Gated DeltaNet of the CPU image: oracle, chunk borders, slots, bit-for-bit equalities."""

from __future__ import annotations

import numpy as np
import pytest

from ginfer.batch import Phase
from tests.models.cpu.kernels import Gdn, batch_of
from tests.oracles.gdn import causal_conv, gated_deltanet, gates
from tests.oracles.norm import gated_rms_norm
from tests.tolerances import GDN_F32, GDN_OUTPUT, GDN_STATE

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NO_PAGES = np.zeros((1, 1))
SHAPES = [(1, 1, 128, 128), (2, 6, 128, 128), (1, 3, 32, 48), (2, 2, 40, 64), (1, 1, 16, 80)]


def _batch(phase, lengths, starts, slots=None):
    return batch_of(phase, lengths, starts, np.zeros((len(lengths), 1)), slots)


def _oracle(
    m: Gdn, mix: np.ndarray, ab: np.ndarray, state: np.ndarray, history: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gated output, raw output, new state) of one row."""
    T, kw = mix.shape[0], m.HK * m.K
    c = causal_conv(mix[:, : m.X], m.weights.taps, history)
    g, beta = gates(ab[:, : m.HV], ab[:, m.HV :], m.a_log, m.weights.dt_bias)
    q, k = c[:, :kw].reshape(T, m.HK, m.K), c[:, kw : 2 * kw].reshape(T, m.HK, m.K)
    v = c[:, 2 * kw :].reshape(T, m.HV, m.V)
    out, new = gated_deltanet(q, k, v, g, beta, state.reshape(m.HV, m.K, m.V))
    z = mix[:, m.X :].reshape(T * m.HV, m.V)
    gated = gated_rms_norm(out.reshape(T * m.HV, m.V), m.weights.norm, z, 1e-6)
    return gated.reshape(T, -1), out, new.reshape(m.HV, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("phase", "T"), [(DECODE, 5), (PREFILL, 1), (PREFILL, 65), (PREFILL, 200)])
def test_both_families_follow_the_oracle_from_nothing(
    shape: tuple[int, int, int, int], phase: Phase, T: int
) -> None:
    m = Gdn(*shape)
    m.clear(0)
    mix, ab = m.inputs(T)
    out = m.run(_batch(phase, [T], [0]), mix, ab)
    zero = np.zeros((m.taps - 1, m.X))
    want, _, state = _oracle(m, mix, ab, np.zeros((m.HV, m.K * m.V)), zero)
    GDN_OUTPUT.check(out, want)
    GDN_F32.check(out, want)
    GDN_STATE.check(m.state[0], state)
    np.testing.assert_array_equal(m.conv[0, -min(T, 3) :], mix[-3:, : m.X][-min(T, 3) :])


@pytest.mark.parametrize("start", [1, 37, 63, 64, 127])
@pytest.mark.parametrize("T", [1, 27, 64, 150])
def test_prefill_continues_any_history(start: int, T: int) -> None:
    m = Gdn(1, 2, 64, 64)
    r = np.random.default_rng(start)
    m.state[1] = r.standard_normal(m.state[1].shape)
    m.conv[1] = r.standard_normal(m.conv[1].shape)
    state, history = m.state[1].astype(np.float64), m.conv[1].astype(np.float64)
    mix, ab = m.inputs(T)
    out = m.run(_batch(PREFILL, [T], [start], ([1], [2])), mix, ab)
    want, _, new = _oracle(m, mix, ab, state, history)
    GDN_F32.check(out, want)
    GDN_F32.check(m.state[2], new)
    np.testing.assert_array_equal(m.state[1], state.astype(np.float32))  # read only


@pytest.mark.parametrize("cuts", [[128], [64, 192], [64, 128, 192, 256], [256]])
def test_prefill_gives_the_same_bits_for_cuts_at_multiples_of_64(cuts: list[int]) -> None:
    T = 300
    whole, parts = Gdn(2, 4, 64, 64), Gdn(2, 4, 64, 64)
    whole.clear(0)
    parts.clear(0)
    mix, ab = whole.inputs(T)
    want = whole.run(_batch(PREFILL, [T], [0]), mix, ab)
    got = []
    for t0, t1 in zip([0, *cuts], [*cuts, T]):
        got.append(parts.run(_batch(PREFILL, [t1 - t0], [t0]), mix[t0:t1], ab[t0:t1]))
    np.testing.assert_array_equal(np.concatenate(got), want)
    np.testing.assert_array_equal(parts.state[0], whole.state[0])
    np.testing.assert_array_equal(parts.conv[0], whole.conv[0])


def test_prefill_completes_to_a_multiple_of_64_first() -> None:
    mid, cut = Gdn(1, 2, 64, 64), Gdn(1, 2, 64, 64)
    for m in (mid, cut):
        m.clear(0)
        mix, ab = m.inputs(250)
        m.run(_batch(DECODE, [21], [0]), mix[:21], ab[:21])
    want = mid.run(_batch(PREFILL, [229], [21]), mix[21:], ab[21:])
    got = []
    for t0, t1 in ((21, 64), (64, 128), (128, 250)):
        got.append(cut.run(_batch(PREFILL, [t1 - t0], [t0]), mix[t0:t1], ab[t0:t1]))
    np.testing.assert_array_equal(np.concatenate(got), want)
    np.testing.assert_array_equal(cut.state[0], mid.state[0])


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_a_row_has_the_same_bits_alone_and_in_company(phase: Phase) -> None:
    lengths, starts = [3, 70, 1, 5], [64, 10, 0, 127]
    together, alone = Gdn(2, 6, 64, 64), Gdn(2, 6, 64, 64)
    r = np.random.default_rng(8)
    together.state[:] = alone.state[:] = r.standard_normal(together.state.shape)
    together.conv[:] = alone.conv[:] = r.standard_normal(together.conv.shape)
    mix, ab = together.inputs(sum(lengths))
    want = together.run(_batch(phase, lengths, starts), mix, ab)
    for row, t in enumerate(np.cumsum([0, *lengths[:-1]])):
        c = slice(t, t + lengths[row])
        batch = _batch(phase, [lengths[row]], [starts[row]], ([row], [row]))
        np.testing.assert_array_equal(alone.run(batch, mix[c], ab[c]), want[c])
    np.testing.assert_array_equal(alone.state, together.state)
    np.testing.assert_array_equal(alone.conv, together.conv)


def test_decode_columns_have_the_same_bits_one_by_one() -> None:
    together, single = Gdn(2, 6, 128, 128), Gdn(2, 6, 128, 128)
    for m in (together, single):
        m.clear(0)
    mix, ab = together.inputs(9)
    want = together.run(_batch(DECODE, [9], [0]), mix, ab)
    for i in range(9):
        got = single.run(_batch(DECODE, [1], [i]), mix[i : i + 1], ab[i : i + 1])
        np.testing.assert_array_equal(got, want[i : i + 1])
    np.testing.assert_array_equal(single.state[0], together.state[0])
    np.testing.assert_array_equal(single.conv[0], together.conv[0])


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_slots_ping_pong_like_one_slot(phase: Phase) -> None:
    same, pong = Gdn(1, 2, 32, 32), Gdn(1, 2, 32, 32)
    same.clear(0)
    pong.clear(0)
    mix, ab = same.inputs(192)
    for i, t in enumerate(range(0, 192, 64)):
        c = slice(t, t + 64)
        slots = ([i % 2], [(i + 1) % 2])
        want = same.run(_batch(phase, [64], [t]), mix[c], ab[c])
        np.testing.assert_array_equal(
            pong.run(_batch(phase, [64], [t], slots), mix[c], ab[c]), want
        )
    np.testing.assert_array_equal(pong.state[1], same.state[0])
    np.testing.assert_array_equal(pong.conv[1], same.conv[0])
    assert np.isnan(pong.state[2:]).all()  # canaries: other slots are not touched


def test_strong_decay_forgets_without_harm() -> None:
    m = Gdn(1, 1, 64, 64)
    m.clear(0)
    mix, ab = m.inputs(130)
    ab[:, 0] = 60.0  # a decay of e^-100 and more per token
    out = m.run(_batch(PREFILL, [130], [0]), mix, ab)
    zero = np.zeros((m.taps - 1, m.X))
    want, _, _ = _oracle(m, mix, ab, np.zeros((1, m.K * m.V)), zero)
    GDN_F32.check(out, want)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_nan_stays_in_its_row(phase: Phase) -> None:
    m = Gdn(1, 2, 32, 32)
    m.clear(0, 1, 2)
    mix, ab = m.inputs(6)
    mix[2:4] = np.nan
    out = m.run(_batch(phase, [2, 2, 2], [0, 0, 0]), mix, ab)
    assert np.isnan(out[2:4]).all()
    assert np.isfinite(out[[0, 1, 4, 5]]).all()
    assert np.isfinite(m.state[[0, 2]]).all()
