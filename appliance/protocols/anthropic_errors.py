"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.protocols import openai_errors

if TYPE_CHECKING:
    from ginfer.errors import GInferError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """The error type that Anthropic's clients expect for an HTTP status."""
    return TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(error: GInferError) -> dict[str, Any]:
    """The error object, for a response body and for an event of a stream alike; `code` and `param`
    are ours, in addition to the protocol's members."""
    told = openai_errors.error_body(error)["error"]
    detail = {
        "type": error_type(error.status),
        "message": told["message"],
        "code": told["code"],
        "param": told["param"],
    }
    return {"type": "error", "error": detail}
