"""Every failure as an HTTP response in the form of OpenAI's API."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from typing import TYPE_CHECKING, Any

import orjson
from sanic.exceptions import RequestCancelled, SanicException
from sanic.handlers import ErrorHandler
from sanic.response import HTTPResponse

from appliance.protocols import anthropic_errors, openai_errors
from ginfer.errors import GInferError, InternalError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sanic import Request

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "1"
CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "encoding_not_supported",
    417: "expectation_failed",
    503: "service_unavailable",
}


# routes whose protocol has errors of its own form
ERROR_BODIES: dict[str, Callable[[GInferError], dict[str, Any]]] = {
    "/v1/messages": anthropic_errors.error_body
}


class HttpError(GInferError):
    """A fault of the HTTP exchange itself."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, code=code or CODES.get(status, "http_error"), param=param)
        self.status = status


def as_error(exception: BaseException) -> GInferError:
    """The error that a client sees for an exception; one we did not foresee is logged and told as
    internal_error, without details."""
    if isinstance(exception, GInferError):
        return exception
    if isinstance(exception, RequestCancelled):  # nobody reads it; the counters do
        return HttpError(499, "the client is gone", code="client_disconnected")
    if isinstance(exception, SanicException):
        message = str(exception) or CODES.get(exception.status_code, "error")
        message = message.encode(errors="backslashreplace").decode()  # it may quote any bytes
        return HttpError(exception.status_code, message)
    if isinstance(exception, CancelledError):
        return UnavailableError("the server is stopping; the request was cancelled")
    logger.error("unforeseen error", exc_info=exception)
    return InternalError("internal error of the server; its log has the details")


def body_of(error: GInferError, path: str) -> dict[str, Any]:
    """The body that tells an error in the form of the protocol that `path` belongs to."""
    for prefix, error_body in ERROR_BODIES.items():
        if path.startswith(prefix):
            return error_body(error)
    return openai_errors.error_body(error)


def error_response(exception: BaseException, path: str = "") -> HTTPResponse:
    """The response that tells `exception` in the form of the protocol that `path` belongs to."""
    error = as_error(exception)
    headers = dict(getattr(exception, "headers", {}))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = RETRY_AFTER_S
    return HTTPResponse(
        orjson.dumps(body_of(error, path)),
        status=error.status,
        headers=headers,
        content_type="application/json",
    )


class JsonErrorHandler(ErrorHandler):
    """Sanic's error handler, answering JSON on every path."""

    def response(self, request: Request, exception: Exception) -> HTTPResponse:
        """The response to an exception, whether a handler, the router or the parser raised it."""
        return error_response(exception, request.path)
