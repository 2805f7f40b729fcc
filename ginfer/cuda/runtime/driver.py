"""Calls of the CUDA driver as values or typed errors."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from cuda.bindings import driver

from ginfer.errors import DeviceError

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # no kernel is loaded at its first launch
LOST = frozenset(  # after these the context is gone; everything else leaves it usable
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "ILLEGAL_INSTRUCTION"),
        *("INVALID_PC", "HARDWARE_STACK_ERROR", "ASSERT", "LAUNCH_FAILED", "LAUNCH_TIMEOUT"),
        *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "EXTERNAL_DEVICE"),
        *("CONTEXT_IS_DESTROYED", "UNKNOWN"),
    )
)


TAKEN: Counter[str] = Counter()  # memory, graphs, events and kernels, since the process started


def call(what: str, result: tuple[Any, ...]) -> Any:
    """Unwrap a driver call: return its value(s). Raises DeviceError with `what` and the status."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise device_error(what, status)
    return values[0] if len(values) == 1 else tuple(values)


def device_error(what: str, status: Any) -> DeviceError:
    """The error of a status that is not CUDA_SUCCESS."""
    _, text = driver.cuGetErrorString(status)
    reason = text.decode() if isinstance(text, bytes) else str(text)
    return DeviceError(
        f"{what}: {status.name} ({reason})",
        status_name=status.name,
        context_lost=status.name in LOST,
    )
