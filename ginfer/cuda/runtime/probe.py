"""Probe: whether this machine has a GPU that there are kernels for, without a compiler."""

from __future__ import annotations

from ginfer.cuda.runtime.device import Device, device_count
from ginfer.cuda.runtime.image import native_capability
from ginfer.errors import GInferError


def refusal() -> str:
    """Why the CUDA image cannot serve here, in one line; empty when it can."""
    try:
        if device_count() == 0:
            return "there is no NVIDIA GPU (is the driver installed?); use backend cpu"
        device = Device()
        native_capability(device.info.capability)
        device.close()
    except GInferError as error:
        return str(error)
    return ""
