"""Token ids per piece of text, least recently used first out, bounded by bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

ENTRY_NBYTES = 400  # dictionary slot, link and array header, measured with sys.getsizeof


class PieceCache:
    """text -> ids [n] int32, at most `limit_nbytes` in all. Safe to share between threads."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit = limit_nbytes
        self._nbytes = 0
        self._entries: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held, at most the limit."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, pieces: Iterable[str]) -> list[NDArray[np.int32] | None]:
        """Ids of each piece, None where it is not held; every hit becomes the most recent."""
        with self._lock:
            found = []
            for piece in pieces:
                ids = self._entries.get(piece)
                if ids is not None:
                    self._entries.move_to_end(piece)
                found.append(ids)
            return found

    def put(self, piece: str, ids: NDArray[np.int32]) -> None:
        """Bind a piece, replacing what it had; one above the limit is not kept."""
        with self._lock:
            old = self._entries.pop(piece, None)
            if old is not None:
                self._nbytes -= _nbytes(piece, old)
            size = _nbytes(piece, ids)
            if size > self._limit:
                return
            self._entries[piece] = ids
            self._nbytes += size
            while self._nbytes > self._limit:
                self._nbytes -= _nbytes(*self._entries.popitem(last=False))

    def check_integrity(self) -> None:
        """Assert that the byte count equals the entries and respects the limit."""
        assert self._nbytes == sum(_nbytes(k, v) for k, v in self._entries.items())
        assert self._nbytes <= self._limit


def _nbytes(piece: str, ids: NDArray[np.int32]) -> int:
    return sys.getsizeof(piece) + ids.nbytes + ENTRY_NBYTES
