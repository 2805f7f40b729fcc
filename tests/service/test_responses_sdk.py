"""OpenAI Responses against the live server, through the official client."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.service.chat import ANSWERS, MODEL, STOP_IDS, SseReader, head, occupied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.service.server import Server

THINKING: dict[str, Any] = {"model": MODEL, "temperature": 0}
GREEDY: dict[str, Any] = {
    **THINKING,
    "extra_body": {"presence_penalty": 0, "chat_template_kwargs": {"enable_thinking": False}},
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "unit": {
                "type": "string",
                "description": "Temperature unit",
                "enum": ["celsius", "fahrenheit"],
            },
        },
        "required": ["city"],
    },
    "strict": False,
}
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "run_shell",
    "description": "Run a shell command and return its output.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The command line"}},
        "required": ["command"],
    },
    "strict": False,
}
SNOW = '{"city": "Oslo", "temperature": -3, "condition": "snow"}'
WEATHER_QUESTION = "What is the weather in Oslo?"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as opened:
        yield opened


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def post(server: Server, body: dict[str, Any], path: str = "/v1/responses") -> tuple[int, Any]:
    """A bare request: status and decoded body."""
    status, _, data = server.request("POST", path, orjson.dumps(body))
    return status, orjson.loads(data)


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_whole(client: openai.OpenAI, question: str) -> None:
    response = client.responses.create(input=question, **GREEDY)
    assert response.output_text == ANSWERS[question]
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL)
    assert response.id.startswith("resp_")
    assert response.temperature == 0
    Response.model_validate(response.model_dump(by_alias=True))


def test_usage_counts_the_stop_token(client: openai.OpenAI) -> None:
    usage = client.responses.create(input="Hello!", **GREEDY).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (14, 16, 30)
    assert usage.output_tokens_details.reasoning_tokens == 0
    count = client.responses.input_tokens.count(
        input="Hello!", model=MODEL, extra_body=GREEDY["extra_body"]
    )
    assert (count.input_tokens, count.object) == (14, "response.input_tokens")


def test_every_event_of_a_stream_is_valid(server: Server) -> None:
    with streaming(server, input="Who are you?") as reader:
        named = [read_event(block) for block in reader.blocks()]
    events = [event for _, event in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"


def test_the_streaming_helper_accumulates_the_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(input="Who are you?", **THINKING) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    reasoning, message = final.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text
    assert message.type == "message"
    assert final.output_text == "".join(texts)
    assert final.output_text
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_async_streams_side_by_side(server: Server) -> None:
    async def answer(client: openai.AsyncOpenAI, question: str) -> str:
        stream = await client.responses.create(input=question, stream=True, **GREEDY)
        pieces = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        return "".join(pieces)

    async def all_answers() -> list[str]:
        async with server.openai_async() as client:
            return await asyncio.gather(*(answer(client, question) for question in ANSWERS))

    assert asyncio.run(all_answers()) == list(ANSWERS.values())


def test_tools_full_round_trip(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, SHELL]
    asked = client.responses.create(input=WEATHER_QUESTION, tools=tools, **GREEDY)
    (call,) = asked.output
    assert call.type == "function_call"
    assert (call.name, orjson.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": SNOW}
    told = client.responses.create(
        input=[result], tools=tools, previous_response_id=asked.id, **GREEDY
    )
    assert told.output_text == "The weather in Oslo: -3 °C, snow."
    assert asked.usage is not None
    assert cached(told) >= asked.usage.total_tokens - 1
    question: Any = {"role": "user", "content": WEATHER_QUESTION}
    sent: Any = [question, *(item.model_dump() for item in asked.output), result]
    again = client.responses.create(input=sent, tools=tools, store=False, **GREEDY)
    assert again.output_text == told.output_text
    assert again.usage is not None
    assert told.usage is not None
    assert again.usage.input_tokens == told.usage.input_tokens


def test_tool_calls_stream_in_fragments(client: openai.OpenAI) -> None:
    question = "What is the weather in Bergen, Tokyo and Lima?"
    tools: Any = [SHELL, WEATHER]
    with client.responses.stream(input=question, tools=tools, **GREEDY) as stream:
        fragments = [e for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    for index, call in enumerate(calls):
        pieces = [e.delta for e in fragments if e.output_index == index]
        assert "".join(pieces) == call.arguments
    cities = [orjson.loads(call.arguments)["city"] for call in calls]
    assert cities == ["Bergen", "Tokyo", "Lima"]
    assert len({call.call_id for call in calls}) == 3


def test_a_stored_conversation_reuses_its_prefix_with_its_reasoning(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Who are you?", **THINKING)
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    second = client.responses.create(input="Hello!", previous_response_id=first.id, **THINKING)
    assert cached(second) >= first.usage.total_tokens - 1
    assert second.previous_response_id == first.id


def test_sealed_reasoning_reuses_the_prefix_without_a_store(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    question: Any = {"role": "user", "content": "Who are you?"}
    first = client.responses.create(input=[question], **fields, **THINKING)
    assert first.usage is not None
    reasoning, message = first.output
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content
    sealed: Any = {
        "type": "reasoning",
        "id": reasoning.id,
        "summary": [],
        "encrypted_content": reasoning.encrypted_content,
    }
    follow_up: Any = [question, sealed, message.model_dump(), {"role": "user", "content": "Hello!"}]
    second = client.responses.create(input=follow_up, **fields, **THINKING)
    assert cached(second) >= first.usage.total_tokens - 1
    given = reasoning.encrypted_content
    sealed["encrypted_content"] = given[:20] + ("B" if given[20] == "A" else "A") + given[21:]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=follow_up, **fields, **THINKING)
    assert caught.value.code == "invalid_encrypted_content"
    assert caught.value.param == "input.1.encrypted_content"


def test_stored_responses(client: openai.OpenAI, server: Server) -> None:
    stored = server.metrics()["ginfer_stored_responses"]
    first = client.responses.create(input="Hello!", metadata={"k": "v"}, **GREEDY)
    second = client.responses.create(input="Who are you?", previous_response_id=first.id, **GREEDY)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    listed = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed] == ["message"] * 3  # the client turns the pages
    newest = client.responses.input_items.list(second.id).data[0]
    assert newest.type == "message"
    assert server.metrics()["ginfer_stored_responses"] == stored + 2
    client.responses.delete(first.id)
    assert server.metrics()["ginfer_stored_responses"] == stored + 1
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"
    third = client.responses.create(input="Hello!", previous_response_id=second.id, **GREEDY)
    assert third.usage is not None
    assert third.usage.input_tokens > 60
    unstored = client.responses.create(input="Hello!", store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", previous_response_id=unstored.id, **GREEDY)


def test_a_limit_makes_it_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(input="Count from 1 to 30.", max_output_tokens=16, **GREEDY)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 16


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        input="Hello!", include=["message.output_text.logprobs"], top_logprobs=3, **GREEDY
    )
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(entry.token for entry in part.logprobs) == response.output_text
    for entry in part.logprobs:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy


def test_what_an_agent_sends_is_accepted(server: Server) -> None:
    """All members that the Codex CLI sends, hosted tools among them."""
    body = {
        **THINKING,
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hello!"}],
            },
        ],
        "tools": [
            SHELL,
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "description": "Edit files"},
            {"type": "namespace", "name": "mcp__fs__", "description": "Files", "tools": [WEATHER]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0197-thread",
        "client_metadata": {"installation": "x"},
    }
    status, found = post(server, body)
    assert status == 200, found
    assert found["ginfer"]["accepted_without_effect"] == [
        "prompt_cache_key",
        "client_metadata",
        "reasoning.summary",
        "tools.web_search",
    ]


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI, server: Server) -> None:
    wrong: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
        (openai.NotFoundError, "model_not_found", {"model": "vendor/other"}),
        (openai.NotFoundError, "response_not_found", {"previous_response_id": "resp_none"}),
        (openai.BadRequestError, "background_not_supported", {"background": True}),
        (openai.BadRequestError, "context_length_exceeded", {"input": "word " * 9000}),
        (openai.BadRequestError, "unknown_parameter", {"extra_body": {"colour": "red"}}),
    ]
    for kind, code, fields in wrong:
        with pytest.raises(kind) as caught:
            client.responses.create(**{"input": "Hello!", "model": MODEL, **fields})
        assert caught.value.code == code
        if code == "context_length_exceeded":
            assert caught.value.param == "input"
    stored = client.responses.create(input="Hello!", **GREEDY)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(stored.id)
    assert refused.value.code == "background_not_supported"
    status, found = post(server, {"input": "x" * 100}, "/v1/responses/compact")
    assert (status, found["error"]["code"]) == (400, "compaction_not_supported")
    for path, code in (
        ("?include[]=message.output_text.logprobs", "include_not_supported"),
        ("?stream=true", "unsupported_parameter"),
        ("?colour=red", "unknown_parameter"),
        ("/input_items?limit=0", "invalid_pagination"),
    ):
        status, _, data = server.request("GET", f"/v1/responses/{stored.id}{path}")
        assert (status, orjson.loads(data)["error"]["code"]) == (400, code)
    status, _, data = server.request("DELETE", "/v1/responses/resp_none")
    assert (status, orjson.loads(data)["error"]["code"]) == (404, "response_not_found")


@contextmanager
def streaming(server: Server, **fields: Any) -> Iterator[SseReader]:
    """The reader of a stream; leaving the block closes the connection."""
    body = orjson.dumps({**THINKING, "input": "Hello!", "stream": True, **fields})
    with server.connect() as sock:
        sock.sendall(head(body, path="/v1/responses") + body)
        reader = SseReader(sock)
        try:
            yield reader
        finally:
            reader.close()


def read_event(block: str) -> tuple[str, Any]:
    """Name and data of an event."""
    name, _, line = block.partition("\n")
    return name.removeprefix("event: "), orjson.loads(line.removeprefix("data: "))


ENDLESS = {"logit_bias": {str(token): -100 for token in STOP_IDS}, "max_output_tokens": 7000}


def test_a_client_that_leaves_stores_nothing_and_frees_its_slot(server: Server) -> None:
    with streaming(server, **ENDLESS) as reader:
        name, created = read_event(next(reader.blocks()))
    assert name == "response.created"
    server.settle()
    status, _, _ = server.request("GET", f"/v1/responses/{created['response']['id']}")
    assert status == 404


def test_in_the_queue_it_shows_life_and_its_timeout_is_told(narrow: Server) -> None:
    with occupied(narrow), streaming(narrow) as waiting:
        blocks = list(waiting.blocks())
    assert ": keep-alive" in blocks
    events = [read_event(block) for block in blocks if block != ": keep-alive"]
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert events[-1][1]["response"]["error"]["code"] == "request_queue_timeout"
