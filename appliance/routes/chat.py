"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from sanic import Blueprint
from sanic.response import HTTPResponse

from appliance import sse
from appliance.errors import as_error
from appliance.protocols.checks import decoded
from appliance.protocols.openai_chat import (
    Identity,
    ResponseBuilder,
    StreamBuilder,
    error_body,
    parse_request,
)
from appliance.routes.body import read_body
from appliance.routes.models import model_not_found
from ginfer.engine.request import Delta, Failed, Finished
from ginfer.errors import ContextLengthError, InternalError

if TYPE_CHECKING:
    from sanic import Request

    from appliance.app import App
    from appliance.context import ServerContext
    from appliance.engine_client import EventStream
    from appliance.protocols.openai_chat import ChatRequest
    from ginfer.engine.request import Event
    from ginfer.engine.request import Request as EngineRequest

blueprint = Blueprint("chat")


@dataclass(frozen=True)
class Job:
    """One completion: what the client wants, and what the engine is asked."""

    chat: ChatRequest
    identity: Identity
    request: EngineRequest
    generated: list[int] = field(default_factory=list)  # ids of the answer so far


@blueprint.post("/v1/chat/completions", stream=True)
async def chat_completions(request: Request[App, Any]) -> HTTPResponse | None:
    """Answer a conversation, streamed or whole."""
    context = request.app.ctx
    context.check_ready()
    with context.admission.place() as place:
        body = await read_body(request, context.config, place)
        job = await context.prepare(lambda data: _prepare(context, data), body)
        del body
        context.check_ready()
        events = await context.client.submit(job.request)
    context.http_stats.active += 1
    try:
        if job.chat.stream:
            await _stream(request, job, events)
            return None
        return await _whole(context, job, events)
    finally:
        context.http_stats.active -= 1
        events.close()  # cancels in the engine if the client left


def _prepare(context: ServerContext, body: bytes) -> Job:
    """Check, render and tokenise. Raises RequestError, or HttpError for another model."""
    chat = parse_request(decoded(body), defaults=context.config.defaults)
    if chat.model != context.model_id:
        raise model_not_found(chat.model, context.model_id)
    frontend = context.frontend
    prompt = frontend.prepare(chat.messages, chat.active_tools, chat.options)
    info = context.client.info
    if info is not None and prompt.num_tokens > info.max_context:
        raise ContextLengthError(
            f"the prompt has {prompt.num_tokens} tokens; the context holds {info.max_context}; "
            "shorten the conversation",
            param="messages",
        )
    identity = Identity(model=context.model_id, created=int(time.time()))
    preset = frontend.sampling_defaults(thinking=chat.options.thinking)
    return Job(chat, identity, chat.to_engine_request(prompt, identity.response_id, preset))


async def _whole(context: ServerContext, job: Job, events: EventStream) -> HTTPResponse:
    builder = ResponseBuilder(job.chat, job.identity, context.frontend)
    async for event in events:
        _follow(context, job, event)
        if isinstance(event, Delta):
            builder.delta(event)
        elif isinstance(event, Finished):
            body = orjson.dumps(builder.finish(event))
            return HTTPResponse(body, content_type="application/json")
        elif isinstance(event, Failed):
            raise event.error
    raise InternalError("the engine ended the request without a result")


async def _stream(request: Request[App, Any], job: Job, events: EventStream) -> None:
    """Once the headers are out, every failure is an event."""
    context = request.app.ctx
    config = context.config
    builder = StreamBuilder(job.chat, job.identity, context.frontend)
    stream = await sse.SseStream.open(
        request, keepalive_s=config.keepalive_s, send_timeout_s=config.send_timeout_s
    )
    try:
        await stream.send(map(sse.data, builder.start()))
        async for event in stream.read(events):
            _follow(context, job, event)
            if isinstance(event, Finished):
                await stream.send(map(sse.data, builder.flush()))
            await stream.send(map(sse.data, _chunks(builder, event)))
        await stream.send([sse.DONE])
    except Exception as exception:
        error = as_error(exception)
        context.http_stats.stream_errors[error.code] += 1
        await stream.send([sse.data(error_body(error))])


def _follow(context: ServerContext, job: Job, event: Event) -> None:
    """Keep the ids of the answer, so that its turn is replayed exactly when it comes back."""
    if isinstance(event, Delta):
        job.generated.extend(event.token_ids)
    elif isinstance(event, Finished):
        context.frontend.remember(job.request.prompt, job.generated)


def _chunks(builder: StreamBuilder, event: Event) -> list[dict[str, Any]]:
    """Chunks that an event makes. Raises the error of Failed."""
    if isinstance(event, Delta):
        return builder.delta(event)
    if isinstance(event, Finished):
        return builder.finish(event)
    if isinstance(event, Failed):
        raise event.error
    return []
