"""Wire bodies and engine events that the protocol tests share."""

from pathlib import Path

import orjson

from appliance.protocols.chat_response import Identity
from appliance.protocols.defaults import ServerDefaults
from appliance.protocols.openai_chat import parse_request
from ginfer.engine.request import Delta, Finished, FinishReason, Timings, Usage
from ginfer.prompt import Channel

DEFAULTS = ServerDefaults()
IDENTITY = Identity(model="demo", created=1700000000, response_id="chatcmpl-0123456789abcdef")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}


def body(**fields):
    """A minimal request with more fields."""
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}


def nested(depth):
    """An array in an array, and so on."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


def parse(**fields):
    """The checked minimal request with more fields."""
    return parse_request(body(**fields), defaults=DEFAULTS)


def with_messages(*messages):
    """The checked request with these messages."""
    return parse_request(body(messages=list(messages)), defaults=DEFAULTS)


def delta(text, channel=Channel.CONTENT, **more):
    """New text of a channel."""
    return Delta(request_id="r", channel=channel, text=text, **more)


def values(frames):
    """JSON values of the data lines of frames, in order; `[DONE]` is left out."""
    lines = b"".join(frames).split(b"\n")
    payloads = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    return [orjson.loads(payload) for payload in payloads if payload != b"[DONE]"]


def finished(reason=FinishReason.STOP_TOKEN, **usage):
    """The terminal event."""
    counts = {
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "completion_tokens": 5,
        "reasoning_tokens": 2,
    }
    return Finished(request_id="r", reason=reason, usage=Usage(**counts | usage), timings=Timings())


def documented(heading):
    """Fields that a section of docs/api.md lists: name to (verdict, note)."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("| `"): (cells[1], cells[2].removesuffix(" |")) for cells in rows}
