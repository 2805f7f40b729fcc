"""Memory plan: every 'auto' resolved, every impossible wish refused with both numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ginfer.config import EngineConfig
from ginfer.cpu.arena import slot_nbytes
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import ledger_line, page_nbytes, plan_memory
from ginfer.errors import ConfigError
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.spec import KvCodec

GIB = 1 << 30


def plan(spec=QWEN_DEMO.spec, available=64 * GIB, **options):
    room = CpuBackend(spec).room(0, available)
    return plan_memory(EngineConfig(package=Path("p"), **options), spec, room)


def test_sizes_of_the_27b_model_are_the_documented_ones():
    assert page_nbytes(QWEN_27B.spec) == 64 * 65_536
    spec = QWEN_27B.spec
    sizes = spec.page_nbytes(KvCodec.INT8), spec.scales_nbytes(KvCodec.INT8)
    assert sizes == (2 << 20, 64 << 10)
    assert sum(sizes) == 64 * 33_792
    state, conv = 144 * (1 << 20), 48 * 3 * 10_240 * 4
    assert slot_nbytes(QWEN_27B.spec) == state + conv


def test_automatic_capacity_is_modest_and_no_more_than_all_lanes_need():
    capacity = plan()
    assert capacity.max_context == 16_384
    assert capacity.kv_capacity == 4 * 16_384  # 128 MiB
    assert plan(max_context=4096).kv_capacity == 8 * 4096
    assert capacity.plan.num_slots == 8
    assert capacity.plan.max_pages_per_row == 256


def test_int8_holds_nearly_twice_as_much_in_the_same_memory():
    contexts = [
        plan(QWEN_27B.spec, available=8 * GIB, kv_dtype=kv).max_context for kv in ("bf16", "int8")
    ]
    assert 1.9 < contexts[1] / contexts[0] < 1.95  # 64 / 33, in whole pages
    int8 = plan(QWEN_27B.spec, available=8 * GIB, kv_dtype="int8")
    assert int8.nbytes <= 8 * GIB
    assert (int8.geometry.page_nbytes, int8.plan.unit_nbytes) == (2 << 20, 2 << 20)


def test_automatic_capacity_always_holds_one_request():
    assert plan(QWEN_27B.spec).kv_capacity == 262_144


def test_automatic_context_is_what_the_memory_holds():
    assert plan(kv_capacity=5000).max_context == 4992
    assert plan(kv_capacity=1 << 20).max_context == 16_384
    small = plan(QWEN_27B.spec, available=10 * GIB)
    assert 64 * 1024 < small.max_context < 262_144
    assert small.nbytes <= 10 * GIB
    assert small.kv_capacity == small.max_context
    assert plan(available=GIB // 8).nbytes <= GIB // 8


def test_snapshots_get_what_the_pages_leave():
    demo = plan(max_context=4096)
    assert (demo.plan.unit_nbytes, demo.geometry.state_units) == (2 << 20, 2)
    assert demo.num_pages == 8 * 64
    assert demo.plan.num_units == 8 * 64 // 16 + 8 * 4 * 2
    assert plan(max_context=4096, prefix_reuse=False).plan.num_units == 32
    large = plan(QWEN_27B.spec, max_context=65_536, max_concurrency=1)
    assert (large.num_pages, large.geometry.state_units) == (1024, 75)
    assert large.plan.num_units == 2 * 1024 + 4 * 75
    tight = plan(available=(32 + 7) * (2 << 20) + 8 * slot_nbytes(QWEN_DEMO.spec), max_context=4096)
    assert tight.plan.num_units == 39
    assert tight.num_pages == 8 * 64


def test_parking_space_is_a_part_of_the_plan():
    parking = plan(max_context=4096, park_mib=65)
    assert parking.plan.num_park_units == 32
    assert parking.nbytes == plan(max_context=4096).nbytes + (64 << 20)
    with pytest.raises(ConfigError, match="park_mib"):
        plan(available=GIB, park_mib=1024)


def test_explicit_capacity_is_taken_in_whole_pages():
    assert plan(max_context=1000, kv_capacity=2100).kv_capacity == 2048
    assert plan(max_context=1000).plan.max_pages_per_row == 16
    assert plan(max_context=100, prefill_chunk=1024).plan.max_columns == 128


@pytest.mark.parametrize(
    ("options", "param", "numbers"),
    [
        ({"max_context": 20_000}, "max_context", ("20000", "16384")),
        ({"kv_capacity": 16_383, "max_context": 16_384}, "kv_capacity", ("16383", "16384")),
        ({"kv_capacity": 448, "max_context": 64}, "kv_capacity", ("448", "512")),
        ({"available": GIB // 64}, "max_context", ("16.0 MiB", "20.7")),
        ({"available": GIB // 32, "max_context": 16_384}, "max_context", ("32.0 MiB", "50.7")),
        ({"available": GIB // 8, "kv_capacity": 131_072}, "kv_capacity", ("128.0 MiB", "274.7")),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(options, param, numbers):
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    assert caught.value.param == param
    assert all(number in str(caught.value) for number in numbers), str(caught.value)


@pytest.mark.parametrize(
    ("chunk", "says"), [(0, "64 to 16384"), (16448, "64 to 16384"), (100, "64")]
)
def test_a_prefill_chunk_is_bounded_and_whole_pages(chunk, says):
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig(package=Path("x.ginfer"), prefill_chunk=chunk)
    assert caught.value.param == "prefill_chunk"


def test_a_ledger_reads_as_one_line():
    assert ledger_line({"weights": 5 << 20, "parking": 0, "arena": 3 << 30}) == (
        "3.0 GiB: weights 5.0 MiB, arena 3.0 GiB"
    )


@pytest.mark.parametrize(("gib", "chunk"), [(64, 8192), (9, 8192), (6, 4096), (3, 2048), (1, 1024)])
def test_an_automatic_chunk_shrinks_with_the_memory_and_says_so(caplog, gib, chunk):
    plain = CpuBackend(QWEN_DEMO.spec).room(0, gib * GIB)

    def cost(plan):
        return plain.cost(plan) + plan.max_columns * 128 * 1024

    room = replace(plain, prefill_chunk=8192, cost=cost)
    config = EngineConfig(package=Path("p"))
    with caplog.at_level("INFO", "ginfer.engine.memory"):
        capacity = plan_memory(config, QWEN_DEMO.spec, room)
    assert capacity.plan.max_columns == chunk
    assert (f"prefill_chunk is {chunk}" in caplog.text) == (chunk < 8192)
    asked = plan_memory(replace(config, prefill_chunk=4096), QWEN_DEMO.spec, room)
    assert asked.plan.max_columns == 4096
