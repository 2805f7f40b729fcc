"""The memory of requests on the CPU image: an arena of units, its parking space, recurrent slots.

K/V pages and snapshots are views of the arena: page p begins at byte p * page size, unit u at
u * unit size; sizes divide one another. A snapshot is the state of all layers, then their
convolution history, then the drafter's ring, over its units in the order given. The parking space
looks the same.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.cpu.kv_codec import Pages
from ginfer.sizes import align_up
from ginfer.spec import KV_GROUP, PAGE_TOKENS, KvCodec, LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ginfer.backend import MemoryPlan
    from ginfer.spec import ModelSpec

    Ids = Sequence[int]


class Space(NamedTuple):
    """Units and pages of the same bytes. units: [units, bytes] uint8."""

    memory: mmap.mmap
    units: NDArray[np.uint8]
    kv: Pages

    def copy_page(self, source: int, other: Space, target: int) -> None:
        """Copy page `source` to page `target` of a space."""
        for mine, theirs in zip(self.kv, other.kv):
            if mine.size:
                theirs[target] = mine[source]


def _make_space(spec: ModelSpec, plan: MemoryPlan, num_units: int) -> Space:
    """Zeroed and resident from the start."""
    a, unit_nbytes = spec.attention, plan.unit_nbytes
    heads = (len(spec.layers_of(LayerKind.FULL_ATTENTION)), 2, a.num_kv_heads)
    nbytes = num_units * unit_nbytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    flat = np.frombuffer(memory, np.uint8, nbytes)
    num_pages = nbytes // spec.page_nbytes(plan.kv)
    pages = flat[: num_pages * spec.page_nbytes(plan.kv)]
    plane, groups = PAGE_TOKENS * a.head_dim, -(-a.head_dim // KV_GROUP)
    packed = plan.kv is KvCodec.INT8
    count = num_pages if packed else 0
    kv = Pages(
        bits=pages[: 0 if packed else None].view(np.uint16).reshape(-1, *heads, plane),
        codes=pages[: None if packed else 0].view(np.int8).reshape(-1, *heads, plane),
        scales=np.zeros((count, *heads, groups, PAGE_TOKENS), np.uint16),
    )
    return Space(memory, flat.reshape(num_units, unit_nbytes), kv)


def slot_nbytes(spec: ModelSpec) -> int:
    """Bytes of one recurrent slot: FP32 state and convolution history of all GDN layers."""
    g = spec.gdn
    state = g.num_v_heads * g.k_head_dim * g.v_head_dim + (g.conv_taps - 1) * g.conv_channels
    return len(spec.layers_of(LayerKind.GATED_DELTANET)) * state * 4


class Arena:
    """state: [GDN layers, slots, heads, K V] float32. history: [GDN layers, slots, taps - 1,
    channels] float32. rings: [layers, lanes, ...] uint16, of a drafter; slot s goes with the ring
    of lane s % lanes."""

    def __init__(self, spec: ModelSpec, plan: MemoryPlan, rings: NDArray[np.uint16]) -> None:
        g = spec.gdn
        self._here = _make_space(spec, plan, plan.num_units)
        self._host = _make_space(spec, plan, plan.num_park_units)
        layers = (len(spec.layers_of(LayerKind.GATED_DELTANET)), plan.num_slots)
        self.state = np.zeros((*layers, g.num_v_heads, g.k_head_dim * g.v_head_dim), np.float32)
        self.history = np.zeros((*layers, g.conv_taps - 1, g.conv_channels), np.float32)
        self.rings = rings
        slot_nbytes = self.slots_nbytes // plan.num_slots + rings.nbytes // plan.num_rows
        self._image = np.zeros(align_up(slot_nbytes, plan.unit_nbytes), np.uint8)
        self._given_back: set[int] = set()

    @property
    def kv(self) -> Pages:
        """The pages."""
        return self._here.kv

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all recurrent slots."""
        return self.state.nbytes + self.history.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, less what was given back."""
        units = self._here.units
        given_back = len(self._given_back) * int(units.shape[1])
        return int(units.nbytes + self.kv.scales.nbytes) - given_back

    @property
    def parking_nbytes(self) -> int:
        """Bytes of the parking space."""
        return self._host.units.nbytes + self._host.kv.scales.nbytes

    def _parts(self, slot: int) -> tuple[np.ndarray, ...]:
        """What a slot consists of."""
        ring = slot % self.rings.shape[1]
        return self.state[:, slot], self.history[:, slot], self.rings[:, ring]

    def copy_slot(self, target: int, source: int) -> None:
        """Copy a recurrent slot."""
        for to, part in zip(self._parts(target), self._parts(source)):
            to[...] = part

    def save_state(self, slot: int, units: Ids) -> None:
        """Copy a recurrent slot to units."""
        start = 0
        for part in self._parts(slot):
            image = self._image[start : start + part.nbytes].view(part.dtype)
            image.reshape(part.shape)[...] = part
            start += part.nbytes
        size = self._here.units.shape[1]
        for i, unit in enumerate(units):
            self._here.units[unit] = self._image[i * size : (i + 1) * size]

    def load_state(self, units: Ids, slot: int) -> None:
        """Copy a snapshot to a recurrent slot."""
        self._load(self._here, units, slot)

    def load_parked_state(self, host_units: Ids, slot: int) -> None:
        """Copy a parked snapshot to a recurrent slot."""
        self._load(self._host, host_units, slot)

    def _load(self, space: Space, units: Ids, slot: int) -> None:
        size, start = space.units.shape[1], 0
        for i, unit in enumerate(units):
            self._image[i * size : (i + 1) * size] = space.units[unit]
        for part in self._parts(slot):
            image = self._image[start : start + part.nbytes].view(part.dtype)
            part[...] = image.reshape(part.shape)
            start += part.nbytes

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        self._here.copy_page(source, self._here, target)

    def park_pages(self, pages: Ids, host_pages: Ids) -> None:
        """Copy pages to host pages."""
        for page, host_page in zip(pages, host_pages, strict=True):
            self._here.copy_page(page, self._host, host_page)

    def unpark_pages(self, host_pages: Ids, pages: Ids) -> None:
        """Copy host pages to pages."""
        for host_page, page in zip(host_pages, pages, strict=True):
            self._host.copy_page(host_page, self._here, page)

    def park_units(self, units: Ids, host_units: Ids) -> None:
        """Copy units to host units."""
        for unit, host_unit in zip(units, host_units, strict=True):
            self._host.units[host_unit] = self._here.units[unit]

    def unpark_units(self, host_units: Ids, units: Ids) -> None:
        """Copy host units to units."""
        for host_unit, unit in zip(host_units, units, strict=True):
            self._here.units[unit] = self._host.units[host_unit]

    def give_back(self, units: Ids) -> None:
        """Hand units back to the system; what they held is lost."""
        size = self._here.units.shape[1]
        if size % mmap.PAGESIZE == 0:
            for unit in units:
                self._here.memory.madvise(mmap.MADV_DONTNEED, unit * size, size)
            self._given_back.update(units)

    def take_back(self) -> None:
        """Have every unit again."""
        for unit in self._given_back:
            self._here.units[unit] = 0
        self._given_back.clear()
