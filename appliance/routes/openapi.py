"""GET /openapi.json: every route and field, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from sanic import Blueprint
from sanic.response import HTTPResponse

from appliance.openapi import document

if TYPE_CHECKING:
    from sanic import Request

    from appliance.app import App

blueprint = Blueprint("openapi")


@blueprint.get("/openapi.json")
async def openapi(request: Request[App, Any]) -> HTTPResponse:
    """The OpenAPI document of this server."""
    app = request.app
    body = orjson.dumps(document(app.router.routes, app.ctx.model_id))
    return HTTPResponse(body, content_type="application/json")
