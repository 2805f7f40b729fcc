"""open_backend: the one place that imports a device package, and only when it is wanted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from ginfer.backend import Backend
    from ginfer.spec import ModelSpec


def resolve_backend(name: str) -> str:
    """'auto' becomes 'cuda' when the CUDA image can serve here, else 'cpu'."""
    if name != "auto":
        return name
    return "cpu" if cuda_refusal() else "cuda"


def cuda_refusal() -> str:
    """Why the CUDA image cannot serve here, in one line; empty when it can."""
    try:
        module = import_module("ginfer.cuda.runtime.probe")
    except ImportError as e:
        return f"this version has no CUDA image ({e}); use backend cpu"
    return cast("str", module.refusal())


def open_backend(name: str, spec: ModelSpec, *, threads: int | None = None) -> Backend:
    """Open a backend by name. Raises ConfigError in one line when it cannot serve here."""
    name = resolve_backend(name)
    if name == "cuda":
        refusal = cuda_refusal()
        if refusal:
            raise ConfigError(f"backend cuda: {refusal}", param="backend")
        return cast("Backend", import_module("ginfer.cuda.backend").CudaBackend(spec))
    return cast("Backend", import_module("ginfer.cpu.backend").CpuBackend(spec, threads=threads))
