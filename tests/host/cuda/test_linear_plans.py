"""Plans of the linear family: defaults are legal for every format and width, where they run."""

import pytest

from ginfer.cuda.linear.decode_launch import DecodeLinear
from ginfer.cuda.linear.decode_mma import DecodeMmaPlan
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.variants import (
    COLUMN_TILES,
    LinearDecodePlan,
    decode_kernel,
    image_kernels,
)
from ginfer.cuda.runtime.compiler import MAX_SHARED_NBYTES
from ginfer.cuda.runtime.jit import CAPABILITIES
from ginfer.cuda.runtime.plan import PlanTable
from ginfer.formats import TILE_NBYTES


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("column_tiles", COLUMN_TILES)
def test_default_decode_plans_are_legal(fmt, column_tiles):
    shape = (34816, 5120, column_tiles, TILE_NBYTES[fmt])
    plan = LinearDecodePlan.default("90a", shape)
    assert plan.supports("90a", shape)
    assert not plan.supports("80", shape)
    assert not LinearDecodePlan(64, plan.stages, plan.wgmma).supports("90a", shape)
    assert not LinearDecodePlan(plan.span, 1, plan.wgmma).supports("90a", shape)


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("column_tiles", COLUMN_TILES)
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != "90a"])
def test_capabilities_without_bulk_copies_have_decode_kernels(capability, column_tiles, fmt):
    shape = (34816, 5120, column_tiles, TILE_NBYTES[fmt])
    plan = DecodeMmaPlan.default(capability, shape)
    assert plan in DecodeMmaPlan.candidates(capability, shape)
    assert not plan.supports("90a", shape)
    assert not DecodeMmaPlan(8).supports(capability, shape)
    item, _ = decode_kernel(PlanTable(capability), fmt, shape)
    assert item in image_kernels(capability, every=False)
    assert item.build().shared_nbytes <= MAX_SHARED_NBYTES[capability]


def test_an_image_holds_the_measured_plans_of_every_format_that_they_serve(monkeypatch):
    plan, bucket = LinearDecodePlan(2, 8, wgmma=True), (34816, 5120, 8, 4352)
    table = PlanTable("90a", {("linear_decode", bucket): plan})
    assert plan != LinearDecodePlan.default("90a", bucket)
    wanted = {decode_kernel(table, f, bucket)[0] for f in ("Q4G64_F16S", "Q4G64_BF16S")}
    assert not wanted & set(image_kernels("90a", every=False))
    monkeypatch.setattr(PlanTable, "load", lambda capability: table)
    held = set(image_kernels("90a", every=False))
    assert wanted <= held
    assert decode_kernel(table, "W8G32_F16S", (34816, 5120, 8, 8704))[0] in held


@pytest.mark.parametrize("column_tiles", COLUMN_TILES)
@pytest.mark.parametrize("fmt", EPILOGUES)
def test_the_image_holds_the_default_of_every_size_of_a_matrix_each_alone_on_a_multiprocessor(
    fmt, column_tiles
):
    held = set(image_kernels("90a", every=False))
    for N, K in ((96, 5120), (5120, 6144), (5120, 17408), (16384, 5120), (34816, 5120)):
        shape = (N, K, column_tiles, TILE_NBYTES[fmt])
        item, _ = decode_kernel(PlanTable("90a"), fmt, shape)
        assert item in held
        assert 2 * item.build().shared_nbytes > MAX_SHARED_NBYTES["90a"]


def test_a_small_matrix_has_less_under_way_when_its_tokens_come():
    small, large = (
        LinearDecodePlan.default("90a", (*shape, 1, TILE_NBYTES["Q4G64_F16S"]))
        for shape in ((5120, 6144), (5120, 17408))
    )
    assert small.span * small.stages < large.span * large.stages


@pytest.mark.parametrize("fmt", EPILOGUES)
def test_a_matrix_refuses_an_epilogue_that_kernels_of_its_format_are_built_without(fmt):
    for epilogue in Epilogue:
        if epilogue in EPILOGUES[fmt]:
            DecodeLinear(w=0, fmt=fmt, N=128, K=64, epilogue=epilogue)
        else:
            with pytest.raises(AssertionError, match=fmt):
                DecodeLinear(w=0, fmt=fmt, N=128, K=64, epilogue=epilogue)
