"""Driver launches of loaded kernels: shared memory, dependent and cooperative launch, clusters.

A launch packs its numbers into memory of its function and calls the driver: a fraction of what the
binding needs to make its structures anew, and a chunk of a prompt is 700 launches.
"""

from __future__ import annotations

import ctypes
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call

if TYPE_CHECKING:
    from ginfer.cuda.runtime.manifest import CubinRecord
    from ginfer.cuda.runtime.stream import Stream

CONFIG = Struct("<7I4xQQI4x")  # CUlaunchConfig: grid, block, shared, stream, attributes, how many
_SLOT = 8  # bytes of an argument; the driver reads as many of them as its type has
_SLOTS = {"int64": "q", "uint64": "Q", "int32": "q", "uint32": "q", "float32": "f4x"}


class Arguments:
    """Memory for the arguments of a launch, by the types of a signature. `pointers`: what the
    driver takes."""

    def __init__(self, signature: tuple[str, ...]) -> None:
        self._struct = Struct("<" + "".join(_SLOTS[t] for t in signature))
        self._memory = ctypes.create_string_buffer(self._struct.size)
        first = ctypes.addressof(self._memory)
        places = range(first, first + self._struct.size, _SLOT)
        self.pointers = (ctypes.c_void_p * len(signature))(*places)

    def pack(self, arguments: tuple[int | float, ...]) -> None:
        """Put the arguments of the next launch there."""
        self._struct.pack_into(self._memory, 0, *arguments)


class Function:
    """A kernel loaded into the current context. Launching neither allocates nor synchronises; one
    thread at a time does."""

    def __init__(self, record: CubinRecord, code: bytes) -> None:
        self.record = record
        self._arguments = Arguments(record.signature)
        self._config = ctypes.create_string_buffer(CONFIG.size)
        name = record.name
        TAKEN["kernels"] += 1
        self.module = call(f"load {name}", driver.cuModuleLoadData(code))
        found = driver.cuModuleGetFunction(self.module, record.entry.encode())
        self.handle = call(f"find {name}", found)
        self._entry, self._launch = int(self.handle), launch_call()
        if record.dynamic_shared:
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", record.dynamic_shared)
            # one split of L1 and shared memory, or kernels that follow each other cannot overlap
            self._set("PREFERRED_SHARED_MEMORY_CARVEOUT", 100)

    def _set(self, attribute: str, value: int) -> None:
        which = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        done = driver.cuFuncSetAttribute(self.handle, which, value)
        call(f"{attribute} of {self.record.name}", done)

    def occupancy(self) -> int:
        """Blocks of this kernel that one multiprocessor of the current device holds at a time."""
        r = self.record
        found = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self.handle, r.threads, r.dynamic_shared
        )
        return int(call(f"occupancy of {r.name}", found))

    def launch(
        self,
        grid: tuple[int, ...],
        stream: Stream,
        *arguments: int | float,
        dependent: bool = False,
        cooperative: bool = False,
        cluster: int = 1,
    ) -> None:
        """Put the kernel on the stream.

        grid: blocks in x, y, z. dependent: it may start before the kernel before it has ended, for
        which it waits inside. cooperative: all blocks are resident together. cluster: neighbouring
        blocks in x that share their memories. Raises DeviceError naming the kernel.
        """
        r = self.record
        attributes, count = _attributes(dependent, cooperative, cluster)
        sizes = (*(*grid, 1, 1)[:3], r.threads, 1, 1, r.dynamic_shared)
        CONFIG.pack_into(self._config, 0, *sizes, stream.handle, attributes, count)
        self._arguments.pack(arguments)
        status = self._launch(self._config, self._entry, self._arguments.pointers, None)
        if status:
            call(f"launch {r.name}", (driver.CUresult(status),))
        stream.note(r.name)

    def close(self) -> None:
        """Unload the module."""
        call(f"unload {self.record.name}", driver.cuModuleUnload(self.module))


@cache
def launch_call() -> Any:
    """cuLaunchKernelEx of the driver library, which the binding has loaded by now."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


_OWNERS: list[Any] = []  # of launch attributes in the driver's form; they stay


@cache
def _attributes(dependent: bool, cooperative: bool, cluster: int) -> tuple[int, int]:
    """Address and number of launch attributes."""
    ids = driver.CUlaunchAttributeID
    attributes = []
    if dependent:
        a = _attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        a.value.programmaticStreamSerializationAllowed = 1
        attributes.append(a)
    if cooperative:
        a = _attribute(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        a.value.cooperative = 1
        attributes.append(a)
    if cluster > 1:
        a = _attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = cluster, 1, 1
        attributes.append(a)
    if not attributes:
        return 0, 0
    owner = driver.CUlaunchConfig()
    owner.attrs, owner.numAttrs = attributes, len(attributes)
    _OWNERS.append(owner)
    *_, address, count = CONFIG.unpack(ctypes.string_at(owner.getPtr(), CONFIG.size))
    return address, count


def _attribute(identity: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = identity
    return attribute
