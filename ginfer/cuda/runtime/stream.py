"""Streams, events and device time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call
from ginfer.env import LAUNCH_CHECK

if TYPE_CHECKING:
    from collections.abc import Callable

NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
REMEMBERED = 4  # faults surface at a later call; it names this many last launches


class Stream:
    """An order of work on the current device, without ties to the default stream."""

    def __init__(self) -> None:
        self.handle = int(call("cuStreamCreate", driver.cuStreamCreate(NON_BLOCKING)))
        self.recent: deque[str] = deque(maxlen=REMEMBERED)
        self.capturing = False
        self.check = LAUNCH_CHECK.read() == "1"

    def note(self, name: str) -> None:
        """Remember a launch. With GINFER_LAUNCH_CHECK=1 also wait for it, except in a capture."""
        self.recent.append(name)
        if self.check and not self.capturing:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until the stream is empty. Raises DeviceError for what its work did, with the names
        of the last launches."""
        call(self._after("cuStreamSynchronize"), driver.cuStreamSynchronize(self.handle))

    def done(self) -> bool:
        """Whether the stream is empty. Raises as synchronize() does."""
        result = driver.cuStreamQuery(self.handle)
        if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call(self._after("cuStreamQuery"), result)
        return True

    def wait(self, event: Event) -> None:
        """Hold later work of this stream until the event's work is done."""
        call("cuStreamWaitEvent", driver.cuStreamWaitEvent(self.handle, event.handle, 0))

    def close(self) -> None:
        """Destroy the stream once its work is done."""
        call("cuStreamDestroy", driver.cuStreamDestroy(self.handle))

    def _after(self, what: str) -> str:
        return f"{what} after {', '.join(reversed(self.recent))}" if self.recent else what


class Event:
    """A point in a stream's work. timed: elapsed_ms() works, recording costs more."""

    def __init__(self, *, timed: bool = False) -> None:
        TAKEN["events"] += 1
        flags = driver.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self.handle = int(call("cuEventCreate", driver.cuEventCreate(int(flag))))

    def record(self, stream: Stream) -> None:
        """Mark the end of what the stream has so far."""
        call("cuEventRecord", driver.cuEventRecord(self.handle, stream.handle))

    def synchronize(self) -> None:
        """Wait for the marked work."""
        call("cuEventSynchronize", driver.cuEventSynchronize(self.handle))

    def reached(self) -> bool:
        """Whether the marked work is done."""
        (status,) = driver.cuEventQuery(self.handle)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        call("cuEventQuery", (status,))
        return True

    def elapsed_ms(self, start: Event) -> float:
        """Device time since `start`, both timed and reached."""
        return float(
            call("cuEventElapsedTime", driver.cuEventElapsedTime(start.handle, self.handle))
        )

    def close(self) -> None:
        """Destroy the event."""
        call("cuEventDestroy", driver.cuEventDestroy(self.handle))


class Timer:
    """Device time of work on a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.start, self.stop = Event(timed=True), Event(timed=True)

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Run `work`, which orders work on the stream, wait for it and return its device time."""
        self.start.record(self.stream)
        work()
        self.stop.record(self.stream)
        self.stop.synchronize()
        return self.stop.elapsed_ms(self.start)
