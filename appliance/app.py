"""create_app: the Sanic application over an engine."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, cast

from sanic import Sanic
from sanic.config import Config
from sanic.response import HTTPResponse

from appliance import logs, sse
from appliance.auth import check_key
from appliance.context import ServerContext
from appliance.errors import JsonErrorHandler
from appliance.http_request import HEADER, HttpRequest
from appliance.routes import chat, health, messages, metrics, models, openapi, responses

if TYPE_CHECKING:
    from appliance.config import ApplianceConfig
    from appliance.engine_client import EngineClient

CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",
}
MESSAGES_PATH = "/v1/messages"  # its protocol has a header of its own for the id
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_numbers = count(1)  # Sanic wants unique names in one interpreter

App = Sanic[Config, ServerContext]


def create_app(client: EngineClient, config: ApplianceConfig) -> App:
    """The application, for Sanic's single-process mode. Raises ArtifactError when the package
    cannot be used."""
    app: App = Sanic(
        f"ginfer-{next(_numbers)}",
        config=Config(_settings(config), env_prefix=None),
        ctx=ServerContext(client, config),
        error_handler=JsonErrorHandler(),
        request_class=HttpRequest,
        configure_logging=False,
    )
    for routes in (chat, health, messages, metrics, models, openapi, responses):
        app.blueprint(routes.blueprint.copy(routes.blueprint.name))
    app.register_middleware(_before, "request")
    app.register_middleware(cast("Any", _after), "response")
    return app


def _settings(config: ApplianceConfig) -> dict[str, Any]:
    return {
        "REQUEST_MAX_SIZE": config.max_request_nbytes,
        "REQUEST_TIMEOUT": config.request_timeout_s,
        "RESPONSE_TIMEOUT": config.response_timeout_s,
        "KEEP_ALIVE_TIMEOUT": 120,
        "MOTD": False,
        "ACCESS_LOG": False,
        "AUTO_EXTEND": False,
        "OAS": False,
    }


async def _before(request: HttpRequest) -> HTTPResponse | None:
    context = request.app.ctx
    if request.method == "OPTIONS" and context.config.cors:
        return HTTPResponse(status=204)
    if request.method != "OPTIONS":
        check_key(request, context.keys)
    return None


async def _after(request: HttpRequest, response: HTTPResponse) -> None:
    context = request.app.ctx
    if context.config.cors:
        response.headers.update(CORS_HEADERS)
    route = f"/{request.route.path}" if request.route else "none"
    method = request.method if request.method in METHODS else "other"
    context.http_stats.requests[method, route, response.status] += 1
    response.headers[HEADER] = request.request_id
    if request.path.startswith(MESSAGES_PATH):
        response.headers["request-id"] = request.request_id
    if response.content_type != sse.CONTENT_TYPE:  # a stream is told at its end
        logs.access(request, response.status)
