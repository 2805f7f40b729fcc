"""Both images offer exactly the Backend protocol: same methods, same parameters, same kinds."""

import importlib
import inspect
from importlib.util import find_spec

import pytest

from ginfer.backend import Backend

BACKENDS = {"cpu": "CpuBackend", "cuda": "CudaBackend"}


def methods(cls):
    return {n: f for n, f in vars(cls).items() if inspect.isfunction(f) and not n.startswith("_")}


@pytest.mark.parametrize("image", [i for i in BACKENDS if find_spec(f"ginfer.{i}.backend")])
def test_image_has_the_protocol_signatures(image):
    cls = getattr(importlib.import_module(f"ginfer.{image}.backend"), BACKENDS[image])
    for name, expected in methods(Backend).items():
        actual = getattr(cls, name, None)
        assert actual is not None, f"{cls.__name__} has no {name}"
        got, want = inspect.signature(actual), inspect.signature(expected)
        assert [(p.name, p.kind) for p in got.parameters.values()] == [
            (p.name, p.kind) for p in want.parameters.values()
        ], name
    extra = set(methods(cls)) - set(methods(Backend))
    assert not extra, f"{cls.__name__} has public methods outside the protocol: {sorted(extra)}"
