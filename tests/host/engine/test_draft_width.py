"""Draft widths against simulated costs and acceptance: never much slower, near the best width."""

from __future__ import annotations

import random
from itertools import cycle, pairwise

import pytest

from ginfer.engine.cost_table import CostTable, RoundCosts
from ginfer.engine.draft_width import (
    LOSS,
    MAX_COLUMNS,
    Acceptance,
    DraftWidths,
    Offer,
    Origin,
)

COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128)


def cost_table(per_column=0.01, draft=0.2, rows=8):
    """Rounds of one second and more: a share per column beyond the rows, and the drafter's."""
    return CostTable(
        columns=COLUMNS,
        plain_round_s=tuple(1 + 0.02 * row for row in range(rows)),
        verify_s=tuple(
            tuple(1 + 0.02 * row + per_column * max(c - row - 1, 0) for c in COLUMNS)
            for row in range(rows)
        ),
        draft_s=(draft,) * rows,
    )


class Simulation:
    """Rounds of requests whose drafts are accepted with given probabilities."""

    def __init__(self, costs, seed=0, learned=7, believed=None):
        """believed: the costs that were measured at start, where they are wrong."""
        self.costs, self.random = costs, random.Random(seed)
        self.known = RoundCosts(believed or costs)
        self.widths = DraftWidths(self.known, learned=learned, copied=15)
        self.learned, self.seconds, self.tokens, self.plain = learned, 0.0, 0, 0.0
        self.history = []

    def rounds(self, rates, tokens, origin=Origin.DRAFTER):
        """Run until every request has `tokens` more. rates: probability of each next draft."""
        done = dict.fromkeys(rates, 0)
        while min(done.values()) < tokens:
            limits = {
                k: self.learned if origin is Origin.DRAFTER else self.widths.copy_limit(k)
                for k in rates
            }
            offers = {k: Offer(origin, limits[k]) for k in rates}
            plan = self.widths.plan(offers)
            accepted = {k: self.accept(plan[k], rates[k]) for k in rates}
            self.widths.record(offers, plan, accepted)
            columns = len(rates) + sum(plan.values())
            drafter = origin is Origin.DRAFTER and columns > len(rates)
            seconds = self.costs.round_s(len(rates), columns, drafter=drafter)
            self.known.observe(len(rates), columns, seconds, drafter=drafter)
            self.seconds += seconds
            for k in rates:
                done[k] += accepted[k] + 1
            self.history.append(plan)
        self.tokens += sum(done.values())
        self.plain += sum(done.values()) / len(rates) * self.costs.plain_s(len(rates))

    def accept(self, width, rate):
        n = 0
        while n < width and self.random.random() < rate:
            n += 1
        return n


def fixed(costs, rate, width):
    """Tokens per second of one request at a fixed width."""
    tokens = sum(rate**i for i in range(width + 1))
    return tokens / costs.round_s(1, 1 + width, drafter=width > 0)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("tokens", [64, 256, 3000])
def test_rejected_drafts_cost_at_most_three_percent(rows, tokens):
    s = Simulation(cost_table(), seed=rows)
    s.rounds(dict.fromkeys(range(rows), 0.0), tokens)
    assert s.seconds <= 1.03 * s.plain


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("costs", [cost_table(), cost_table(0.05, 0.1), cost_table(0.002, 0.4)])
def test_one_request_comes_near_the_best_fixed_width(rate, costs):
    s = Simulation(costs, seed=3)
    s.rounds({0: rate}, 6000)
    best = max(fixed(costs, rate, width) for width in range(8))
    assert s.tokens / s.seconds >= 0.95 * best
    assert s.seconds <= 1.03 * s.plain


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_wrong_costs_are_corrected_by_what_rounds_take(rate, factor):
    costs = cost_table(0.1, 0.3)
    wrong = cost_table(0.1 * factor, 0.3 * factor)
    s = Simulation(costs, seed=5, believed=wrong)
    s.rounds({0: rate}, 6000)
    best = max(fixed(costs, rate, width) for width in range(8))
    assert s.tokens / s.seconds >= 0.93 * best
    assert s.seconds <= 1.03 * s.plain


