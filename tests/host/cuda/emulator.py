"""Runs kernels without a GPU: the threads of a block as Python generators, in step where they meet.

The device modules are loaded a second time with stand-ins for `numba` and for the instructions of
`ginfer.cuda.lib.ptx`, so that the text which is compiled is the text which runs here. Integers wrap
as their types do; floats round to FP32 where they are stored, converted or exchanged. Memory that
no array owns is refused, and shared memory begins as NaN.
"""

import ast
import importlib.machinery
import importlib.util
import sys
import types

import numpy as np

from ginfer.cuda.lib import ptx as real_ptx
from tests.host.cuda.emulated_block import machine
from tests.host.cuda.emulated_instructions import TYPES, fake_numba, fake_ptx


def _call(function, *arguments):
    """A call in device code: of a function that may meet other threads, or of a plain one."""
    result = function(*arguments)
    if isinstance(result, types.GeneratorType):
        return (yield from result)
    return result


PLAIN = {"range", "min", "max", *TYPES}


class _Meeting(ast.NodeTransformer):
    """Device functions become generators: where threads meet, they yield."""

    def __init__(self):
        self.inside = False

    def visit_FunctionDef(self, node):
        marks = "".join(ast.unparse(d) for d in node.decorator_list)
        before, self.inside = self.inside, "cuda.jit" in marks
        self.generic_visit(node)
        self.inside = before
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        text = ast.unparse(node.func)
        plain = text in PLAIN or text.endswith(".array") or text in ("cuda.jit", "shared_address")
        if not self.inside or plain or text.startswith(("ld_", "st_", "cuda.jit")):
            return node
        call = ast.Call(ast.Name("_call", ast.Load()), [node.func, *node.args], [])
        return ast.YieldFrom(call)


class _Source(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **_):
        tree = _Meeting().visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec")

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module):
        module.__dict__["_call"] = _call
        super().exec_module(module)


class _Finder:
    """Finds the device modules first."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not _ours(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            places = spec.submodule_search_locations
            loader = _Source(name, spec.origin)
            spec = importlib.util.spec_from_file_location(
                name, spec.origin, loader=loader, submodule_search_locations=places
            )
        return spec


def _ours(name):
    return name.startswith("ginfer.cuda.") and not name.startswith(
        ("ginfer.cuda.runtime", "ginfer.cuda.plans")
    )


_loaded = {}


def emulated(module):
    """`module` with its kernels as Python functions."""
    if module not in _loaded:
        kept = {n: m for n, m in sys.modules.items() if _ours(n) or n == "numba"}
        for name in kept:
            del sys.modules[name]
        names = [n for n in dir(real_ptx) if not n.startswith("_")]
        sys.modules["numba"] = fake_numba()
        sys.modules["ginfer.cuda.lib.ptx"] = fake_ptx(names)
        from ginfer.cuda.runtime.jit import BUILDERS

        builders = dict(BUILDERS)
        sys.meta_path.insert(0, _Finder)
        try:
            _loaded[module] = importlib.import_module(module)
        finally:
            sys.meta_path.remove(_Finder)
            for name in [n for n in sys.modules if _ours(n) or n == "numba"]:
                del sys.modules[name]
            sys.modules.update(kept)
            BUILDERS.clear()
            BUILDERS.update(builders)
            for name, loaded in kept.items():
                package, _, last = name.rpartition(".")
                if package in sys.modules:
                    setattr(sys.modules[package], last, loaded)
    return _loaded[module]


def launch(item, grid, arguments):
    """Run a kernel of an emulated module; addresses lie in the ranges of `machine.arrays`."""
    build = emulated(item.module).__dict__[item.builder_name].__wrapped__(*item.arguments)
    values = [TYPES[t](v) for t, v in zip(item.signature, arguments, strict=True)]
    machine.run(build.function, grid, build.threads, build.shared_nbytes, values)


def run(item, grid, *arguments):
    """Run a kernel on arrays, which become addresses; numbers stay."""
    machine.arrays = []
    values = [machine.own(a) if isinstance(a, np.ndarray) else a for a in arguments]
    launch(item, grid, values)


class Emulator:
    """Runs launches; early: the variants for dependent launch."""

    def __init__(self, early):
        self.early = early

    def __call__(self, item, grid, *arguments):
        run(item, grid, *arguments)
