"""Run a server with any configuration: python -m tests.service.launch '{"engine": {}, ...}'."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import orjson

from appliance.config import ApplianceConfig
from appliance.server import serve
from ginfer.config import EngineConfig

GPU_KV_CAPACITY = 65_536  # several servers share the GPU; automatic capacity would take it all
PACKAGE = Path(__file__).parents[2] / "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"


def main(text: str) -> None:
    """Serve the demo package with the options of a JSON object."""
    options: dict[str, Any] = orjson.loads(text)
    wanted: dict[str, Any] = {
        "package": PACKAGE,
        "backend": os.environ.get("GINFER_TEST_BACKEND", "cpu"),
        "max_context": 8192,
    }
    if wanted["backend"] == "cuda":
        wanted["kv_capacity"] = GPU_KV_CAPACITY
    wanted |= options.pop("engine", {})
    wanted["package"] = Path(wanted["package"])
    engine = EngineConfig(**wanted)
    for name in ("request_log", "api_keys_file", "state_dir"):
        if name in options:
            options[name] = Path(options[name])
    options["api_keys"] = tuple(options.pop("api_keys", ()))
    serve(ApplianceConfig(engine=engine, port=0, **options))


if __name__ == "__main__":
    main(sys.argv[1])
