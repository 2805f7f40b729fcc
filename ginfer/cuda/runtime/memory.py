"""Device memory: arenas taken at start in 2 MiB units, slices, arrays; pinned staging buffers"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call
from ginfer.cuda.runtime.stream import Event
from ginfer.errors import ConfigError
from ginfer.sizes import MIB, align_up, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from numpy.typing import DTypeLike, NDArray

    from ginfer.cuda.runtime.stream import Stream

UNIT_NBYTES = 2 * MIB
ALIGNMENT = 256


@dataclass(frozen=True)
class Slice:
    """A range of device memory. It owns nothing and lives as long as its arena."""

    address: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Slice:
        """A range inside this one."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return Slice(self.address + offset, nbytes)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """The first bytes as a C-contiguous array."""
        array = DeviceArray(self.address, shape, np.dtype(dtype))
        assert array.nbytes <= self.nbytes
        return array


@dataclass(frozen=True)
class DeviceArray:
    """Device memory as an array, for tests and tools: any library that knows the CUDA array
    interface sees it without a copy."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def write(self, values: NDArray[Any]) -> None:
        """Copy host values in; waits. They have this shape and are converted to this dtype."""
        host = np.ascontiguousarray(values, self.dtype)
        assert host.shape == self.shape
        copied = driver.cuMemcpyHtoD(self.address, host.ctypes.data, self.nbytes)
        call("cuMemcpyHtoD", copied)
        # What a copy from pageable memory staged may still be on its way, and streams do not wait
        # for the default stream, where it is.
        call("cuStreamSynchronize", driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))

    def read(self) -> NDArray[Any]:
        """Copy of the values; waits for the copy, not for streams."""
        host = np.empty(self.shape, self.dtype)
        call("cuMemcpyDtoH", driver.cuMemcpyDtoH(host.ctypes.data, self.address, self.nbytes))
        return host


class Arena:
    """Device memory taken in one piece, whole units of 2 MiB, given out in slices from its start.
    Nothing is given back before the arena is closed."""

    def __init__(self, nbytes: int, name: str) -> None:
        self.name = name
        self.nbytes = align_up(nbytes, UNIT_NBYTES)
        self.used = 0
        self.ledger: dict[str, int] = {}
        TAKEN["memory"] += 1
        result = driver.cuMemAlloc(self.nbytes + UNIT_NBYTES)  # room for the alignment
        if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, _ = call("cuMemGetInfo", driver.cuMemGetInfo())
            raise ConfigError(
                f"{name} needs {human_bytes(self.nbytes)} of GPU memory; "
                f"{human_bytes(int(free))} are free",
                param="gpu_memory",
            )
        self._base = int(call(f"cuMemAlloc for {name}", result))
        self.address = align_up(self._base, UNIT_NBYTES)

    @property
    def num_units(self) -> int:
        """Units of 2 MiB."""
        return self.nbytes // UNIT_NBYTES

    @property
    def taken_nbytes(self) -> int:
        """Bytes that the driver gave for it."""
        return self.nbytes + UNIT_NBYTES

    def unit(self, unit_idx: int) -> int:
        """Address of a unit."""
        assert 0 <= unit_idx < self.num_units
        return self.address + unit_idx * UNIT_NBYTES

    def take(self, nbytes: int, name: str, *, alignment: int = ALIGNMENT) -> Slice:
        """The next `nbytes`, entered in the ledger under `name`. Raises ConfigError with both
        numbers when they do not fit."""
        start = align_up(self.used, alignment)
        if start + nbytes > self.nbytes:
            raise ConfigError(
                f"{name} needs {human_bytes(nbytes)} of {self.name}; "
                f"{human_bytes(max(0, self.nbytes - start))} are left",
                param="gpu_memory",
            )
        self.ledger[name] = self.ledger.get(name, 0) + start + nbytes - self.used
        self.used = start + nbytes
        return Slice(self.address + start, nbytes)

    def fill(self, byte: int, stream: Stream) -> None:
        """Set every byte of the arena, in the order of the stream."""
        set_bytes(Slice(self.address, self.nbytes), byte, stream)

    def check_integrity(self) -> None:
        """The ledger accounts for every byte that is in use."""
        assert sum(self.ledger.values()) == self.used <= self.nbytes
        assert self.address % UNIT_NBYTES == 0

    def close(self) -> None:
        """Give the memory back to the driver."""
        call(f"cuMemFree of {self.name}", driver.cuMemFree(self._base))


