"""Chunks and responses built from events: transcripts, split-independence, finish reasons."""

import itertools
import json
from dataclasses import dataclass, field

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from appliance.protocols.chat_response import ChatCollector, ChatWriter, usage_body
from appliance.protocols.turn import MalformedToolCallError
from ginfer.engine.request import FinishReason, TokenLogprob, Usage
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    ReasoningText,
)
from ginfer.prompt import Channel
from tests.frontends import demo_frontend
from tests.host.protocols.bodies import IDENTITY, WEATHER, delta, finished, parse, values

HEAD = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "demo",
    "system_fingerprint": None,
}
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


@dataclass
class Scripted:
    """A frontend whose parser answers each text with the events scripted for it; other text is
    reasoning or content as its channel says. At the end it gives `last`."""

    script: dict = field(default_factory=dict)
    num_unannounced: int = 0
    last: tuple = ()

    def output_parser(self, tools):
        self.tools = tools
        return self

    def feed(self, channel, text):
        kind = ReasoningText if channel is Channel.REASONING else ContentText
        return self.script.get(text, [kind(text)] if text else [])

    def finish(self):
        return list(self.last)

    def token_text(self, token_id):
        return f"<{token_id}>"

    def token_bytes(self, token_id):
        return b"<%d>" % token_id


CALLS = Scripted(
    {
        "<call>": [CallStarted(0, "get_weather")],
        "<city>": [CallArguments(0, '{"city": "Os')],
        "</city>": [CallArguments(0, 'lo"}'), CallEnded(0)],
        "<two>": [CallStarted(1, "get_weather"), CallArguments(1, "{}"), CallEnded(1)],
        "<held>": [],
        "<broken>": [CallBroken(0, "no end tag")],
    }
)


def transcript(deltas, frontend=CALLS, end=None, **fields):
    """The chunks of a whole stream."""
    builder = ChatWriter(parse(stream=True, **fields), IDENTITY, frontend)
    chunks = builder.start()
    for event in deltas:
        chunks += builder.delta(event)
    chunks += builder.finish(end or finished())
    assert chunks[-1] == b"data: [DONE]\n\n"
    return values(chunks)


def whole(deltas, frontend=CALLS, end=None, **fields):
    """The body of a response that is not streamed."""
    builder = ChatCollector(parse(**fields), IDENTITY, frontend)
    for event in deltas:
        builder.delta(event)
    return builder.finish(end or finished())


def chunk(wire_delta, finish_reason=None, logprobs=None, **more):
    choice = {
        "index": 0,
        "delta": wire_delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return {**HEAD, "choices": [choice], **more}


def test_transcript_of_reasoning_and_content():
    chunks = transcript([delta("hm", Channel.REASONING), delta("Hi"), delta(" there")])
    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "hm", "reasoning": "hm"}),
        chunk({"content": "Hi"}),
        chunk({"content": " there"}),
        chunk({}, "stop"),
    ]


def test_usage_tells_what_became_of_drafts():
    counts = {"prompt_tokens": 12, "cached_tokens": 8, "completion_tokens": 5}
    body = usage_body(Usage(**counts, reasoning_tokens=2, draft_tokens=9, accepted_tokens=3))
    drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}
    assert body == USAGE | {"completion_tokens_details": {"reasoning_tokens": 2, **drafts}}


def test_transcript_with_usage():
    options = {"include_usage": True}
    chunks = transcript([delta("Hi")], stream_options=options)
    assert chunks == [
        chunk({"role": "assistant", "content": ""}, usage=None),
        chunk({"content": "Hi"}, usage=None),
        chunk({}, "stop", usage=None),
        {**HEAD, "choices": [], "usage": USAGE},
    ]


def test_transcript_of_two_calls():
    deltas = [delta(t) for t in ("Look.", "<held>", "<call>", "<city>", "</city>", "<two>")]
    first, second = IDENTITY.call_id(0), IDENTITY.call_id(1)
    assert first != second

    def call(index, call_id):
        function = {"name": "get_weather", "arguments": ""}
        return {"index": index, "id": call_id, "type": "function", "function": function}

    def fragment(index, text):
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    assert transcript(deltas, tools=[WEATHER]) == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Look."}),
        chunk({"tool_calls": [call(0, first)]}),
        chunk(fragment(0, '{"city": "Os')),
        chunk(fragment(0, 'lo"}')),
        chunk({"tool_calls": [call(1, second)]}),
        chunk(fragment(1, "{}")),
        chunk({}, "tool_calls"),
    ]


def test_transcript_names_what_was_accepted_without_effect():
    first, *rest = transcript([delta("Hi")], user="u")
    assert first["ginfer"] == {"accepted_without_effect": ["user"]}
    assert not any("ginfer" in other for other in rest)


def test_text_held_back_by_the_parser_comes_before_the_finish():
    chunks = transcript([delta("Hi")], Scripted(last=(ContentText("!"),)))
    assert [c["choices"][0]["delta"] for c in chunks[1:]] == [
        {"content": "Hi"},
        {"content": "!"},
        {},
    ]


