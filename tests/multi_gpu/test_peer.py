"""Peer access: every rank reads and writes the buffers of the others."""

import numpy as np

from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.memory import Slice
from ginfer.cuda.runtime.peer import PeerBuffers, enable_peer_access
from ginfer.cuda.runtime.stream import Stream
from tests.cuda.kernels import scale_kernel

SCALE = scale_kernel(256, 3)


def test_a_kernel_reads_from_one_gpu_and_writes_to_the_other(devices):
    enable_peer_access(devices)  # again is harmless
    buffers = PeerBuffers.allocate(devices, 1 << 20, "exchange")
    mine, theirs = (Slice(a, 1 << 20).array((1024,), np.float32) for a in buffers.addresses)
    assert (mine.read() == 0).all()
    values = np.random.default_rng(1).standard_normal(1024).astype(np.float32)
    theirs.write(values)
    devices[0].use()
    capability = devices[0].info.capability
    image = Image.open(native_capability(capability), [SCALE], device_capability=capability)
    stream = Stream()
    image.launch(SCALE, (4,), stream, mine.address, theirs.address, 1024)
    image.launch(SCALE, (4,), stream, theirs.address, mine.address, 1024)
    stream.synchronize()
    assert (mine.read() == values * 3).all()
    assert (theirs.read() == values * 3 * 3).all()
    stream.close()
    buffers.close()
