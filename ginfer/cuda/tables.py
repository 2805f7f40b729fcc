"""Tables at fixed device addresses, filled on the host and sent in one copy, or few.

Kernels and captured graphs keep the addresses; a turn only changes what lies there. Two pinned
copies take turns: while the device reads one, the host fills the other.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Group(NamedTuple):
    """Beginnings of several tables that are filled together: where they lie, and a view of each for
    either turn."""

    places: list[tuple[int, int, int]]
    views: tuple[list[NDArray[Any]], list[NDArray[Any]]]


class Tables:
    """Tables of 32-bit words, by name, in the order of `sizes`."""

    def __init__(self, sizes: Mapping[str, int], memory: Arena, stream: Stream) -> None:
        """sizes: words of each table at most."""
        nbytes = tables_nbytes(sizes)
        self._device, self._stream = memory.take(nbytes, "tables"), stream
        self._turns = [(PinnedBuffer(nbytes), Event()) for _ in range(2)]
        self._places: dict[str, tuple[int, int]] = {}  # which table, and its first byte
        at = 0
        for i, (name, words) in enumerate(sizes.items()):
            self._places[name] = i, at
            at += align_up(words * 4, ALIGNMENT)
        self._views = [
            {
                name: buffer.bytes[at : at + align_up(sizes[name] * 4, ALIGNMENT)].view(np.int32)
                for name, (_, at) in self._places.items()
            }
            for buffer, _ in self._turns
        ]
        self._turn = 0
        self._filled: list[tuple[int, int, int]] = []  # (table, first byte, last + 1) of this turn
        self._kept: dict[str, NDArray[Any]] = {}  # what lies in tables that `keeps` was asked for

    def __getitem__(self, name: str) -> int:
        """Device address of a table."""
        return self._device.address + self._places[name][1]

    def begin(self) -> None:
        """Start a turn, once the device has read what the turn before the last one sent."""
        self._turn = 1 - self._turn
        self._turns[self._turn][1].synchronize()
        self._filled.clear()

    def words(self, name: str, count: int, dtype: Any = np.int32) -> NDArray[Any]:
        """The first `count` words of a table, to be filled before `send`."""
        view = self._views[self._turn][name]
        assert count <= len(view), name
        if count:
            table, at = self._places[name]
            self._filled.append((table, at, at + count * 4))
        return view[:count] if dtype is np.int32 else view[:count].view(dtype)

    def group(self, *sizes: tuple[str, tuple[int, ...], Any]) -> Group:
        """Beginnings of tables by name, shape and type of 32 bits, none of them empty."""
        group = Group([], ([], []))
        for name, shape, dtype in sizes:
            (table, at), count = self._places[name], prod(shape)
            group.places.append((table, at, at + count * 4))
            for turn, views in zip(self._views, group.views):
                assert 0 < count <= len(turn[name]), name
                views.append(turn[name][:count].view(dtype).reshape(shape))
        return group

    def words_of(self, group: Group) -> list[NDArray[Any]]:
        """A group's words, to be filled before `send`."""
        self._filled += group.places
        return group.views[self._turn]

    def fill(self, name: str, values: NDArray[Any]) -> None:
        """Fill a table from its start with integers or floats of 32 bits."""
        self.words(name, values.size, values.dtype.type)[:] = (
            values if values.ndim == 1 else values.reshape(-1)
        )

    def keeps(self, name: str, values: NDArray[Any]) -> bool:
        """Whether a table holds what this very array, which nobody changes, put there last; if not,
        it is to be filled from it now. Others never fill that table."""
        if self._kept.get(name) is values:
            return True
        self._kept[name] = values
        return False

    def keep(self, name: str, values: NDArray[Any]) -> None:
        """As `fill`, once per array."""
        if not self.keeps(name, values):
            self.fill(name, values)

    def send(self) -> None:
        """Copy what this turn has filled to the device, in the order of the stream: neighbours
        together, and what lies between them is lost."""
        buffer, event = self._turns[self._turn]
        for first, end in self._runs():
            to = self._device.address + first
            copy_to_device(to, buffer.host + first, end - first, stream=self._stream)
        event.record(self._stream)

    def _runs(self) -> list[tuple[int, int]]:
        """(first byte, last + 1) of the runs of filled tables."""
        runs: list[tuple[int, int]] = []
        before = -2
        self._filled.sort()
        for table, first, end in self._filled:
            if table <= before + 1:
                first, last = runs.pop()
                end = max(end, last)
            runs.append((first, end))
            before = table
        return runs

    def close(self) -> None:
        """Free the pinned memory once the device has read it."""
        for buffer, event in self._turns:
            event.synchronize()
            event.close()
            buffer.close()