def test_whole_response():
    deltas = [delta("hm", Channel.REASONING), delta("Hi"), delta("!")]
    assert whole(deltas) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi!",
                    "refusal": None,
                    "reasoning_content": "hm",
                    "reasoning": "hm",
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_whole_response_with_calls_has_null_content():
    deltas = [delta(t) for t in ("<call>", "<city>", "</city>", "<two>")]
    choice = whole(deltas, tools=[WEATHER])["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert "reasoning" not in message
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"city": "Oslo"}', "{}"]
    assert [c["id"] for c in message["tool_calls"]] == [IDENTITY.call_id(0), IDENTITY.call_id(1)]


def test_whole_response_without_text_has_empty_content():
    assert whole([delta("hm", Channel.REASONING)])["choices"][0]["message"]["content"] == ""


COMPLETE = ["<call>", "<city>", "</city>"]
CUT = ["<call>", "<city>"]

FINISH = [
    (FinishReason.STOP_TOKEN, ["Hi"], "stop"),
    (FinishReason.STOP_STRING, ["Hi"], "stop"),
    (FinishReason.OUTPUT_LIMIT, ["Hi"], "length"),
    (FinishReason.CONTEXT_LIMIT, ["Hi"], "length"),
    (FinishReason.CANCELLED, ["Hi"], "stop"),
    (FinishReason.STOP_TOKEN, COMPLETE, "tool_calls"),
    (FinishReason.CANCELLED, COMPLETE, "tool_calls"),
    (FinishReason.OUTPUT_LIMIT, COMPLETE, "length"),
    (FinishReason.OUTPUT_LIMIT, [*CUT, "<broken>"], "length"),
    (FinishReason.CONTEXT_LIMIT, [*CUT, "<broken>"], "length"),
    (FinishReason.CANCELLED, [*CUT, "<broken>"], "stop"),
    (FinishReason.STOP_TOKEN, [*CUT, "<broken>"], None),
    (FinishReason.STOP_STRING, [*CUT, "<broken>", "<two>"], None),
]


@pytest.mark.parametrize("build", [transcript, whole])
@pytest.mark.parametrize(("reason", "texts", "expected"), FINISH)
def test_finish_reason(build, reason, texts, expected):
    deltas = [delta(t) for t in texts]
    if expected is None:
        with pytest.raises(MalformedToolCallError, match="no end tag") as caught:
            build(deltas, end=finished(reason), tools=[WEATHER])
        assert (caught.value.code, caught.value.status) == ("tool_call_malformed", 502)
        return
    result = build(deltas, end=finished(reason), tools=[WEATHER])
    last = result[-1] if isinstance(result, list) else result
    assert last["choices"][0]["finish_reason"] == expected


