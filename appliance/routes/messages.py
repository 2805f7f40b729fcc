"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sanic import Blueprint
from sanic.response import json

from appliance.protocols.anthropic_messages import MessagesRequest, parse_request
from appliance.protocols.checks import decoded
from appliance.protocols.messages_response import (
    PING,
    MessagesCollector,
    MessagesWriter,
    Origin,
    applied_edits,
)
from appliance.routes.body import read_body
from appliance.routes.generation import Dialect, Exchange, answer, engine_request

if TYPE_CHECKING:
    from sanic.response import HTTPResponse

    from appliance.context import ServerContext
    from appliance.http_request import HttpRequest

blueprint = Blueprint("messages")


def open_message(context: ServerContext, body: bytes) -> Exchange:
    """Check, render and tokenise. Raises RequestError."""
    request = _parse(context, body)
    edits = applied_edits(request, context.frontend)
    origin = Origin(signer=context.signer, applied_edits=edits)
    return Exchange(
        generation=request,
        request=engine_request(context, request, origin.response_id),
        writer=partial(MessagesWriter, request, origin, context.frontend),
        collector=partial(MessagesCollector, request, origin, context.frontend),
    )


MESSAGES = Dialect(name="anthropic_messages", open=open_message, keepalive=PING)


@blueprint.post("/v1/messages", stream=True)
async def messages(request: HttpRequest) -> HTTPResponse | None:
    """Answer a conversation, streamed or whole."""
    return await answer(request, MESSAGES)


@blueprint.post("/v1/messages/count_tokens", stream=True)
async def count_tokens(request: HttpRequest) -> HTTPResponse:
    """Length of the prompt that the same body would make, whether it fits or not."""
    context = request.app.ctx
    with context.admission.place() as place:
        body = await read_body(request, context.config, place)
        num_tokens = await context.prepare(partial(_count, context), body)
    return json({"input_tokens": num_tokens})


def _parse(context: ServerContext, body: bytes) -> MessagesRequest:
    defaults = context.config.defaults
    return parse_request(decoded(body), defaults=defaults, signer=context.signer)


def _count(context: ServerContext, body: bytes) -> int:
    request = _parse(context, body)
    prompt = context.frontend.prepare(request.messages, request.active_tools, request.options)
    return prompt.num_tokens
