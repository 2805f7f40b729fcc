"""Selection kernels with emulated threads: the same bits as the CPU image."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numba import get_num_threads

from ginfer.cpu import sampling
from ginfer.cpu.head import make_chosen
from ginfer.cpu.stage import stage_draws
from ginfer.cuda.runtime.memory import Arena, copy_to_device
from ginfer.cuda.runtime.queue import Queue
from ginfer.cuda.runtime.stream import Stream
from ginfer.cuda.sampling.selector import Selector
from tests.device_cases import check_selection, random_draws
from tests.host.cuda.emulated_device import Image, install
from tests.host.cuda.emulator import Emulator


def check(seed, V, R):
    logits, batch, counts = random_draws(seed, V, R, masked=seed % 2 == 0)
    if seed:
        logits[1, 5] = float("nan")
    check_selection(Emulator(seed % 2), logits, batch, counts, V)


@pytest.mark.parametrize(("seed", "V"), [(0, 37), (1, 130)])
def test_choices_equal_those_of_the_cpu_image(seed, V):
    check(seed, V, 4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_choices_equal_those_of_the_cpu_image_at_many_seeds(seed):
    check(seed, (64, 129, 300, 1023, 5000, 4111)[seed - 2], 6)


class World:
    """A selector on an emulated device, and what the CPU image chooses beside it."""

    def __init__(self, monkeypatch, logits, V):
        R = len(logits)
        driver = install(monkeypatch)
        self.copies, send = [], driver.cuMemcpyHtoDAsync
        driver.cuMemcpyHtoDAsync = lambda *a: (self.copies.append(a[2]), send(*a))[1]
        memory, queue = Arena(1 << 20, "test"), Queue(Image(driver), Stream())
        spec, plan = SimpleNamespace(num_token_ids=V, vocab_size=V), SimpleNamespace(num_rows=R)
        self.selector = Selector(spec, plan, memory, selected=R, queue=queue)
        self.logits, self.device = logits, memory.take(logits.nbytes, "logits").address
        copy_to_device(self.device, logits.ctypes.data, logits.nbytes, stream=queue.stream)
        self.counts, self.copies[:] = np.zeros((R, V), np.int32), []

    def choose(self, batch):
        """Ids by the selector; the same as by the CPU image."""
        R, V = self.counts.shape
        self.selector.select(self.device, batch)
        got = self.selector.answers().read()
        want, scratch = make_chosen(R, 0), sampling.make_scratch(get_num_threads(), V)
        sampling.select_rows(want, self.logits, stage_draws(batch), self.counts, scratch)
        assert want.finite.all()
        assert got.finite.all()
        assert got.token_ids.tolist() == want.token_ids.tolist()
        np.add.at(self.counts, (batch.rows, want.token_ids), 1)


def test_positions_that_go_on_by_one_are_counted_on_the_device(monkeypatch):
    V, R = 37, 3
    logits, batch, _ = random_draws(0, V, R, masked=False)
    logits = np.ascontiguousarray(logits[:, :V])
    warm = np.full(R, 2.0, np.float32)
    batch = replace(batch, num_top=-1, temperature=warm, forced=np.full(R, -1, np.int32))
    world, at, sent = World(monkeypatch, logits, V), batch.positions, []
    all_ids = np.full((R, 2), 0xFFFFFFFF, np.uint32)
    steps = [(1, None), (1, None), (1, None), (7, None), (1, None), (1, all_ids), (1, None)]
    for step, mask in steps:
        at = at + np.int32(step)
        world.choose(replace(batch.at(at), mask=mask))
        sent.append(bool(world.copies))
        world.copies.clear()
    assert sent == [True, False, False, True, False, True, False]
    batch = replace(batch, forced=np.array([-1, 5, -1], np.int32))
    world.choose(batch.at(at + np.int32(1)))
    assert world.copies
