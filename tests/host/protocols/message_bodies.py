"""Wire bodies of Anthropic Messages that the protocol tests share."""

from appliance.protocols.anthropic_messages import parse_request
from appliance.protocols.defaults import ServerDefaults
from appliance.protocols.thinking_signature import ThinkingSigner

SIGNER = ThinkingSigner(b"k" * 32)
DEFAULTS = ServerDefaults()
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CACHE = {"type": "ephemeral"}


def use(call_id="toolu_1", city="Oslo"):
    """A tool_use block."""
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": city}}


def result(call_id="toolu_1", content="rain", **more):
    """A tool_result block."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def text(value, **more):
    """A text block."""
    return {"type": "text", "text": value, **more}


def body(**fields):
    """A minimal request with more fields."""
    return {"model": "any", "messages": [{"role": "user", "content": "Hi"}], **fields}


def parse(*, defaults=DEFAULTS, **fields):
    """The checked minimal request with more fields."""
    return parse_request(body(**fields), defaults=defaults, signer=SIGNER)


def with_messages(*messages, **fields):
    """The checked request with these messages, given as (role, content)."""
    return parse(messages=[{"role": r, "content": c} for r, c in messages], **fields)