def test_a_change_of_acceptance_is_followed_both_ways():
    s = Simulation(cost_table(), seed=4)
    s.rounds({0: 0.95}, 2000)
    assert sum(plan[0] for plan in s.history[-50:]) > 50 * 5
    at, before = len(s.history), s.seconds
    s.rounds({0: 0.0}, 2000)
    assert s.seconds - before <= 2000 * (1 + 0.03) + LOSS * before
    assert sum(plan[0] for plan in s.history[-100:]) < 100
    s.rounds({0: 0.95}, 3000)
    assert sum(plan[0] for plan in s.history[-50:]) > 50 * 5
    assert len(s.history) > at


def test_widths_do_not_flutter_where_two_are_almost_equal():
    costs = cost_table()
    s = Simulation(costs, seed=5)
    s.rounds({0: 0.6}, 5000)
    plans = [plan[0] for plan in s.history[100:]]
    changes = sum(a != b for a, b in pairwise(plans))
    assert changes < 0.1 * len(plans)


def test_a_request_with_good_drafts_keeps_its_width_beside_one_without():
    s = Simulation(cost_table(), seed=6)
    s.rounds({0: 0.9, 1: 0.0}, 1500)
    late = s.history[-200:]
    assert sum(plan[0] for plan in late) > 200 * 4
    assert sum(plan[1] for plan in late) < 200 * 0.5


def test_columns_of_a_batch_stay_within_the_captured_ones():
    s = Simulation(cost_table(per_column=0.0), seed=7, learned=15)
    s.rounds(dict.fromkeys(range(8), 1.0), 500)
    assert max(8 + sum(plan.values()) for plan in s.history) == MAX_COLUMNS
    offers = {0: Offer(Origin.DRAFTER, 3), 1: Offer(Origin.DRAFTER, 0)}
    plan = s.widths.plan(offers)
    assert plan[0] <= 3
    assert plan[1] == 0


def test_a_copy_grows_beyond_the_learned_window_after_two_full_ones():
    s = Simulation(cost_table(), seed=8)
    s.rounds({0: 1.0}, 300, origin=Origin.COPY)
    widths = [plan[0] for plan in s.history]
    wide = next(i for i, width in enumerate(widths) if width > 7)
    assert wide >= 2
    assert widths[-1] == 15
    assert s.tokens / s.seconds > 10
    s.rounds({0: 0.0}, 1, origin=Origin.COPY)
    assert s.widths.copy_limit(0) == 7


def test_acceptance_of_a_place_counts_only_rounds_that_reached_it():
    a = Acceptance(4)
    for _ in range(200):
        a.observe(3, 1)
    first, second, third, _ = a.gains(4)
    assert first > 0.9
    assert second < 0.1
    assert third < second
    assert a.gains(2) == a.gains(4)[:2]


def test_a_bad_round_after_good_ones_is_paid_from_what_they_brought():
    s = Simulation(cost_table(0.03, 0.2), seed=11)
    counts = cycle((1, 0, 3, 2, 1, 0, 4, 2, 1, 3))
    s.accept = lambda width, rate: min(next(counts), width) if width else 0
    s.rounds({0: 0.0}, 400)
    assert sum(plan[0] > 0 for plan in s.history) >= 0.95 * len(s.history)
    assert s.tokens / s.seconds >= 1.9


def test_an_origin_whose_drafts_fail_does_not_silence_the_other():
    s = Simulation(cost_table(), seed=10)
    s.rounds({0: 0.0}, 200)
    assert s.widths.plan({0: Offer(Origin.DRAFTER, 7)})[0] in (0, 3)
    assert s.widths.plan({0: Offer(Origin.COPY, 7)})[0] == 7
    s.widths.charge({0: Origin.COPY}, 100.0)
    assert not s.widths.may_draft([0], Origin.COPY, 1)


def test_a_forgotten_request_starts_anew():
    s = Simulation(cost_table(), seed=9)
    before = s.widths.plan({0: Offer(Origin.DRAFTER, 7)})
    s.rounds({0: 0.0}, 100)
    s.widths.forget(0)
    assert s.widths.plan({0: Offer(Origin.DRAFTER, 7)}) == before
