"""The official Anthropic client against the live server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import orjson
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock
from pydantic import BaseModel

from tests.service.chat import ANSWERS, MODEL
from tests.service.test_openai_sdk import SNOW, WEATHER_TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anthropic.types import Message

    from tests.service.server import Server

GREEDY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 256,
    "thinking": {"type": "disabled"},
    "extra_body": {"temperature": 0, "presence_penalty": 0},
}
THINKING: dict[str, Any] = GREEDY | {"thinking": {"type": "adaptive"}}
HELLO: Any = [{"role": "user", "content": "Hello!"}]
SUM: Any = [{"role": "user", "content": "What is 348 + 275?"}]
TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in WEATHER_TOOLS
]
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{0}; cc_entrypoint=sdk-cli; cch={0};"


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as opened:
        yield opened


def text_of(message: Message) -> str:
    """The text blocks joined."""
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_models_are_listed_with_their_context(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.max_input_tokens) == (MODEL, "model", 8192)
    assert type(model).model_validate_json(model.model_dump_json()) == model
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-other")


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_whole(client: anthropic.Anthropic, question: str) -> None:
    message = client.messages.create(messages=[{"role": "user", "content": question}], **GREEDY)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert block.text == ANSWERS[question]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")


def test_any_model_name_is_answered_and_repeated(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=HELLO, **GREEDY | {"model": "claude-opus-4-6"})
    assert message.model == "claude-opus-4-6"
    assert text_of(message) == ANSWERS["Hello!"]


def test_answers_streamed_event_by_event(client: anthropic.Anthropic) -> None:
    with client.messages.create(messages=HELLO, stream=True, **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)


def test_streaming_helper_and_usage(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=HELLO, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == text_of(message) == ANSWERS["Hello!"]
    usage = message.usage
    read = usage.cache_read_input_tokens or 0
    assert (usage.input_tokens + read, usage.output_tokens) == (14, 16)
    assert usage.cache_creation_input_tokens == 0


def test_async_whole_and_streamed(server: Server) -> None:
    async def run() -> list[str]:
        async with server.anthropic_async() as client:
            whole = client.messages.create(messages=HELLO, **GREEDY)
            async with client.messages.stream(messages=HELLO, **GREEDY) as stream:
                final = await stream.get_final_message()
            return [text_of(await whole), text_of(final)]

    assert asyncio.run(run()) == [ANSWERS["Hello!"]] * 2


def test_thinking_is_signed_and_round_trips(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=SUM, **THINKING) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= set(kinds)
    thought, answer = first.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(answer, TextBlock)
    assert thought.thinking.startswith("Digits from the right")
    assert answer.text == "348 + 275 = 623"
    assert first.usage.output_tokens_details is not None
    assert first.usage.output_tokens_details.thinking_tokens > 40

    history: Any = [*SUM, {"role": "assistant", "content": first.content}, *HELLO]
    second = client.messages.create(messages=history, **THINKING)
    read = second.usage.cache_read_input_tokens or 0
    prompt = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert read >= prompt  # the thinking stayed in its place

    thought.thinking += " Or not."
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(messages=history, **GREEDY)
    assert "messages.1.content.0.signature" in caught.value.message


def test_omitted_thinking_comes_back_from_its_signature(client: anthropic.Anthropic) -> None:
    def ask(display: str) -> tuple[Message, int]:
        wish: Any = {"type": "adaptive", "display": display}
        first = client.messages.create(messages=SUM, **GREEDY | {"thinking": wish})
        history: Any = [*SUM, {"role": "assistant", "content": first.content}, *HELLO]
        counted = client.messages.count_tokens(model=MODEL, messages=history)
        return first, counted.input_tokens

    shown, num_tokens = ask("summarized")
    hidden, num_hidden = ask("omitted")
    assert isinstance(hidden.content[0], ThinkingBlock)
    assert hidden.content[0].thinking == ""
    assert text_of(shown) == text_of(hidden)
    assert num_tokens == num_hidden


def test_a_thinking_budget_is_kept(client: anthropic.Anthropic) -> None:
    wish: Any = {"type": "enabled", "budget_tokens": 8}
    message = client.messages.create(messages=SUM, **GREEDY | {"thinking": wish})
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens <= 16
    assert "</think>" not in text_of(message)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_full_round_trip(client: anthropic.Anthropic, stream: bool) -> None:
    def ask() -> Message:
        if not stream:
            return client.messages.create(messages=messages, tools=TOOLS, **GREEDY)
        with client.messages.stream(messages=messages, tools=TOOLS, **GREEDY) as opened:
            return opened.get_final_message()

    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = ask()
    assert asked.stop_reason == "tool_use"
    (call,) = asked.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": SNOW}
    messages += [
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    told = ask()
    assert text_of(told) == "The weather in Oslo: -3 °C, snow."
    assert told.stop_reason == "end_turn"


def test_tool_input_streams_in_fragments(client: anthropic.Anthropic) -> None:
    question: Any = "What is the weather in Bergen, Tokyo and Lima?"
    with client.messages.stream(
        messages=[{"role": "user", "content": question}], tools=TOOLS[::-1], **GREEDY
    ) as stream:
        fragments = [event for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert [call.input for call in calls] == [{"city": c} for c in ("Bergen", "Tokyo", "Lima")]
    assert len({call.id for call in calls}) == 3
    assert len(fragments) >= 3  # more when nothing had to be merged for a slow reader


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_calls_can_be_forced_and_limited(client: anthropic.Anthropic, thinking: str) -> None:
    def calls(question: str, **choice: Any) -> list[tuple[str, object]]:
        message = client.messages.create(
            messages=[{"role": "user", "content": question}],
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
            **GREEDY | {"thinking": {"type": thinking}},
        )
        assert message.stop_reason == "tool_use"
        assert not text_of(message)
        return [(b.name, b.input) for b in message.content if isinstance(b, ToolUseBlock)]

    assert calls("Hello!", type="any")
    ((name, arguments),) = calls("Hello!", type="tool", name="run_shell")
    assert name == "run_shell"
    assert isinstance(arguments, dict)
    cities = "What is the weather in Bergen, Tokyo and Lima?"
    one = calls(cities, type="auto", disable_parallel_tool_use=True)
    assert one == [("get_weather", {"city": "Bergen"})]


def test_strict_tools_obey_their_schema(client: anthropic.Anthropic) -> None:
    unit = {"type": "string", "enum": ["kelvin", "rankine"]}
    schema = TOOLS[0]["input_schema"]
    strict = {
        **TOOLS[0],
        "strict": True,
        "input_schema": {**schema, "properties": {"unit": unit}, "required": ["unit"]},
    }
    message = client.messages.create(
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[strict],
        tool_choice={"type": "any"},
        **GREEDY,
    )
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert calls
    for call in calls:
        assert isinstance(call.input, dict)
        assert call.input.keys() == {"unit"}
        assert call.input["unit"] in unit["enum"]


class Person(BaseModel):
    name: str
    age: int
    city: str


def test_output_format_is_parsed_by_the_sdk(client: anthropic.Anthropic) -> None:
    question = next(question for question in ANSWERS if question.startswith("Extract"))
    messages: Any = [{"role": "user", "content": question}]
    parsed = client.messages.parse(messages=messages, output_format=Person, **GREEDY)
    assert parsed.parsed_output == Person(name="Clara Berg", age=34, city="Oslo")
    with client.messages.stream(messages=messages, output_format=Person, **THINKING) as stream:
        final = stream.get_final_message()
    assert final.parsed_output == parsed.parsed_output


def test_stop_sequence_and_limit(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(messages=HELLO, stop_sequences=["nothing", "model"], **GREEDY)
    assert text_of(stopped) == "Hello! I am the GInfer demo "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "model")
    cut = client.messages.create(messages=HELLO, **GREEDY | {"max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_system_turns_anywhere(client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
        *HELLO,
        {"role": "system", "content": "The user is in a hurry."},
    ]
    message = client.messages.create(
        messages=messages, system=[{"type": "text", "text": "Be kind."}], **GREEDY
    )
    assert text_of(message)


def test_count_tokens_is_the_prompt_of_the_same_body(client: anthropic.Anthropic) -> None:
    fields: Any = {"messages": SUM, "tools": TOOLS, "system": "Be brief."}
    counted = client.messages.count_tokens(
        model=MODEL, thinking={"type": "disabled"}, **fields
    ).input_tokens
    usage = client.messages.create(**fields, **GREEDY | {"max_tokens": 1}).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    long: Any = [{"role": "user", "content": "word " * 9000}]
    assert client.messages.count_tokens(model=MODEL, messages=long).input_tokens > 8192


@pytest.mark.parametrize("first", ["", "Not "])
def test_a_changing_header_does_not_cost_the_prefix(
    client: anthropic.Anthropic, first: str
) -> None:
    def ask(value: str) -> Message:
        system: Any = [
            {"type": "text", "text": first + HEADER.format(value)},
            {"type": "text", "text": "You are careful. " * 40},
        ]
        return client.messages.create(messages=messages, system=system, **GREEDY)

    messages: Any = [*HELLO]
    answer = ask("a1b")
    messages += [{"role": "assistant", "content": answer.content}, *HELLO]
    message = ask("7d5")
    report = {} if first else {"ginfer": {"canonicalised": ["x-anthropic-billing-header"]}}
    assert message.model_extra == report
    read = message.usage.cache_read_input_tokens or 0
    assert read < 64 if first else read > 128


def test_beta_client_with_what_claude_code_sends(client: anthropic.Anthropic) -> None:
    cached: Any = {"cache_control": {"type": "ephemeral"}}
    message = client.beta.messages.create(
        model=MODEL,
        max_tokens=200,
        betas=["claude-code-20250219", "context-management-2025-06-27"],
        system=[{"type": "text", "text": "You are a Claude agent.", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hello!", **cached}]},
            {"role": "system", "content": "Agents: none."},
        ],
        metadata={"user_id": '{"device_id":"x"}'},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        tools=TOOLS,
        extra_body={"temperature": 0},
    )
    assert message.context_management is not None
    assert message.context_management.applied_edits == []
    assert message.model_extra == {
        "ginfer": {"accepted_without_effect": ["metadata", "cache_control"]}
    }


def test_errors_arrive_as_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(messages=HELLO, **GREEDY | {"extra_body": {"temperature": 1.5}})
    assert isinstance(wrong.value.body, dict)
    error = wrong.value.body["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_value",
        "temperature",
    )
    assert wrong.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="wish is not a parameter"):
        client.messages.create(messages=HELLO, **GREEDY | {"extra_body": {"wish": 1}})
    long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match="the context holds 8192"):
        client.messages.create(messages=long, **GREEDY)
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image is not supported"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    with pytest.raises(anthropic.ContentTooLargeError):
        client.messages.create(messages=[{"role": "user", "content": "x" * (3 << 20)}], **GREEDY)


def test_every_path_of_the_protocol_has_its_error_form(server: Server) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
    ):
        found, headers, data = server.request(method, path, b"{")
        assert found == status
        body = orjson.loads(data)
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert headers["request-id"]
