"""The demo package with its drafter: the package of the product, and the drafter's tensors.

`tests/golden/qwen3.8-demo-dflash2-q4.ginfer` holds what a package of weights
groupwise-int-dflash2-q4 has beyond one of groupwise-int; its identity is that of the whole.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from ginfer.artifact import Package, PackageWriter, PlannedResource, PlannedTensor
from ginfer.formats import FORMATS, Layout
from tests.engines import DEMO_PACKAGE

DRAFTER = Path(__file__).parent / "golden" / "qwen3.8-demo-dflash2-q4.ginfer"


def write_together(out: Path, *parts: Package) -> None:
    """A package of all objects of some packages, with the identity of the last one."""
    plan: list[PlannedResource | PlannedTensor] = []
    for part in parts:
        resources = [(name, part.resource(name)) for name in part.resources]
        plan += [PlannedResource(name=name, nbytes=len(data)) for name, data in resources]
        plan += [
            PlannedTensor(
                name=t.name, shape=t.shape, format=FORMATS[t.format], layout=Layout(t.layout)
            )
            for t in part.tensors
        ]
    with PackageWriter(out, parts[-1].identity, plan) as writer:
        for part in parts:
            for name in part.resources:
                writer.write(name, part.resource(name))
            for record in part.tensors:
                writer.write(record.name, part.tensor(record.name).data)


@cache
def drafted_demo() -> Path:
    """The package, made once per process in a temporary folder."""
    out = Path(mkdtemp(prefix="ginfer-drafted-")) / "demo.ginfer"
    with Package.open(DEMO_PACKAGE) as base, Package.open(DRAFTER) as drafter:
        write_together(out, base, drafter)
    return out
