"""Tables of a forward on an emulated device: what is filled arrives, in one copy per turn."""

import ctypes

import numpy as np
import pytest

from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.stream import Stream
from ginfer.cuda.tables import Tables, tables_nbytes
from tests.host.cuda.emulated_device import install

SIZES = {"ids": 5, "rope": 100, "pages": 64, "units": 70}


@pytest.fixture
def tables(monkeypatch):
    driver = install(monkeypatch)
    copies = []
    real = driver.cuMemcpyHtoDAsync

    def copy(to, source, nbytes, stream):
        copies.append(nbytes)
        return real(to, source, nbytes)

    driver.cuMemcpyHtoDAsync = copy
    made = Tables(SIZES, Arena(1 << 20, "test"), Stream())
    made.copies = copies
    yield made
    made.close()


def on_device(tables, name, count, dtype=np.int32):
    raw = (ctypes.c_uint8 * (count * 4)).from_address(tables[name])
    return np.frombuffer(raw, np.uint8).view(dtype).copy()


def test_a_group_is_filled_in_either_turn(tables):
    group = tables.group(("ids", (3,), np.int32), ("rope", (2, 5), np.float32))
    for turn in range(3):
        tables.begin()
        ids, rope = tables.words_of(group)
        ids[:] = np.arange(3) + turn
        rope[:] = np.arange(10).reshape(2, 5) * (turn + 0.5)
        tables.send()
        assert on_device(tables, "ids", 3).tolist() == [turn, turn + 1, turn + 2]
        want = np.arange(10, dtype=np.float32) * np.float32(turn + 0.5)
        assert (on_device(tables, "rope", 10, np.float32) == want).all()
    with pytest.raises(AssertionError):
        tables.group(("ids", (65,), np.int32))  # tables are rounded up


def test_addresses_are_aligned_and_apart(tables):
    places = sorted(tables[name] for name in SIZES)
    assert all(at % 256 == 0 for at in places)
    assert places[-1] + 4 * SIZES["units"] - places[0] <= tables_nbytes(SIZES) == 4 * 256 + 512


def test_neighbours_are_one_copy_from_the_first_to_the_last_word(tables):
    for turn in range(5):
        tables.begin()
        tables.fill("rope", np.arange(turn + 3, dtype=np.float32) / 8)
        tables.fill("ids", np.array([[turn, ~turn]], np.int32))
        tables.words("units", turn + 1)[:] = turn
        tables.send()
        assert on_device(tables, "ids", 2).tolist() == [turn, ~turn]
        assert on_device(tables, "rope", turn + 3, np.float32)[-1] == (turn + 2) / 8
        assert on_device(tables, "units", turn + 1).tolist() == [turn] * (turn + 1)
        assert tables.copies == [256 + 4 * (turn + 3), 4 * (turn + 1)]
        tables.copies.clear()


def test_what_an_array_has_put_there_is_kept_until_another_comes(tables):
    one, other = np.arange(3, dtype=np.int32), np.arange(4, 7, dtype=np.int32)
    for values, copies in ((one, 2), (one, 1), (other, 2), (other, 1), (one, 2)):
        tables.begin()
        tables.keep("rope", values)
        tables.fill("units", np.full(2, copies, np.int32))
        tables.send()
        assert on_device(tables, "rope", 3).tolist() == values.tolist()
        assert on_device(tables, "units", 2).tolist() == [copies] * 2
        assert len(tables.copies) == copies
        tables.copies.clear()


def test_the_turn_before_is_not_written_while_the_device_reads_it(tables):
    tables.begin()
    before = tables.words("ids", 5)
    before[:] = 7
    tables.send()
    tables.begin()
    tables.fill("ids", np.array([1, 2], np.int32))
    tables.send()
    assert before.tolist() == [7] * 5
    tables.begin()
    assert np.shares_memory(tables.words("ids", 1), before), "the turns are two"


def test_an_empty_turn_copies_nothing_and_too_much_is_our_fault(tables):
    tables.begin()
    tables.fill("units", np.zeros(0, np.int32))
    tables.send()
    assert not tables.copies
    with pytest.raises(AssertionError, match="ids"):
        tables.fill("ids", np.zeros(65, np.int32))
