"""Plans of the linear family: defaults are legal for every format and width, where they run."""

import pytest

from ginfer.cuda.linear.variants import COLUMN_TILES, EPILOGUES, LinearDecodePlan
from ginfer.formats import TILE_NBYTES


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("column_tiles", COLUMN_TILES)
def test_default_decode_plans_are_legal(fmt, column_tiles):
    shape = (34816, 5120, column_tiles, TILE_NBYTES[fmt])
    plan = LinearDecodePlan.default("90a", shape)
    assert plan.supports("90a", shape)
    assert not plan.supports("80", shape)
    assert not LinearDecodePlan(plan.warps, plan.M, 64, plan.stages).supports("90a", shape)
    assert not LinearDecodePlan(12, plan.M, plan.span, plan.stages).supports("90a", shape)
