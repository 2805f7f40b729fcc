"""Look-up of launch plans: exact bucket, nearest legal bucket, family default, refusal."""

from dataclasses import dataclass

import pytest

from ginfer.cuda.runtime.jit import CAPABILITIES
from ginfer.cuda.runtime.plan import LaunchPlan, PlanTable
from ginfer.errors import InternalError


@dataclass(frozen=True)
class RowPlan(LaunchPlan):
    """A plan for shapes (rows, columns) whose rows are a multiple of the tile."""

    tile: int

    def supports(self, capability, shape):
        return capability != "80" and shape[0] % self.tile == 0

    @classmethod
    def default(cls, capability, shape):
        return cls(1)


TABLE = PlanTable(
    "90a",
    {
        ("rows", (1024, 64)): RowPlan(256),
        ("rows", (512, 64)): RowPlan(128),
        ("rows", (256, 64)): RowPlan(32),
        ("other", (96, 64)): RowPlan(96),
    },
)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1024, 64), 256),  # exact
        ((1536, 64), 256),  # nearest
        ((2048, 64), 1),  # twice as large: the default
        ((1280, 96), 256),
        ((1536, 96), 1),
        ((768, 64), 256),  # nearer to 1024 than to 512, as ratios go
        ((640, 64), 128),
        ((896, 64), 128),  # 256 is nearer but not legal
        ((96, 64), 1),  # the exact bucket is another op's
        ((321, 64), 1),  # none is legal: the default
        ((1024,), 1),  # buckets of another rank do not count
    ],
)
def test_look_up_order(shape, tile):
    assert TABLE.find("rows", RowPlan, shape) == RowPlan(tile)


def test_of_two_equally_near_buckets_the_smaller_wins():
    table = PlanTable("90a", {("r", (3, 2)): RowPlan(1), ("r", (2, 3)): RowPlan(2)})
    assert table.find("r", RowPlan, (2, 2)) == RowPlan(2)
    turned = PlanTable("90a", dict(reversed(list(table.plans.items()))))
    assert turned.find("r", RowPlan, (2, 2)) == RowPlan(2)


def test_a_shape_without_a_legal_plan_is_named():
    with pytest.raises(InternalError, match=r"rows has no plan for \(8, 8\) on sm_80"):
        PlanTable("80").find("rows", RowPlan, (8, 8))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_plan_in_the_tables_is_legal_at_its_bucket(capability):
    table = PlanTable.load(capability)
    assert table.capability == capability
    for (op, bucket), plan in table.plans.items():
        assert plan.supports(capability, bucket), (op, bucket)
        assert table.find(op, type(plan), bucket) == plan
