"""Watchdog: whether an engine process that should work shows life and moves."""

from __future__ import annotations


class Watchdog:
    """Judges by signs of life: frames that say how many rounds the engine has run. Time is counted
    in ticks of the server's own loop, so that a pause of the whole machine accuses nobody."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.tick_s = min(1.0, limit_s / 4)
        self._rounds = -1
        self.reset()

    def reset(self) -> None:
        """The engine is new."""
        self._silent_s = self._still_s = 0.0

    def alive(self, rounds: int) -> None:
        """The engine says that it has run so many rounds."""
        self._silent_s = 0.0
        if rounds != self._rounds:
            self._rounds, self._still_s = rounds, 0.0

    def tick(self, *, has_work: bool) -> str | None:
        """A tick has passed; why the engine is given up, or None. has_work: requests run or
        wait."""
        self._silent_s += self.tick_s
        self._still_s = self._still_s + self.tick_s if has_work else 0.0
        if self._silent_s > self._limit_s:
            return f"the engine process froze: no sign of life for {self._limit_s:g} s"
        if self._still_s > self._limit_s:
            return f"the engine froze: no round for {self._limit_s:g} s while requests wait"
        return None
