"""The official OpenAI client against the live server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from tests.service.chat import ANSWERS, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.service.server import Server

GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "presence_penalty": 0,
    "extra_body": {"enable_thinking": False},
}
HELLO = [{"role": "user", "content": "Hello!"}]
WEATHER_TOOLS = [
    {
        "type": "function",
        "function": {
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
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_shell",
            "description": "Run a shell command and return its output.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command line"}},
                "required": ["command"],
            },
        },
    },
]
SNOW = '{"city": "Oslo", "temperature": -3, "condition": "snow"}'


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as opened:
        yield opened


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "ginfer")
    assert model.model_extra == {"context_window": 8192}
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("vendor/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_whole(client: openai.OpenAI, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    completion = client.chat.completions.create(messages=messages, **GREEDY)
    assert completion.choices[0].message.content == ANSWERS[question]
    assert completion.choices[0].finish_reason == "stop"
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")


def test_usage_counts_the_stop_token(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(messages=HELLO, **GREEDY).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (14, 16, 30)
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_answers_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWERS["Hello!"]
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


def test_eight_at_once_answer_as_alone(server: Server) -> None:
    async def run() -> list[str | None]:
        async with server.openai_async() as client:
            questions = [*ANSWERS, *ANSWERS]
            completions = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        messages=[{"role": "user", "content": question}], **GREEDY
                    )
                    for question in questions
                )
            )
            return [c.choices[0].message.content for c in completions]

    assert asyncio.run(run()) == [*ANSWERS.values(), *ANSWERS.values()]


def test_async_stream(server: Server) -> None:
    async def run() -> str:
        async with server.openai_async() as client:
            stream = await client.chat.completions.create(messages=HELLO, stream=True, **GREEDY)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(run()) == ANSWERS["Hello!"]


def test_reasoning_comes_apart_from_the_answer(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 348 + 275?"}],
        temperature=0,
        reasoning_effort="xhigh",
    )
    message = completion.choices[0].message
    assert message.content == "348 + 275 = 623"
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"].startswith("Digits from the right")
    assert "</think>" not in message.model_extra["reasoning_content"]
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens > 40


def test_tools_full_round_trip(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = client.chat.completions.create(messages=messages, tools=WEATHER_TOOLS, **GREEDY)
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, orjson.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": SNOW})
    told = client.chat.completions.create(messages=messages, tools=WEATHER_TOOLS, **GREEDY)
    assert told.choices[0].message.content == "The weather in Oslo: -3 °C, snow."
    assert told.choices[0].finish_reason == "stop"


def test_tool_calls_stream_in_fragments(client: openai.OpenAI) -> None:
    question = "What is the weather in Bergen, Tokyo and Lima?"
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": question}],
        tools=[WEATHER_TOOLS[1], WEATHER_TOOLS[0]],
        stream=True,
        **GREEDY,
    )
    chunks = list(stream)
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert delta.index not in ids
                ids[delta.index] = delta.id
                names[delta.index] = delta.function.name or ""
            joined = arguments.get(delta.index, "") + (delta.function.arguments or "")
            arguments[delta.index] = joined
    assert set(names.values()) == {"get_weather"}
    cities = [orjson.loads(arguments[i]) for i in sorted(arguments)]
    assert cities == [{"city": "Bergen"}, {"city": "Tokyo"}, {"city": "Lima"}]
    assert len(set(ids.values())) == 3
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=3, stream=stream, **GREEDY
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    entries = [e for c in choices if c.logprobs for e in c.logprobs.content or ()]
    assert "".join(e.token for e in entries).startswith(ANSWERS["Hello!"])
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert bytes(entry.bytes or ()).decode() == entry.token


def test_stop_string_and_limit(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(messages=HELLO, stop=["model"], **GREEDY)
    assert stopped.choices[0].message.content == "Hello! I am the GInfer demo "
    assert stopped.choices[0].finish_reason == "stop"
    cut = client.chat.completions.create(messages=HELLO, max_completion_tokens=3, **GREEDY)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 3


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str | None:
        completion = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Write a long story about the sea."}],
            temperature=1.5,
            seed=seed,
            max_tokens=40,
            extra_body={"enable_thinking": False},
        )
        return completion.choices[0].message.content

    assert draw(2**64 - 1) == draw(2**64 - 1)
    assert draw(1) != draw(2)


def test_a_conversation_reuses_its_prefix(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Explain Gated DeltaNet, please. " * 20}]
    first = client.chat.completions.create(messages=messages, max_tokens=64, **GREEDY)
    messages += [first.choices[0].message, {"role": "user", "content": "Hello!"}]
    second = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 64


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_an_answer_that_comes_back_is_replayed_token_for_token(
    client: openai.OpenAI, seed: int
) -> None:
    """Hot sampling spells words in tokens that the tokenizer would not choose."""
    messages: list[Any] = [{"role": "user", "content": "Write a long story about the sea."}]
    off = {"enable_thinking": False}
    first = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=40, temperature=1.5, seed=seed, extra_body=off
    )
    messages += [first.choices[0].message, {"role": "user", "content": "Hello!"}]
    second = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # all but the last token
    assert second.usage.prompt_tokens_details.cached_tokens == held


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"wish": 1})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "wish")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bias:
        client.chat.completions.create(model=MODEL, messages=HELLO, logit_bias={"5000": 1})
    assert bias.value.param == "logit_bias"


def test_a_large_body_is_413(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * (3 << 20)}]
        )
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"
