"""Kernel values and their keys: what makes two kernels the same, and what makes a cubin stale."""

import pickle
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from ginfer.cuda.runtime.jit import CAPABILITIES, Build, Kernel, kernel
from ginfer.cuda.runtime.sources import reached, sources_digest
from ginfer.errors import ConfigError
from tests.cuda.kernels import add_kernel, scale_kernel, tile_kernel

ROOT = Path(__file__).resolve().parents[3]


class Size(IntEnum):
    SMALL = 3


def test_equal_arguments_are_one_kernel_with_one_key():
    value = scale_kernel(256, 3)
    spellings = (scale_kernel(256, Size.SMALL), scale_kernel(256, factor=3))
    assert {value, *spellings} == {value}
    assert {item.key("90a") for item in spellings} == {value.key("90a")}
    assert pickle.loads(pickle.dumps(value)) == value
    assert value.name == "scale(256, 3)"


def test_defaults_are_part_of_the_arguments():
    @kernel("int64")
    def widen_kernel(threads, stages=4, fused=False):
        return Build(None, threads)

    assert widen_kernel(32) == widen_kernel(32, 4, False) == widen_kernel(32, stages=4)
    assert widen_kernel(32).arguments == (32, 4, 0)


def test_a_kernel_knows_threads_and_shared_memory_without_compiling():
    build = tile_kernel(1024).build()
    assert (build.threads, build.shared_nbytes) == (32, 4096 + 1024)


def test_key_depends_on_everything_that_shapes_the_code():
    value = scale_kernel(256, 3)
    others = [
        scale_kernel(128, 3),
        add_kernel(256),
        Kernel(value.module, value.builder_name, ("int64", "int64", "int32"), value.arguments),
    ]
    keys = {item.key("90a") for item in (value, *others)}
    keys |= {value.key(capability) for capability in CAPABILITIES}
    assert len(keys) == 1 + len(others) + len(CAPABILITIES) - 1


def test_key_depends_on_the_compilers_and_the_source_digest_does_not(monkeypatch):
    value = scale_kernel(256, 3)
    source, key = value.source("80"), value.key("80")
    monkeypatch.setattr("ginfer.cuda.runtime.jit.compilers", lambda: "numba 0")
    assert value.source("80") == source
    assert value.key("80") != key


def test_an_unknown_capability_is_refused():
    with pytest.raises(ConfigError, match=r"sm is '75'; one of 80, 86"):
        scale_kernel(256, 3).key("75")


def test_a_missing_compiler_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr("ginfer.cuda.runtime.jit.COMPILERS", ("numba", "no-such-compiler"))
    from ginfer.cuda.runtime.jit import compilers

    with pytest.raises(ConfigError, match=r"no-such-compiler is not installed.*ginfer\[cuda\]"):
        compilers.__wrapped__()


MODULES = {
    "__init__": "",
    "kernel": """from typing import TYPE_CHECKING
from sample_package import device, words
from sample_package.words import scale as factor, unused
from ginfer.sizes import MIB
from ginfer.cuda.runtime.jit import Build
if TYPE_CHECKING:
    from sample_package.typing_only import T
THREADS = 32
def add_kernel(threads):
    '''Words.'''
    def add(x): return factor(x, THREADS)
    return Build(add)
def other_kernel(): return device.f(MIB)
def add(): return launch(add_kernel)
def launch(item): return item
""",
    "device": "def f():\n    from sample_package.constants import LIMIT\n    return LIMIT\n",
    "constants": "LIMIT = 3\nOTHER = 4\n",
    "words": """from sample_package.constants import OTHER
TABLE = {1: OTHER}
TABLE[2] = 5
@print
def scale(x, by): return TABLE[x]
def unused(): return 7
""",
    "typing_only": "T = int\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose module `kernel` has two builders."""
    folder = tmp_path / "sample_package"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("sample_package")]:
        del sys.modules[name]


def test_a_builder_reaches_what_it_names_and_what_its_modules_do(package):
    found = reached("sample_package.kernel", "add_kernel")
    assert {f"{module}.{name}".removeprefix("sample_package.") for module, name in found} == {
        "kernel.add_kernel",
        "kernel.THREADS",
        "words.scale",
        "words.TABLE",
        "words.",
        "constants.OTHER",
    }
    whole = reached("sample_package.kernel", "other_kernel")
    assert {("sample_package.device", "f"), ("sample_package.constants", "LIMIT")} <= set(whole)
    assert ("ginfer.sizes", "MIB") in whole


@pytest.mark.parametrize(
    ("module", "old", "new", "stale"),
    [
        ("constants", "OTHER = 4", "OTHER = 5", "add_kernel"),
        ("constants", "LIMIT = 3", "LIMIT = 5", "other_kernel"),
        ("constants", "LIMIT = 3", "ANOTHER = 9\nLIMIT = 3", ""),
        ("words", "@print", "@repr", "add_kernel"),
        ("words", "TABLE[2] = 5", "TABLE[2] = 6", "add_kernel"),
        ("words", "return 7", "return 8", ""),
        ("words", "TABLE = {1: OTHER}", "TABLE = {1: unused}", "add_kernel"),
        ("kernel", "THREADS = 32", "THREADS = 64", "add_kernel"),
        ("kernel", "words import scale as", "words import unused as", "add_kernel"),
        ("kernel", "device.f(MIB)", "device.g(MIB)", "other_kernel"),
        ("kernel", "'''Words.'''", "'''Other words,\n    more of them.'''", ""),
        ("kernel", "launch(add_kernel)", "launch(add_kernel())", ""),
        ("typing_only", "int", "str", ""),
        ("device", "return LIMIT", "return LIMIT + 1", "other_kernel"),
    ],
)
def test_an_edit_makes_stale_what_reaches_it_and_nothing_else(package, module, old, new, stale):
    def digests():
        names = ("add_kernel", "other_kernel")
        return {n: sources_digest.__wrapped__("sample_package.kernel", n) for n in names}

    before = digests()
    path = package / f"{module}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    after = digests()
    assert {n for n in before if before[n] != after[n]} == ({stale} if stale else set())


def test_kernels_of_the_library_depend_on_the_instructions_they_use():
    found = reached("tests.cuda.kernels", "scale_kernel")
    assert ("ginfer.cuda.lib.ptx", "ld_global_f32") in found
    assert ("ginfer.cuda.lib.ptx", "ptx_op") in found
    assert ("ginfer.cuda.lib.ptx", "mbarrier_wait") not in found
    assert not any(module.startswith("ginfer.cuda.runtime") for module, _ in found)


def test_importing_the_runtime_starts_no_driver_and_needs_no_gpu():
    code = (
        "import ctypes, ginfer.cuda.runtime.catalog, ginfer.cuda.runtime.image\n"
        "from ginfer.cuda.runtime.device import device_count\n"
        "assert isinstance(device_count(), int)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)
