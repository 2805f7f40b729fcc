"""Eight lanes under load with cancels: right answers, and nothing taken, loaded or captured."""

import signal

import numpy as np
import pytest

from tests.bench.load import LENGTHS, check_load
from tests.engines import complete, open_demo, random_prompt


@pytest.mark.parametrize("seconds", [8.0, pytest.param(300.0, marks=pytest.mark.long)])
def test_nothing_is_taken_loaded_or_captured_under_load(device, seconds):
    signal.alarm(int(seconds) + 120)
    with open_demo(backend="cuda", max_context=4096, kv_capacity=32_768, max_pending=8) as engine:
        complete(engine, random_prompt(np.random.default_rng(1), 5), 5)  # the driver's own pools
        free = device.free_nbytes()
        check_load(engine, seconds, LENGTHS[:-1])
        assert device.free_nbytes() == free
