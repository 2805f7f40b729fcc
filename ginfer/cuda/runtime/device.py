"""Devices: how many there are, what they are, and the context that a thread works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import call
from ginfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """What the kernels and plans need to know of a GPU. Sizes in bytes."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_nbytes: int
    l2_nbytes: int
    shared_nbytes: int  # per block at most
    registers: int  # per multiprocessor

    @property
    def sm(self) -> str:
        """'sm_90' of (9, 0)."""
        return "sm_{}{}".format(*self.capability)


def device_count() -> int:
    """Number of GPUs; 0 without a driver."""
    try:
        result = driver.cuInit(0)
    except RuntimeError:  # the driver library is not there
        return 0
    if result[0] == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return 0
    call("cuInit", result)
    return int(call("cuDeviceGetCount", driver.cuDeviceGetCount()))


class Device:
    """One GPU with its primary context, which is current in the thread that opened it."""

    def __init__(self, ordinal: int = 0) -> None:
        count = device_count()
        if not 0 <= ordinal < count:
            raise ConfigError(
                f"device is {ordinal}; this machine has {count} usable NVIDIA GPUs"
                + ("" if count else " (is the driver installed?)"),
                param="device",
            )
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", driver.cuDeviceGet(ordinal))
        retained = driver.cuDevicePrimaryCtxRetain(self.handle)
        self.context = call("cuDevicePrimaryCtxRetain", retained)
        self.use()
        self.info = self._info()

    def use(self) -> None:
        """Make the context current in the calling thread."""
        call("cuCtxSetCurrent", driver.cuCtxSetCurrent(self.context))

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self.use()
        call("cuCtxSynchronize", driver.cuCtxSynchronize())

    def free_nbytes(self) -> int:
        """Device memory that the driver can still give."""
        self.use()
        free, _ = call("cuMemGetInfo", driver.cuMemGetInfo())
        return int(free)

    def close(self) -> None:
        """Give the context back; what was allocated in it is gone when nobody else holds it."""
        call("cuDevicePrimaryCtxRelease", driver.cuDevicePrimaryCtxRelease(self.handle))

    def _info(self) -> DeviceInfo:
        names = driver.CUdevice_attribute

        def get(name: str) -> int:
            attribute: Any = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
            found = driver.cuDeviceGetAttribute(attribute, self.handle)
            return int(call("cuDeviceGetAttribute", found))

        name: bytes = call("cuDeviceGetName", driver.cuDeviceGetName(128, self.handle))
        return DeviceInfo(
            name=name.split(b"\0")[0].decode(),
            capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
            num_sms=get("MULTIPROCESSOR_COUNT"),
            memory_nbytes=int(call("cuDeviceTotalMem", driver.cuDeviceTotalMem(self.handle))),
            l2_nbytes=get("L2_CACHE_SIZE"),
            shared_nbytes=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            registers=get("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        )
