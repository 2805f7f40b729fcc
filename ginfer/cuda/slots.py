"""The memory of requests on the device: arena of units, its parking space, recurrent slots.

K/V pages and snapshots are views of the arena: page p begins at byte p * page size, unit u at
u * unit size. Slots lie layer by layer, [GDN layer][slot]: state [HV][K][V] FP32, history
[taps - 1][X] BF16. Slot s goes with the drafter's ring of lane s % lanes, if there is a drafter. A
snapshot is the states of all layers, then their histories and the ring, over its units in the order
given. The parking space is pinned host memory with the arena's geometry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.cuda.attention.pages import PageShape
from ginfer.cuda.runtime.memory import (
    PinnedBuffer,
    Slice,
    copy_on_device,
    copy_to_device,
    copy_to_host,
    set_bytes,
)
from ginfer.spec import KvCodec, LayerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ginfer.backend import MemoryPlan
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.stream import Stream
    from ginfer.spec import DrafterSpec, ModelSpec

    Ids = Sequence[int]
    Copy = Callable[[int, int, int], None]


def slot_parts(spec: ModelSpec) -> tuple[int, int, int]:
    """(GDN layers, bytes of a layer's state, bytes of its history) of one slot."""
    g = spec.gdn
    state = g.num_v_heads * g.k_head_dim * g.v_head_dim * 4
    layers = len(spec.layers_of(LayerKind.GATED_DELTANET))
    return layers, state, (g.conv_taps - 1) * g.conv_channels * 2


def page_shape(spec: ModelSpec, codec: KvCodec, scales: int = 0) -> PageShape:
    """Shape of a K/V page; scales: address of those of page 0."""
    a, layers = spec.attention, len(spec.layers_of(LayerKind.FULL_ATTENTION))
    return PageShape(layers, a.num_kv_heads, a.head_dim, codec is KvCodec.INT8, scales)


def scales_nbytes(spec: ModelSpec, plan: MemoryPlan, num_units: int) -> int:
    """Bytes of the scales of all pages that so many units can be."""
    num_pages = num_units * plan.unit_nbytes // spec.page_nbytes(plan.kv)
    return num_pages * spec.scales_nbytes(plan.kv)


def slot_nbytes(spec: ModelSpec) -> int:
    """Bytes of one slot, without the ring that goes with it."""
    layers, state, history = slot_parts(spec)
    return layers * (state + history)


def memory_nbytes(
    spec: ModelSpec, plan: MemoryPlan, drafter: DrafterSpec | None = None
) -> dict[str, int]:
    """Bytes on the device, by use."""
    return {
        "arena": plan.num_units * plan.unit_nbytes,
        "scales": scales_nbytes(spec, plan, plan.num_units),
        "slots": plan.num_slots * slot_nbytes(spec),
        "rings": plan.num_rows * drafter.ring_nbytes if drafter else 0,
    }


class Slots:
    """Moves of pages, units and recurrent slots, in the order of a stream."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: MemoryPlan,
        memory: Arena,
        stream: Stream,
        *,
        drafter: DrafterSpec | None = None,
        units: Slice | None = None,
    ) -> None:
        """units: the arena; without it a part of `memory` is."""
        self._layers, self._state, self._history = slot_parts(spec)
        self._num_slots, self.unit_nbytes, self._stream = plan.num_slots, plan.unit_nbytes, stream
        self._lanes, nbytes = plan.num_rows, memory_nbytes(spec, plan, drafter)
        self.units = units or memory.take(nbytes["arena"], "arena", alignment=2 << 20)
        scales = memory.take(nbytes["scales"], "arena")
        self.pages = page_shape(spec, plan.kv, scales.address)
        self._scales = spec.scales_nbytes(plan.kv)  # of a page
        slots, self.rings = (memory.take(nbytes[name], "slots") for name in ("slots", "rings"))
        self._states = slots.address
        self._histories = slots.address + self._layers * plan.num_slots * self._state
        self._parked_units = plan.num_park_units * plan.unit_nbytes
        parking = self._parked_units + scales_nbytes(spec, plan, plan.num_park_units)
        self._parking = PinnedBuffer(parking) if parking else None
        for part in (self.units, scales, slots, self.rings):
            if part.nbytes:
                set_bytes(part, 0, stream)

    def state(self, gdn_idx: int) -> int:
        """Address of slot 0 of a layer's states."""
        return self._states + gdn_idx * self._num_slots * self._state

    def history(self, gdn_idx: int) -> int:
        """Address of slot 0 of a layer's histories."""
        return self._histories + gdn_idx * self._num_slots * self._history

    @property
    def parking_nbytes(self) -> int:
        """Bytes of the parking space."""
        return self._parking.nbytes if self._parking else 0

    def parts(self, slot: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of a slot's parts, in the order of a snapshot."""
        for i in range(self._layers):
            yield self.state(i) + slot * self._state, self._state
        for i in range(self._layers):
            yield self.history(i) + slot * self._history, self._history
        if self.rings.nbytes:
            nbytes = self.rings.nbytes // self._lanes
            yield self.rings.address + slot % self._lanes * nbytes, nbytes

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        for address, nbytes in self.parts(slot):
            set_bytes(Slice(address, nbytes), 0, self._stream)

    def copy(self, target: int, source: int) -> None:
        """Copy a slot."""
        for (to, nbytes), (at, _) in zip(self.parts(target), self.parts(source)):
            if to != at:  # both slots of a lane have its ring
                copy_on_device(to, at, nbytes, stream=self._stream)

    def _through_units(self, slot: int, units: Ids, base: int, copy: Copy) -> None:
        """Call copy(slot address, unit address, bytes) for every piece of a snapshot."""
        done = 0
        for address, nbytes in self.parts(slot):
            while nbytes:
                unit, inside = divmod(done, self.unit_nbytes)
                piece = min(nbytes, self.unit_nbytes - inside)
                copy(address, base + units[unit] * self.unit_nbytes + inside, piece)
                address, nbytes, done = address + piece, nbytes - piece, done + piece

    def save(self, slot: int, units: Ids) -> None:
        """Copy a slot to units."""

        def copy(address: int, unit: int, nbytes: int) -> None:
            copy_on_device(unit, address, nbytes, stream=self._stream)

        self._through_units(slot, units, self.units.address, copy)

    def load(self, units: Ids, slot: int) -> None:
        """Copy units to a slot."""

        def copy(address: int, unit: int, nbytes: int) -> None:
            copy_on_device(address, unit, nbytes, stream=self._stream)

        self._through_units(slot, units, self.units.address, copy)

    def load_parked(self, host_units: Ids, slot: int) -> None:
        """Copy parked units to a slot."""

        def copy(address: int, unit: int, nbytes: int) -> None:
            copy_to_device(address, unit, nbytes, stream=self._stream)

        self._through_units(slot, host_units, self._host(0, 0), copy)

    def _host(self, index: int, size: int) -> int:
        assert self._parking is not None, "no parking space was planned"
        return self._parking.host + index * size

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        for base, _, size in self._places(pages=True):
            copy_on_device(base + target * size, base + source * size, size, stream=self._stream)

    def _places(self, *, pages: bool) -> list[tuple[int, int, int]]:
        """(address here, offset in the parking space, bytes) of the parts of page or unit 0."""
        size = self.pages.page_nbytes if pages else self.unit_nbytes
        places = [(self.units.address, 0, size)]
        if pages and self._scales:
            places.append((self.pages.scales, self._parked_units, self._scales))
        return places

    def park(self, here: Ids, there: Ids, *, pages: bool) -> None:
        """Copy pages or units to the parking space."""
        for base, offset, size in self._places(pages=pages):
            for a, b in zip(here, there, strict=True):
                to = self._host(b, size) + offset
                copy_to_host(to, base + a * size, size, stream=self._stream)

    def unpark(self, there: Ids, here: Ids, *, pages: bool) -> None:
        """Copy pages or units from the parking space."""
        for base, offset, size in self._places(pages=pages):
            for b, a in zip(there, here, strict=True):
                source = self._host(b, size) + offset
                copy_to_device(base + a * size, source, size, stream=self._stream)

    def close(self) -> None:
        """Free the parking space; the rest belongs to the arena."""
        if self._parking is not None:
            self._parking.close()
