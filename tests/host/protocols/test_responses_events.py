"""Events and objects of Responses: transcripts, invariants, any split of the text."""

import itertools
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from appliance.protocols.responses.custom_input import InputText
from appliance.protocols.turn import MalformedToolCallError
from appliance.response_store import ResponseStoreCapacityError
from ginfer.engine.request import FinishReason, TokenLogprob
from ginfer.errors import QueueTimeoutError
from ginfer.prompt import Channel
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import delta, finished
from tests.host.protocols.response_bodies import (
    PATCH,
    WEATHER,
    checked,
    memory,
    transcript,
    whole,
    writer,
)

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = {"tools": [WEATHER, PATCH]}
CALL_TEXT = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
CITY, DAYS = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("city", "Åre"), ("days", "2")))
DIFF = '*** Begin\n-a "quoted"\\ \t\n+å 🙂\n*** End'
CUSTOM_TEXT = (
    "<tool_call>\n<function=apply_patch>\n<parameter={}>\n{}\n</parameter>\n</function>\n"
    "</tool_call>"
)
THOUGHT = delta("hm", Channel.REASONING)
LIMIT = finished(FinishReason.OUTPUT_LIMIT)


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def last(events):
    return events[-1]["response"]


def test_transcript_of_reasoning_and_text():
    events = transcript([THOUGHT, delta("Hi"), delta(" there")], demo_frontend())
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message = last(events)["output"]
    assert reasoning["id"].startswith("rs_")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["id"].startswith("msg_")
    assert message["content"][0]["text"] == "Hi there"
    assert message["content"][0]["logprobs"] == []
    assert last(events)["status"] == "completed"
    assert last(events)["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_transcript_of_calls():
    text = "Look." + CALL_TEXT.format(CITY + DAYS) + "\n" + CUSTOM_TEXT.format("input", DIFF)
    pieces = [delta(text[i : i + 3]) for i in range(0, len(text), 3)]
    events = transcript(pieces, demo_frontend(), **TOOLS)
    assert list(dict.fromkeys(kinds(events))) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "completed",
    ]
    _, function, custom = last(events)["output"]
    assert function["id"].startswith("fc_")
    assert function["call_id"].startswith("call_")
    assert json.loads(function["arguments"]) == {"city": "Åre", "days": 2}
    assert custom["id"].startswith("ctc_")
    assert (custom["name"], custom["input"]) == ("apply_patch", DIFF)
    assert custom["call_id"] != function["call_id"]
    assert kinds(events).count("function_call_arguments.delta") > 3
    assert kinds(events).count("custom_tool_call_input.delta") > 3


def test_namespaced_call_is_told_by_its_own_name():
    tools = [{"type": "namespace", "name": "mcp", "description": "", "tools": [WEATHER]}]
    text = CALL_TEXT.replace("get_weather", "mcp.get_weather").format(CITY)
    (call,) = whole([delta(text)], demo_frontend(), tools=tools)["output"]
    assert (call["namespace"], call["name"]) == ("mcp", "get_weather")


def test_an_empty_answer_has_an_empty_message():
    events = transcript([THOUGHT], demo_frontend())
    assert [item["type"] for item in last(events)["output"]] == ["reasoning", "message"]
    assert last(events)["output"][1]["content"][0]["text"] == ""


@pytest.mark.parametrize("reason", [FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_LIMIT])
def test_a_limit_makes_the_response_incomplete(reason):
    events = transcript([THOUGHT, delta("Hi")], demo_frontend(), end=finished(reason))
    assert kinds(events)[-1] == "incomplete"
    assert last(events)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last(events)["output"]] == ["completed", "incomplete"]
    assert last(events)["completed_at"] is None


def test_a_cancelled_response_says_so_and_is_not_stored():
    kept = memory()
    end = finished(FinishReason.CANCELLED)
    events = transcript([THOUGHT, delta("Hi")], demo_frontend(), end=end, remembered=kept)
    assert kinds(events)[-1] == "cancelled"
    assert last(events)["status"] == "cancelled"
    assert [item["status"] for item in last(events)["output"]] == ["completed", "incomplete"]
    assert len(kept.store) == 0


def test_a_limit_in_the_reasoning_leaves_no_message():
    events = transcript([THOUGHT], demo_frontend(), end=LIMIT)
    assert [item["type"] for item in last(events)["output"]] == ["reasoning"]
    assert last(events)["output"][0]["status"] == "incomplete"


def test_a_call_cut_by_a_limit_stays_unfinished():
    text = CALL_TEXT.format(CITY)[:-40]
    events = transcript([delta(text)], demo_frontend(), end=LIMIT, **TOOLS)
    assert "output_item.done" not in kinds(events)
    assert "function_call_arguments.done" not in kinds(events)
    (call,) = last(events)["output"]
    assert call["status"] == "incomplete"
    assert kinds(events)[-1] == "incomplete"


