"""A GPU that is not there: the driver calls of the runtime on host memory, launches emulated."""

import ctypes
from types import SimpleNamespace

import numpy as np
from cuda.bindings import driver as real

from ginfer.cuda.runtime import memory, stream
from ginfer.cuda.runtime.device import DeviceInfo
from ginfer.cuda.runtime.plan import PlanTable
from tests.host.cuda.emulated_block import machine
from tests.host.cuda.emulator import launch

CAPABILITY = "80"
OK = real.CUresult.CUDA_SUCCESS


class Driver:
    """Memory and streams of the CUDA driver; everything is done at once."""

    def __init__(self):
        self.blocks = {}

    def __getattr__(self, name):
        if name.startswith(("CU", "cuda")):
            return getattr(real, name)
        if name.startswith(("cuStream", "cuEvent")):
            return lambda *_: (OK, 1)
        raise AttributeError(name)

    def cuMemAlloc(self, nbytes):
        block = np.full(nbytes, 0xFF, np.uint8)
        self.blocks[block.ctypes.data] = block
        return OK, block.ctypes.data

    def cuMemHostAlloc(self, nbytes, flags):
        return self.cuMemAlloc(nbytes)

    def cuMemHostGetDevicePointer(self, address, flags):
        return OK, address

    def cuMemFree(self, address):
        del self.blocks[address]
        return (OK,)

    cuMemFreeHost = cuMemFree

    def cuMemcpyHtoD(self, to, source, nbytes, *_):
        ctypes.memmove(to, source, nbytes)
        return (OK,)

    cuMemcpyDtoH = cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoD

    def cuMemsetD8Async(self, address, byte, nbytes, *_):
        ctypes.memset(address, byte, nbytes)
        return (OK,)


class Device:
    info = DeviceInfo(
        name="emulated",
        capability=(8, 0),
        num_sms=2,
        memory_nbytes=1 << 30,
        l2_nbytes=1 << 20,
        shared_nbytes=163 << 10,
        registers=65_536,
    )

    def use(self):
        pass

    def free_nbytes(self):
        return 1 << 30

    def close(self):
        pass


class Image:
    """Launches kernels as emulated threads."""

    capability = CAPABILITY

    def __init__(self, driver):
        self.driver, self.plans = driver, PlanTable.load(CAPABILITY)

    def close(self):
        pass

    def seal(self):
        pass

    def __getitem__(self, item):
        return SimpleNamespace(occupancy=lambda: 1)

    def launch(self, item, grid, stream, *arguments, **how):
        blocks = self.driver.blocks.items()
        machine.arrays = [(at, at + block.nbytes) for at, block in blocks]
        launch(item, grid[0], arguments)


def install(monkeypatch):
    """Put the emulated GPU under the CUDA image; a row of logits gets two thread blocks, not tens."""
    from ginfer.cuda import backend
    from ginfer.cuda.sampling import launch as selection

    monkeypatch.setattr(selection, "BLOCKS", 2)
    monkeypatch.setattr(selection, "LEAST_BLOCKS", 2)

    driver = Driver()
    for module in (memory, stream):
        monkeypatch.setattr(module, "driver", driver)
    image = Image(driver)
    monkeypatch.setattr(backend, "Device", Device)
    monkeypatch.setattr(backend, "Image", SimpleNamespace(open=lambda *_, **__: image))
    return driver
