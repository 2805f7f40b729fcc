"""Round scheduler: alternation, absolute chunk borders, entitlements."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.engine.round import DecodeUnit, PrefillUnit, RoundView
from ginfer.engine.scheduler import (
    chunk_end,
    effective_output,
    entitled_pages,
    may_admit,
    next_unit,
)


@settings(derandomize=True)
@given(n=st.integers(1, 3000), start=st.integers(0, 2999), chunk=st.integers(1, 20))
def test_chunks_cover_the_prompt_and_end_on_absolute_borders(n, start, chunk):
    start %= n
    while start < n:
        stop = chunk_end(start, n, 64 * chunk)
        assert start < stop <= min(n, start + 64 * chunk)
        assert stop == n or stop % 64 == 0
        start = stop


def test_entitlement_counts_all_but_the_last_token():
    assert [entitled_pages(p, n) for p, n in ((64, 1), (64, 2), (1, 1), (60, 68))] == [1, 2, 1, 2]
    assert effective_output(100, 50, 1000) == 50
    assert effective_output(100, 5000, 1000) == 901
    assert effective_output(1000, 10, 1000) == 1
    assert entitled_pages(100, effective_output(100, 1 << 40, 1024)) == 16


def test_units_alternate_strictly_while_both_have_work():
    owner, ready = (2, 0, 4096), (0, 1, 5)
    kinds, decoded_last = [], False
    for _ in range(6):
        unit = next_unit(RoundView(owner=owner, ready=ready, decoded_last=decoded_last), 1024)
        decoded_last = isinstance(unit, DecodeUnit)
        if isinstance(unit, PrefillUnit):
            owner = (2, unit.stop, 4096)
        kinds.append(type(unit))
    assert kinds == [DecodeUnit, PrefillUnit] * 3


def test_one_kind_of_work_runs_alone():
    alone = RoundView(owner=(3, 64, 200), ready=(), decoded_last=False)
    assert next_unit(alone, 128) == PrefillUnit(3, 64, 192, last=False)
    ready = RoundView(owner=None, ready=(0, 7), decoded_last=True)
    assert next_unit(ready, 128) == DecodeUnit((0, 7))
    assert next_unit(RoundView(owner=None, ready=(), decoded_last=True), 128) is None


def test_chunks_end_at_the_points_of_snapshots():
    points, start, ends = (128, 192, 1024), 0, []
    while start < 1500:
        view = RoundView(owner=(3, start, 1500), points=points, ready=(), decoded_last=False)
        unit = next_unit(view, 512)
        assert unit.last == (unit.stop == 1500)
        start = unit.stop
        ends.append(start)
    assert ends == [128, 192, 704, 1024, 1500]


def test_admission_waits_for_the_owner_and_for_a_decode_round():
    for owner, ready, decoded_last, expected in (
        (None, (), False, True),
        (None, (1,), True, True),
        (None, (1,), False, False),
        ((0, 0, 10), (), True, False),
    ):
        view = RoundView(owner=owner, ready=ready, decoded_last=decoded_last)
        assert may_admit(view) is expected


def test_no_ready_request_waits_longer_than_one_chunk():
    rng = random.Random(5)
    owner, decoded_last, since = None, False, 0
    for _ in range(3000):
        ready = tuple(sorted(rng.sample(range(8), rng.randrange(1, 7))))
        if owner is None and may_admit(RoundView(owner=None, ready=ready, decoded_last=True)):
            owner = (7, 0, rng.randrange(1, 4000))
        unit = next_unit(RoundView(owner=owner, ready=ready, decoded_last=decoded_last), 512)
        decoded_last = isinstance(unit, DecodeUnit)
        since = 0 if decoded_last else since + 1
        assert since <= 1
        if isinstance(unit, PrefillUnit):
            owner = None if unit.last else (7, unit.stop, owner[2])