def failed(text, error=MalformedToolCallError, **fields):
    """The events of a stream whose end raises; the error becomes response.failed."""
    builder = writer(demo_frontend(), **fields)
    frames = builder.start() + builder.delta(THOUGHT) + builder.delta(delta(text))
    frames += builder.flush()
    with pytest.raises(error) as caught:
        builder.finish(finished())
    return checked(frames + builder.fail(caught.value))


def test_a_malformed_call_fails_the_response():
    events = failed("<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo", **TOOLS)
    assert kinds(events)[-1] == "failed"
    assert last(events)["status"] == "failed"
    assert last(events)["error"]["code"] == "tool_call_malformed"
    reasoning, call = last(events)["output"]
    assert (reasoning["status"], call["status"]) == ("completed", "incomplete")
    assert call["arguments"].startswith('{"city": "Oslo')


def test_a_malformed_call_is_an_error_of_the_whole_response():
    with pytest.raises(MalformedToolCallError):
        whole([delta("<tool_call>\n<function=get_weather>\n")], demo_frontend(), **TOOLS)


def test_a_custom_call_with_two_texts_is_malformed():
    second = "<parameter=more>\nx\n</parameter>\n</function>"
    text = CUSTOM_TEXT.format("input", "a").replace("</function>", second)
    events = failed(text, **TOOLS)
    assert last(events)["error"]["code"] == "tool_call_malformed"
    assert last(events)["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("name", ["input", "patch"])
def test_the_text_of_a_custom_call_may_have_any_name(name):
    (call,) = whole([delta(CUSTOM_TEXT.format(name, DIFF))], demo_frontend(), **TOOLS)["output"]
    assert call["input"] == DIFF


def test_a_custom_call_without_text_is_empty():
    text = CUSTOM_TEXT.replace("<parameter={}>\n{}\n</parameter>\n", "")
    (call,) = whole([delta(text)], demo_frontend(), **TOOLS)["output"]
    assert call["input"] == ""


def test_an_error_before_any_output_is_told_in_the_response():
    builder = writer(demo_frontend())
    events = checked(builder.start() + builder.fail(QueueTimeoutError("too long")))
    assert kinds(events) == ["created", "in_progress", "failed"]
    assert last(events)["error"]["code"] == "request_queue_timeout"
    assert last(events)["output"] == []


def test_an_error_in_the_middle_closes_the_text_and_leaves_the_call():
    for text, status in (("Hi", "incomplete"), ("<tool_call>\n<function=get_weather>\n", None)):
        builder = writer(demo_frontend(), **TOOLS)
        frames = builder.start() + builder.delta(THOUGHT) + builder.delta(delta(text))
        events = checked(frames + builder.fail(QueueTimeoutError("lost")))
        done = [e["item"]["status"] for e in events if e["type"] == "response.output_item.done"]
        assert done == ["completed", *([status] if status else [])]
        assert last(events)["output"][-1]["status"] == "incomplete"
        assert last(events)["status"] == "failed"


def test_a_response_that_cannot_be_stored_fails_after_its_items():
    kept = memory()
    kept.store._max_nbytes = 100
    events = failed("Hi", ResponseStoreCapacityError, remembered=kept)
    assert kinds(events)[-2:] == ["output_item.done", "failed"]
    assert last(events)["error"]["code"] == "response_store_capacity_exceeded"


def test_text_after_a_call_is_a_message_of_its_own():
    text = "One." + CALL_TEXT.format(CITY) + "\nTwo." + CALL_TEXT.format(CITY) + "\n\n"
    output = whole([delta(text)], demo_frontend(), **TOOLS)["output"]
    kinds_found = [item["type"] for item in output]
    assert kinds_found == ["message", "function_call", "message", "function_call"]
    assert output[2]["content"][0]["text"] == "\nTwo."


def test_only_tools_on_offer_are_called():
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "apply_patch"}],
    }
    text = CALL_TEXT.format(CITY)
    body = whole([delta(text)], demo_frontend(), tool_choice=choice, **TOOLS)
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["output"][0]["content"][0]["text"] == text
    assert body["tool_choice"] == choice


def test_reasoning_is_sealed_on_request():
    kept = memory()
    include = ["reasoning.encrypted_content"]
    body = whole([THOUGHT, delta("Hi")], demo_frontend(), remembered=kept, include=include)
    sealed = body["output"][0]["encrypted_content"]
    assert kept.unseal(sealed, "p") == "hm"
    events = transcript([THOUGHT, delta("Hi")], demo_frontend(), include=include)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done[0]["encrypted_content"] == last(events)["output"][0]["encrypted_content"]
    assert whole([THOUGHT], demo_frontend())["output"][0]["encrypted_content"] is None


def entry(token_id, *top):
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top)


