"""The `kernel` decorator: a builder of device code becomes a hashable kernel value with a key.

    @kernel(int64, int64, float32)                    # the launch signature: addresses and scalars
    def scale_kernel(threads, factor):                # builder arguments are its constants
        @cuda.jit(fastmath=True, launch_bounds=threads)
        def scale(y, x, eps): ...
        return Build(scale, threads=threads)

    scale_kernel(256, 2)                              # a Kernel: nothing is compiled yet

A kernel compiles to a cubin on any machine. Its source digest covers the definitions of the project
that its builder reaches, builder arguments, signature, capability and our compile options; its key
adds the compiler versions. An image is stale when a source digest differs; a build also renews
what other compilers have made.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ginfer.cuda.runtime.sources import sources_digest
from ginfer.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvjitlink", "nvidia-nvvm")
CAPABILITIES: dict[str, tuple[int, int] | tuple[int, int, str]] = {
    "80": (8, 0),
    "86": (8, 6),
    "89": (8, 9),
    "90": (9, 0),  # sm_80-class variants for machines that develop on sm_90
    "90a": (9, 0, "a"),
    "120a": (12, 0, "a"),
}
SCALARS = ("int64", "uint64", "int32", "uint32", "float32")
BUILDERS: dict[tuple[str, str], Callable[..., Kernel]] = {}  # (module, builder) of all imported


@dataclass(frozen=True)
class Build:
    """What a builder returns: the dispatcher, threads per block, dynamic shared memory in bytes.
    since_sm_90: it uses instructions that the sm_80 class lacks."""

    function: Any
    threads: int
    shared_nbytes: int = 0
    since_sm_90: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel as a value: its builder by name, and arguments. Equal values are the same cubin."""

    module: str
    builder_name: str
    signature: tuple[str, ...]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """For people: 'linear_decode_w4(5120, 16)'."""
        arguments = ", ".join(map(str, self.arguments))
        return f"{self.builder_name.removesuffix('_kernel')}({arguments})"

    def build(self) -> Build:
        """Run the builder."""
        decorated = getattr(import_module(self.module), self.builder_name)
        built: Build = decorated.__wrapped__(*self.arguments)
        return built

    def source(self, capability: str) -> str:
        """Digest of everything of ours that shapes the cubin for a capability, 32 hex digits."""
        return _source(self, capability)

    def key(self, capability: str) -> str:
        """Content key of the cubin: the source digest with the compilers of this machine. Raises
        ConfigError when one of them is not installed."""
        return _hash(self.source(capability), compilers())


def kernel(*signature: Any) -> Callable[[Callable[..., Build]], Callable[..., Kernel]]:
    """Turn a builder into a function that returns Kernel values with the given launch signature.
    Builder arguments are ints, bools, enumerators or strings."""
    types = tuple(map(str, signature))
    assert set(types) <= set(SCALARS), types

    def wrap(builder: Callable[..., Build]) -> Callable[..., Kernel]:
        shape = inspect.signature(builder)

        @cache
        def value(*arguments: Any, **named: Any) -> Kernel:
            bound = shape.bind(*arguments, **named)
            bound.apply_defaults()
            return Kernel(
                builder.__module__, builder.__name__, types, tuple(map(_plain, bound.args))
            )

        BUILDERS[builder.__module__, builder.__name__] = value
        return update_wrapper(value, builder)

    return wrap


def _plain(argument: Any) -> int | str:
    """Enumerators and bools as the numbers they equal, so that equal kernels have equal keys."""
    if isinstance(argument, int):
        return int(argument)
    assert isinstance(argument, str), argument
    return str(argument)


@cache
def _source(item: Kernel, capability: str) -> str:
    if capability not in CAPABILITIES:
        raise ConfigError(f"sm is {capability!r}; one of {', '.join(CAPABILITIES)}", param="sm")
    return _hash(
        sources_digest(item.module, item.builder_name),
        sources_digest("ginfer.cuda.runtime.compiler"),
        item.builder_name,
        repr(item.arguments),
        repr(item.signature),
        capability,
    )


@cache
def compilers() -> str:
    """Names and versions of the compilers. Raises ConfigError when one is not installed."""
    try:
        return ", ".join(f"{name} {version(name)}" for name in COMPILERS)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, kernels cannot be compiled; "
            "run: pip install 'ginfer[cuda]'"
        ) from error


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class SealedError(InternalError):
    """Something was to be compiled or loaded after seal()."""


class _Seal:
    closed = False


def seal() -> None:
    """Forbid every later compilation and loading of kernels in this process."""
    _Seal.closed = True


def refuse_after_seal(what: str) -> None:
    """Raise SealedError when the process is sealed."""
    if _Seal.closed:
        raise SealedError(f"{what} after the kernel images had been sealed")
