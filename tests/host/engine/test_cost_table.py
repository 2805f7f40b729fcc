"""Costs of rounds: between what was measured at start, and after what is measured in service."""

import random

import pytest

from ginfer.engine.cost_table import MOST, CostTable, RoundCosts

TABLE = CostTable(
    columns=(2, 4, 9),
    plain_round_s=(1.0, 1.25),
    verify_s=((1.25, 1.5, 2.0), (1.5, 1.75, 2.5)),
    draft_s=(0.5, 0.5),
)


def test_costs_between_measured_columns_are_linear_and_beyond_them_the_last():
    assert TABLE.round_s(1, 1, drafter=False) == 1.0
    assert TABLE.round_s(1, 3, drafter=False) == 1.375
    assert TABLE.round_s(1, 4, drafter=True) == 2.0
    assert TABLE.round_s(1, 12, drafter=False) == 2.0


def test_rounds_of_one_kind_move_what_they_share():
    costs = RoundCosts(TABLE)
    for _ in range(200):
        costs.observe(1, 1, 3.0, drafter=False)  # a long context
    assert costs.plain_s(1) == pytest.approx(3.0, rel=1e-3)
    assert costs.round_s(1, 4, drafter=True) == pytest.approx(6.0, rel=1e-3)
    for _ in range(200):
        costs.observe(1, 9, 9.0, drafter=True)
    assert costs.round_s(1, 9, drafter=True) == pytest.approx(9.0, rel=1e-3)
    assert costs.plain_s(1) == pytest.approx(3.0, rel=1e-3)
    assert costs.round_s(1, 9, drafter=False) == pytest.approx(6.0, rel=1e-3)
    assert costs.plain_s(2) == 1.25


def test_outliers_hardly_move_an_estimate_that_is_bounded():
    costs, rng = RoundCosts(TABLE), random.Random(1)
    for i in range(400):
        seconds = 1000.0 if i % 40 == 39 else rng.uniform(0.95, 1.05)
        costs.observe(1, 1, seconds, drafter=False)
    assert 0.95 < costs.plain_s(1) < 1.1
    for _ in range(400):
        costs.observe(1, 1, 1e6, drafter=False)
    assert costs.plain_s(1) == MOST


def test_what_was_measured_at_start_counts_until_three_rounds_were():
    costs = RoundCosts(TABLE)
    for seconds, wanted in ((0.02, 0.02), (7.0, 0.02), (0.03, 0.03)):
        assert not costs.known(1)
        costs.observe(1, 1, seconds, drafter=False)
        assert costs.plain_s(1) == wanted
    assert costs.known(1)
    assert not costs.known(2)
