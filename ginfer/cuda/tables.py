"""Tables at fixed device addresses, filled on the host and sent in one copy.

Kernels and captured graphs keep the addresses; a turn only changes what lies there. Two pinned
copies take turns: while the device reads one, the host fills the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.cuda.runtime.memory import PinnedBuffer, copy_to_device
from ginfer.cuda.runtime.stream import Event
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.stream import Stream

ALIGNMENT = 256


def tables_nbytes(sizes: Mapping[str, int]) -> int:
    """Bytes of tables of so many words each."""
    return sum(align_up(words * 4, ALIGNMENT) for words in sizes.values())


class Tables:
    """Tables of 32-bit words, by name, in the order of `sizes`."""

    def __init__(self, sizes: Mapping[str, int], memory: Arena, stream: Stream) -> None:
        """sizes: words of each table at most."""
        nbytes = tables_nbytes(sizes)
        self._device, self._stream = memory.take(nbytes, "tables"), stream
        self._turns = [(PinnedBuffer(nbytes), Event()) for _ in range(2)]
        self._places: dict[str, int] = {}
        at = 0
        for name, words in sizes.items():
            self._places[name] = at
            at += align_up(words * 4, ALIGNMENT)
        self._views = [
            {
                name: buffer.bytes[at : at + align_up(sizes[name] * 4, ALIGNMENT)].view(np.int32)
                for name, at in self._places.items()
            }
            for buffer, _ in self._turns
        ]
        self._turn = self._first = self._end = 0

    def __getitem__(self, name: str) -> int:
        """Device address of a table."""
        return self._device.address + self._places[name]

    def begin(self) -> None:
        """Start a turn, once the device has read what the turn before the last one sent."""
        self._turn = 1 - self._turn
        self._turns[self._turn][1].synchronize()
        self._first, self._end = self._device.nbytes, 0

    def words(self, name: str, count: int, dtype: Any = np.int32) -> NDArray[Any]:
        """The first `count` words of a table, to be filled before `send`."""
        view, at = self._views[self._turn][name], self._places[name]
        assert count <= len(view), name
        if count:
            self._first = min(self._first, at)
            self._end = max(self._end, at + count * 4)
        return view[:count].view(dtype)

    def fill(self, name: str, values: NDArray[Any]) -> None:
        """Fill a table from its start with integers or floats of 32 bits."""
        self.words(name, values.size, values.dtype)[:] = values.reshape(-1)

    def send(self) -> None:
        """Copy what this turn has filled to the device, in the order of the stream; what lies
        between is lost."""
        buffer, event = self._turns[self._turn]
        if self._end:
            to, nbytes = self._device.address + self._first, self._end - self._first
            copy_to_device(to, buffer.host + self._first, nbytes, stream=self._stream)
        event.record(self._stream)

    def close(self) -> None:
        """Free the pinned memory once the device has read it."""
        for buffer, event in self._turns:
            event.synchronize()
            event.close()
            buffer.close()
