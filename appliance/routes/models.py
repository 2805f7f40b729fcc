"""GET /v1/models and /v1/models/{id}: the one model served, in OpenAI's or Anthropic's form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sanic import Blueprint
from sanic.response import json

from appliance.errors import HttpError

if TYPE_CHECKING:
    from sanic import Request
    from sanic.response import HTTPResponse

    from appliance.app import App
    from appliance.context import ServerContext

blueprint = Blueprint("models")

ANTHROPIC = "anthropic-version"  # the header that clients of that protocol send


def model_not_found(model: str, served: str) -> HttpError:
    """The error for a model that is not the served one."""
    return HttpError(
        404,
        f"model {model[:100]!r} is not served here; the served one is {served!r}",
        code="model_not_found",
        param="model",
    )


@blueprint.get("/v1/models")
async def list_models(request: Request[App, Any]) -> HTTPResponse:
    """The list, of one."""
    model = _model(request)
    if ANTHROPIC in request.headers:
        ends = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return json({"data": [model], **ends})
    return json({"object": "list", "data": [model]})


@blueprint.get("/v1/models/<name:path>")
async def get_model(request: Request[App, Any], name: str) -> HTTPResponse:
    """The model; 404 model_not_found for any other id. Ids may contain slashes."""
    context = request.app.ctx
    if unquote(name) != context.model_id:
        raise model_not_found(unquote(name), context.model_id)
    return json(_model(request))


def _model(request: Request[App, Any]) -> dict[str, Any]:
    """The served model as the clients of either protocol know models."""
    context: ServerContext = request.app.ctx
    info = context.client.info
    max_context = info.max_context if info else context.config.engine.max_context
    if ANTHROPIC in request.headers:
        return {
            "type": "model",
            "id": context.model_id,
            "display_name": context.model_id,
            "created_at": datetime.fromtimestamp(context.created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": max_context,
            "max_tokens": max_context,
        }
    return {
        "id": context.model_id,
        "object": "model",
        "created": context.created,
        "owned_by": "ginfer",
        "context_window": max_context,
    }
