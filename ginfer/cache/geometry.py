"""CacheGeometry: sizes of an arena and of what is kept in it."""

from __future__ import annotations

from dataclasses import dataclass

from ginfer.errors import ConfigError
from ginfer.sizes import MIB, div_ceil


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """`num_units` units of `unit_nbytes`; a page is a whole number of units (which then lie side
    by side) or an equal slot of one unit; a recurrent state is any units that hold `state_nbytes`.

    num_slots: recurrent slots of running sequences, outside the arena. park_nbytes: host memory for
    what the arena cannot keep, 0 = none.
    """

    num_units: int
    page_nbytes: int
    state_nbytes: int
    num_slots: int
    park_nbytes: int = 0
    unit_nbytes: int = 2 * MIB

    def __post_init__(self) -> None:
        large, small = (
            max(self.unit_nbytes, self.page_nbytes),
            min(self.unit_nbytes, self.page_nbytes),
        )
        if large % small:
            raise ConfigError(
                f"a page of {self.page_nbytes} bytes is neither a multiple nor a divisor of a unit "
                f"of {self.unit_nbytes} bytes; choose another unit_nbytes",
                param="unit_nbytes",
            )

    @property
    def units_per_page(self) -> int:
        """Units that one page covers; 1 when it covers a slot of one."""
        return max(1, self.page_nbytes // self.unit_nbytes)

    @property
    def pages_per_unit(self) -> int:
        """Pages that fit into one unit; 1 when a page covers one or more."""
        return max(1, self.unit_nbytes // self.page_nbytes)

    @property
    def num_pages(self) -> int:
        """Pages when the arena holds nothing else. Page ids are 0 .. num_pages - 1."""
        return self.num_units // self.units_per_page * self.pages_per_unit

    @property
    def state_units(self) -> int:
        """Units of one snapshot."""
        return div_ceil(self.state_nbytes, self.unit_nbytes)

    @property
    def num_host_units(self) -> int:
        """Units of the parking space, a whole number of pages."""
        units = self.park_nbytes // self.unit_nbytes
        return units - units % self.units_per_page
