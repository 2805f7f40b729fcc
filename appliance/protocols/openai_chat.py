"""OpenAI Chat Completions: wire JSON to a request. Pure.

Everything a client can observe in a body is decided in `openai_chat` and `chat_response`; the route
checks that `request.model` is served, keeps the stream alive and turns errors into bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_fields import FIELDS
from appliance.protocols.chat_tools import chosen_tools
from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.fields import check_fields, conflict
from appliance.protocols.generation import Generation
from ginfer.prompt import PromptOptions

if TYPE_CHECKING:
    from appliance.protocols.defaults import ServerDefaults

SAMPLING_FIELDS = tuple(SamplingOverrides.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Generation):
    """A checked request. include_usage: the stream ends with a chunk of token counts."""

    include_usage: bool = False


def parse_request(body: Any, *, defaults: ServerDefaults) -> ChatRequest:
    """Check a decoded body. Raises RequestError (400) whose `param` is the path of the member, as
    in messages.3.content.0.text; UnsupportedError when the member is refused."""
    values, accepted = check_fields(checks.mapping(body, "body"), FIELDS)
    own = SamplingOverrides(**{k: values[k] for k in SAMPLING_FIELDS if k in values})
    choice, tools = values.get("tool_choice"), values.get("tools", ())
    if choice is not None:
        tools = chosen_tools(choice, tools)
    if "stream_options" in values and not values.get("stream"):
        raise checks.wrong("stream_options", body["stream_options"], "stream: true with it")
    return ChatRequest(
        model=checks.required(values, "", "model"),
        messages=checks.required(values, "", "messages"),
        options=prompt_options(values, defaults),
        max_tokens=_max_tokens(values, defaults),
        tools=tools,
        tool_choice=choice.mode if choice else "auto",
        named_tool=choice.named[0] if choice and choice.named else None,
        parallel_tool_calls=values.get("parallel_tool_calls", True),
        schema=values.get("response_format"),
        schema_path="response_format.json_schema.schema",
        sampling=own.over(defaults.sampling),
        logit_bias=values.get("logit_bias", ()),
        logprobs=_logprobs(values),
        stop=values.get("stop", ()),
        thinking_budget=values.get("thinking_budget"),
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", False),
        accepted_without_effect=accepted,
    )


def prompt_options(
    values: dict[str, Any], defaults: ServerDefaults, *, effort_field: str = "reasoning_effort"
) -> PromptOptions:
    """Thinking, effort and preservation from the fields and chat_template_kwargs over the server's
    defaults. Raises RequestError conflicting_template_option."""
    kwargs = values.get("chat_template_kwargs", {})
    chosen = dict(kwargs)
    fields = {"enable_thinking": "enable_thinking", "preserve_thinking": "preserve_thinking"}
    for name, option in {**fields, effort_field: "reasoning_effort"}.items():
        if name in values and kwargs.get(option, values[name]) != values[name]:
            raise conflict((name, f"chat_template_kwargs.{option}"), "conflicting_template_option")
        if name in values:
            chosen[option] = values[name]
    effort = chosen.get("reasoning_effort")
    thinking = chosen.get("enable_thinking")
    if effort is not None and thinking not in (None, effort != "none"):
        raise conflict(("enable_thinking", effort_field), "conflicting_template_option")
    if thinking is None:
        thinking = defaults.thinking if effort is None else effort != "none"
    return PromptOptions(
        thinking=thinking,
        effort=(effort or defaults.effort) if thinking else None,
        preserve_thinking=chosen.get("preserve_thinking", defaults.preserve_thinking),
    )


def _max_tokens(values: dict[str, Any], defaults: ServerDefaults) -> int:
    given = {values[n] for n in ("max_completion_tokens", "max_tokens") if n in values}
    if len(given) > 1:
        raise conflict(("max_completion_tokens", "max_tokens"), "conflicting_parameters")
    return int(given.pop()) if given else defaults.max_tokens


def _logprobs(values: dict[str, Any]) -> int | None:
    if values.get("logprobs"):
        return int(values.get("top_logprobs", 0))
    if values.get("top_logprobs"):
        raise checks.wrong("top_logprobs", values["top_logprobs"], "logprobs: true with it")
    return None
