"""Reading a request body under the limits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from appliance.errors import HttpError

if TYPE_CHECKING:
    from sanic import Request

    from appliance.admission import Place
    from appliance.config import ApplianceConfig

LINGER_S = 10.0


async def read_body(request: Request[Any, Any], config: ApplianceConfig, place: Place) -> bytes:
    """The whole body, counted in `place`.

    Raises HttpError 413 beyond the limit, 408 when it takes too long, 415 when it is encoded;
    OverloadedError when the bodies of all requests together are too large."""
    limit = config.max_request_nbytes
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        message = f"content-encoding {coding[:60]!r} is not supported; send the body as it is"
        raise HttpError(415, message, param="content-encoding")
    stream: Any = request.stream
    transport: Any = request.transport
    if int(request.headers.get("content-length", "0")) > limit:
        await _refuse(stream, config)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(config.request_timeout_s):
            async for chunk in stream:
                if place.nbytes + len(chunk) > limit:
                    await _refuse(stream, config)
                place.grow(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body did not arrive within {config.request_timeout_s:g} s"
        raise HttpError(408, message) from None
    # Sanic pauses a socket whose buffer was full and would not notice that the client leaves.
    transport.resume_reading()
    return b"".join(chunks)


async def _refuse(stream: Any, config: ApplianceConfig) -> None:
    """Raise HttpError 413, after letting the client finish: one that still writes would see its
    connection reset instead of the answer."""
    if stream.expecting_continue:  # it asked before sending: the answer is no
        stream.expecting_continue = False
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                async for _ in stream:
                    pass
    raise HttpError(413, f"the body is larger than {config.max_request_mib} MiB")
