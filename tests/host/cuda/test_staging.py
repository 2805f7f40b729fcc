"""Uploads through pinned buffers over an emulated driver: every byte in its place, and faults."""

import ctypes
import threading
from functools import partial

import numpy as np
import pytest

from ginfer.cuda.runtime.memory import Arena, Piece, Staging
from ginfer.cuda.runtime.stream import Stream
from tests.host.cuda.emulated_device import install

SIZE = 4096


@pytest.fixture
def room(monkeypatch):
    """(arena, staging) of an emulated GPU."""
    install(monkeypatch)
    arena, staging = Arena(1 << 20, "test"), Staging(SIZE, 6)
    yield arena, staging
    staging.close()
    arena.close()


def pieces(arena, data, fill):
    for at in range(0, data.nbytes, SIZE):
        yield Piece(arena.address + at, min(SIZE, data.nbytes - at), partial(fill, at))


@pytest.mark.parametrize("nbytes", [1, SIZE, SIZE + 1, 37 * SIZE + 11])
def test_every_byte_arrives_and_is_counted(room, nbytes):
    arena, staging = room
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    names = set()

    def fill(at, buffer):
        names.add(threading.current_thread().name)
        buffer[:] = data.data[at : at + len(buffer)]

    assert sum(staging.upload(pieces(arena, data, fill), Stream())) == nbytes
    there = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(arena.address))
    assert (there == data).all()
    assert all(name.startswith("ginfer-upload") for name in names)


def test_a_fault_of_a_reader_comes_out(room):
    arena, staging = room

    def fill(at, buffer):
        if at == 9 * SIZE:
            raise OSError("a bad sector")

    with pytest.raises(OSError, match="a bad sector"):
        list(staging.upload(pieces(arena, np.zeros(20 * SIZE, np.uint8), fill), Stream()))
