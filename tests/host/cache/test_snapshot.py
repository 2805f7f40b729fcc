"""Where a prompt wants snapshots."""

from __future__ import annotations

from ginfer.cache.snapshot import SnapshotKind, snapshot_points

SYSTEM, TURN, INTERVAL = SnapshotKind.SYSTEM, SnapshotKind.TURN, SnapshotKind.INTERVAL


def points(num_tokens, turns=(), *, base=0, free=0.0):
    return snapshot_points(num_tokens, turns, base=base, free_fraction=free)


def test_system_end_and_assistant_header_on_page_borders():
    assert points(1000, (130, 500, 990)) == {128: SYSTEM, 960: TURN}


def test_computed_points_are_left_out():
    assert points(1000, (130, 500, 990), base=128) == {960: TURN}
    assert points(1000, (130, 500, 990), base=990) == {}


def test_short_prompts_have_none():
    assert points(64) == {}
    assert points(60, (10, 55)) == {}


def test_prompt_without_turns_leaves_one_token():
    assert points(128) == {64: TURN}
    assert points(129) == {128: TURN}


def test_one_turn_is_system_and_frontier_at_once():
    assert points(300, (200,)) == {192: SYSTEM}


def test_intervals_inside_long_prompts_halve_in_ample_memory():
    wanted = points(30_000, (10_000, 29_990))
    assert list(wanted) == [8192, 9984, 16384, 24576, 29952]
    assert [n for n, kind in wanted.items() if kind is INTERVAL] == [8192, 16384, 24576]
    ample = points(30_000, (10_000, 29_990), base=16_384, free=0.3)
    assert list(ample) == [20480, 24576, 28672, 29952]
