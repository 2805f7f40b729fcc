"""Arena: units and pages from one free list."""

from __future__ import annotations

import random

import pytest

from ginfer.cache.arena import Arena
from ginfer.cache.geometry import CacheGeometry
from ginfer.errors import ConfigError

SHAPES = [(1, 1), (2, 1), (3, 1), (1, 4), (1, 16)]


@pytest.mark.parametrize(("span", "share"), SHAPES)
def test_whatever_fits_can_be_had(span, share):
    rng = random.Random(3)
    arena = Arena(40, units_per_page=span, pages_per_unit=share)
    pages, states = [], []
    for _ in range(3000):
        count = rng.randrange(1, 9)
        if rng.random() < 0.5:
            if pages and rng.random() < 0.6:
                rng.shuffle(pages)
                arena.free_pages(pages[:count])
                del pages[:count]
            elif states:
                arena.free_units(states.pop(rng.randrange(len(states))))
        elif rng.random() < 0.6:
            if arena.fits(0, count):
                pages += arena.allocate_pages(count)
        elif arena.fits(count):
            states.append(arena.allocate_units(count))
            assert len(states[-1]) == count
        held = sum(-(-len(units) // span) for units in states) * share + len(pages)
        assert arena.num_free_pages == arena.num_pages - held
        arena.check_integrity(pages, states)
    arena.free_pages(pages)
    for units in states:
        arena.free_units(units)
    assert arena.fits(arena.num_groups * span)


def test_pages_of_several_units_are_aligned():
    arena = Arena(8, units_per_page=2, pages_per_unit=1)
    units = arena.allocate_units(3)
    assert [unit // 2 for unit in units] == [0, 0, 1]
    assert arena.allocate_pages(2) == [2, 3]
    assert not arena.fits(0, 1)


def test_pages_fill_used_units_first():
    arena = Arena(4, units_per_page=1, pages_per_unit=4)
    pages = arena.allocate_pages(6)
    assert {page // 4 for page in pages} == {0, 1}
    arena.free_pages([pages[0]])
    assert arena.allocate_pages(4) == [pages[0], 6, 7, 8]
    assert arena.fits(1, 3)
    assert not arena.fits(1, 4)
    assert arena.free_fraction == 0.25
    assert arena.whole_units() == [3]


def test_double_free_is_caught():
    arena = Arena(4, units_per_page=1, pages_per_unit=4)
    pages, units = arena.allocate_pages(2), arena.allocate_units(1)
    arena.free_pages(pages[:1])
    arena.free_units(units)
    with pytest.raises(AssertionError, match="free already"):
        arena.free_pages(pages[:1])
    with pytest.raises(AssertionError, match="free already"):
        arena.free_units(units)


def test_geometry_counts_places():
    large = CacheGeometry(
        num_units=9, unit_nbytes=2, page_nbytes=4, state_nbytes=5, num_slots=1, park_nbytes=11
    )
    assert (large.num_pages, large.state_units, large.num_host_units) == (4, 3, 4)
    small = CacheGeometry(num_units=9, unit_nbytes=8, page_nbytes=2, state_nbytes=8, num_slots=1)
    assert (small.num_pages, small.state_units, small.num_host_units) == (36, 1, 0)
    with pytest.raises(ConfigError, match="page of 3 bytes"):
        CacheGeometry(num_units=9, unit_nbytes=8, page_nbytes=3, state_nbytes=8, num_slots=1)
