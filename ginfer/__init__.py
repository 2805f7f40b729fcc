"""GInfer: single-node LLM inference for agent work, as a library. Public names only."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ginfer.config import EngineConfig
from ginfer.engine.request import (
    Delta,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    Started,
    StopString,
    Timings,
    TokenLogprob,
    Usage,
)
from ginfer.errors import (
    ArtifactError,
    ConfigError,
    ContextLengthError,
    GInferError,
    InternalError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from ginfer.prompt import (
    Channel,
    ContentPart,
    Message,
    PreparedPrompt,
    PromptOptions,
    Tool,
    ToolCall,
)

if TYPE_CHECKING:
    from ginfer.engine import bench
    from ginfer.engine.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "Channel",
    "ConfigError",
    "ContentPart",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineInfo",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GInferError",
    "InternalError",
    "Message",
    "OverloadedError",
    "PreparedPrompt",
    "PromptOptions",
    "QueueTimeoutError",
    "Request",
    "RequestError",
    "SamplingParams",
    "Started",
    "StopString",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
    "__version__",
    "bench",
]


def __getattr__(name: str) -> Any:
    """Load the engine only when it is asked for: importing the package stays cheap."""
    if name == "Engine":
        return import_module("ginfer.engine.engine").Engine
    if name == "bench":
        return import_module("ginfer.engine.bench")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
