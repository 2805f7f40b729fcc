"""Elastic memory: what goes back to the driver, and that all of it comes again."""

import pytest
from cuda.bindings import driver as real

from ginfer.cuda.runtime import elastic
from ginfer.cuda.runtime.elastic import PIECE_NBYTES, ElasticMemory
from ginfer.errors import DeviceError
from ginfer.sizes import MIB

OK = real.CUresult.CUDA_SUCCESS
BASE = 1 << 40
UNITS = PIECE_NBYTES // (2 * MIB)  # of 2 MiB in a piece


class Driver:
    """Reservations and pieces; `mapped` are addresses with memory behind them."""

    def __init__(self):
        self.mapped, self.live, self.limit, self.made = {}, set(), 10, 0

    def __getattr__(self, name):
        return getattr(real, name)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert size % alignment == 0
        return OK, BASE

    def cuMemAddressFree(self, address, size):
        assert address == BASE
        assert not self.mapped
        return (OK,)

    def cuMemCreate(self, size, kind, flags):
        if len(self.live) == self.limit:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        self.made += 1
        self.live.add(self.made)
        return OK, self.made

    def cuMemMap(self, address, size, offset, handle, flags):
        assert address not in self.mapped
        self.mapped[address] = None
        return (OK,)

    def cuMemSetAccess(self, address, size, access, count):
        assert len(access) == count == 1
        self.mapped[address] = "open"
        return (OK,)

    def cuGetErrorString(self, status):
        return OK, b"out of memory"

    def cuMemUnmap(self, address, size):
        del self.mapped[address]
        return (OK,)

    def cuMemRelease(self, handle):
        self.live.remove(handle)
        return (OK,)


class Stream:
    handle = 1

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def device(monkeypatch):
    driver, zeroed = Driver(), []
    monkeypatch.setattr(elastic, "driver", driver)
    monkeypatch.setattr("ginfer.cuda.runtime.driver.driver", driver)

    def set_bytes(part, byte, stream):
        assert driver.mapped[part.address] == "open", "memory is written before it is there"
        zeroed.append((part.address - BASE) // PIECE_NBYTES)

    monkeypatch.setattr(elastic, "set_bytes", set_bytes)
    driver.zeroed = zeroed
    return driver


def test_whole_pieces_go_back_and_come_again(device):
    stream = Stream()
    memory = ElasticMemory(5 * PIECE_NBYTES - 1, stream)
    assert memory.taken_nbytes == memory.nbytes == 5 * PIECE_NBYTES
    assert device.zeroed == [0, 1, 2, 3, 4]
    free = [*range(2 * UNITS - 1), *range(2 * UNITS, 4 * UNITS + 3)]  # one unit of piece 1 is held
    memory.give_back(2 * MIB, free)
    assert sorted(device.mapped) == [BASE + i * PIECE_NBYTES for i in (1, 4)]
    assert stream.waits == 1
    assert memory.taken_nbytes == 2 * PIECE_NBYTES == PIECE_NBYTES * len(device.live)
    memory.give_back(2 * MIB, free)
    memory.take_back()
    assert device.zeroed[5:] == [0, 2, 3], "what was kept is not touched"
    assert set(device.mapped.values()) == {"open"}
    assert memory.taken_nbytes == memory.nbytes
    memory.close()
    assert not device.live


def test_units_that_are_no_part_of_a_piece_count_by_their_bytes(device):
    memory = ElasticMemory(3 * PIECE_NBYTES, Stream())
    unit = 3 * MIB  # pieces end inside units
    memory.give_back(unit, range(2 * PIECE_NBYTES // unit))
    assert sorted(device.mapped) == [BASE + i * PIECE_NBYTES for i in (1, 2)]
    memory.close()


def test_memory_that_others_have_taken_is_an_error_that_says_so(device):
    memory = ElasticMemory(3 * PIECE_NBYTES, Stream())
    memory.give_back(2 * MIB, range(3 * UNITS))
    device.limit = 1
    with pytest.raises(DeviceError, match="cuMemCreate of K/V memory: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.take_back()
    memory.close()
    device.limit = 2
    with pytest.raises(DeviceError):
        ElasticMemory(3 * PIECE_NBYTES, Stream())
    assert not device.live
