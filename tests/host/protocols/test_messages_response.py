"""Events and messages built from engine events: transcripts, split-independence, stop reasons."""

import itertools
import json
from base64 import urlsafe_b64decode
from dataclasses import replace

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from appliance.protocols.messages_response import (
    MessagesCollector,
    MessagesWriter,
    Origin,
    applied_edits,
)
from appliance.protocols.turn import MalformedToolCallError
from ginfer.engine.request import FinishReason, Started
from ginfer.errors import QueueTimeoutError
from ginfer.prompt import Channel
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import delta, finished, values
from tests.host.protocols.message_bodies import SEARCH, SIGNER, WEATHER, parse, with_messages
from tests.host.protocols.test_chat_response import CALLS

ORIGIN = Origin(signer=SIGNER, response_id="msg_0123456789abcdef")
STARTED = Started(request_id="r", prompt_tokens=12, cached_tokens=8, reuse_path="append")
INPUT = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8}
USAGE = {**INPUT, "output_tokens": 5, "output_tokens_details": {"thinking_tokens": 2}}
HEAD = {
    "id": "msg_0123456789abcdef",
    "type": "message",
    "role": "assistant",
    "model": "any",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
}
START = {"type": "message_start", "message": HEAD | {"usage": {**INPUT, "output_tokens": 0}}}
STOP = {"type": "message_stop"}
THOUGHTS = [delta("hm ", Channel.REASONING), delta("so", Channel.REASONING)]
SIGNATURE = SIGNER.sign("hm so")


def origin(request, frontend):
    """The origin as the route makes it, with the id of the tests."""
    return replace(ORIGIN, applied_edits=applied_edits(request, frontend))


def stream(deltas, frontend=CALLS, end=None, request=None, **fields):
    """The events of a whole stream; each frame is named like its data."""
    request = request or parse(stream=True, **fields)
    writer = MessagesWriter(request, origin(request, frontend), frontend)
    frames = [*writer.start(), *writer.started(STARTED)]
    for event in deltas:
        frames += writer.delta(event)
    frames += [*writer.flush(), *writer.finish(end or finished())]
    events = values(frames)
    names = [line for line in b"".join(frames).decode().split("\n") if line.startswith("event: ")]
    assert names == [f"event: {event['type']}" for event in events]
    assert events.pop(0) == {"type": "ping"}
    return events


def whole(deltas, frontend=CALLS, end=None, request=None, **fields):
    """The message of a response that is not streamed."""
    request = request or parse(**fields)
    collector = MessagesCollector(request, origin(request, frontend), frontend)
    for event in deltas:
        collector.delta(event)
    return collector.finish(end or finished())


def opened(index, kind, **members):
    block = {"type": kind, **members}
    return {"type": "content_block_start", "index": index, "content_block": block}


def more(index, kind, **members):
    change = {"type": kind, **members}
    return {"type": "content_block_delta", "index": index, "delta": change}


def closed(index):
    return {"type": "content_block_stop", "index": index}


def ended(reason, sequence=None):
    change = {"stop_reason": reason, "stop_sequence": sequence}
    return {"type": "message_delta", "delta": change, "usage": USAGE}


def test_transcript_of_thinking_and_text():
    assert stream([*THOUGHTS, delta("Hi"), delta(" you")]) == [
        START,
        opened(0, "thinking", thinking="", signature=""),
        more(0, "thinking_delta", thinking="hm "),
        more(0, "thinking_delta", thinking="so"),
        more(0, "signature_delta", signature=SIGNATURE),
        closed(0),
        opened(1, "text", text=""),
        more(1, "text_delta", text="Hi"),
        more(1, "text_delta", text=" you"),
        closed(1),
        ended("end_turn"),
        STOP,
    ]


def test_transcript_of_two_calls():
    texts = ["Look.", "<call>", "<city>", "</city>", "<two>"]
    call = {"name": "get_weather", "input": {}}
    assert stream([delta(t) for t in texts], tools=[WEATHER]) == [
        START,
        opened(0, "text", text=""),
        more(0, "text_delta", text="Look."),
        closed(0),
        opened(1, "tool_use", id=ORIGIN.call_id(0), **call),
        more(1, "input_json_delta", partial_json='{"city": "Os'),
        more(1, "input_json_delta", partial_json='lo"}'),
        closed(1),
        opened(2, "tool_use", id=ORIGIN.call_id(1), **call),
        more(2, "input_json_delta", partial_json="{}"),
        closed(2),
        ended("tool_use"),
        STOP,
    ]
    assert ORIGIN.call_id(0) != ORIGIN.call_id(1)


