"""Memory of an engine on the GPU: an honest ledger, plans that fit, nothing taken while serving."""

import pytest

from ginfer.cuda.backend import RESERVE_NBYTES
from ginfer.cuda.runtime.memory import Arena
from ginfer.errors import ConfigError
from ginfer.sizes import MIB
from tests.drafted import drafted_demo
from tests.engines import complete, ids_prompt, open_demo, wait_until


def open_gpu(**options):
    return open_demo(backend="cuda", **options)


def counted(engine):
    ledger = engine.stats()["memory"]
    return sum(nbytes for use, nbytes in ledger.items() if use != "parking")


def test_the_ledger_is_what_the_driver_has_given(device):
    before = device.free_nbytes()
    with open_gpu(max_context=4096, kv_capacity=65_536, park_mib=64) as engine:
        ready = device.free_nbytes()
        for i in range(8):
            complete(engine, ids_prompt(range(50 * i, 50 * i + 300)), 40)
        gone = before - device.free_nbytes()
        assert gone - counted(engine) <= gone // 100
        assert counted(engine) - gone <= gone // 100
        assert device.free_nbytes() == ready, "memory was taken while serving"
        assert engine.stats()["memory"]["parking"] == 64 * MIB
    assert before - device.free_nbytes() <= 32 * MIB


def test_the_ledger_counts_a_drafter(device):
    before = device.free_nbytes()
    with open_gpu(package=drafted_demo(), max_context=4096, kv_capacity=65_536) as engine:
        gone = before - device.free_nbytes()
        assert abs(gone - counted(engine)) <= gone // 100


def test_idle_elastic_memory_goes_back_to_the_device(device):
    prompt, options = ids_prompt(range(300)), {"max_context": 4096, "kv_capacity": 65_536}
    with open_gpu(**options) as engine:
        want = complete(engine, prompt, 20, ignore_eos=True).ids
    before = device.free_nbytes()
    with open_gpu(**options, kv_elastic=True) as engine:
        whole = engine.stats()["memory"]["arena"]
        for cached in (0, 256):
            run = complete(engine, prompt, 20, ignore_eos=True)
            assert (run.ids, run.started.cached_tokens) == (want, cached)
            wait_until(lambda: engine.stats()["memory"]["arena"] < whole // 2)
            gone = before - device.free_nbytes()
            assert abs(gone - counted(engine)) <= gone // 100
        engine.check_integrity()


def test_automatic_capacity_takes_the_device_and_leaves_the_reserve(device):
    with open_gpu(kv_capacity=None) as engine:
        assert RESERVE_NBYTES // 4 < device.free_nbytes() <= 2 * RESERVE_NBYTES
        assert engine.info.max_context == 16_384
        assert engine.info.kv_capacity == 8 * 16_384
        complete(engine, ids_prompt(range(300)), 10)


def test_a_gpu_that_is_taken_is_refused_with_both_numbers(device):
    others = Arena(device.free_nbytes() - RESERVE_NBYTES, "others")
    try:
        with pytest.raises(ConfigError, match=r"weights need 1\.\d GiB .* MiB are free; end what"):
            open_gpu()
    finally:
        others.close()


def test_a_plan_that_is_too_large_is_refused_before_the_weights_are_loaded(device):
    before = device.free_nbytes()
    with pytest.raises(ConfigError, match=r"need \d+\.\d GiB for max_context 16384 .* available"):
        open_gpu(kv_capacity=1 << 28)
    assert before - device.free_nbytes() <= 32 * MIB
