"""Moves: what the cache asks of a device. Effects happen in the order of the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Moves(Protocol):
    """Copies between recurrent slots, the arena and its parking space on the host.

    Page and unit ids name places of one arena: unit i is at byte i * unit_nbytes, page p at byte
    p * page_nbytes. The parking space is a second arena of the same geometry; host ids are places
    in it. A state of state_nbytes lies in its units one after the other, in the order given.
    """

    def clear_slot(self, slot: int) -> None:
        """Set a recurrent slot to the state before the first token."""

    def save_state(self, slot: int, units: Sequence[int]) -> None:
        """Copy the state in `slot` to `units`."""

    def load_state(self, units: Sequence[int], slot: int) -> None:
        """Copy a state in `units` to `slot`."""

    def load_parked_state(self, host_units: Sequence[int], slot: int) -> None:
        """Copy a parked state to `slot`."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page."""

    def park_pages(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages to host pages, one by one."""

    def unpark_pages(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy host pages to pages, one by one."""

    def park_units(self, units: Sequence[int], host_units: Sequence[int]) -> None:
        """Copy units to host units, one by one."""

    def unpark_units(self, host_units: Sequence[int], units: Sequence[int]) -> None:
        """Copy host units to units, one by one."""
