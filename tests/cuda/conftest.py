"""A device, its kernel image, a stream, poisoned memory with canaries; skipped without a GPU."""

import signal

import numpy as np
import pytest

from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.device import Device, device_count
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.stream import Stream
from ginfer.sizes import MIB
from tests.cuda.kernels import kernels_for

ALARM_S = 300
GUARD_NBYTES = 256
POISON = 0xFF  # NaN in every float format
TOLERATED_NBYTES = 32 * MIB  # the driver's own pools grow at first use


def pytest_collection_modifyitems(items):
    """Everything here needs a GPU."""
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if "tests/cuda/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if device_count() == 0:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    return Device()


@pytest.fixture(scope="session")
def capability(device):
    return native_capability(device.info.capability)


@pytest.fixture(scope="session")
def image(device, capability):
    """The kernels of the library and of the tests."""
    items = (*kernels_of(capability), *kernels_for(capability))
    return Image.open(capability, items, device_capability=device.info.capability)


@pytest.fixture(autouse=True)
def _alarm():
    def ring(*_):
        raise TimeoutError(f"the test took more than {ALARM_S} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(ALARM_S)
    yield
    signal.alarm(0)


@pytest.fixture(autouse=True)
def _leaks(device, image):
    """A test gives back what it took."""
    before = device.free_nbytes()
    yield
    device.synchronize()
    assert before - device.free_nbytes() <= TOLERATED_NBYTES


@pytest.fixture
def stream(device, _leaks):
    device.use()
    stream = Stream()
    yield stream
    stream.synchronize()
    stream.close()


class Memory:
    """Slices of a poisoned arena, each between canaries."""

    def __init__(self, nbytes, stream):
        self.arena, self.stream = Arena(nbytes, "test memory"), stream
        self._poison()

    def _poison(self):
        self.arena.fill(POISON, self.stream)
        self.stream.synchronize()
        self.guards = []

    def restart(self):
        """Check the canaries; no array is used any more."""
        self.check()
        self.arena.used = 0
        self.arena.ledger.clear()
        self._poison()

    def empty(self, shape, dtype):
        """A poisoned array."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._guard()
        part = self.arena.take(nbytes, "array", alignment=1024)
        self._guard(nbytes)
        return part.array(tuple(np.atleast_1d(shape)), dtype)

    def put(self, values):
        """A copy of host values."""
        values = np.ascontiguousarray(values)
        array = self.empty(values.shape, values.dtype)
        array.write(values)
        return array

    def _guard(self, before=0):
        gap = -before % 16  # right behind the last byte, then aligned
        self.guards.append(self.arena.take(GUARD_NBYTES + gap, "guard", alignment=1))

    def check(self):
        """No canary was overwritten."""
        self.stream.synchronize()
        self.arena.check_integrity()
        for guard in self.guards:
            assert (guard.array((guard.nbytes,), np.uint8).read() == POISON).all()


@pytest.fixture
def memory(stream):
    memory = Memory(512 * MIB, stream)
    yield memory
    memory.check()
    memory.arena.close()
