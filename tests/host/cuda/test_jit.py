"""Kernel values and their keys: what makes two kernels the same, and what makes a cubin stale."""

import pickle
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from ginfer.cuda.runtime.jit import CAPABILITIES, Build, Kernel, kernel
from ginfer.cuda.runtime.sources import source_files, sources_digest
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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules: kernel -> device -> constants, and one that only types see."""
    folder = tmp_path / "sample_package"
    folder.mkdir()
    texts = {
        "__init__": "",
        "kernel": "from typing import TYPE_CHECKING\nfrom sample_package import device\n"
        "from ginfer.sizes import MIB\nfrom ginfer.cuda.runtime.jit import Build\n"
        "if TYPE_CHECKING:\n    from sample_package.typing_only import T\n",
        "device": "def f():\n    from sample_package.constants import LIMIT\n    return LIMIT\n",
        "constants": "LIMIT = 3\n",
        "typing_only": "T = int\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("sample_package")]:
        del sys.modules[name]


def test_sources_are_what_a_module_imports_of_the_project(package):
    assert set(source_files("sample_package.kernel")) == {
        "sample_package",
        "sample_package.kernel",
        "sample_package.device",
        "sample_package.constants",
        "ginfer.sizes",
    }


def test_an_edit_anywhere_below_a_kernel_changes_its_digest_and_no_other(package):
    def digests():
        names = ("kernel", "device", "constants", "typing_only")
        return {n: sources_digest.__wrapped__(f"sample_package.{n}") for n in names}

    before = digests()
    (package / "constants.py").write_text("LIMIT = 4\n")
    after = digests()
    assert {n for n in before if before[n] != after[n]} == {"kernel", "device", "constants"}


def test_kernels_of_the_library_depend_on_the_instructions_they_use():
    files = source_files("tests.cuda.kernels")
    assert "ginfer.cuda.lib.ptx" in files
    assert not any(name.startswith("ginfer.cuda.runtime") for name in files)


def test_importing_the_runtime_starts_no_driver_and_needs_no_gpu():
    code = (
        "import ctypes, ginfer.cuda.runtime.catalog, ginfer.cuda.runtime.image\n"
        "from ginfer.cuda.runtime.device import device_count\n"
        "assert isinstance(device_count(), int)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)
