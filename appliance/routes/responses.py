"""The routes of OpenAI Responses: create, count, and what is stored."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from sanic import Blueprint
from sanic.response import HTTPResponse, json

from appliance.protocols import checks, frames
from appliance.protocols.responses.fields import VACUOUS
from appliance.protocols.responses.pages import page
from appliance.protocols.responses.request import (
    ResponseNotFoundError,
    ResponsesRequest,
    parse_request,
)
from appliance.protocols.responses.response import Head, ResponsesCollector, ResponsesWriter, new_id
from appliance.routes.body import read_body
from appliance.routes.generation import Dialect, Exchange, answer, check_model, engine_request
from ginfer.errors import RequestError

if TYPE_CHECKING:
    from appliance.context import ServerContext
    from appliance.http_request import HttpRequest
    from appliance.response_store import StoredResponse
    from ginfer.engine.request import Request as EngineRequest

blueprint = Blueprint("responses")


def open_response(context: ServerContext, body: bytes) -> Exchange:
    """Check, render and tokenise. Raises RequestError, or HttpError for another model."""
    wanted = _parse(context, checks.decoded(body))
    response_id = new_id()
    request = _engine_request(context, wanted, response_id)
    head = Head(
        model=context.model_id,
        created=int(time.time()),
        sampling=request.sampling,
        response_id=response_id,
    )
    parts = (wanted, head, context.frontend, context.responses)
    return Exchange(
        generation=wanted,
        request=request,
        writer=partial(ResponsesWriter, *parts),
        collector=partial(ResponsesCollector, *parts),
    )


LONG = b"previous_response_id"
RESPONSES = Dialect(
    name="openai_responses", open=open_response, keepalive=frames.COMMENT, long=LONG
)


@blueprint.post("/v1/responses", stream=True)
async def create_response(request: HttpRequest) -> HTTPResponse | None:
    """Answer a conversation, streamed or whole."""
    return await answer(request, RESPONSES)


@blueprint.post("/v1/responses/input_tokens", stream=True)
async def count_input_tokens(request: HttpRequest) -> HTTPResponse:
    """Length of the prompt that the same body would make, whether it fits or not."""
    context: ServerContext = request.app.ctx
    with context.admission.place() as place:
        body = await read_body(request, context.config, place)
        num_tokens = await context.prepare(partial(_count, context), body, LONG)
    return json({"object": "response.input_tokens", "input_tokens": num_tokens})


@blueprint.get("/v1/responses/<response_id:str>")
async def get_response(request: HttpRequest, response_id: str) -> HTTPResponse:
    """A stored response."""
    query = _query(request, ("include", "stream", "starting_after", "include_obfuscation"))
    for name in query:
        if name != "include" and query[name] != "false":
            why = "a stored response is sent whole; leave it out"
            raise checks.refused(name, why, code="unsupported_parameter")
    return HTTPResponse(_stored(request, response_id).body, content_type="application/json")


@blueprint.delete("/v1/responses/<response_id:str>")
async def delete_response(request: HttpRequest, response_id: str) -> HTTPResponse:
    """Forget a response; those that follow from it stay usable."""
    _stored(request, response_id)
    request.app.ctx.responses.store.delete(response_id)
    return json({"id": response_id, "object": "response.deleted", "deleted": True})


@blueprint.get("/v1/responses/<response_id:str>/input_items")
async def list_input_items(request: HttpRequest, response_id: str) -> HTTPResponse:
    """The items that a response was generated from, in pages."""
    query = _query(request, ("include", "limit", "order", "after"))
    query.pop("include", None)
    node = _stored(request, response_id).node
    listed = await asyncio.to_thread(lambda: page(node.input_items(), query))
    return HTTPResponse(orjson.dumps(listed), content_type="application/json")


@blueprint.post("/v1/responses/<response_id:str>/cancel")
async def cancel_response(request: HttpRequest, response_id: str) -> NoReturn:
    """Refused: only responses in the background can be cancelled by id."""
    why = "a response lasts as long as its request; close the connection to cancel it"
    raise checks.refused("background", why, code="background_not_supported")


@blueprint.post("/v1/responses/compact", stream=True)
async def compact(request: HttpRequest) -> NoReturn:
    """Refused."""
    why = "conversations are not compacted; send a shorter one"
    raise checks.refused("input", why, code="compaction_not_supported")


def _engine_request(
    context: ServerContext, wanted: ResponsesRequest, response_id: str
) -> EngineRequest:
    """The engine's request. What is wrong with the messages is wrong with the input here."""
    try:
        return engine_request(context, wanted, response_id)
    except RequestError as error:
        if error.param is None or error.param.startswith("messages"):
            error.param = "input"
        raise


def _parse(context: ServerContext, body: Any) -> ResponsesRequest:
    wanted = parse_request(body, defaults=context.config.defaults, memory=context.responses)
    check_model(wanted.model, context)
    return wanted


def _count(context: ServerContext, body: bytes) -> int:
    found = dict(checks.mapping(checks.decoded(body), "body"))
    if found.get("model") is None:  # optional here
        found["model"] = context.model_id
    wanted = _parse(context, found)
    prompt = context.frontend.prepare(wanted.messages, wanted.active_tools, wanted.options)
    return prompt.num_tokens


def _stored(request: HttpRequest, response_id: str) -> StoredResponse:
    found: StoredResponse | None = request.app.ctx.responses.store.get(response_id)
    if found is None:
        shown = checks.shown(response_id)
        raise ResponseNotFoundError(f"response {shown} is not stored", param="response_id")
    return found


def _query(request: HttpRequest, known: tuple[str, ...]) -> dict[str, str]:
    """The query's members. Raises RequestError for unknown ones, and for inclusions that would add
    something."""
    found = {}
    for name, value in request.get_query_args(keep_blank_values=True):
        plain = name.removesuffix("[]")
        if plain not in known:
            raise checks.unknown(name)
        if plain == "include":
            checks.one_of(value, "include", VACUOUS, code="include_not_supported")
        found[plain] = value
    return found
