"""Driver launches of loaded kernels: shared memory, dependent and cooperative launch, clusters."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import TAKEN, call

if TYPE_CHECKING:
    from ginfer.cuda.runtime.manifest import CubinRecord
    from ginfer.cuda.runtime.stream import Stream

_TYPES = {
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "float32": ctypes.c_float,
}


class Function:
    """A kernel loaded into the current context. Launching neither allocates nor synchronises."""

    def __init__(self, record: CubinRecord, code: bytes) -> None:
        self.record = record
        self.types = tuple(_TYPES[t] for t in record.signature)
        name = record.name
        TAKEN["kernels"] += 1
        self.module = call(f"load {name}", driver.cuModuleLoadData(code))
        found = driver.cuModuleGetFunction(self.module, record.entry.encode())
        self.handle = call(f"find {name}", found)
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
        assert len(arguments) == len(self.types), self.record.name
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.record.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.record.dynamic_shared, stream.handle
        if dependent or cooperative or cluster > 1:
            attributes = _attributes(dependent, cooperative, cluster)
            config.attrs, config.numAttrs = attributes, len(attributes)
        started = driver.cuLaunchKernelEx(config, self.handle, (arguments, self.types), 0)
        call(f"launch {self.record.name}", started)
        stream.note(self.record.name)

    def close(self) -> None:
        """Unload the module."""
        call(f"unload {self.record.name}", driver.cuModuleUnload(self.module))


@cache
def _attributes(dependent: bool, cooperative: bool, cluster: int) -> list[Any]:
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
    return attributes


def _attribute(identity: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = identity
    return attribute
