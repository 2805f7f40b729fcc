"""Wire bodies and transcripts that the tests of the Responses protocol share."""

import orjson

from appliance.protocols.defaults import ServerDefaults
from appliance.protocols.responses.request import parse_request
from appliance.protocols.responses.response import Head, ResponsesCollector, ResponsesWriter
from appliance.response_memory import ResponseMemory
from appliance.response_store import ResponseStore
from ginfer.engine.request import SamplingParams
from ginfer.sizes import MIB
from tests.host.protocols.bodies import finished, values

DEFAULTS = ServerDefaults()
HEAD = Head(
    model="demo", created=1700000000, sampling=SamplingParams(), response_id="resp_" + "0" * 32
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Apply a patch"}
CALL = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "get_weather",
    "arguments": '{"city": "Oslo"}',
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


def memory():
    """An empty memory of a server."""
    return ResponseMemory(ResponseStore(16, MIB), b"k" * 32)


def body(**fields):
    """A minimal request with more fields."""
    return {"model": "demo", "input": "Hi", **fields}


def parse(remembered=None, **fields):
    """The checked minimal request with more fields."""
    return parse_request(body(**fields), defaults=DEFAULTS, memory=remembered or memory())


def writer(frontend, remembered=None, head=HEAD, **fields):
    """A writer of a streamed response."""
    kept = remembered or memory()
    return ResponsesWriter(parse(kept, stream=True, **fields), head, frontend, kept)


def transcript(deltas, frontend, end=None, **fields):
    """The events of a whole stream, checked for what holds in every stream."""
    builder = writer(frontend, **fields)
    frames = builder.start()
    for event in deltas:
        frames += builder.delta(event)
    frames += builder.flush() + builder.finish(end or finished())
    return checked(frames)


def whole(deltas, frontend, end=None, remembered=None, head=HEAD, **fields):
    """The body of a response that is not streamed, as it is sent."""
    kept = remembered or memory()
    builder = ResponsesCollector(parse(kept, **fields), head, frontend, kept)
    for event in deltas:
        builder.delta(event)
    return orjson.loads(orjson.dumps(builder.finish(end or finished())))


def checked(frames):
    """The events of frames. Asserts the invariants: numbers without gaps, names that match, every
    item opened once and closed at most once under the same id, deltas that join to the whole."""
    events = values(frames)
    names = [line for frame in frames for line in frame.split(b"\n") if line.startswith(b"event: ")]
    assert [f"event: {event['type']}".encode() for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items, text, done = {}, {}, {}
    for event in events:
        index, kind = event.get("output_index"), event["type"]
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index] = event["item"]["id"]
            assert event["item"]["status"] == "in_progress"
        elif kind == "response.output_item.done":
            assert items[index] == event["item"]["id"]
            assert index not in done
            done[index] = event["item"]
        elif index is not None:
            assert event["item_id"] == items[index]
            assert index not in done
            assert index == len(items) - 1
        if kind.endswith(".delta"):
            assert event["delta"]
            text[index] = text.get(index, "") + event["delta"]
        elif ".done" in kind and "part" not in kind and "item" not in kind:
            told = [event[name] for name in ("text", "arguments", "input") if name in event]
            assert told == [text.get(index, "")]
    last = events[-1].get("response")
    if last is not None and last["status"] != "in_progress":
        assert [item["id"] for item in last["output"]] == list(items.values())
        for index, item in enumerate(last["output"]):
            assert done.get(index, item) == item
            assert index in done or (item["status"] == "incomplete" and "call_id" in item)
    return events
