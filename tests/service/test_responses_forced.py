"""What Responses enforces while generating: formats, strict arguments, tool choices, one call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.service.test_responses_sdk import GREEDY, SHELL, THINKING, WEATHER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.service.server import Server

STRICT: dict[str, Any] = {
    "type": "function",
    "name": "paint",
    "description": "Paint a wall.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2, 3]}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Answer(BaseModel):
    """A finite language, so that every answer ends."""

    mood: Literal["good", "bad"]
    sure: bool


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as opened:
        yield opened


@pytest.mark.parametrize("options", [GREEDY, THINKING], ids=["plain", "thinking"])
def test_the_sdk_parses_a_model(client: openai.OpenAI, options: dict[str, Any]) -> None:
    response = client.responses.parse(
        input="How is your mood?", text_format=Answer, max_output_tokens=400, **options
    )
    assert isinstance(response.output_parsed, Answer)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_the_streaming_helper_parses_a_model(client: openai.OpenAI) -> None:
    with client.responses.stream(input="How is it?", text_format=Answer, **GREEDY) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_a_call_is_forced(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, SHELL]
    response = client.responses.create(
        input="Hello!", tools=tools, tool_choice="required", **GREEDY
    )
    assert {item.type for item in response.output} == {"function_call"}


def test_a_named_strict_call_obeys_its_schema(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, STRICT]
    response = client.responses.create(
        input="Hello!", tools=tools, tool_choice={"type": "function", "name": "paint"}, **GREEDY
    )
    (call,) = response.output
    assert call.type == "function_call"
    arguments = orjson.loads(call.arguments)
    assert call.name == "paint"
    assert arguments["colour"] in ("red", "blue")
    assert arguments["coats"] in (1, 2, 3)


def test_one_call_at_most(client: openai.OpenAI) -> None:
    tools: Any = [SHELL, WEATHER]
    response = client.responses.create(
        input="What is the weather in Bergen, Tokyo and Lima?",
        tools=tools,
        parallel_tool_calls=False,
        **GREEDY,
    )
    assert [item.type for item in response.output] == ["function_call"]
    assert response.parallel_tool_calls is False


def test_a_custom_call_matches_its_pattern(client: openai.OpenAI) -> None:
    pattern = "(north|south) [0-9]{2}"
    tools: Any = [
        {
            "type": "custom",
            "name": "steer",
            "description": "Steer the ship.",
            "format": {"type": "grammar", "syntax": "regex", "definition": pattern},
        }
    ]
    with client.responses.stream(
        input="Go!", tools=tools, tool_choice={"type": "custom", "name": "steer"}, **GREEDY
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.custom_tool_call_input.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(pattern, call.input)
    assert "".join(deltas) == call.input


def test_what_cannot_be_enforced_is_refused_by_name(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    tools: Any = [{"type": "web_search"}, {**STRICT, "parameters": parameters}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="Hello!", tools=tools, **GREEDY)
    assert caught.value.param == "tools.1.parameters.properties.x.pattern"
