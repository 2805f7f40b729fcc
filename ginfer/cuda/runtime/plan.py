"""Launch plans: how an op is tiled for a shape on a capability, which changes speed, never numbers.

A family is a frozen dataclass below LaunchPlan. Its measured plans lie in `ginfer/cuda/plans`, by
op and bucket, the shape that a plan was measured at. A look-up never searches: the exact bucket,
the nearest one within a factor of two whose plan supports the shape, the family's default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from math import log2
from typing import TYPE_CHECKING, Self, TypeVar

from ginfer.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]
P = TypeVar("P", bound="LaunchPlan")
TABLES = "ginfer.cuda.plans"
REMEMBERED = 4096  # shapes whose plans a table knows; their number of tokens can be anything


@dataclass(frozen=True)
class LaunchPlan(ABC):
    """Base of the plans of a family."""

    @abstractmethod
    def supports(self, capability: str, shape: Shape) -> bool:
        """Whether the plan is legal for this shape on this capability: the one place that says so,
        for look-up, tuner and tests alike."""

    @classmethod
    @abstractmethod
    def default(cls, capability: str, shape: Shape) -> Self:
        """A legal plan for any shape of the family that the capability has kernels for."""

    @classmethod
    def candidates(cls, capability: str, shape: Shape) -> tuple[Self, ...]:
        """What a tuner may try, all legal."""
        return (cls.default(capability, shape),)


@dataclass(frozen=True)
class PlanTable:
    """The measured plans of one capability."""

    capability: str
    plans: Mapping[tuple[str, Shape], LaunchPlan] = field(default_factory=dict)
    _found: dict[tuple[str, Shape], LaunchPlan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def load(cls, capability: str) -> PlanTable:
        """The table in `ginfer/cuda/plans`; an empty one for a capability without measurements."""
        name = f"{TABLES}.sm_{capability}"
        if find_spec(name) is None:
            return cls(capability)
        return cls(capability, import_module(name).PLANS)

    def find(self, op: str, family: type[P], shape: Shape) -> P:
        """The plan of `op` for a shape. Raises InternalError when not even the default is legal."""
        known = self._found.get((op, shape))
        if isinstance(known, family):
            return known
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        plan = self._found[op, shape] = self._find(op, family, shape)
        return plan

    def _find(self, op: str, family: type[P], shape: Shape) -> P:
        exact = self.plans.get((op, shape))
        for plan in (exact, *self._nearest(op, shape)):
            if isinstance(plan, family) and plan.supports(self.capability, shape):
                return plan
        plan = family.default(self.capability, shape)
        if not plan.supports(self.capability, shape):
            raise InternalError(f"{op} has no plan for {shape} on sm_{self.capability}")
        return plan

    def _nearest(self, op: str, shape: Shape) -> list[LaunchPlan]:
        """The plans of `op`, nearest bucket first; of two equally near ones the smaller. What was
        measured further away says little."""
        buckets = sorted(
            (_distance(bucket, shape), bucket)
            for name, bucket in self.plans
            if name == op and len(bucket) == len(shape)
        )
        return [self.plans[op, bucket] for distance, bucket in buckets if distance < 1]


def _distance(bucket: Shape, shape: Shape) -> float:
    """Sum of the ratios of the dimensions, as powers of two."""
    return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in zip(bucket, shape))
