"""Tensor maps: descriptors of bulk tensor copies (sm_90 and later), encoded here for kernels"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from cuda.bindings import driver

from ginfer.cuda.runtime.driver import call

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.cuda.runtime.memory import Slice

NBYTES = 128
ALIGNMENT = 64
_TYPES = {  # element type to (driver name, bytes)
    "bf16": ("BFLOAT16", 2),
    "f16": ("FLOAT16", 2),
    "f32": ("FLOAT32", 4),
    "u8": ("UINT8", 1),
    "u32": ("UINT32", 4),
}


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tiled view of a row-major array in device memory.

    shape, box: elements, outermost dimension first. stride_nbytes: of all dimensions but the last,
    multiples of 16; left out, the array is contiguous. swizzle: 0, 32, 64 or 128 bytes, which the
    innermost side of the box must not exceed. Elements outside the array read as zero and are not
    written.
    """

    address: int
    shape: tuple[int, ...]
    box: tuple[int, ...]
    dtype: str = "bf16"
    stride_nbytes: tuple[int, ...] | None = None
    swizzle: int = 128

    def encode(self) -> NDArray[np.uint8]:
        """The 128 bytes of the descriptor. Raises DeviceError when the driver refuses the view."""
        kind, itemsize = _TYPES[self.dtype]
        rank = len(self.shape)
        strides = self.stride_nbytes or _contiguous(self.shape, itemsize)
        swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{self.swizzle}B' if self.swizzle else 'NONE'}"
        encoded = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            rank,
            self.address,
            [driver.cuuint64_t(n) for n in reversed(self.shape)],
            [driver.cuuint64_t(n) for n in reversed(strides)],
            [driver.cuuint32_t(n) for n in reversed(self.box)],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        view = call(f"cuTensorMapEncodeTiled of {self}", encoded)
        return np.frombuffer(ctypes.string_at(view.getPtr(), NBYTES), np.uint8)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    stride = itemsize
    for n in reversed(shape[1:]):
        stride *= n
        strides.insert(0, stride)
    return tuple(strides)


def place_tensor_maps(maps: list[TensorMap], memory: Slice) -> list[int]:
    """Write the descriptors to device memory, one after the other; waits. Returns their addresses,
    which kernels take as arguments."""
    assert memory.address % ALIGNMENT == 0
    table = np.stack([m.encode() for m in maps])
    memory.array(table.shape, np.uint8).write(table)
    return [memory.address + i * NBYTES for i in range(len(maps))]
