"""RoundClock: device time of rounds and of the gaps between them, by events on the stream."""

from __future__ import annotations

from itertools import pairwise

from ginfer.cuda.runtime.stream import Event, Stream


class RoundClock:
    """Marks where forwards begin and draws end, up to a number of marks; then it stops."""

    def __init__(self, stream: Stream, *, num_marks: int = 1024) -> None:
        self._stream = stream
        self._events = [Event(timed=True) for _ in range(num_marks)]
        self._begins: list[bool] = []

    def forward_begins(self) -> None:
        """The next work of the stream is a forward."""
        self._mark(begins=True)

    def draw_ends(self) -> None:
        """The last work of the stream was a draw."""
        self._mark(begins=False)

    def _mark(self, *, begins: bool) -> None:
        if len(self._begins) < len(self._events):
            self._events[len(self._begins)].record(self._stream)
            self._begins.append(begins)

    def intervals_us(self) -> tuple[list[float], list[float]]:
        """(gaps, rounds): microseconds from a draw to the forward after it, and from a forward to
        the end of its draw. Waits for the marks, and starts anew."""
        self._stream.synchronize()
        gaps: list[float] = []
        rounds: list[float] = []
        for (a, begins), (b, again) in pairwise(zip(self._events, self._begins)):
            if begins != again:
                (rounds if begins else gaps).append(1000 * b.elapsed_ms(a))
        self._begins = []
        return gaps, rounds

    def close(self) -> None:
        """Destroy the events."""
        for event in self._events:
            event.close()
