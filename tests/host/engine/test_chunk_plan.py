"""Chunk plans: legal ends, packing in order, chunks that keep to a pause, learned costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ginfer.engine import chunk_plan
from ginfer.engine.chunk_plan import (
    ChunkClock,
    ChunkCost,
    ChunkLimits,
    Piece,
    PromptView,
    has_room,
    piece_of,
)

TRUE = ChunkCost(0.004, 80e-6, 1 / 65_536)


def plan_chunk(prompts, columns, **bounds):
    return chunk_plan.plan_chunk(prompts, ChunkLimits(columns=columns, cost=TRUE, **bounds))


def test_a_long_prompt_takes_the_whole_chunk_to_a_multiple_of_64():
    prompts = [PromptView(2, 100, 5000), PromptView(0, 0, 30)]
    assert plan_chunk(prompts, 1024) == (Piece(2, 100, 1088, last=False),)


def test_short_prompts_are_packed_in_order_and_the_last_one_is_cut():
    prompts = [PromptView(3, 64, 164), PromptView(1, 0, 200), PromptView(0, 70, 2000)]
    assert plan_chunk(prompts, 512) == (
        Piece(3, 64, 164, last=True),
        Piece(1, 0, 200, last=True),
        Piece(0, 70, 256, last=False),
    )


def test_a_prompt_follows_where_the_one_before_takes_a_snapshot():
    prompts = [PromptView(0, 10, 100, points=(64,)), PromptView(1, 0, 10)]
    assert plan_chunk(prompts, 1024) == (Piece(0, 10, 64, last=False), Piece(1, 0, 10, last=True))


def test_the_end_of_a_prompt_goes_on_behind_a_point_where_the_backend_allows_it():
    prompts = [
        PromptView(0, 0, 100, points=(64,)),
        PromptView(1, 0, 250, points=(64, 192)),  # ends two points further
        PromptView(2, 0, 30),
    ]
    first = Piece(0, 0, 64, last=False)
    more = (Piece(1, 0, 64, last=False), Piece(2, 0, 30, last=True))
    assert plan_chunk(prompts, 1024, goes_on=True) == (first, Piece(0, 64, 100, last=True), *more)
    assert plan_chunk(prompts, 1024) == (first, *more)
    assert plan_chunk(prompts[:1], 64, goes_on=True) == (first,)
    assert plan_chunk(prompts[:1], 1024, goes_on=True, pages=2) == (first,)


def test_prompts_share_a_chunk_as_long_as_their_pages_fit():
    prompts = [PromptView(0, 6400, 6500), PromptView(1, 0, 64), PromptView(2, 0, 10)]
    for pages, count in ((1, 1), (102, 1), (103, 2), (104, 3), (None, 3)):
        assert len(plan_chunk(prompts, 1024, pages=pages)) == count
        limits = ChunkLimits(columns=1024, cost=TRUE, pages=pages)
        assert has_room(prompts, limits) == (count == 3)


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.02, 0.03, 0.2])
def test_a_packed_chunk_keeps_to_the_pause(pause_s):
    prompts = [PromptView(lane, 8192 * lane, 8192 * lane + 130) for lane in range(8)]
    pieces = plan_chunk(prompts, 8192, pause_s=pause_s)
    seconds = TRUE.fixed_s + sum(
        TRUE.work_s * TRUE.work(piece.start, piece.num_columns) for piece in pieces
    )
    assert seconds <= pause_s or (len(pieces) == 1 and pieces[0].num_columns == 64)
    assert len(pieces) == (1, 1, 1, 2, 8)[(0.0, 0.01, 0.02, 0.03, 0.2).index(pause_s)]


def test_columns_that_reach_no_legal_end_stay_empty():
    prompts = [PromptView(0, 0, 30), PromptView(1, 10, 100)]
    assert plan_chunk(prompts, 64) == (Piece(0, 0, 30, last=True),)
    assert piece_of(PromptView(1, 10, 100), 53) is None
    assert plan_chunk((), 64) == ()


@st.composite
def prompts(draw):
    """Prompts with points at multiples of 64."""
    found = []
    for lane in range(draw(st.integers(1, 8))):
        num_prompt = draw(st.integers(1, 3000))
        start = draw(st.integers(0, num_prompt - 1))
        points = draw(st.lists(st.integers(0, num_prompt // 64), max_size=3))
        found.append(PromptView(lane, start, num_prompt, tuple(sorted(64 * p for p in points))))
    return found


@given(prompts(), st.integers(1, 64))
def test_chunks_of_any_prompts_are_legal_and_finish_them(waiting, pages):
    ends = {p.lane: p.num_prompt for p in waiting}
    for _ in range(10_000):
        if not waiting:
            break
        pieces = plan_chunk(waiting, 64 * pages)
        assert 0 < sum(piece.num_columns for piece in pieces) <= 64 * pages
        assert [piece.lane for piece in pieces] == [p.lane for p in waiting[: len(pieces)]]
        for piece, prompt in zip(pieces, waiting):
            assert piece.start == prompt.start < piece.stop
            assert piece.last == (piece.stop == ends[piece.lane])
            assert piece.last or piece.stop % 64 == 0
            assert not any(piece.start < point < piece.stop for point in prompt.points)
        stops = {piece.lane: piece.stop for piece in pieces}
        waiting = [
            PromptView(p.lane, stops.get(p.lane, p.start), p.num_prompt, p.points)
            for p in waiting
            if stops.get(p.lane, p.start) < p.num_prompt
        ]
    assert not waiting


@pytest.mark.parametrize("start", [0, 8192, 131_072])
@pytest.mark.parametrize("pause_s", [0.001, 0.03, 0.2, 10.0])
def test_a_chunk_keeps_to_the_pause_and_uses_it(start, pause_s):
    columns = TRUE.columns_within(start, pause_s, 8192)
    assert columns % 64 == 0
    assert 0 <= columns <= 8192
    if columns:
        assert TRUE.seconds(start, columns) <= pause_s
    if columns < 8192:
        assert TRUE.seconds(start, columns + 64) > pause_s


def observe(clock, start, columns, seconds):
    clock.observe([Piece(0, start, start + columns, last=False)], seconds)


def test_the_clock_learns_both_parts_of_the_cost():
    clock = ChunkClock(ChunkCost(0.05, 1e-3, TRUE.pair_share))
    for start, columns in [(0, 64), (0, 1024), (4096, 512), (65_536, 256), (0, 2048)] * 3:
        observe(clock, start, columns, TRUE.seconds(start, columns))
    assert clock.cost.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.05)
    assert clock.cost.work_s == pytest.approx(TRUE.work_s, rel=0.05)


def test_the_clock_follows_a_machine_that_gets_slower_with_equal_chunks():
    clock = ChunkClock(TRUE)
    for _ in range(40):
        observe(clock, 0, 512, 3 * TRUE.seconds(0, 512))
    assert clock.cost.seconds(0, 512) == pytest.approx(3 * TRUE.seconds(0, 512), rel=0.05)
    assert clock.cost.columns_within(0, 0.03, 8192) < TRUE.columns_within(0, 0.03, 8192)


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 128), st.floats(0, 100))))
def test_no_observation_makes_a_cost_negative(times):
    clock = ChunkClock(TRUE)
    for start, pages, seconds in times:
        observe(clock, start, 64 * pages, seconds)
        assert clock.cost.fixed_s >= -1e-9
        assert clock.cost.work_s >= 0
        assert 0 <= clock.cost.columns_within(start, 0.03, 8192) <= 8192


def steps(start, columns):
    """Seconds of a chunk on a device whose tiles have 128 columns."""
    return 0.004 + 0.007 * -(-columns // 128) + 0.7e-9 * columns * start


def test_widths_that_cost_no_more_than_narrower_ones_are_found():
    clock = ChunkClock(ChunkCost(0.005, 1e-4, 8e-6))
    chosen, start = [], 0
    while start < 65_536:
        columns = max(clock.cost.columns_within(start, 0.03, 8192), 64)
        observe(clock, start, columns, steps(start, columns))
        best = max(n for n in range(64, 1024, 64) if steps(start, n) <= 0.03)
        chosen.append((columns, best, steps(start, columns)))
        start += columns
    late = [seconds for *_, seconds in chosen if seconds > 0.03]
    assert len(late) <= 0.05 * len(chosen)
    assert max(late, default=0) < 0.034
    assert sum(columns == best for columns, best, _ in chosen) > 0.8 * len(chosen)


def test_a_width_that_something_disturbed_once_is_tried_again():
    clock = ChunkClock(TRUE)
    for columns in (256, 320):
        observe(clock, 0, columns, TRUE.seconds(0, columns))
    observe(clock, 0, 320, 1.0)
    assert clock.cost.columns_within(0, 0.03, 320) < 320
    for _ in range(300):
        columns = clock.cost.columns_within(0, 0.03, 320)
        observe(clock, 0, columns, TRUE.seconds(0, columns))
    assert clock.cost.columns_within(0, 0.03, 320) == 320