def test_logprobs_belong_to_the_text_of_the_message():
    text = "Hi there"
    ids = demo_frontend().encode(text)
    deltas = [delta("hm", Channel.REASONING, logprobs=(entry(7),))]
    shown = [demo_frontend().token_text(i) for i in ids]
    deltas += [delta(s, logprobs=(entry(i, (i, -0.5), (9, -1.0)),)) for s, i in zip(shown, ids)]
    call = CALL_TEXT.format(CITY)
    deltas += [delta(c, logprobs=(entry(5),)) for c in call]
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **TOOLS}
    events = transcript(deltas, demo_frontend(), **fields)
    message = next(i for i in last(events)["output"] if i["type"] == "message")
    logprobs = message["content"][0]["logprobs"]
    assert "".join(e["token"] for e in logprobs) == text
    assert [len(e["top_logprobs"]) for e in logprobs] == [2] * len(ids)
    streamed = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert list(itertools.chain(*streamed)) == logprobs
    assert whole(deltas, demo_frontend(), **fields)["output"] == last(events)["output"]


def test_what_was_accepted_without_effect_is_reported():
    fields = {"user": "u", "tools": [{"type": "web_search"}], "reasoning": {"summary": "auto"}}
    events = transcript([delta("Hi")], demo_frontend(), **fields)
    names = ["user", "reasoning.summary", "tools.web_search"]
    assert events[0]["response"]["ginfer"] == {"accepted_without_effect": names}
    assert last(events)["ginfer"] == {"accepted_without_effect": names}


def test_integers_of_any_size_come_back():
    schema = {"type": "object", "properties": {"n": {"maximum": 10**40}}}
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    builder = writer(demo_frontend(), tools=tools)
    frame = builder.start()[0].split(b"data: ")[1]
    assert json.loads(frame)["response"]["tools"][0]["parameters"] == schema


def test_the_official_sdk_reads_everything():
    text = "Look." + CALL_TEXT.format(CITY) + "\n" + CUSTOM_TEXT.format("input", DIFF)
    deltas = [THOUGHT, *(delta(c, logprobs=(entry(5, (5, -0.5)),)) for c in text)]
    fields = {
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 1,
        "user": "u",
        "metadata": {"k": "v"},
        "tools": [
            WEATHER,
            PATCH,
            {"type": "web_search"},
            {"type": "namespace", "name": "n", "description": "d", "tools": [WEATHER]},
        ],
    }
    for event in transcript(deltas, demo_frontend(), **fields):
        EVENT.validate_python(event)
    read = Response.model_validate(whole(deltas, demo_frontend(), **fields))
    assert read.output_text == "Look."
    assert [item.type for item in read.output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]
    assert read.usage.input_tokens_details.cached_tokens == 8
    assert read.metadata == {"k": "v"}
    assert [tool.type for tool in read.tools] == ["function", "custom", "web_search", "namespace"]


TEXT = (
    "Let me look.\n\n"
    + CALL_TEXT.format(CITY + DAYS)
    + "\n"
    + CUSTOM_TEXT.format("input", DIFF)
    + "\nDone."
)


def joined(events):
    """Items as a client that reads deltas alone joins them."""
    items = []
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append([event["item"]["type"], ""])
        elif event["type"].endswith(".delta"):
            items[event["output_index"]][1] += event["delta"]
    return items


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, len(TEXT) - 1), unique=True, max_size=12), st.integers(1, len(TEXT)))
def test_any_split_gives_the_same_items(cuts, length):
    text = TEXT[:length]
    bounds = [0, *sorted(c for c in cuts if c < length), length]
    pieces = [delta(text[a:b]) for a, b in itertools.pairwise(bounds)]
    thought = [delta("hm ", Channel.REASONING), delta("so", Channel.REASONING)]
    options = {"end": finished() if text == TEXT else LIMIT, **TOOLS}
    events = transcript([*thought, *pieces], demo_frontend(), **options)
    at_once = [delta("hm so", Channel.REASONING), delta(text)]
    expected = whole(at_once, demo_frontend(), **options)
    assert last(events)["output"] == expected["output"]
    assert joined(events) == joined(transcript(at_once, demo_frontend(), **options))
    if text == TEXT:
        assert [kind for kind, _ in joined(events)] == [
            "reasoning",
            "message",
            "function_call",
            "custom_tool_call",
            "message",
        ]
        assert joined(events)[3][1] == DIFF


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.text(min_size=1, max_size=5),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_input_text_of_any_split(text, name, cuts):
    wire = json.dumps({name: text}, ensure_ascii=False)
    bounds = [0, *sorted(c for c in cuts if c < len(wire)), len(wire)]
    reader = InputText()
    assert "".join(reader.feed(wire[a:b]) for a, b in itertools.pairwise(bounds)) == text
    assert not reader.excess


def test_every_event_round_trips_through_the_sdk_union():
    """The SDK picks the class of an event by its type; none of ours is unknown to it."""
    for event in transcript([THOUGHT, delta(TEXT)], demo_frontend(), **TOOLS):
        built = construct_type(type_=ResponseStreamEvent, value=orjson.loads(orjson.dumps(event)))
        assert built.type == event["type"]
        assert type(built).__name__ != "dict"
