"""Launches: what the driver is given, in the layout of its own structures."""

import ctypes
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

from ginfer.cuda.runtime import launch
from ginfer.cuda.runtime.launch import CONFIG, Function
from ginfer.errors import DeviceError

SIGNATURE = ("int64", "uint32", "float32", "int32", "uint64")
ARGUMENTS = (0x7F12_3456_7890, 0xFFFF_FFF0, 1.5, -3, (1 << 64) - 2)
NBYTES = 72  # of an attribute
TYPES = (ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_int32, ctypes.c_uint64)


class Driver:
    """Stands for cuLaunchKernelEx: keeps what it is given, as the driver would read it."""

    def __init__(self, status=0):
        self.status, self.calls = status, []
        self.entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launch)

    def _launch(self, config, function, pointers, extra):
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        values = tuple(t.from_address(at[i]).value for i, t in enumerate(TYPES))
        raw = ctypes.string_at(config, CONFIG.size)
        *_, attributes, count = CONFIG.unpack(raw)
        self.calls.append(
            (raw, function, values, ctypes.string_at(attributes or config, count * NBYTES))
        )
        return self.status


def bytes_of(attribute):
    return ctypes.string_at(attribute.getPtr(), NBYTES)


def function(monkeypatch, found):
    monkeypatch.setattr(launch, "launch_call", lambda: found.entry)
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda code: (driver.CUresult.CUDA_SUCCESS, 1))
    handle = driver.CUfunction(0x5550)
    monkeypatch.setattr(
        driver, "cuModuleGetFunction", lambda *_: (driver.CUresult.CUDA_SUCCESS, handle)
    )
    record = SimpleNamespace(name="k", entry="k", signature=SIGNATURE, threads=96, dynamic_shared=0)
    return Function(record, b"")


class Stream:
    handle = 0x1234_5678_9ABC

    def __init__(self):
        self.noted = []

    def note(self, name):
        self.noted.append(name)


def test_the_driver_gets_the_numbers_of_a_launch(monkeypatch):
    found, stream = Driver(), Stream()
    it = function(monkeypatch, found)
    it.launch((7, 2), stream, *ARGUMENTS, dependent=True, cooperative=True, cluster=4)
    it.launch((9,), stream, *ARGUMENTS)
    (raw, entry, values, attributes), (plain, *_) = found.calls
    assert (entry, values) == (0x5550, ARGUMENTS)
    config = driver.CUlaunchConfig()
    ctypes.memmove(config.getPtr(), raw, CONFIG.size)  # read back through the binding
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert int(config.hStream) == Stream.handle
    assert config.numAttrs == 3
    kinds = driver.CUlaunchAttributeID
    wanted = []
    for kind in ("PROGRAMMATIC_STREAM_SERIALIZATION", "COOPERATIVE", "CLUSTER_DIMENSION"):
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(kinds, f"CU_LAUNCH_ATTRIBUTE_{kind}")
        wanted.append(attribute)
    wanted[0].value.programmaticStreamSerializationAllowed = 1
    wanted[1].value.cooperative = 1
    dim = wanted[2].value.clusterDim
    dim.x, dim.y, dim.z = 4, 1, 1
    assert attributes == b"".join(map(bytes_of, wanted))
    assert CONFIG.unpack(plain) == (9, 1, 1, 96, 1, 1, 0, Stream.handle, 0, 0)
    assert stream.noted == ["k", "k"]


def test_a_refused_launch_names_its_kernel_and_the_status(monkeypatch):
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(
        driver, "cuGetErrorString", lambda _: (driver.CUresult.CUDA_SUCCESS, b"invalid argument")
    )
    it = function(monkeypatch, Driver(int(refused)))
    with pytest.raises(DeviceError, match="launch k: CUDA_ERROR_INVALID_VALUE"):
        it.launch((1,), Stream(), *ARGUMENTS)
