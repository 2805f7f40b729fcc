"""The oracles against closed forms: what a formula must give where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.attention import attention, round_bf16
from tests.oracles.gdn import causal_conv, delta_rule, gates
from tests.oracles.norm import gated_rms_norm, rms_norm
from tests.oracles.rope import axis_of, rotate
from tests.oracles.sampling import Request, select, splitmix_finaliser, uniform

SECTIONS = (11, 11, 10)
rng = np.random.default_rng(7)


def test_rms_norm_of_a_constant_row_is_its_sign_times_the_weight() -> None:
    w = rng.standard_normal(5)
    np.testing.assert_allclose(rms_norm(np.full((1, 5), -3.0), w, 0.0)[0], -w)


def test_gated_norm_with_a_large_gate_is_the_norm_times_the_gate() -> None:
    x, w = rng.standard_normal((2, 4)), np.ones(4)
    z = np.full((2, 4), 50.0)
    np.testing.assert_allclose(gated_rms_norm(x, w, z, 1e-6), 50.0 * rms_norm(x, w, 1e-6))


def test_mrope_axes_alternate_and_count_11_11_10() -> None:
    axes = [axis_of(f, SECTIONS) for f in range(32)]
    assert axes[:6] == [0, 1, 2, 0, 1, 2]
    assert axes[29:] == [2, 0, 1]
    assert [axes.count(a) for a in range(3)] == [11, 11, 10]


def test_rotation_of_equal_axes_is_one_dimensional_rope() -> None:
    x, position, theta = rng.standard_normal((1, 1, 64)), 12345, 1e7
    y = rotate(x, np.full((3, 1), position), theta, SECTIONS)[0, 0]
    angle = position * (theta ** (-np.arange(32) / 32)).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(y[:32], x[0, 0, :32] * np.cos(angle) - x[0, 0, 32:] * np.sin(angle))
    np.testing.assert_allclose(y[32:], x[0, 0, 32:] * np.cos(angle) + x[0, 0, :32] * np.sin(angle))


def test_rotation_keeps_scores_of_equal_distances() -> None:
    q, k = rng.standard_normal((2, 1, 1, 64))
    scores = [
        float(
            np.sum(
                rotate(q, np.full((3, 1), p + 9), 1e7, SECTIONS)
                * rotate(k, np.full((3, 1), p), 1e7, SECTIONS)
            )
        )
        for p in (0, 100, 9999)
    ]
    np.testing.assert_allclose(scores, scores[0])


def test_attention_to_equal_keys_is_the_mean_of_the_values() -> None:
    v = rng.standard_normal((6, 1, 4))
    out = attention(rng.standard_normal((2, 3, 4)), np.ones((6, 1, 4)), v, 4, 0.5)
    for t in range(2):
        np.testing.assert_allclose(out[t], np.tile(v[: 5 + t, 0].mean(0), (3, 1)))


def test_round_bf16_rounds_ties_to_even() -> None:
    ulp = 2.0**-7
    x = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, -1 - ulp / 2])
    np.testing.assert_array_equal(round_bf16(x), [1, 1 + 2 * ulp, 1 + ulp, -1])


def test_convolution_of_an_impulse_replays_the_taps() -> None:
    taps = rng.standard_normal((4, 1))
    m = np.zeros((6, 1))
    m[1] = 1.0
    silu = taps / (1 + np.exp(-taps))
    want = [0, silu[3, 0], silu[2, 0], silu[1, 0], silu[0, 0], 0]
    np.testing.assert_allclose(causal_conv(m, taps, np.zeros((3, 1)))[:, 0], want)


def test_delta_rule_without_beta_only_decays() -> None:
    state = rng.standard_normal((4, 3))
    g = np.array([-0.5, -1.0])
    _, new = delta_rule(np.ones((2, 4)), np.ones((2, 4)), np.ones((2, 3)), g, np.zeros(2), state)
    np.testing.assert_allclose(new, state * np.exp(-1.5))


def test_delta_rule_stores_values_under_orthonormal_keys() -> None:
    keys, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    values = rng.standard_normal((4, 3))
    _, state = delta_rule(keys, keys, values, np.zeros(4), np.ones(4), np.zeros((4, 3)))
    np.testing.assert_allclose(keys @ state, values, atol=1e-12)


def test_gates_are_linear_for_large_and_vanish_for_small_inputs() -> None:
    a, zero = np.array([[100.0, -100.0]]), np.zeros(2)
    g, beta = gates(a, np.zeros((1, 2)), zero, zero)
    np.testing.assert_allclose(g, [[-100.0, 0.0]], atol=1e-40)
    np.testing.assert_allclose(beta, 0.5)


def test_finaliser_gives_the_published_splitmix_sequence() -> None:
    gamma = 0x9E3779B97F4A7C15
    got = [splitmix_finaliser(1234567 + i * gamma & (1 << 64) - 1) for i in range(3)]
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_is_uniform_over_positions() -> None:
    draws = np.array([uniform(5, p, 1) for p in range(20000)])
    observed, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert ((observed - 1000) ** 2 / 1000).sum() < 43.8  # 99.9 % of chi-square with 19 degrees


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        (Request(), [0, 1, 2, 3]),
        (Request(top_k=2), [1, 2]),
        (Request(top_p=0.5), [1, 2]),
        (Request(min_p=0.9), [1, 2]),
        (Request(top_k=3, top_p=0.6), [1, 2]),
        (Request(forbidden=frozenset({1})), [0, 2, 3]),
        (Request(presence=9.0, top_k=1), [2]),
        (Request(bias={3: 50.0}, top_p=0.5), [3]),
    ],
)
def test_selection_keeps_the_candidates_that_the_rules_name(
    request_: Request, kept: list[int]
) -> None:
    logits = np.array([0.0, 2.0, 2.0, 0.0])  # shares 0.06, 0.44, 0.44, 0.06
    choice = select(logits, request_, np.array([0, 1, 0, 0]))
    assert sorted(choice.probabilities) == kept
    assert choice.token in kept
