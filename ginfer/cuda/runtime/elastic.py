"""Device memory at a fixed address, pieces of which go back to the driver and are taken again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call
from ginfer.cuda.runtime.memory import Slice, set_bytes
from ginfer.sizes import MIB, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.cuda.runtime.stream import Stream

PIECE_NBYTES = 32 * MIB  # what the driver gives and takes at a time; mapping costs per piece


class ElasticMemory:
    """A range of addresses with memory behind all of it at first. Graphs and tables that point
    into it stay as they are, whatever is behind it."""

    def __init__(self, nbytes: int, stream: Stream, *, ordinal: int = 0) -> None:
        self._stream = stream
        self.nbytes = align_up(nbytes, PIECE_NBYTES)
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = ordinal
        reserved = driver.cuMemAddressReserve(self.nbytes, PIECE_NBYTES, 0, 0)
        self.address = int(call("cuMemAddressReserve", reserved))
        self._handles: list[Any] = [None] * (self.nbytes // PIECE_NBYTES)
        try:
            self.take_back()
        except BaseException:
            self.close()
            raise

    @property
    def taken_nbytes(self) -> int:
        """Bytes that the driver gave for it and has not got back."""
        return PIECE_NBYTES * sum(handle is not None for handle in self._handles)

    def slice(self, nbytes: int) -> Slice:
        """The first `nbytes`."""
        assert nbytes <= self.nbytes
        return Slice(self.address, nbytes)

    def give_back(self, unit_nbytes: int, units: Iterable[int]) -> None:
        """Give back the pieces that lie in these units; what they held is lost. Waits for the
        stream."""
        free = [0] * len(self._handles)
        for unit in units:
            begin, end = unit * unit_nbytes, (unit + 1) * unit_nbytes
            while begin < end:
                piece = begin // PIECE_NBYTES
                stop = min(end, (piece + 1) * PIECE_NBYTES)
                free[piece] += stop - begin
                begin = stop
        self._stream.synchronize()
        for piece, nbytes in enumerate(free):
            if nbytes == PIECE_NBYTES:
                self._drop(piece)

    def take_back(self) -> None:
        """Have memory behind all addresses; what is new is zero. Raises DeviceError when others
        have taken it meanwhile."""
        access = driver.CUmemAccessDesc()
        access.location = self._kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for piece, handle in enumerate(self._handles):
            if handle is not None:
                continue
            TAKEN["memory"] += 1
            made = driver.cuMemCreate(PIECE_NBYTES, self._kind, 0)
            handle = call("cuMemCreate of K/V memory", made)
            at = self.address + piece * PIECE_NBYTES
            call("cuMemMap", driver.cuMemMap(at, PIECE_NBYTES, 0, handle, 0))
            self._handles[piece] = handle
            call("cuMemSetAccess", driver.cuMemSetAccess(at, PIECE_NBYTES, [access], 1))
            set_bytes(Slice(at, PIECE_NBYTES), 0, self._stream)

    def close(self) -> None:
        """Give everything back."""
        for piece in range(len(self._handles)):
            self._drop(piece)
        call("cuMemAddressFree", driver.cuMemAddressFree(self.address, self.nbytes))

    def _drop(self, piece: int) -> None:
        handle, self._handles[piece] = self._handles[piece], None
        if handle is not None:
            at = self.address + piece * PIECE_NBYTES
            call("cuMemUnmap", driver.cuMemUnmap(at, PIECE_NBYTES))
            call("cuMemRelease", driver.cuMemRelease(handle))