class PinnedBuffer:
    """Host memory that the device copies from and to at full speed, and can address itself."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        TAKEN["pinned memory"] += 1
        self.host = int(call("cuMemHostAlloc", driver.cuMemHostAlloc(nbytes, flags)))
        found = driver.cuMemHostGetDevicePointer(self.host, 0)
        self.address = int(call("cuMemHostGetDevicePointer", found))
        raw = (ctypes.c_uint8 * nbytes).from_address(self.host)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Free the memory; no view of it may be used any more."""
        call("cuMemFreeHost", driver.cuMemFreeHost(self.host))


@dataclass(frozen=True)
class Piece:
    """Bytes on their way to the device: `fill` puts them into a buffer of this size."""

    address: int
    nbytes: int
    fill: Callable[[memoryview], None]


class Staging:
    """A ring of pinned buffers through which host bytes reach the device: some are filled, each by
    a thread of its own, while the device copies others."""

    def __init__(self, nbytes: int = 8 * MIB, count: int = 16) -> None:
        self.nbytes = nbytes
        self._ring = [(PinnedBuffer(nbytes), Event()) for _ in range(count)]
        self._threads = ThreadPoolExecutor(max(1, count // 2), "ginfer-upload")

    def upload(self, pieces: Iterable[Piece], stream: Stream) -> Iterator[int]:
        """Copy pieces of at most `nbytes` in the order of the stream; yields the bytes of each when
        they have been read, which is before they have arrived."""
        filling: deque[tuple[Future[None], Piece, PinnedBuffer, Event]] = deque()
        for (buffer, event), piece in zip(cycle(self._ring), pieces):
            if len(filling) == len(self._ring) // 2:
                yield _send(*filling.popleft(), stream)
            event.synchronize()
            view = buffer.bytes.data[: piece.nbytes]
            filling.append((self._threads.submit(piece.fill, view), piece, buffer, event))
        while filling:
            yield _send(*filling.popleft(), stream)

    def close(self) -> None:
        """Free the ring once the device has read it."""
        self._threads.shutdown(cancel_futures=True)
        for buffer, event in self._ring:
            event.synchronize()
            event.close()
            buffer.close()


def _send(
    filled: Future[None], piece: Piece, buffer: PinnedBuffer, event: Event, stream: Stream
) -> int:
    """Copy a piece once its buffer is filled; returns its bytes."""
    filled.result()
    copy_to_device(piece.address, buffer.host, piece.nbytes, stream=stream)
    event.record(stream)
    return piece.nbytes


def copy_to_device(address: int, host: int, nbytes: int, *, stream: Stream) -> None:
    """Copy from pinned host memory, in the order of the stream."""
    copied = driver.cuMemcpyHtoDAsync(address, host, nbytes, stream.handle)
    call("cuMemcpyHtoDAsync", copied)


def copy_to_host(host: int, address: int, nbytes: int, *, stream: Stream) -> None:
    """Copy to pinned host memory, in the order of the stream."""
    copied = driver.cuMemcpyDtoHAsync(host, address, nbytes, stream.handle)
    call("cuMemcpyDtoHAsync", copied)


def copy_on_device(to: int, source: int, nbytes: int, *, stream: Stream) -> None:
    """Copy within a device or, with peer access, between two, in the order of the stream."""
    copied = driver.cuMemcpyDtoDAsync(to, source, nbytes, stream.handle)
    call("cuMemcpyDtoDAsync", copied)


def set_bytes(part: Slice, byte: int, stream: Stream) -> None:
    """Set every byte, in the order of the stream."""
    call("cuMemsetD8Async", driver.cuMemsetD8Async(part.address, byte, part.nbytes, stream.handle))
