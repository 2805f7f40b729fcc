"""Bounds on what is being read and prepared before the engine's queue counts it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ginfer.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """Counts requests, and the bytes of their bodies, between arrival and the engine's queue."""

    def __init__(self, *, num_places: int, max_nbytes: int) -> None:
        self._num_places = num_places
        self._max_nbytes = max_nbytes
        self.num_taken = 0
        self.nbytes = 0

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for one request. Raises OverloadedError when all are taken."""
        if self.num_taken >= self._num_places:
            raise OverloadedError(f"{self.num_taken} requests are arriving; try again later")
        self.num_taken += 1
        place = Place(self)
        try:
            yield place
        finally:
            self.num_taken -= 1
            self.nbytes -= place.nbytes

    def grow(self, place: Place, nbytes: int) -> None:
        """Count `nbytes` more for a place. Raises OverloadedError beyond the bound of all."""
        if self.nbytes + nbytes > self._max_nbytes:
            raise OverloadedError("too many large requests are arriving; try again later")
        self.nbytes += nbytes
        place.nbytes += nbytes


class Place:
    """What one request holds of the bounds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Take `nbytes` more; see Admission.grow."""
        self._admission.grow(self, nbytes)