def test_input_that_is_not_to_be_streamed_comes_in_one_piece():
    deltas = [delta(t) for t in ("<call>", "<city>", "</city>")]
    events = stream(deltas, tools=[WEATHER | {"eager_input_streaming": False}])
    assert events[2:4] == [
        more(0, "input_json_delta", partial_json='{"city": "Oslo"}'),
        closed(0),
    ]
    body = whole(deltas, tools=[WEATHER | {"eager_input_streaming": False}])
    assert body["content"][0]["input"] == {"city": "Oslo"}


def test_whole_message():
    texts = ["Look.", "<call>", "<city>", "</city>", "<two>"]
    body = whole([*THOUGHTS, *map(delta, texts)], tools=[WEATHER])
    call = {"type": "tool_use", "name": "get_weather"}
    assert body == HEAD | {
        "content": [
            {"type": "thinking", "thinking": "hm so", "signature": SIGNATURE},
            {"type": "text", "text": "Look."},
            {**call, "id": ORIGIN.call_id(0), "input": {"city": "Oslo"}},
            {**call, "id": ORIGIN.call_id(1), "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": USAGE,
    }


def test_hidden_thinking_is_in_the_signature_alone():
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    events = stream([*THOUGHTS, delta("Hi")], **fields)
    assert [e["type"] for e in events[1:4]] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    assert events[2]["delta"]["type"] == "signature_delta"
    block = whole([*THOUGHTS, delta("Hi")], **fields)["content"][0]
    assert block["thinking"] == ""
    for signature in (events[2]["delta"]["signature"], block["signature"]):
        sealed = urlsafe_b64decode(signature.rpartition(".")[2])
        assert b"hm so" not in sealed
        assert SIGNER.read("", signature, "p") == "hm so"


def test_an_empty_answer_is_one_empty_text():
    assert stream([]) == [START, opened(0, "text", text=""), closed(0), ended("end_turn"), STOP]
    assert whole([])["content"] == [{"type": "text", "text": ""}]


STOPS = [
    (FinishReason.STOP_TOKEN, ["x"], None, ("end_turn", None)),
    (FinishReason.CANCELLED, ["x"], None, ("end_turn", None)),
    (FinishReason.STOP_STRING, ["x"], "END", ("stop_sequence", "END")),
    (FinishReason.OUTPUT_LIMIT, ["x"], None, ("max_tokens", None)),
    (FinishReason.CONTEXT_LIMIT, ["x"], None, ("model_context_window_exceeded", None)),
    (FinishReason.STOP_TOKEN, ["<call>", "<city>", "</city>"], None, ("tool_use", None)),
    (FinishReason.STOP_STRING, ["<two>"], "END", ("tool_use", None)),
    (FinishReason.OUTPUT_LIMIT, ["<call>", "<city>", "</city>"], None, ("max_tokens", None)),
    (FinishReason.OUTPUT_LIMIT, ["<call>", "<city>", "<broken>"], None, ("max_tokens", None)),
]


@pytest.mark.parametrize(("reason", "texts", "stop", "expected"), STOPS)
def test_stop_reason(reason, texts, stop, expected):
    end = replace(finished(reason), stop=stop)
    deltas = [delta(t) for t in texts]
    body = whole(deltas, end=end, tools=[WEATHER])
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    *_, last, _stop = stream(deltas, end=end, tools=[WEATHER])
    assert last == ended(*expected)


def test_a_call_cut_by_a_limit_is_never_closed_nor_in_the_whole_message():
    deltas = [delta(t) for t in ("Look.", "<call>", "<city>", "<broken>")]
    end = finished(FinishReason.OUTPUT_LIMIT)
    events = stream(deltas, end=end, tools=[WEATHER])
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0]
    assert events[-2:] == [ended("max_tokens"), STOP]
    body = whole(deltas, end=end, tools=[WEATHER])
    assert body["content"] == [{"type": "text", "text": "Look."}]


def test_a_malformed_call_is_an_error_after_all_that_was_shown():
    deltas = [delta(t) for t in ("<call>", "<city>", "<broken>", "and so")]
    writer = MessagesWriter(parse(stream=True, tools=[WEATHER]), ORIGIN, CALLS)
    shown = [event for d in deltas for event in values(writer.delta(d))]
    assert shown[-1] == more(1, "text_delta", text="and so")
    with pytest.raises(MalformedToolCallError) as caught:
        writer.finish(finished())
    (error,) = values(writer.fail(caught.value))
    assert error["error"]["type"] == "api_error"
    assert error["error"]["code"] == "tool_call_malformed"
    with pytest.raises(MalformedToolCallError):
        whole(deltas, tools=[WEATHER])


def test_an_error_in_the_queue_is_an_event_of_its_own():
    writer = MessagesWriter(parse(stream=True), ORIGIN, CALLS)
    (frame,) = writer.fail(QueueTimeoutError("too long"))
    assert frame.startswith(b"event: error\n")
    assert values([frame])[0]["error"]["type"] == "overloaded_error"


def test_the_message_tells_what_happened_to_the_request():
    header = "x-anthropic-billing-header: cc_version=2.1.197.7d5; cc_entrypoint=cli;"
    request = {"tools": [SEARCH], "metadata": {"user_id": "u"}, "system": header}
    report = {
        "accepted_without_effect": ["metadata", "tools.web_search_20250305"],
        "canonicalised": ["x-anthropic-billing-header"],
    }
    assert stream([], **request)[0]["message"]["ginfer"] == report
    assert whole([], **request)["ginfer"] == report
    assert "ginfer" not in whole([])


def test_cut_thinking_is_reported_when_asked_for():
    def history(keep):
        thought = {"type": "thinking", "thinking": "Let me think.", "signature": ""}
        turn = [("assistant", [thought, {"type": "text", "text": "a"}]), ("user", "u")]
        edits = [{"type": "clear_thinking_20251015", "keep": keep}]
        return with_messages(
            ("user", "u"), *turn, *turn, stream=True, context_management={"edits": edits}
        )

    frontend = demo_frontend()
    edit = {
        "type": "clear_thinking_20251015",
        "cleared_thinking_turns": 1,
        "cleared_input_tokens": len(frontend.encode("Let me think.")),
    }
    for keep, edits in ((1, [edit]), ("all", [])):
        body = whole([], frontend, request=history(keep))
        assert body["context_management"] == {"applied_edits": edits}
        BetaMessage.model_validate(body, strict=True)
        last = stream([], frontend, request=history(keep))[-2]
        assert last["context_management"] == {"applied_edits": edits}
    assert "context_management" not in whole([])


EVENT = TypeAdapter(RawMessageStreamEvent)


def accumulated(events):
    """The message that the official SDK makes of events; it validates each."""
    snapshot, buffers = None, {}
    for event in events:
        typed = EVENT.validate_python(event)
        assert typed.model_dump(exclude_unset=True) == event
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    message = json.loads(snapshot.model_dump_json(exclude_unset=True))
    assert message.pop("stop_details", None) is None
    return message


CALL_TEXT = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
CITY, DAYS = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("city", "Åre"), ("days", "2")))
TEXT = "Let me look.\n\n" + CALL_TEXT.format(CITY + DAYS) + "\n" + CALL_TEXT.format(CITY)
INPUTS = [{"city": "Åre", "days": 2}, {"city": "Åre"}]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, len(TEXT) - 1), unique=True, max_size=12), st.integers(1, len(TEXT)))
def test_any_split_is_the_same_message_streamed_and_whole(cuts, length):
    text = TEXT[:length]
    bounds = [0, *sorted(c for c in cuts if c < length), length]
    pieces = [delta(text[a:b]) for a, b in itertools.pairwise(bounds)]
    end = finished(FinishReason.STOP_TOKEN if text == TEXT else FinishReason.OUTPUT_LIMIT)
    options = {"frontend": demo_frontend(), "end": end, "tools": [WEATHER]}
    body = whole([*THOUGHTS, *pieces], **options)
    assert body == whole([delta("hm so", Channel.REASONING), delta(text)], **options)
    Message.model_validate(body, strict=True)
    events = stream([*THOUGHTS, *pieces], **options)
    streamed = accumulated(events)
    stopped = {e["index"] for e in events if e["type"] == "content_block_stop"}
    streamed["content"] = [b for i, b in enumerate(streamed["content"]) if i in stopped]
    assert streamed == body
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    assert [call["input"] for call in calls] == INPUTS[: len(calls)]
    if text == TEXT:
        assert (body["stop_reason"], len(calls)) == ("tool_use", 2)
        assert body["content"][1] == {"type": "text", "text": "Let me look."}
    else:
        assert body["stop_reason"] == "max_tokens"


def test_blocks_open_and_close_one_after_another():
    events = stream([*THOUGHTS, delta(TEXT), delta("Hi")], demo_frontend(), tools=[WEATHER])
    place = -1
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                place += 1
        assert event["index"] == place
    starts = sum(e["type"] == "content_block_start" for e in events)
    stops = sum(e["type"] == "content_block_stop" for e in events)
    assert starts == stops == place + 1


def test_the_message_of_the_sdk_is_accepted_back():
    body = whole([*THOUGHTS, delta(TEXT)], demo_frontend(), tools=[WEATHER])
    message = Message.model_validate(orjson.loads(orjson.dumps(body)))
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": "rain"}
        for b in message.content
        if b.type == "tool_use"
    ]
    back = with_messages(
        ("user", "u"),
        ("assistant", [block.model_dump() for block in message.content]),
        ("user", results),
        tools=[WEATHER],
    )
    turn = back.messages[1]
    assert (turn.reasoning, turn.text) == ("hm so", "Let me look.")
    assert [call.arguments for call in turn.tool_calls] == INPUTS
    assert [m.role for m in back.messages] == ["user", "assistant", "tool", "tool"]
