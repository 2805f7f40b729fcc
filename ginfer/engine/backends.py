"""open_backend: the one place that imports a device package, and only when it is wanted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from ginfer.backend import Backend
    from ginfer.config import EngineConfig
    from ginfer.spec import DrafterSpec, ModelSpec


def cuda_refusal() -> str:
    """Why the CUDA image cannot serve here, in one line; empty when it can."""
    try:
        module = import_module("ginfer.cuda.runtime.probe")
    except ImportError as e:
        return f"this version has no CUDA image ({e}); use backend cpu"
    return cast("str", module.refusal())


def open_backend(
    config: EngineConfig, spec: ModelSpec, drafter: DrafterSpec | None = None
) -> Backend:
    """Open the backend that is asked for; with 'auto' the CUDA image where it can serve. Its rounds
    speculate where it can and the options allow it, with a drafter or without. Raises ConfigError
    in one line when it cannot serve here or not with these options."""
    speculates = config.spec != "none"
    refusal = "" if config.backend == "cpu" else cuda_refusal()
    if config.backend == "cpu" or (config.backend == "auto" and refusal):
        module = import_module("ginfer.cpu.backend")
        backend = module.CpuBackend(
            spec, threads=config.threads, speculates=speculates, drafter=drafter
        )
        return cast("Backend", backend)
    if refusal:
        raise ConfigError(f"backend cuda: {refusal}", param="backend")
    module = import_module("ginfer.cuda.backend")
    backend = module.CudaBackend(
        spec,
        graphs=config.cuda_graphs,
        speculates=speculates,
        drafter=drafter,
        elastic=config.kv_elastic,
    )
    return cast("Backend", backend)
