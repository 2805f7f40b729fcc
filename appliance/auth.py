"""API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import HttpError

if TYPE_CHECKING:
    from sanic import Request

    from appliance.config import ApplianceConfig

OPEN_PATHS = ("/health", "/ready")  # probes carry no keys


def check_key(request: Request[Any, Any], config: ApplianceConfig) -> None:
    """Let the request pass if the server has no keys, the path is open or a key is right.

    Raises HttpError 401 invalid_api_key."""
    if not config.api_keys or request.path in OPEN_PATHS:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    keys = [bearer.strip()] if scheme.lower() == "bearer" else []
    keys.append(request.headers.get("x-api-key", ""))
    if not any(config.accepts_key(key) for key in keys):
        raise HttpError(
            401,
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
