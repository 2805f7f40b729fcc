"""Round scheduler: alternation, chunks of several prompts, entitlements."""

from __future__ import annotations

import random
from dataclasses import replace

from ginfer.engine.chunk_plan import ChunkCost, ChunkLimits, Piece, PromptView
from ginfer.engine.round import DecodeUnit, PrefillUnit, RoundView
from ginfer.engine.scheduler import effective_output, entitled_pages, may_admit, next_unit

COST = ChunkCost(0.004, 80e-6, 1 / 65_536)


def limits(columns=1024, **bounds):
    return ChunkLimits(columns=columns, cost=COST, **bounds)


def test_entitlement_counts_all_but_the_last_token():
    assert [entitled_pages(p, n) for p, n in ((64, 1), (64, 2), (1, 1), (60, 68))] == [1, 2, 1, 2]
    assert effective_output(100, 50, 1000) == 50
    assert effective_output(100, 5000, 1000) == 901
    assert effective_output(1000, 10, 1000) == 1
    assert entitled_pages(100, effective_output(100, 1 << 40, 1024)) == 16


def advanced(prompts, unit):
    """The prompts that are left after a chunk."""
    stops = {piece.lane: piece.stop for piece in unit.pieces}
    moved = (replace(p, start=stops.get(p.lane, p.start)) for p in prompts)
    return tuple(p for p in moved if p.start < p.num_prompt)


def test_units_alternate_strictly_while_both_have_work():
    prompts, ready = (PromptView(2, 0, 4096),), (0, 1, 5)
    kinds, decoded_last = [], False
    for _ in range(6):
        view = RoundView(prompts=prompts, ready=ready, decoded_last=decoded_last)
        unit = next_unit(view, limits())
        decoded_last = isinstance(unit, DecodeUnit)
        if isinstance(unit, PrefillUnit):
            prompts = advanced(prompts, unit)
        kinds.append(type(unit))
    assert kinds == [DecodeUnit, PrefillUnit] * 3


def test_one_kind_of_work_runs_alone():
    alone = RoundView(prompts=(PromptView(3, 64, 200),), ready=(), decoded_last=False)
    assert next_unit(alone, limits(128)) == PrefillUnit((Piece(3, 64, 192, last=False),))
    ready = RoundView(ready=(0, 7), decoded_last=True)
    assert next_unit(ready, limits(128)) == DecodeUnit((0, 7))
    assert next_unit(RoundView(ready=(), decoded_last=True), limits(128)) is None


def test_admission_waits_for_room_in_the_chunk_and_for_a_decode_round():
    short, long = PromptView(0, 0, 960), PromptView(0, 0, 961)
    for prompts, ready, decoded_last, expected in (
        ((), (), False, True),
        ((), (1,), True, True),
        ((), (1,), False, False),
        ((short,), (), True, True),
        ((short,), (1,), False, False),
        ((long,), (), True, False),
        ((short, long), (), True, False),
        ((replace(long, num_prompt=5000, points=(640,)),), (), True, True),
    ):
        view = RoundView(prompts=prompts, ready=ready, decoded_last=decoded_last)
        assert may_admit(view, limits()) is expected, (prompts, ready, decoded_last)


def test_no_room_is_left_where_the_pause_is_used():
    view = RoundView(prompts=(PromptView(0, 0, 250),), ready=(1,), decoded_last=True)
    assert may_admit(view, limits(pause_s=0.03))
    assert not may_admit(view, limits(pause_s=0.025))
    assert may_admit(replace(view, prompts=()), limits(pause_s=0.0))


def test_no_ready_request_waits_longer_than_one_chunk_and_every_prompt_goes_on():
    rng = random.Random(5)
    prompts, decoded_last, since, seen = (), False, 0, 0
    for _ in range(3000):
        ready = tuple(sorted(rng.sample(range(5), rng.randrange(1, 5))))
        bounds = limits(512, pause_s=rng.choice((0.0, 0.02, 1.0)))
        view = RoundView(prompts=prompts, ready=ready, decoded_last=decoded_last)
        free = sorted(set(range(5, 8)) - {p.lane for p in prompts})
        if free and may_admit(view, bounds):
            prompts += (PromptView(free[0], 0, rng.randrange(1, 4000)),)
            view = replace(view, prompts=prompts)
        unit = next_unit(view, bounds)
        decoded_last = isinstance(unit, DecodeUnit)
        since = 0 if decoded_last else since + 1
        assert since <= 1
        if isinstance(unit, PrefillUnit):
            assert unit.pieces[0].lane == prompts[0].lane
            assert sum(piece.num_columns for piece in unit.pieces) <= 512
            prompts = advanced(prompts, unit)
            seen += len(unit.pieces) > 1
    assert seen > 50
