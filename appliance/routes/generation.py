"""One generation, from the body of a request to its last byte, whatever the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import orjson
from sanic.response import HTTPResponse

from appliance import logs, sse
from appliance.errors import as_error
from appliance.routes.body import read_body
from appliance.routes.models import model_not_found
from appliance.trace import Trace
from ginfer.engine.request import Delta, Failed, Finished, Started
from ginfer.errors import ContextLengthError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.context import ServerContext
    from appliance.engine_client import EventStream
    from appliance.http_request import HttpRequest
    from appliance.protocols.generation import Collector, Generation, StreamWriter
    from ginfer.engine.request import Event
    from ginfer.engine.request import Request as EngineRequest
    from ginfer.prompt import PreparedPrompt


HTTP_OK = 200


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request of a protocol: what the client wants, what the engine is asked, and who builds
    the answer (`writer` a streamed one, `collector` a whole one)."""

    generation: Generation
    request: EngineRequest
    writer: Callable[[], StreamWriter]
    collector: Callable[[], Collector]
    generated: list[int] = field(default_factory=list)  # ids of the answer so far


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one protocol enters: `open` checks, renders and tokenises a body (in a thread when it is
    long) and raises GInferError; `keepalive` is the frame that shows life in a stream."""

    name: str
    open: Callable[[ServerContext, bytes], Exchange]
    keepalive: bytes
    long: bytes = b""  # what makes the preparation of a short body long


async def answer(request: HttpRequest, dialect: Dialect) -> HTTPResponse | None:
    """Answer a request, streamed or whole."""
    context: ServerContext = request.app.ctx
    trace = Trace(
        context.request_log,
        request_id=request.request_id,
        protocol=dialect.name,
        key_name=request.key_name,
    )
    with trace:
        exchange, events = await _submit(request, dialect, trace)
        try:
            if exchange.generation.stream:
                await _stream(request, dialect, exchange, events, trace)
                return None
            return await _whole(context, exchange, events, trace)
        finally:
            context.http_stats.active -= 1
            tally = exchange.generation.tally
            context.http_stats.malformed_calls += tally.broken + tally.as_text
            events.close()  # cancels in the engine if the client left


async def _submit(
    request: HttpRequest, dialect: Dialect, trace: Trace
) -> tuple[Exchange, EventStream]:
    """Read, prepare and hand to the engine; it counts as active from the last step on, so that a
    server that stops waits for it."""
    context: ServerContext = request.app.ctx
    context.check_ready()
    with context.admission.place() as place:
        body = await read_body(request, context.config, place)
        exchange = await context.prepare(partial(dialect.open, context), body, dialect.long)
        del body
        trace.prepared(exchange.generation, exchange.request)
        context.check_ready()
        context.http_stats.active += 1
        try:
            events = await context.client.submit(exchange.request)
        except BaseException:
            context.http_stats.active -= 1
            raise
    trace.accepted()
    return exchange, events


def check_model(model: str, context: ServerContext) -> None:
    """Raise HttpError 404 model_not_found unless `model` is the served one."""
    if model != context.model_id:
        raise model_not_found(model, context.model_id)


def prepare_prompt(context: ServerContext, generation: Generation) -> PreparedPrompt:
    """Render and tokenise. Raises RequestError naming the message, ContextLengthError."""
    prompt = context.frontend.prepare(
        generation.messages, generation.active_tools, generation.options
    )
    info = context.client.info
    if info is not None and prompt.num_tokens > info.max_context:
        raise ContextLengthError(
            f"the prompt has {prompt.num_tokens} tokens; the context holds {info.max_context}; "
            "shorten the conversation",
            param="messages",
        )
    return prompt


def engine_request(
    context: ServerContext, generation: Generation, response_id: str
) -> EngineRequest:
    """The request as the engine takes it, named like its response."""
    prompt = prepare_prompt(context, generation)
    preset = context.frontend.sampling_defaults(thinking=generation.options.thinking)
    return generation.to_engine_request(prompt, response_id, preset)


async def _whole(
    context: ServerContext, exchange: Exchange, events: EventStream, trace: Trace
) -> HTTPResponse:
    collector = exchange.collector()
    async for event in events:
        _follow(context, exchange, trace, event)
        if isinstance(event, Delta):
            collector.delta(event)
        elif isinstance(event, Finished):
            body = orjson.dumps(collector.finish(event))
            trace.done(event, exchange.generation.tally)
            return HTTPResponse(body, content_type="application/json")
        elif isinstance(event, Failed):
            raise event.error
    raise InternalError("the engine ended the request without a result")


async def _stream(
    request: HttpRequest, dialect: Dialect, exchange: Exchange, events: EventStream, trace: Trace
) -> None:
    """Once the headers are out, every failure is an event."""
    context: ServerContext = request.app.ctx
    config = context.config
    writer = exchange.writer()
    follow = partial(_follow, context, exchange, trace)
    failure: str | None = "client_disconnected"
    stream = await sse.SseStream.open(
        request,
        keepalive=dialect.keepalive,
        keepalive_s=config.keepalive_s,
        send_timeout_s=config.send_timeout_s,
    )
    try:
        await stream.send(writer.start())
        event: Event | None = None
        while not events.over:
            await stream.wait(events)
            event = await _relay(events, stream, writer, follow)
        if isinstance(event, Finished):
            trace.done(event, exchange.generation.tally)
        failure = None
    except Exception as exception:
        error = as_error(exception)
        failure = error.code
        trace.failed(error)
        context.http_stats.stream_errors[error.code] += 1
        await stream.send(writer.fail(error))
    finally:
        stream.close()
        logs.access(request, HTTP_OK, failure)


async def _relay(
    events: EventStream,
    stream: sse.SseStream,
    writer: StreamWriter,
    follow: Callable[[Event], None],
) -> Event | None:
    """Send the frames of all events that are there in one piece; returns the last event. Raises
    what the writer raises, after sending what it wrote before."""
    frames: list[bytes] = []
    last: Event | None = None
    end = False
    try:
        while (event := events.pop()) is not None:
            last = event
            follow(event)
            if isinstance(event, Finished):
                frames += writer.flush()
            frames += _frames(writer, event)
        end = isinstance(last, Finished)
    finally:
        await stream.send(frames, end=end)
    return last


def _follow(context: ServerContext, exchange: Exchange, trace: Trace, event: Event) -> None:
    """Keep the ids of the answer, so that its turn is replayed exactly when it comes back."""
    trace.follow(event)
    if isinstance(event, Delta):
        exchange.generated.extend(event.token_ids)
    elif isinstance(event, Finished):
        context.frontend.remember(exchange.request.prompt, exchange.generated)


def _frames(writer: StreamWriter, event: Event) -> list[bytes]:
    """Frames that an event makes. Raises the error of Failed."""
    match event:
        case Started():
            return writer.started(event)
        case Delta():
            return writer.delta(event)
        case Finished():
            return writer.finish(event)
        case Failed():
            raise event.error
