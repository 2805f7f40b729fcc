"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

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
    return json({"object": "list", "data": [_model(request.app.ctx)]})


@blueprint.get("/v1/models/<name:path>")
async def get_model(request: Request[App, Any], name: str) -> HTTPResponse:
    """The model; 404 model_not_found for any other id. Ids may contain slashes."""
    context = request.app.ctx
    if unquote(name) != context.model_id:
        raise model_not_found(unquote(name), context.model_id)
    return json(_model(context))


def _model(context: ServerContext) -> dict[str, Any]:
    info = context.client.info
    return {
        "id": context.model_id,
        "object": "model",
        "created": context.created,
        "owned_by": "ginfer",
        "context_window": info.max_context if info else context.config.engine.max_context,
    }
