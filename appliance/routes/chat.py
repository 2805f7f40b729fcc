"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from sanic import Blueprint

from appliance.protocols import frames
from appliance.protocols.chat_response import ChatCollector, ChatWriter, Identity
from appliance.protocols.checks import decoded
from appliance.protocols.openai_chat import parse_request
from appliance.routes.generation import Dialect, Exchange, answer, check_model, engine_request

if TYPE_CHECKING:
    from sanic.response import HTTPResponse

    from appliance.context import ServerContext
    from appliance.http_request import HttpRequest

blueprint = Blueprint("chat")


def open_chat(context: ServerContext, body: bytes) -> Exchange:
    """Check, render and tokenise. Raises RequestError, or HttpError for another model."""
    chat = parse_request(decoded(body), defaults=context.config.defaults)
    check_model(chat.model, context)
    identity = Identity(model=context.model_id, created=int(time.time()))
    return Exchange(
        generation=chat,
        request=engine_request(context, chat, identity.response_id),
        writer=partial(ChatWriter, chat, identity, context.frontend),
        collector=partial(ChatCollector, chat, identity, context.frontend),
    )


CHAT = Dialect(name="openai_chat_completions", open=open_chat, keepalive=frames.COMMENT)


@blueprint.post("/v1/chat/completions", stream=True)
async def chat_completions(request: HttpRequest) -> HTTPResponse | None:
    """Answer a conversation, streamed or whole."""
    return await answer(request, CHAT)
