"""ChunkTimes: device time of prefill forwards, by events on the stream."""

from __future__ import annotations

from collections import deque

from ginfer.cuda.runtime.stream import Event, Stream

NUM_CHUNKS = 8  # on their way; a ninth waits for the first


class ChunkTimes:
    """Marks where prefill forwards begin and end."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free = [(Event(timed=True), Event(timed=True)) for _ in range(NUM_CHUNKS)]
        self._marked: deque[tuple[Event, Event]] = deque()
        self._seconds: list[float] = []

    def begin(self) -> None:
        """The next work of the stream is a prefill forward."""
        if not self._free:
            self._marked[0][1].synchronize()
            self._collect()
        self._marked.append(self._free.pop())
        self._marked[-1][0].record(self._stream)

    def end(self) -> None:
        """The last work of the stream was the end of one."""
        self._marked[-1][1].record(self._stream)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be told, or waited for."""
        return not (self._marked or self._seconds)

    def take(self) -> list[float]:
        """Seconds of those that have ended since the last call."""
        self._collect()
        seconds, self._seconds = self._seconds, []
        return seconds

    def _collect(self) -> None:
        while self._marked and self._marked[0][1].reached():
            begin, end = pair = self._marked.popleft()
            self._seconds.append(end.elapsed_ms(begin) / 1e3)
            self._free.append(pair)

    def close(self) -> None:
        """Destroy the events."""
        for pair in (*self._free, *self._marked):
            for event in pair:
                event.close()
