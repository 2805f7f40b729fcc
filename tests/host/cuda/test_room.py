"""What a GPU has for a memory plan: two slots per lane, BF16 histories, K/V as much as fits."""

from pathlib import Path

import pytest

from ginfer.config import EngineConfig
from ginfer.cuda import backend as image
from ginfer.cuda.backend import RESERVE_NBYTES, CudaBackend, parts_nbytes, request_parts
from ginfer.cuda.weights import arena_nbytes
from ginfer.engine import backends
from ginfer.engine.backends import open_backend
from ginfer.engine.memory import plan_memory
from ginfer.errors import ConfigError
from ginfer.models.qwen import QWEN_27B
from tests.host.cuda.emulated_device import Device, install

GIB = 1 << 30
SPEC = QWEN_27B.spec
WEIGHTS_NBYTES = int(14.9 * GIB)


@pytest.fixture
def room(monkeypatch):
    """room(free bytes) of the emulated GPU for the weights of the 27B model."""
    install(monkeypatch)

    def of(free_nbytes, weights_nbytes=WEIGHTS_NBYTES, **options):
        monkeypatch.setattr(Device, "free_nbytes", lambda self: free_nbytes)
        return CudaBackend(SPEC, **options).room(weights_nbytes, 64 * GIB)

    return of


def plan(room, **options):
    return plan_memory(EngineConfig(package=Path("p"), **options), SPEC, room)


def test_automatic_capacity_takes_what_is_there(room):
    large = room(139 * GIB)
    capacity = plan(large)
    assert capacity.max_context == 262_144
    assert 1_500_000 < capacity.kv_capacity < 8 * 262_144
    assert large.nbytes - capacity.nbytes < capacity.plan.unit_nbytes
    assert capacity.plan.num_slots == large.slots_per_lane * 8
    assert capacity.geometry.num_slots == 8
    assert capacity.geometry.state_nbytes == 48 * (3 * (1 << 20) + 3 * 10_240 * 2)


def test_a_small_gpu_gets_a_shorter_context(room):
    small = plan(room(24 * GIB))
    assert 16_384 < small.max_context < 262_144
    assert small.kv_capacity >= small.max_context
    assert small.nbytes <= 24 * GIB - WEIGHTS_NBYTES - RESERVE_NBYTES


def test_a_plan_costs_what_is_allocated_for_it(room):
    large = room(139 * GIB)
    capacity = plan(large, max_context=8192, kv_capacity=65_536)
    assert capacity.kv_capacity == 65_536
    assert capacity.nbytes == parts_nbytes(request_parts(SPEC, capacity.plan))
    assert capacity.nbytes < 20 * GIB


def test_a_drafter_has_an_arena_of_its_own_with_second_copies_of_keys_and_values(room):
    free, d = 139 * GIB, QWEN_27B.drafter
    taken = free - room(free, speculates=True, drafter=d).nbytes - RESERVE_NBYTES
    vectors = arena_nbytes(0)
    copies = d.num_layers * 2 * d.kv_width * d.hidden_size * 2
    assert taken == WEIGHTS_NBYTES + copies + 2 * vectors


def test_what_does_not_fit_is_refused_with_both_numbers_before_it_is_loaded(room):
    with pytest.raises(ConfigError, match=r"weights need 15\.9 GiB .* 12\.0 GiB are free"):
        room(12 * GIB)
    with pytest.raises(ConfigError, match=r"need \d+\.\d GiB .* but 7\.1 GiB is available"):
        plan(room(23 * GIB), max_context=262_144)
    with pytest.raises(ConfigError, match=r"park_mib is 66000, 64\.5 GiB; 64\.0 GiB of host"):
        plan(room(139 * GIB), park_mib=66_000)


def test_a_gpu_is_opened_with_elastic_memory_or_without(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(backends, "cuda_refusal", str)
    for elastic in (False, True):
        opened = open_backend(EngineConfig(package=Path("p"), kv_elastic=elastic), SPEC)
        assert isinstance(opened, image.CudaBackend)
        assert opened._is_elastic == elastic
