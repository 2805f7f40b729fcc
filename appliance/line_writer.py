"""LineWriter: lines to a file or stderr from a thread of its own, so that no event loop waits."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ginfer.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NBYTES = 4 * MIB  # held while the disk or the terminal is slow
GATHER_S = 0.01  # lines of so long are written together: the thread wakes once for them
CLOSE_S = 2.0


class LineWriter:
    """Takes whole lines, bytes that end with a newline, and hands them in order to `write`.

    Beyond `max_nbytes` of unwritten lines new ones are dropped and counted, and so are the lines
    that `write` refuses by OSError; `on_error` is told of the first refusal after a success, on
    the writing thread."""

    def __init__(
        self,
        write: Callable[[Sequence[bytes]], None],
        *,
        max_nbytes: int = MAX_NBYTES,
        on_error: Callable[[OSError], None] | None = None,
    ) -> None:
        self._write, self._max_nbytes, self._on_error = write, max_nbytes, on_error
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._nbytes = 0
        self._idle = True
        self._hurry = False  # somebody waits for the lines
        self._closed = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, or drop it; never waits for the medium."""
        with self._changed:
            if self._closed or self._nbytes + len(line) > self._max_nbytes:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._nbytes += len(line)
            if self._idle:
                self._idle = False
                self._changed.notify_all()

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything queued is written, or for so long; whether it is."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._idle, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is queued, at most for so long, and take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failed = False
        while lines := self._take():
            try:
                self._write(lines)
                failed = False
            except OSError as error:
                with self._changed:
                    self.num_dropped += len(lines)
                if self._on_error is not None and not failed:
                    with suppress(OSError):
                        self._on_error(error)
                failed = True

    def _take(self) -> list[bytes]:
        """The queued lines, when there are any; nothing at the end."""
        with self._changed:
            if not self._lines:
                self._idle, self._hurry = True, False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._closed)
            self._changed.wait_for(lambda: self._hurry or self._closed, GATHER_S)
            lines = list(self._lines)
            self._lines.clear()
            self._nbytes = 0
            return lines
