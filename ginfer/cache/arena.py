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


class Arena:
    """Units of one buffer, handed out singly (states) or as pages from one free list.

    It is managed in groups: u units that one page covers, or one unit that s pages share. Pages
    prefer the fullest unit that has a place left, so that whole units stay free for states; a page
    can always be had as long as the count says so.
    """

    def __init__(self, num_units: int, *, units_per_page: int, pages_per_unit: int) -> None:
        assert units_per_page == 1 or pages_per_unit == 1
        self._span, self._share = units_per_page, pages_per_unit
        self.num_groups = num_units // units_per_page
        self.num_pages = self.num_free_pages = self.num_groups * pages_per_unit
        self._free = list(range(self.num_groups - 1, -1, -1))
        self._places: dict[int, list[int]] = {}  # free pages of groups that are partly used
        self._holes: list[dict[int, None]] = [{} for _ in range(pages_per_unit)]  # by their number
        self._used = bytearray(self.num_pages)
        self._used_groups = bytearray(self.num_groups)  # by units

    @property
    def free_fraction(self) -> float:
        """Share of the arena that is free in whole units."""
        return len(self._free) / max(1, self.num_groups)

    def whole_units(self) -> list[int]:
        """Units of groups that are free as a whole."""
        return [group * self._span + i for group in self._free for i in range(self._span)]

    def fits(self, num_units: int, num_pages: int = 0) -> bool:
        """Whether so many units and so many pages can be had now, together."""
        groups = -(-num_units // self._span)
        rest = self.num_free_pages - groups * self._share
        return groups <= len(self._free) and num_pages <= rest

    def holds(self, num_units: int, num_pages: int = 0) -> bool:
        """Whether so many units and pages can be had when nothing is used."""
        groups = -(-num_units // self._span)
        return groups * self._share + num_pages <= self.num_pages

    def allocate_units(self, count: int) -> list[int]:
        """Take `count` units in whole groups; the caller has made sure that they are there."""
        num_groups = -(-count // self._span)
        assert num_groups <= len(self._free), f"{count} units wanted, {len(self._free)} groups free"
        groups = [self._free.pop() for _ in range(num_groups)]
        for group in groups:
            self._used_groups[group] = 1
        self.num_free_pages -= num_groups * self._share
        return [g * self._span + i for g in groups for i in range(self._span)][:count]

    def free_units(self, units: list[int]) -> None:
        """Give back all units of one allocation."""
        groups = [unit // self._span for unit in units[:: self._span]]
        for group in reversed(groups):
            assert self._used_groups[group], f"group {group} is free already"
            self._used_groups[group] = 0
            self._free.append(group)
        self.num_free_pages += len(groups) * self._share

    def allocate_pages(self, count: int) -> list[int]:
        """Take `count` pages; the caller has made sure that they are there."""
        assert count <= self.num_free_pages, f"{count} pages wanted, {self.num_free_pages} free"
        pages: list[int] = []
        while len(pages) < count:
            group = self._fullest()
            places = self._places.pop(group)
            take = min(count - len(pages), len(places))
            pages += places[: -take - 1 : -1]
            del places[len(places) - take :]
            self._file(group, places)
        for page in pages:
            self._used[page] = 1
        self.num_free_pages -= count
        return pages

    def free_pages(self, pages: list[int]) -> None:
        """Give pages back."""
        for page in reversed(pages):
            assert self._used[page], f"page {page} is free already"
            self._used[page] = 0
            group = page // self._share
            places = self._places.pop(group, [])
            if places:
                del self._holes[len(places)][group]
            places.append(page)
            self._file(group, places)
        self.num_free_pages += len(pages)

    def _fullest(self) -> int:
        """A group with a free page, taken out of its list: partly used before free."""
        for holes in self._holes[1:]:
            if holes:
                group, _ = holes.popitem()
                return group
        group = self._free.pop()
        first = group * self._share
        self._places[group] = list(range(first + self._share - 1, first - 1, -1))
        return group

    def _file(self, group: int, places: list[int]) -> None:
        """Put a group where its number of free pages belongs."""
        if len(places) == self._share:
            self._free.append(group)
        elif places:
            self._places[group] = places
            self._holes[len(places)][group] = None

    def check_integrity(self, pages: list[int], units: list[list[int]]) -> None:
        """Assert that `pages` and `units` (the allocations of all owners) and what is free cover
        the arena exactly once."""
        groups = [unit // self._span for allocation in units for unit in allocation[:: self._span]]
        partly = [page for places in self._places.values() for page in places]
        whole = [g * self._share + i for g in groups + self._free for i in range(self._share)]
        assert sorted(pages + partly + whole) == list(range(self.num_pages)), "lost or double"
        assert self.num_free_pages == len(partly) + len(self._free) * self._share
        assert sum(self._used) == len(pages), "a page is marked wrongly"
        assert all(self._used[page] for page in pages), "an owned page is marked free"
        assert sum(self._used_groups) == len(groups), "a group is marked wrongly"
        assert all(self._used_groups[group] for group in groups), "an owned group is marked free"
        for group, places in self._places.items():
            assert 0 < len(places) < self._share
            assert group in self._holes[len(places)]
        assert sum(len(holes) for holes in self._holes) == len(self._places)
