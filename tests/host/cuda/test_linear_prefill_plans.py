"""Plans of prefill linear: defaults are legal and in the image at every shape, where they run."""

import pytest

from ginfer.cuda.lib.wgmma import WIDTHS
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.prefill import shared_nbytes
from ginfer.cuda.linear.prefill_launch import (
    COSTS,
    LinearPrefillPlan,
    image_kernels,
    prefill_kernel,
    token_maps,
)
from ginfer.cuda.runtime.compiler import MAX_SHARED_NBYTES
from ginfer.formats import TILE_NBYTES

SHAPES = ((96, 5120), (16384, 5120), (34816, 5120), (5120, 17408), (5120, 6144))
TOKENS = (1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 500, 2048, 8192, 100_003)


@pytest.mark.parametrize("fmt", EPILOGUES)
def test_default_plans_are_legal_and_in_the_image(fmt):
    held = set(image_kernels("90a", every=False))
    for N, K in SHAPES:
        for T in TOKENS:
            shape = (N, K, T, TILE_NBYTES[fmt])
            plan = LinearPrefillPlan.default("90a", shape)
            assert plan.supports("90a", shape)
            assert not plan.supports("80", shape)
            assert {prefill_kernel(fmt, plan, e, "90a") for e in EPILOGUES[fmt]} <= held


@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "120a"])
def test_capabilities_without_wgmma_have_the_tile_of_mma(capability):
    shape = (34816, 5120, 500, TILE_NBYTES["Q4G64_F16S"])
    assert LinearPrefillPlan.default(capability, shape).supports(capability, shape)
    assert not any(plan.supports(capability, shape) for plan in COSTS)
    names = {item.builder_name for item in image_kernels(capability, every=True)}
    assert names == {"linear_prefill_mma_kernel"}


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("plan", COSTS, ids=str)
def test_resident_blocks_share_a_multiprocessor(plan, fmt):
    tile_nbytes = TILE_NBYTES[fmt]
    stages = plan.stages(tile_nbytes)
    nbytes = shared_nbytes(tile_nbytes, plan.tile_n, plan.groups, stages, Epilogue.STORE_BF16)
    barriers, reserved = 16 * stages, 1024
    assert nbytes + barriers <= MAX_SHARED_NBYTES["90a"]
    assert (nbytes + barriers + reserved) * plan.resident <= 228 << 10


@pytest.mark.parametrize(
    "plan",
    [
        LinearPrefillPlan(264, 2),
        LinearPrefillPlan(8, 2),
        LinearPrefillPlan(128, 4),
        LinearPrefillPlan(256, 3),
        LinearPrefillPlan(128, 2, 2),
    ],
    ids=str,
)
def test_plans_without_registers_or_instructions_are_illegal(plan):
    assert not plan.supports("90a", (128, 64, 1, TILE_NBYTES["Q4G64_F16S"]))


def test_few_tokens_take_narrow_tiles_and_many_take_wide_ones():
    tile_nbytes = TILE_NBYTES["Q4G64_F16S"]
    narrow = LinearPrefillPlan.default("90a", (34816, 5120, 8, tile_nbytes))
    wide = LinearPrefillPlan.default("90a", (34816, 5120, 8192, tile_nbytes))
    assert narrow.tile_n == 32
    assert wide.tile_n == 256


def test_token_maps_cover_the_tiles_of_every_plan():
    maps = token_maps(1 << 20, rows=2048, K=5120)
    assert set(maps) == {plan.tile_n for plan in COSTS} <= set(WIDTHS)
    assert all(m.box == (n, 64) and m.shape == (2048, 5120) for n, m in maps.items())
