"""Compiling without a GPU: what the record says, and what makes a kernel unacceptable."""

import copy
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from numba import cuda

from ginfer.cuda.norm import rms_norm_kernel
from ginfer.cuda.runtime import compiler
from ginfer.cuda.runtime.compiler import breaches, compile_cubin, compile_ptx, static_shared_nbytes
from ginfer.cuda.runtime.front_end import REPLACED
from ginfer.cuda.runtime.inliner import Inlinable, meaning
from ginfer.cuda.sampling.acceptance import acceptance_settle_kernel
from ginfer.errors import InternalError
from tests.cuda import kernels


@pytest.fixture(scope="module")
def record():
    return compile_cubin(kernels.reverse_kernel(20_000), "90a")[0]


def test_record_describes_the_cubin(record):
    item = kernels.reverse_kernel(20_000)
    record, code = compile_cubin(item, "90a")
    assert code[:4] == b"\x7fELF"
    assert record.entry.encode() in code
    assert (record.key, record.source) == (item.key("90a"), item.source("90a"))
    assert (record.threads, record.dynamic_shared, record.static_shared) == (128, 80_000, 0)
    assert 0 < record.registers <= 255
    assert (record.spills, record.stack) == (0, 0)
    assert "numba-cuda" in record.compilers


def test_ptx_targets_the_capability_and_has_a_plain_name():
    text, entry, _ = compile_ptx(kernels.scale_kernel(256, 3), "90a")
    assert ".target sm_90a" in text
    assert ".entry scale(" in text
    assert entry == "scale"
    assert "_ZN" not in text


def test_capabilities_with_the_same_instructions_share_their_ptx(tmp_path):
    item = kernels.scale_kernel(256, 7)
    alone = {c: compile_cubin(item, c) for c in ("80", "86", "89", "90", "120a")}
    assert len({code for _, code in alone.values()}) == 5
    shared = {c: compile_cubin(item, c, ptx_folder=tmp_path) for c in alone}
    assert shared == alone
    (path,) = tmp_path.iterdir()
    assert ".target sm_80" in path.read_text()
    path.write_text("nonsense")  # is what the next one reads
    with pytest.raises(InternalError, match="does not link for sm_86"):
        compile_cubin(item, "86", ptx_folder=tmp_path)
    compile_cubin(item, "90a", ptx_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_kernels_with_later_instructions_have_ptx_of_their_own(tmp_path):
    compile_cubin(kernels.add_kernel(256), "120a", ptx_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_equal_kernels_are_equal_bytes_whatever_was_compiled_before():
    tile, reverse = kernels.tile_kernel(512), kernels.reverse_kernel(8)
    first = compile_cubin(tile, "90a")
    compile_cubin(reverse, "90a")
    assert compile_cubin(tile, "90a") == first


def test_fixed_shared_arrays_are_counted_with_their_alignment():
    ptx = """
        .visible .shared .align 4 .b8 a[6];
        .visible .shared .align 8 .b8 b[96];
        .extern .shared .align 4 .b8 c[];
    """
    assert static_shared_nbytes(ptx) == 104
    assert compile_cubin(kernels.tile_kernel(1024), "90a")[0].static_shared == 8


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (kernels.double_kernel(), r"kernel double\(\) computes in float64"),
        (kernels.wrong_kernel(), r"kernel wrong\(\) does not compile for sm_90a"),
        (kernels.stack_kernel(), r"kernel stack\(\) on sm_90a has a stack frame of \d+ bytes"),
        (kernels.spilling_kernel(), r"kernel spilling\(\) on sm_90a spills \d+ bytes"),
    ],
)
def test_an_unacceptable_kernel_is_named(item, says):
    with pytest.raises(InternalError, match=says):
        compile_cubin(item, "90a")


def test_shared_memory_is_limited_by_the_capability(record):
    with pytest.raises(
        InternalError, match=r"needs 120000 bytes of shared memory; a block has 101"
    ):
        compile_cubin(kernels.reverse_kernel(30_000), "86")
    assert breaches(record, "90a") == []
    exactly = replace(record, dynamic_shared=227 << 10, static_shared=0)
    assert breaches(exactly, "90a") == []
    assert len(breaches(replace(exactly, static_shared=4), "90a")) == 1


def test_registers_and_threads_are_limited(record):
    assert breaches(replace(record, registers=64, threads=1024), "80") == []
    (text,) = breaches(replace(record, registers=65, threads=1024), "80")
    assert "needs 73728 registers" in text
    (text,) = breaches(replace(record, registers=8, threads=1056), "80")
    assert "has 1056 threads" in text


def test_instructions_that_a_capability_lacks_are_an_error_that_names_the_kernel():
    with pytest.raises(InternalError, match=r"kernel add\(256\) does not link for sm_80: "):
        compile_cubin(kernels.add_kernel(256), "80")


def test_what_makes_numba_faster_changes_no_code(monkeypatch):
    def text(item):
        return re.sub(r"_cudapy_smem_\d+", "", compile_ptx(item, "80")[0])

    items = (
        kernels.sum_of_ranks_kernel(64),
        kernels.calls_kernel(32),
        kernels.ranges_kernel(32),
        rms_norm_kernel(0, 0),
        acceptance_settle_kernel(0),
    )

    def fault():
        with pytest.raises(InternalError, match="does not compile") as caught:
            compile_ptx(kernels.wrong_kernel(), "80")
        return str(caught.value)

    ours, says = [text(item) for item in items], fault()
    plain = spec_from_file_location("plain_postproc", compiler.postproc.__file__)
    module = module_from_spec(plain)
    plain.loader.exec_module(module)
    monkeypatch.setattr(compiler.inline_closurecall, "copy", copy)
    monkeypatch.setattr(compiler.postproc.PostProcessor, "run", module.PostProcessor.run)
    assert [text(item) for item in items] == ours
    for owner, name, replacement in REPLACED:
        assert getattr(owner, name) is not replacement
        monkeypatch.setattr(owner, name, replacement)
    assert [text(item) for item in items] == ours
    assert Inlinable.known[kernels.clamp.py_func]
    assert fault() == says
    assert [text(item) for item in items] == ours  # of functions that are known already


def test_functions_of_the_same_code_and_constants_are_translated_once():
    def device(a, b):
        @cuda.jit(device=True, inline="always")
        def inner(x):
            return x + a

        @cuda.jit(device=True, inline="always")
        def outer(x):
            return inner(x) * b

        return outer.py_func

    known = meaning(device(1, 2))
    assert meaning(device(1, 2)) == known
    others = (device(2, 2), device(1, 3), device(1, True), device(1.0, 2), device(1, device))
    assert len({known, *map(meaning, others)}) == 1 + len(others)
