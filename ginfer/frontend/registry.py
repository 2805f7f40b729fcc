"""Which frontend a model has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ginfer.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ginfer.frontend.base import Frontend

PREFIX = "frontend/"  # of resource names in a package
# Module and class per model family: importing this package loads neither tokenizers nor Jinja2.
_FRONTENDS = {
    "qwen3.8-27b": ("ginfer.frontend.qwen", "QwenFrontend"),
    "qwen3.8-demo": ("ginfer.frontend.qwen", "QwenFrontend"),
}


def open_frontend(model_id: str, resources: Mapping[str, bytes]) -> Frontend:
    """The frontend of a model, from the resources of its package (name, with or without
    `frontend/`, to bytes). Raises ArtifactError for an unknown model or an unusable resource."""
    try:
        module, name = _FRONTENDS[model_id]
    except KeyError:
        known = ", ".join(sorted(_FRONTENDS))
        raise ArtifactError(f"no frontend for model {model_id!r}; known: {known}") from None
    files = {name.removeprefix(PREFIX): data for name, data in resources.items()}
    return cast("Frontend", getattr(import_module(module), name)(files))
