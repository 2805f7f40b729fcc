"""GET /health: the server lives. GET /ready: it takes requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sanic import Blueprint
from sanic.response import json

if TYPE_CHECKING:
    from sanic import Request
    from sanic.response import HTTPResponse

    from appliance.app import App

blueprint = Blueprint("health")


@blueprint.get("/health")
async def health(_request: Request[App, Any]) -> HTTPResponse:
    """Always 200."""
    return json({"status": "ok"})


@blueprint.get("/ready")
async def ready(request: Request[App, Any]) -> HTTPResponse:
    """200, or 503 with the engine's state and the reason."""
    context = request.app.ctx
    reason = context.unready_reason
    if reason is None:
        return json({"status": "ready"})
    status = "stopping" if context.stopping else str(context.client.state.phase)
    return json({"status": status, "reason": reason}, status=503, headers={"Retry-After": "1"})
