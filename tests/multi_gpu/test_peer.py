"""Peer access: every rank reads and writes the buffers of the others."""

import threading

import numpy as np

from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.memory import Slice
from ginfer.cuda.runtime.peer import PeerBuffers, enable_peer_access
from ginfer.cuda.runtime.stream import Stream
from tests.cuda.kernels import scale_kernel, sum_of_ranks_kernel

SCALE, SUM = scale_kernel(256, 3), sum_of_ranks_kernel(256)
DEADLINE_S = 120


def open_image(device, kernel):
    """In the context of the device."""
    device.use()
    capability = device.info.capability
    return Image.open(native_capability(capability), [kernel], device_capability=capability)


def test_a_kernel_reads_from_one_gpu_and_writes_to_the_other(devices):
    enable_peer_access(devices)  # again is harmless
    buffers = PeerBuffers.allocate(devices, 1 << 20, "exchange")
    mine, theirs = (Slice(a, 1 << 20).array((1024,), np.float32) for a in buffers.addresses)
    assert (mine.read() == 0).all()
    values = np.random.default_rng(1).standard_normal(1024).astype(np.float32)
    theirs.write(values)
    image, stream = open_image(devices[0], SCALE), Stream()
    image.launch(SCALE, (4,), stream, mine.address, theirs.address, 1024)
    image.launch(SCALE, (4,), stream, theirs.address, mine.address, 1024)
    stream.synchronize()
    assert (mine.read() == values * 3).all()
    assert (theirs.read() == values * 3 * 3).all()
    stream.close()
    buffers.close()


def test_threads_of_two_ranks_replay_graphs_that_wait_for_each_other(devices):
    n, blocks, part = 1000, 4, 1 << 16
    buffers = PeerBuffers.allocate(devices, 4 * part, "exchange")
    values = np.random.default_rng(2).standard_normal((2, n)).astype(np.float32)
    results, met = [None, None], threading.Barrier(2)

    def rank(i):
        image, stream = open_image(devices[i], SUM), Stream()
        mine, peer = buffers.addresses[i], buffers.addresses[1 - i]
        Slice(mine, part).array((n,), np.float32).write(values[i])
        out, flags, epochs = mine + part, 2 * part, mine + 3 * part
        addresses = (out, mine, peer, mine + flags, peer + flags, epochs)

        def work():
            for _ in range(5):
                image.launch(SUM, (blocks,), stream, *addresses, n)

        graph = Graph(stream, work)
        met.wait(DEADLINE_S)  # both have their values
        for _ in range(3):
            graph.replay()
        stream.synchronize()
        found = Slice(out, part).array((n,), np.float32).read()
        results[i] = (found, Slice(epochs, part).array((blocks,), np.uint32).read())
        graph.close()
        stream.close()

    ranks = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a rank still waits for the other"
    for found, epochs in results:
        assert (found == values[0] + values[1]).all()
        assert (epochs == 15).all()
    buffers.close()
