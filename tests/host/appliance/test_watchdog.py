"""Who is frozen, and who only has nothing to do."""

from __future__ import annotations

from appliance.watchdog import Watchdog

LIMIT_S = 4.0


def _ticks(watchdog: Watchdog, *, rounds: list[int] | None, has_work: bool, count: int = 8) -> int:
    """Ticks until a verdict, `count` if there is none."""
    for i in range(count):
        if rounds is not None:
            watchdog.alive(rounds[min(i, len(rounds) - 1)])
        if watchdog.tick(has_work=has_work):
            return i
    return count


def test_silence_is_a_verdict_with_and_without_work() -> None:
    for has_work in (False, True):
        watchdog = Watchdog(LIMIT_S)
        watchdog.alive(0)
        assert watchdog.tick_s == 1.0
        assert _ticks(watchdog, rounds=None, has_work=has_work) == 4


def test_no_round_is_a_verdict_only_while_requests_wait() -> None:
    assert _ticks(Watchdog(LIMIT_S), rounds=[7], has_work=False, count=50) == 50
    assert _ticks(Watchdog(LIMIT_S), rounds=[7], has_work=True) == 4
    assert _ticks(Watchdog(LIMIT_S), rounds=list(range(50)), has_work=True, count=50) == 50


def test_work_after_a_long_rest_has_the_whole_time() -> None:
    watchdog = Watchdog(LIMIT_S)
    _ticks(watchdog, rounds=[3], has_work=False, count=50)
    assert _ticks(watchdog, rounds=[3], has_work=True) == 4


def test_a_new_engine_starts_anew() -> None:
    watchdog = Watchdog(LIMIT_S)
    _ticks(watchdog, rounds=None, has_work=True, count=4)
    watchdog.reset()
    assert _ticks(watchdog, rounds=None, has_work=True) == 4
