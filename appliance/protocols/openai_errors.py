"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ginfer.errors import GInferError

MESSAGE_CHARS = 1000  # an error may quote a name of any length
PARAM_CHARS = 200


def error_type(status: int) -> str:
    """The error type that OpenAI clients expect for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: GInferError) -> dict[str, Any]:
    """The error object, for a response body and for an event of a stream alike."""
    return {
        "error": {
            "message": _cut(error.message, MESSAGE_CHARS),
            "type": error_type(error.status),
            "param": error.param and _cut(error.param, PARAM_CHARS),
            "code": error.code,
        }
    }


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
