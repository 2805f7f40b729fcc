"""Probe: whether this machine has a GPU that there are kernels for, without a compiler."""

from __future__ import annotations

from cuda.bindings import driver

from ginfer.cuda.runtime.device import Device, device_count
from ginfer.cuda.runtime.driver import call
from ginfer.cuda.runtime.image import native_capability
from ginfer.errors import GInferError

DRIVER_VERSION = 13_000  # the oldest that takes our cubins: 1000 major + 10 minor


def refusal() -> str:
    """Why the CUDA image cannot serve here, in one line; empty when it can."""
    try:
        if device_count() == 0:
            return "there is no NVIDIA GPU (is the driver installed?); use backend cpu"
        version = int(call("cuDriverGetVersion", driver.cuDriverGetVersion()))
        if version < DRIVER_VERSION:
            have, need = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, DRIVER_VERSION))
            return (
                f"the NVIDIA driver is for CUDA {have}, the kernels need {need}; "
                "update the driver or use backend cpu"
            )
        device = Device()
        native_capability(device.info.capability)
        device.close()
    except GInferError as error:
        return str(error)
    return ""
