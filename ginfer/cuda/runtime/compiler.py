"""From a kernel value to a cubin, without a GPU: Numba to PTX, nvJitLink to machine code, checks.

This file is part of every kernel's key: whatever shapes the code beyond the kernel's own files is
here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, types
from numba.cuda.core import (  # type: ignore[import-not-found]
    inline_closurecall,
    postproc,
    transforms,
)

from ginfer.cuda.runtime.jit import CAPABILITIES, compilers, refuse_after_seal
from ginfer.cuda.runtime.manifest import CubinRecord, write_atomically
from ginfer.errors import InternalError
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from pathlib import Path

    from ginfer.cuda.runtime.jit import Build, Kernel

MAX_SHARED_NBYTES = {  # per block, static and dynamic together
    "80": 163 << 10,
    "86": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "90a": 227 << 10,
    "120a": 99 << 10,
}
PTX_OF = {  # kernels of the same instructions share the work of Numba, most of a compilation
    "80": "80",
    "86": "80",
    "89": "80",
    "90": "80",
    "90a": "90a",
    "120a": "80",  # of those that use no more
}
MAX_REGISTERS = 65_536  # per multiprocessor
MAX_THREADS = 1024


class _NoCopies:
    """In place of `copy` in Numba's inliner, which copies what it inlines twice, although it has
    made it afresh for that one call: a fifth of a compilation."""

    @staticmethod
    def deepcopy(block: Any) -> Any:
        """The block itself."""
        return block


def _canonicalize(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """In place of PostProcessor.run of Numba, which follows every pass over every function that is
    inlined and finds what only generators know a use for: a quarter of the rest."""
    blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
    self.func_ir.blocks, self.func_ir.generator_info = blocks, None
    self.func_ir.variable_lifetime = postproc.VariableLifetime(blocks)
    if emit_dels:
        self._insert_var_dels(extend_lifetimes=extend_lifetimes)


inline_closurecall.copy = _NoCopies
postproc.PostProcessor.run = _canonicalize


def _ptx_target(build: Build, capability: str) -> str:
    """The capability that PTX is made for."""
    return capability if build.since_sm_90 else PTX_OF[capability]


def compile_ptx(item: Kernel, capability: str) -> tuple[str, str, Build]:
    """Compile to PTX. Returns (PTX text, entry name, build). Raises InternalError naming the kernel
    when the compiler fails or the code computes in float64, SealedError after seal()."""
    refuse_after_seal(f"kernel {item.name} was to be compiled")
    build = item.build()
    options = build.function.targetoptions
    try:
        text, _ = cuda.compile_ptx(
            build.function.py_func,
            tuple(getattr(types, t) for t in item.signature),
            cc=CAPABILITIES[_ptx_target(build, capability)],
            fastmath=bool(options.get("fastmath")),
            launch_bounds=options.get("launch_bounds", build.threads),
        )
    except Exception as error:
        raise InternalError(
            f"kernel {item.name} does not compile for sm_{capability}: {error}"
        ) from error
    doubles = [line.strip() for line in text.splitlines() if ".f64" in line]
    if doubles:
        raise InternalError(f"kernel {item.name} computes in float64: {doubles[0]}")
    entry = item.builder_name.removesuffix("_kernel")
    return _rename(text, entry), entry, build


def _rename(ptx: str, entry: str) -> str:
    """Give the one kernel of a module a plain name. Numba's counts the compilations of a process,
    so that equal sources would make different cubins."""
    (mangled,) = re.findall(r"\.entry (\w+)", ptx)
    environment = f"_ZN08NumbaEnv{mangled.removeprefix('_ZN')}"
    return ptx.replace(environment, f"{entry}_environment").replace(mangled, entry)


def _shared_ptx(item: Kernel, capability: str, folder: Path | None) -> tuple[str, str, Build]:
    """As compile_ptx(), through a file in `folder` where several capabilities share the PTX."""
    build = item.build()
    owner = _ptx_target(build, capability)
    if folder is None or list(PTX_OF.values()).count(owner) <= 1:
        return compile_ptx(item, capability)
    path = folder / f"{item.key(owner)}.ptx"
    if path.exists():
        return path.read_text(), item.builder_name.removesuffix("_kernel"), build
    text, entry, build = compile_ptx(item, capability)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    return text, entry, build


def compile_cubin(
    item: Kernel, capability: str, *, ptx_folder: Path | None = None
) -> tuple[CubinRecord, bytes]:
    """Compile and link one kernel; ptx_folder keeps PTX that other capabilities can use. Raises
    InternalError naming the kernel when it does not compile, spills, has a stack frame, computes in
    float64 or exceeds a limit of the capability."""
    text, entry, build = _shared_ptx(item, capability, ptx_folder)
    options = LinkerOptions(arch=f"sm_{capability}", ptxas_options=["-v"])
    try:
        linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
        code = bytes(linker.link("cubin").code)
    except Exception as error:
        raise InternalError(
            f"kernel {item.name} does not link for sm_{capability}: {error}"
        ) from error
    log = linker.get_info_log()
    record = CubinRecord(
        key=item.key(capability),
        source=item.source(capability),
        name=item.name,
        entry=entry,
        signature=item.signature,
        threads=build.threads,
        registers=_number(r"(\d+) registers", log),
        static_shared=static_shared_nbytes(text),
        dynamic_shared=build.shared_nbytes,
        stack=_number(r"(\d+) bytes stack frame", log),
        spills=sum(_number(rf"(\d+) bytes spill {way}", log) for way in ("stores", "loads")),
        compilers=compilers(),
    )
    for breach in breaches(record, capability):
        raise InternalError(f"kernel {record.name} on sm_{capability} {breach}")
    return record, code


def breaches(record: CubinRecord, capability: str) -> list[str]:
    """What is wrong with a compiled kernel, as the ends of sentences."""
    limit = MAX_SHARED_NBYTES[capability]
    registers = align_up(record.registers, 8) * align_up(record.threads, 128)
    found = {
        f"spills {record.spills} bytes": record.spills > 0,
        # the driver would allocate it for every thread of the GPU at the first launch
        f"has a stack frame of {record.stack} bytes; index local arrays by constants": record.stack
        > 0,
        f"needs {record.shared} bytes of shared memory; a block has {limit}": record.shared > limit,
        f"needs {registers} registers; a multiprocessor has {MAX_REGISTERS}": registers
        > MAX_REGISTERS,
        f"has {record.threads} threads; a block has at most {MAX_THREADS}": record.threads
        > MAX_THREADS,
    }
    return [text for text, wrong in found.items() if wrong]


def static_shared_nbytes(ptx: str) -> int:
    """Bytes of the fixed shared arrays in a PTX module (the linker's log has no word on them)."""
    total = 0
    for alignment, nbytes in re.findall(r"\.shared \.align (\d+) \.b8 \w+\[(\d+)\]", ptx):
        total = align_up(total, int(alignment)) + int(nbytes)
    return total


def _number(pattern: str, log: str) -> int:
    found = re.findall(pattern, log)
    return max(map(int, found)) if found else 0
