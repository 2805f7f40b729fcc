"""Compile matrix: the kernels of the plans in use here, those of all plans in the long tests."""

import os
from pathlib import Path

import pytest

from ginfer.cuda.runtime.build import build_image
from ginfer.cuda.runtime.catalog import (
    built_capabilities,
    families,
    forgotten_builders,
    kernels_of,
)
from ginfer.cuda.runtime.compiler import MAX_SHARED_NBYTES, breaches
from ginfer.cuda.runtime.jit import BUILDERS, CAPABILITIES
from scripts.compile_all import MAX_CUBINS, table


def test_every_kernel_is_in_some_image():
    assert families()
    assert any(module.startswith("ginfer.cuda.") for module, _ in BUILDERS)
    assert forgotten_builders() == []


def test_a_kernel_that_no_image_holds_is_found(monkeypatch):
    monkeypatch.setitem(BUILDERS, ("ginfer.cuda.linear.decode", "lost_kernel"), None)
    assert forgotten_builders() == ["ginfer.cuda.linear.decode.lost_kernel"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_images_are_small_and_part_of_the_full_matrix(capability):
    items = kernels_of(capability)
    assert len(items) <= MAX_CUBINS
    every = kernels_of(capability, every=True)
    assert set(items) <= set(every)
    needs = {item.name: item.build().shared_nbytes for item in every}
    assert {n: k for n, k in needs.items() if k > MAX_SHARED_NBYTES[capability]} == {}


@pytest.mark.parametrize("capability", built_capabilities())
def test_the_plans_in_use_compile(capability):
    items = kernels_of(capability)
    records = build_image(items, capability, processes=os.cpu_count())
    assert [r.name for r in records] == [item.name for item in items]
    for record in records:
        assert breaches(record, capability) == []
    lines = list(table(records, capability))
    assert len(lines) == len(items)


@pytest.mark.long
@pytest.mark.parametrize("capability", built_capabilities())
def test_every_plan_compiles(capability):
    items = kernels_of(capability, every=True)
    records = build_image(items, capability, processes=os.cpu_count())
    assert len(records) == len(items)


def test_the_tests_use_the_cache_of_the_machine():
    from ginfer.cuda.runtime.manifest import image_folder

    configured = os.environ.get("GINFER_CACHE_DIR")
    if configured:
        assert image_folder("80").is_relative_to(Path(configured))
    else:
        assert image_folder("80").parts[-3:] == ("ginfer", "images", "sm_80")
