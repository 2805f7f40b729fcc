"""Moves of pages, units and recurrent slots over an emulated driver."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.stream import Stream
from ginfer.cuda.slots import Slots, memory_nbytes
from ginfer.engine.memory import page_nbytes
from ginfer.models.dflash2 import QWEN_DEMO_DRAFTER
from ginfer.sizes import MIB
from ginfer.spec import KvCodec
from scripts.random_models import MODELS
from tests.host.cuda.emulated_device import install

SPEC = MODELS[0].spec
PLAN = MemoryPlan(
    num_rows=2,
    num_units=12,
    unit_nbytes=page_nbytes(SPEC),
    num_slots=3,
    max_columns=8,
    max_pages_per_row=2,
    num_park_units=12,
)


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@pytest.fixture(params=KvCodec)
def slots(request, monkeypatch):
    install(monkeypatch)
    plan = replace(PLAN, kv=request.param)
    arena = Arena(sum(memory_nbytes(SPEC, plan).values()) + 4 * MIB, "test")
    slots = Slots(SPEC, plan, arena, Stream())
    yield slots
    slots.close()
    arena.close()


def test_a_slot_goes_with_the_ring_of_its_lane(monkeypatch):
    install(monkeypatch)
    drafter = replace(
        QWEN_DEMO_DRAFTER, num_layers=1, head_dim=32, window=64, num_kv_heads=1, block_size=4
    )
    memory = memory_nbytes(SPEC, PLAN, drafter)
    arena = Arena(sum(memory.values()) + 4 * MIB, "test")
    slots = Slots(SPEC, PLAN, arena, Stream(), drafter=drafter)
    assert memory["rings"] == PLAN.num_rows * drafter.ring_nbytes
    ring = [list(slots.parts(slot))[-1] for slot in range(PLAN.num_slots)]
    assert ring[0] == ring[2] != ring[1]
    fill(slots, 0, seed=1)
    before = fill(slots, 1, seed=2)
    units = units_for(slots)
    slots.save(1, units)
    slots.copy(2, 1)
    assert (bytes_of(slots, 2) == before).all()
    assert (view(*ring[0]) == view(*ring[1])).all()
    fill(slots, 1, seed=3)
    slots.load(units, 1)
    assert (bytes_of(slots, 1) == before).all()
    slots.copy(0, 2)
    assert (bytes_of(slots, 0) == before).all()
    slots.close()
    arena.close()


def bytes_of(slots, slot):
    return np.concatenate([view(at, nbytes) for at, nbytes in slots.parts(slot)])


def fill(slots, slot, seed):
    rng = np.random.default_rng(seed)
    for at, nbytes in slots.parts(slot):
        view(at, nbytes)[:] = rng.integers(0, 256, nbytes, np.uint8)
    return bytes_of(slots, slot)


def units_for(slots):
    nbytes = sum(n for _, n in slots.parts(0))
    return list(range(1, 2 + -(-nbytes // PLAN.unit_nbytes)))[::-1]


def test_memory_starts_as_zero(slots):
    assert not view(slots.units.address, slots.units.nbytes).any()
    assert not any(bytes_of(slots, slot).any() for slot in range(3))


def test_a_snapshot_comes_back_whole_and_leaves_the_other_slots(slots):
    want, other = fill(slots, 1, 1), fill(slots, 2, 2)
    units = units_for(slots)
    slots.save(1, units)
    slots.clear(1)
    assert not bytes_of(slots, 1).any()
    slots.load(units, 0)
    assert (bytes_of(slots, 0) == want).all()
    assert (bytes_of(slots, 2) == other).all()


def test_a_parked_snapshot_comes_back_by_units_and_directly(slots):
    want, units = fill(slots, 1, 3), units_for(slots)
    there = [(u + 5) % PLAN.num_park_units for u in units]
    slots.save(1, units)
    slots.park(units, there, pages=False)
    view(slots.units.address, slots.units.nbytes)[:] = 0
    slots.load_parked(there, 0)
    assert (bytes_of(slots, 0) == want).all()
    slots.unpark(there, units, pages=False)
    slots.load(units, 2)
    assert (bytes_of(slots, 2) == want).all()


def test_pages_and_slots_are_copied(slots):
    size, rng = slots.pages.page_nbytes, np.random.default_rng(4)
    parts = [(slots.units.address, size)]
    if slots.pages.packed:
        parts.append((slots.pages.scales, size // 32))
    for at, nbytes in parts:
        view(at + 3 * nbytes, nbytes)[:] = rng.integers(1, 256, nbytes, np.uint8)
    slots.copy_page(3, 7)
    slots.park([7], [2], pages=True)
    slots.unpark([2], [0], pages=True)
    for at, nbytes in parts:
        pages = view(at, 4 * nbytes).reshape(4, nbytes)
        assert (pages[0] == pages[3]).all()
        assert not pages[1].any()
    want = fill(slots, 0, 5)
    slots.copy(2, 0)
    assert (bytes_of(slots, 2) == want).all()
