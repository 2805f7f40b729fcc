"""A progress bar for a start that takes longer than people wait without asking."""

from __future__ import annotations

import sys
from threading import Lock, Timer
from typing import TYPE_CHECKING, Self

from appliance.stages import STAGES

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 2.0


class LoadBar:
    """Draws on stderr, if that is a terminal, what a start that lasts over PATIENCE_S is doing.

    A context manager around the start; call it with a stage, the amount done and the total."""

    def __init__(self) -> None:
        self._state = ("load", 0, 1)
        self._lock = Lock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._over = False
        self._timer = Timer(PATIENCE_S, self._show)
        self._timer.daemon = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take news of the start."""
        with self._lock:
            self._state = (stage, done, total)
            self._draw()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._bar is not None:
                self._bar.stop()

    def _show(self) -> None:
        # here, because a start that is fast should not pay for the import
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        with self._lock:
            if self._over:
                return
            self._bar, self._task = bar, bar.add_task("")
            self._draw()
            bar.start()

    def _draw(self) -> None:
        if self._bar is not None and self._task is not None:
            stage, done, total = self._state
            text = STAGES.get(stage, stage)
            self._bar.update(self._task, description=text, completed=done, total=total)
