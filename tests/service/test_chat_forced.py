"""What Chat enforces while generating: formats, strict arguments, tool choices, one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import orjson
import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai

    from tests.service.server import Server

ASK: dict[str, Any] = {
    "model": "qwen3.8-demo",
    "messages": [{"role": "user", "content": "What is the weather in Bergen, Tokyo and Lima?"}],
    "temperature": 0,
    "max_tokens": 400,
    "extra_body": {"enable_thinking": False},
}


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = function("get_weather", {"city": {"type": "string"}}, description="Weather of a city.")
PAINT = function("paint", {"colour": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2]}})
STRICT = {**PAINT, "function": PAINT["function"] | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "paint"}}


class Answer(BaseModel):
    """A finite language, so that every answer ends."""

    mood: Literal["good", "bad"]
    sure: bool


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as opened:
        yield opened


@pytest.mark.parametrize("thinking", [False, True])
def test_the_sdk_parses_a_model(client: openai.OpenAI, thinking: bool) -> None:
    more = {"extra_body": {"enable_thinking": thinking, "thinking_budget": 40}}
    completion = client.chat.completions.parse(response_format=Answer, **ASK | more)
    message = completion.choices[0].message
    assert completion.choices[0].finish_reason == "stop"
    assert isinstance(message.parsed, Answer)
    assert hasattr(message, "reasoning_content") is thinking


def test_a_json_object_is_an_object(client: openai.OpenAI) -> None:
    ask = ASK | {"messages": [{"role": "user", "content": "Name two colours as JSON."}]}
    completion = client.chat.completions.create(response_format={"type": "json_object"}, **ask)
    choice = completion.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(orjson.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").lstrip().startswith("{")


def test_a_named_strict_call_obeys_its_schema(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, STRICT]
    named: Any = NAMED
    with client.chat.completions.stream(tools=tools, tool_choice=named, **ASK) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "paint"
    arguments = orjson.loads(call.function.arguments)
    assert arguments["colour"] in ("red", "blue")
    assert arguments["coats"] in (1, 2)


def test_calls_are_forced_limited_and_narrowed(client: openai.OpenAI) -> None:
    def calls(ask: dict[str, Any], **more: Any) -> list[str]:
        completion = client.chat.completions.create(tools=[WEATHER, PAINT], **ask, **more)
        message = completion.choices[0].message
        return [call.function.name for call in message.tool_calls or ()]

    hello = ASK | {"messages": [{"role": "user", "content": "Hello!"}]}
    assert calls(hello, tool_choice="required")
    assert calls(ASK, parallel_tool_calls=False) == ["get_weather"]
    only = {"mode": "required", "tools": [NAMED]}
    narrowed = calls(ASK, tool_choice={"type": "allowed_tools", "allowed_tools": only})
    assert set(narrowed) == {"paint"}
