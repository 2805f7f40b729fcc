"""Catalog: which kernels an image of a capability holds, asked of every module that knows some.

Such a module defines `image_kernels(capability, *, every)`: the kernels that look-ups of plans give
for our models, or those of all plans that a tuner may try; none for a capability without a variant.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

import ginfer.cuda
from ginfer.cuda.runtime.jit import BUILDERS, CAPABILITIES

if TYPE_CHECKING:
    from ginfer.cuda.runtime.jit import Kernel

WITHOUT_KERNELS = ("ginfer.cuda.runtime", "ginfer.cuda.lib", "ginfer.cuda.plans")


@cache
def families() -> tuple[Any, ...]:
    """The modules below ginfer.cuda with `image_kernels`, by name."""
    names = (found.name for found in walk_packages(ginfer.cuda.__path__, "ginfer.cuda."))
    modules = [import_module(n) for n in sorted(names) if not n.startswith(WITHOUT_KERNELS)]
    return tuple(module for module in modules if hasattr(module, "image_kernels"))


def kernels_of(capability: str, *, every: bool = False) -> tuple[Kernel, ...]:
    """The kernels of an image, each once: of the plans in use, or of every plan."""
    found = (family.image_kernels(capability, every=every) for family in families())
    return tuple(dict.fromkeys(item for items in found for item in items))


def built_capabilities() -> tuple[str, ...]:
    """The capabilities that have at least one kernel."""
    return tuple(c for c in CAPABILITIES if kernels_of(c))


def forgotten_builders() -> list[str]:
    """Builders below ginfer.cuda that are in no image of any capability: nothing would ever compile
    them."""
    listed = {
        (item.module, item.builder_name)
        for capability in CAPABILITIES
        for item in kernels_of(capability)
    }
    known = {(module, name) for module, name in BUILDERS if module.startswith("ginfer.cuda.")}
    return sorted(f"{module}.{name}" for module, name in known - listed)
