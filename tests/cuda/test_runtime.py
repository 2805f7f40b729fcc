"""The host side of the device: memory, launches, graphs, events, tensor maps."""

import threading
from functools import partial

import numpy as np
import pytest
from numba import cuda

from ginfer.cuda.runtime.device import Device, device_count
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.memory import (
    UNIT_NBYTES,
    Arena,
    Piece,
    PinnedBuffer,
    Slice,
    Staging,
    copy_on_device,
    copy_to_device,
    copy_to_host,
)
from ginfer.cuda.runtime.stream import Event, Stream, Timer
from ginfer.cuda.runtime.tensor_map import TensorMap, place_tensor_maps
from ginfer.errors import ConfigError, DeviceError
from ginfer.sizes import MIB
from tests.cuda.kernels import (
    add_kernel,
    meet_kernel,
    reverse_kernel,
    scale_kernel,
    tile_kernel,
)

SCALE, ADD, REVERSE = scale_kernel(256, 3), add_kernel(256), reverse_kernel(20_000)


def random_floats(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def blocks(n):
    return (-(-n // 256),)


@pytest.fixture
def needs_sm_90(capability):
    if not capability.startswith("90"):
        pytest.skip("an instruction of sm_90")


def test_device_describes_itself(device):
    info = device.info
    assert info.sm == "sm_{}{}".format(*info.capability)
    assert info.num_sms > 0
    assert 48 << 10 < info.shared_nbytes < 1 << 20
    assert 0 < device.free_nbytes() <= info.memory_nbytes


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=rf"device is 99; this machine has {device_count()} "):
        Device(99)


def test_arena_is_whole_aligned_units_with_an_honest_ledger(device):
    arena = Arena(5 * MIB, "cache")
    assert arena.num_units == 3
    assert arena.address % UNIT_NBYTES == 0
    assert arena.unit(2) == arena.address + 2 * UNIT_NBYTES
    a = arena.take(100, "tables")
    b = arena.take(5 * MIB, "pages")
    assert (a.address, b.address) == (arena.address, arena.address + 256)
    assert arena.ledger == {"tables": 100, "pages": 5 * MIB + 156}
    with pytest.raises(ConfigError, match=r"states needs 2\.0 MiB of cache; 1023\.\d KiB are left"):
        arena.take(2 * MIB, "states")
    arena.check_integrity()
    arena.close()


def test_an_arena_that_does_not_fit_names_both_numbers(device):
    with pytest.raises(ConfigError, match=r"pages needs 1024\.0 GiB of GPU memory; .* are free"):
        Arena(1 << 40, "pages")


def test_arrays_over_slices_are_seen_by_other_libraries(memory):
    values = random_floats(1000).reshape(10, 100)
    array = memory.put(values)
    assert (array.read() == values).all()
    assert (cuda.as_cuda_array(array).copy_to_host() == values).all()
    part = Slice(array.address, array.nbytes).part(400, 400).array((100,), np.float32)
    assert (part.read() == values[1]).all()


def test_poison_is_not_a_number(memory):
    assert np.isnan(memory.empty(10, np.float32).read()).all()
    assert np.isnan(memory.empty(10, np.float16).read()).all()


@pytest.mark.parametrize("nbytes", [1, 4096, 65_536, 65_537, 1_000_003])
def test_staging_carries_any_number_of_bytes_in_order(memory, stream, nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    source, staging = data.copy(), Staging(65_536, 4)
    array = memory.empty(nbytes, np.uint8)

    def fill(at, buffer):
        buffer[:] = source.data[at : at + len(buffer)]

    pieces = [
        Piece(array.address + at, min(65_536, nbytes - at), partial(fill, at))
        for at in range(0, nbytes, 65_536)
    ]
    assert sum(staging.upload(pieces, stream)) == nbytes
    source[:] = 0  # has been read
    stream.synchronize()
    assert (array.read() == data).all()
    staging.close()


def test_pinned_memory_is_addressed_by_host_and_device(memory, stream, image):
    pinned, n = PinnedBuffer(4096), 1024
    values = random_floats(n)
    pinned.bytes.view(np.float32)[:] = values
    y = memory.empty(n, np.float32)
    image.launch(SCALE, blocks(n), stream, y.address, pinned.address, n)
    stream.synchronize()
    assert (y.read() == values * 3).all()
    copy_to_host(pinned.host, y.address, 4096, stream=stream)
    stream.synchronize()
    assert (pinned.bytes.view(np.float32) == values * 3).all()
    pinned.close()


def test_what_was_written_is_there_for_every_stream(memory, stream, image):
    other, pinned = Stream(), PinnedBuffer(16 * MIB)  # keeps the way to the device busy
    busy = memory.empty(16 * MIB, np.uint8)
    x, y = memory.empty(256, np.float32), memory.empty(256, np.float32)
    for turn in range(32):
        for _ in range(4):
            copy_to_device(busy.address, pinned.host, busy.nbytes, stream=other)
        x.write(random_floats(256, seed=turn))
        image.launch(SCALE, (1,), stream, y.address, x.address, 256)
        stream.synchronize()
        assert (y.read() == random_floats(256, seed=turn) * 3).all()
    other.synchronize()
    other.close()
    pinned.close()


def test_copies_on_the_device_follow_the_stream(memory, stream, image):
    x, y = memory.put(random_floats(256)), memory.empty(256, np.float32)
    image.launch(SCALE, (1,), stream, x.address, x.address, 256)
    copy_on_device(y.address, x.address, x.nbytes, stream=stream)
    image.launch(SCALE, (1,), stream, x.address, x.address, 256)
    stream.synchronize()
    assert (y.read() == random_floats(256) * 3).all()


@pytest.mark.parametrize("n", [1, 255, 256, 257, 100_003])
def test_launch_passes_addresses_and_scalars(memory, stream, image, n):
    x, y = memory.put(random_floats(n)), memory.empty(n, np.float32)
    image.launch(SCALE, blocks(n), stream, y.address, x.address, n)
    stream.synchronize()
    assert (y.read() == random_floats(n) * 3).all()


def test_dynamic_shared_memory_beyond_48_kib(memory, stream, image):
    y = memory.empty(20_000, np.uint32)
    image.launch(REVERSE, (1,), stream, y.address)
    stream.synchronize()
    assert (y.read() == np.arange(20_000)[::-1]).all()


def test_occupancy_is_what_shared_memory_allows(image, device):
    per_sm = device.info.shared_nbytes + 1024  # the system keeps 1 KiB per block
    assert image[REVERSE].occupancy() == per_sm // (80_000 + 1024)
    assert image[SCALE].occupancy() == 8  # 2,048 threads


def test_dependent_launches_keep_their_order(memory, stream, image, needs_sm_90):
    n, count = 50_000, 64
    y = memory.put(np.zeros(n, np.float32))
    for i in range(count):
        image.launch(ADD, blocks(n), stream, y.address, float(i), n, dependent=True)
    stream.synchronize()
    assert (y.read() == count * (count - 1) / 2).all()


def test_cooperative_launch_has_all_blocks_at_once(memory, stream, image, device):
    meet = image[meet_kernel()]
    most = meet.occupancy() * device.info.num_sms
    y, counter = memory.empty(most, np.uint32), memory.put(np.zeros(1, np.uint32))
    meet.launch((most,), stream, y.address, counter.address, most, cooperative=True)
    stream.synchronize()
    assert (y.read() == 1).all()
    with pytest.raises(DeviceError, match=r"launch meet\(\): CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_"):
        meet.launch((most + 1,), stream, y.address, counter.address, 0, cooperative=True)


def test_a_launch_that_the_driver_refuses_names_call_and_kernel(memory, stream, image):
    with pytest.raises(
        DeviceError, match=r"launch scale\(256, 3\): CUDA_ERROR_INVALID_V"
    ) as caught:
        image.launch(SCALE, (0,), stream, 0, 0, 0)
    assert not caught.value.context_lost
    assert caught.value.status_name == "CUDA_ERROR_INVALID_VALUE"
    y = memory.empty(20_000, np.uint32)
    image.launch(REVERSE, (1,), stream, y.address)
    stream.synchronize()


def test_replay_is_eager_bit_for_bit_and_reads_memory_anew(memory, stream, image, needs_sm_90):
    n = 10_007
    eager, replayed = memory.put(random_floats(n)), memory.put(random_floats(n))

    def work(y):
        for i in range(20):
            image.launch(SCALE, blocks(n), stream, y.address, y.address, n)
            image.launch(ADD, blocks(n), stream, y.address, 0.1 * i, n, dependent=True)

    graph = Graph(stream, lambda: work(replayed), name="twenty rounds")
    assert graph.num_nodes == 40
    stream.synchronize()
    assert (replayed.read() == random_floats(n)).all()  # capturing runs nothing
    work(eager)
    graph.replay()
    stream.synchronize()
    assert (eager.read().view(np.uint32) == replayed.read().view(np.uint32)).all()
    for array in (eager, replayed):
        array.write(random_floats(n, seed=2))
    work(eager)
    graph.replay()
    stream.synchronize()
    assert (eager.read().view(np.uint32) == replayed.read().view(np.uint32)).all()
    graph.close()


def test_a_capture_that_fails_says_why_and_leaves_the_stream_usable(memory, stream, image):
    y = memory.put(random_floats(256))

    def broken():
        image.launch(SCALE, (1,), stream, y.address, y.address, 256)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Graph(stream, broken)
    with pytest.raises(DeviceError, match=r"cuStreamSynchronize.*CUDA_ERROR_STREAM_CAPTURE_UNSUPP"):
        Graph(stream, stream.synchronize)
    assert (y.read() == random_floats(256)).all()
    image.launch(SCALE, (1,), stream, y.address, y.address, 256)
    stream.synchronize()
    assert (y.read() == random_floats(256) * 3).all()


def test_two_threads_capture_and_replay_on_their_own(memory, device, image):
    n, results = 4096, {}
    arrays = [memory.put(random_floats(n, seed)) for seed in range(2)]

    def rank(i):
        device.use()
        mine = Stream()
        at = arrays[i].address
        graph = Graph(
            mine, lambda: [image.launch(SCALE, (16,), mine, at, at, n) for _ in range(200)]
        )
        arrays[i].write(random_floats(n, i))
        graph.replay()
        mine.synchronize()
        results[i] = graph.num_nodes
        graph.close()
        mine.close()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: 200, 1: 200}


def test_an_event_holds_another_stream_back(memory, stream, image):
    n, other, event = 1 << 20, Stream(), Event()
    x, y = memory.put(np.ones(n, np.float32)), memory.empty(n, np.float32)
    for _ in range(20):
        image.launch(SCALE, blocks(n), stream, x.address, x.address, n)
    event.record(stream)
    other.wait(event)
    copy_on_device(y.address, x.address, x.nbytes, stream=other)
    other.synchronize()
    want = np.float32(1)
    for _ in range(20):
        want *= np.float32(3)
    assert (y.read() == want).all()
    assert stream.done()
    event.close()
    other.close()


def test_timer_measures_the_work_on_the_stream(memory, stream, image):
    n = 1 << 24
    x = memory.put(np.ones(n, np.float32))
    timer = Timer(stream)

    def work(count):
        return lambda: [
            image.launch(SCALE, blocks(n), stream, x.address, x.address, n) for _ in range(count)
        ]

    timer.milliseconds(work(3))
    few, many = timer.milliseconds(work(10)), timer.milliseconds(work(100))
    assert 0 < few < many


def test_done_is_false_while_work_is_pending(memory, stream, image):
    y, counter = memory.empty(2, np.uint32), memory.put(np.zeros(1, np.uint32))
    image.launch(meet_kernel(), (1,), stream, y.address, counter.address, 2)  # waits for another
    assert not stream.done()
    other = Stream()
    image.launch(meet_kernel(), (1,), other, y.address + 4, counter.address, 2)
    stream.synchronize()
    other.synchronize()
    assert stream.done()
    assert (y.read() == 1).all()
    other.close()


def swizzled(box, nbytes):
    """A box of rows of `nbytes` as the hardware stores it: 16-byte chunk c of row r at c ^ r."""
    chunks = box.reshape(box.shape[0], nbytes // 16, -1)
    out = np.empty_like(chunks)
    for r in range(len(chunks)):
        for c in range(chunks.shape[1]):
            out[r, c ^ (r % 8)] = chunks[r, c]
    return out.reshape(-1)


@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (32, 64), (80, 128)])
def test_tensor_maps_read_boxes_with_masked_tails(
    memory, stream, image, needs_sm_90, swizzle, row, column
):
    rows, columns, box = 100, 168, (32, 64)  # BF16 bits; the last box is cut on both sides
    values = np.random.default_rng(3).integers(0, 1 << 16, (rows, columns), np.uint16)
    x, table = memory.put(values), memory.empty(256, np.uint8)
    view = TensorMap(address=x.address, shape=(rows, columns), box=box, swizzle=swizzle)
    _, at = place_tensor_maps([view, view], Slice(table.address, 256))
    y = memory.empty(1024, np.uint32)
    image.launch(tile_kernel(1024), (1,), stream, y.address, at, row, column)
    stream.synchronize()
    padded = np.zeros((rows + 32, columns + 64), np.uint16)
    padded[:rows, :columns] = values
    want = padded[row : row + 32, column : column + 64]
    want = swizzled(want, 128) if swizzle else want.reshape(-1)
    assert (y.read().view(np.uint16) == want).all()


def test_a_view_that_no_tensor_map_can_have_is_refused(memory, needs_sm_90):
    x = memory.empty((64, 65), np.uint16)  # rows of 130 bytes are no multiple of 16
    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeTiled of TensorMap\(address="):
        TensorMap(address=x.address, shape=(64, 65), box=(32, 64)).encode()


def test_memory_errors_of_the_host_are_typed(memory, stream):
    array = memory.empty(16, np.uint8)
    with pytest.raises(DeviceError, match="cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE"):
        copy_on_device(array.address, 0, 16, stream=stream)
