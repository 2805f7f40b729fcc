"""Pools of equal units: K/V pages of one arena, and recurrent slots."""

from __future__ import annotations


class Pool:
    """`size` units with ids 0 .. size - 1; a unit is free or handed out, never both.

    Freed units are handed out again last in, first out: the most recently touched memory is reused.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._used = bytearray(size)

    @property
    def num_free(self) -> int:
        """Units that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` units; the caller has made sure that they are there."""
        assert count <= len(self._free), f"{count} units wanted, {len(self._free)} free"
        cut = len(self._free) - count
        units = self._free[cut:][::-1]
        del self._free[cut:]
        for unit in units:
            self._used[unit] = 1
        return units

    def free(self, units: list[int]) -> None:
        """Give units back."""
        for unit in units:
            assert self._used[unit], f"unit {unit} is free already"
            self._used[unit] = 0
        self._free.extend(reversed(units))

    def check_integrity(self, owned: list[int]) -> None:
        """Assert that `owned` (the units of all owners) and the free units cover the pool exactly
        once."""
        assert len(set(owned)) == len(owned), "a unit has two owners"
        assert sorted(owned + self._free) == list(range(self.size)), "a unit is lost or double"
        assert all(self._used[u] for u in owned), "an owned unit is marked free"
        assert sum(self._used) == len(owned), "a free unit is marked used"