def test_text_held_back_is_sent_before_the_error_of_a_malformed_call():
    builder = ChatWriter(parse(tools=[WEATHER]), IDENTITY, demo_frontend())
    opening = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parame"
    sent = values(builder.delta(delta(opening)) + builder.flush())
    with pytest.raises(MalformedToolCallError):
        builder.finish(finished(FinishReason.STOP_TOKEN))
    calls = [c for s in sent for c in s["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "get_weather"
    arguments = "".join(c["function"].get("arguments", "") for c in calls)
    assert arguments == '{"city": "Oslo\\n</parame'


def test_call_cut_by_a_limit_is_not_in_the_whole_response():
    deltas = [delta(t) for t in ("Look.", *CUT, "<broken>")]
    message = whole(deltas, end=finished(FinishReason.OUTPUT_LIMIT), tools=[WEATHER])["choices"][0][
        "message"
    ]
    assert message["content"] == "Look."
    assert "tool_calls" not in message


def entry(token_id, *top):
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top)


def test_logprobs_follow_the_text_and_skip_reasoning():
    deltas = [
        delta("hm", Channel.REASONING, logprobs=(entry(1),)),
        delta("<held>", logprobs=(entry(2, (2, -0.5), (9, -1.0)),)),
        delta("Hi", logprobs=(entry(3),)),
    ]
    held = {
        "token": "<2>",
        "logprob": -0.5,
        "bytes": [60, 50, 62],
        "top_logprobs": [
            {"token": "<2>", "logprob": -0.5, "bytes": [60, 50, 62]},
            {"token": "<9>", "logprob": -1.0, "bytes": [60, 57, 62]},
        ],
    }
    after = {"token": "<3>", "logprob": -0.5, "bytes": [60, 51, 62], "top_logprobs": []}
    chunks = transcript(deltas, logprobs=True, top_logprobs=2)
    assert [c["choices"][0]["logprobs"] for c in chunks] == [
        None,
        None,
        {"content": [held, after], "refusal": None},
        None,
    ]
    body = whole(deltas, logprobs=True, top_logprobs=2)
    assert body["choices"][0]["logprobs"] == {"content": [held, after], "refusal": None}
    assert whole(deltas)["choices"][0]["logprobs"] is None


def test_logprobs_without_text_come_with_the_finish():
    chunks = transcript([delta("<held>", logprobs=(entry(2),))], logprobs=True)
    assert len(chunks[-1]["choices"][0]["logprobs"]["content"]) == 1


def test_only_active_tools_reach_the_parser():
    frontend = Scripted()
    transcript([delta("Hi")], frontend, tools=[WEATHER], tool_choice="none")
    assert frontend.tools == ()
    transcript([delta("Hi")], frontend, tools=[WEATHER])
    assert [t.name for t in frontend.tools] == ["get_weather"]


def test_the_official_sdk_reads_everything():
    texts = ("Look.", *COMPLETE)
    options = {"tools": [WEATHER], "user": "u", "logprobs": True}
    deltas = [delta("hm", Channel.REASONING), *(delta(t, logprobs=(entry(2),)) for t in texts)]
    for wire in transcript(deltas, stream_options={"include_usage": True}, **options):
        ChatCompletionChunk.model_validate_json(orjson.dumps(wire), strict=True)
    read = ChatCompletion.model_validate_json(orjson.dumps(whole(deltas, **options)), strict=True)
    assert read.choices[0].message.reasoning_content == "hm"
    assert read.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert read.ginfer == {"accepted_without_effect": ["user"]}
    assert read.usage.prompt_tokens_details.cached_tokens == 8


def test_message_of_the_sdk_is_accepted_back():
    read = ChatCompletion.model_validate(whole([delta(t) for t in COMPLETE], tools=[WEATHER]))
    said = read.choices[0].message.model_dump()
    (call,) = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    request = parse(messages=[{"role": "user", "content": "Hi"}, said, result])
    assert request.messages[1].tool_calls[0].arguments == {"city": "Oslo"}


def test_message_accumulated_by_the_sdk_is_accepted_back():
    state = ChatCompletionStreamState(input_tools=[WEATHER])
    deltas = [delta("hm", Channel.REASONING), *map(delta, [*COMPLETE, "<two>"])]
    for wire in transcript(deltas, tools=[WEATHER]):
        state.handle_chunk(ChatCompletionChunk.model_validate(wire))
    said = state.get_final_completion().choices[0].message.model_dump()
    request = parse(messages=[{"role": "user", "content": "Hi"}, said])
    assert [call.arguments for call in request.messages[1].tool_calls] == [{"city": "Oslo"}, {}]
    assert request.messages[1].reasoning == "hm"


def joined(chunks):
    """What a client joins a stream to; checks index, id and name of calls on the way."""
    message = {"reasoning": "", "content": "", "calls": []}
    for wire in chunks:
        part = wire["choices"][0]["delta"]
        message["reasoning"] += part.get("reasoning_content", "")
        message["content"] += part.get("content", "")
        for call in part.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert set(call) == {"index", "function"}
                message["calls"][call["index"]][2] += call["function"]["arguments"]
    return message, chunks[-1]["choices"][0]["finish_reason"]


CALL_TEXT = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
CITY, DAYS = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("city", "Åre"), ("days", "2")))
TEXT = "Let me look.\n\n" + CALL_TEXT.format(CITY + DAYS) + "\n" + CALL_TEXT.format(CITY)
EXPECTED = [{"city": "Åre", "days": 2}, {"city": "Åre"}]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, len(TEXT) - 1), unique=True, max_size=12), st.integers(1, len(TEXT)))
def test_any_split_joins_to_the_same_message(cuts, length):
    text = TEXT[:length]
    bounds = [0, *sorted(c for c in cuts if c < length), length]
    pieces = [delta(text[a:b]) for a, b in itertools.pairwise(bounds)]
    thought = [delta("hm ", Channel.REASONING), delta("so", Channel.REASONING)]
    end = finished(FinishReason.STOP_TOKEN if text == TEXT else FinishReason.OUTPUT_LIMIT)
    options = {"frontend": demo_frontend(), "end": end, "tools": [WEATHER]}
    message, finish = joined(transcript([*thought, *pieces], **options))
    at_once = [delta("hm so", Channel.REASONING), delta(text)]
    assert (message, finish) == joined(transcript(at_once, **options))
    assert message["reasoning"] == "hm so"
    body = whole([*thought, *pieces], **options)["choices"][0]["message"]
    assert body["content"] == (
        message["content"] or None if "tool_calls" in body else message["content"]
    )
    functions = [call["function"] for call in body.get("tool_calls", [])]
    assert [json.loads(f["arguments"]) for f in functions] == EXPECTED[: len(functions)]
    for call, function in zip(message["calls"], functions):
        assert call[1:] == [function["name"], function["arguments"]]
    if text == TEXT:
        assert (finish, len(functions), message["content"]) == ("tool_calls", 2, "Let me look.")
    else:
        assert finish == "length"


def test_single_characters_join_to_complete_calls():
    pieces = [delta(char) for char in TEXT]
    options = {"frontend": demo_frontend(), "tools": [WEATHER]}
    message, finish = joined(transcript(pieces, **options))
    assert finish == "tool_calls"
    assert [json.loads(call[2]) for call in message["calls"]] == EXPECTED


def test_without_active_tools_markup_is_text():
    message, finish = joined(transcript([delta(TEXT)], demo_frontend()))
    assert (message["content"], message["calls"], finish) == (TEXT, [], "stop")
