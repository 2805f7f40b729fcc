"""OpenAI Chat Completions: wire JSON to a request, engine events to wire JSON. Pure.

Typical use by a route:

    request = parse_request(body, defaults=defaults)
    prompt = frontend.prepare(request.messages, request.active_tools, request.options)
    preset = frontend.sampling_defaults(thinking=request.options.thinking)
    engine_request = request.to_engine_request(prompt, request_id, preset)
    builder = StreamBuilder(request, identity, frontend)       # or ResponseBuilder
    builder.start(), builder.delta(event) per Delta, builder.finish(event) for Finished

The route checks that `request.model` is served, sends comments while nothing happens, and turns
errors into `error_body`; everything a client can observe in a body is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_fields import check_fields, conflict
from appliance.protocols.chat_response import Identity, ResponseBuilder, StreamBuilder
from appliance.protocols.defaults import SamplingOverrides, ServerDefaults
from ginfer.engine.request import Request, StopString
from ginfer.prompt import PromptOptions

if TYPE_CHECKING:
    from ginfer.errors import GInferError
    from ginfer.frontend.base import SamplingDefaults
    from ginfer.prompt import Message, PreparedPrompt, Tool

__all__ = [
    "ChatRequest",
    "Identity",
    "ResponseBuilder",
    "SamplingOverrides",
    "ServerDefaults",
    "StreamBuilder",
    "error_body",
    "parse_request",
    "prompt_options",
]

MESSAGE_CHARS = 1000  # an error may quote a name of any length
PARAM_CHARS = 200
SAMPLING_FIELDS = tuple(SamplingOverrides.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request. `max_tokens` and `options` are final: server defaults are applied.

    sampling: the request's wishes over the server's. logprobs: None = off, else the number of
    alternatives per token.
    thinking_budget: most reasoning tokens, None = no limit. accepted_without_effect: names of the
    advisory fields given.
    """

    model: str
    messages: tuple[Message, ...]
    options: PromptOptions
    max_tokens: int
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None
    stream: bool = False
    include_usage: bool = False
    accepted_without_effect: tuple[str, ...] = ()

    @property
    def active_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is shown and may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def has_tool_history(self) -> bool:
        """Whether the conversation contains tool calls or results."""
        return any(m.tool_calls or m.role == "tool" for m in self.messages)

    def to_engine_request(
        self, prompt: PreparedPrompt, request_id: str, preset: SamplingDefaults
    ) -> Request:
        """The request as the engine takes it; `preset` is the model's for `options.thinking`."""
        return Request(
            request_id=request_id,
            prompt=prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling.resolve(
                preset, logprobs=self.logprobs, logit_bias=self.logit_bias
            ),
            stop_strings=tuple(StopString(text=text) for text in self.stop),
            reasoning_budget=self.thinking_budget,
            keep_special_tokens=bool(self.active_tools) or self.has_tool_history,
        )


def parse_request(body: Any, *, defaults: ServerDefaults) -> ChatRequest:
    """Check a decoded body. Raises RequestError (400) whose `param` is the path of the member, as
    in messages.3.content.0.text; UnsupportedError when the member is refused."""
    values, accepted = check_fields(checks.mapping(body, "body"))
    own = SamplingOverrides(**{k: values[k] for k in SAMPLING_FIELDS if k in values})
    tools = values.get("tools", ())
    if values.get("tool_choice", "none") != "none" and not tools:
        raise checks.wrong("tool_choice", values["tool_choice"], "tools with it, or 'none'")
    if "stream_options" in values and not values.get("stream"):
        raise checks.wrong("stream_options", body["stream_options"], "stream: true with it")
    return ChatRequest(
        model=checks.required(values, "", "model"),
        messages=checks.required(values, "", "messages"),
        options=prompt_options(values, defaults),
        max_tokens=_max_tokens(values, defaults),
        tools=tools,
        tool_choice=values.get("tool_choice", "auto"),
        sampling=own.over(defaults.sampling),
        logit_bias=values.get("logit_bias", ()),
        logprobs=_logprobs(values),
        stop=values.get("stop", ()),
        thinking_budget=values.get("thinking_budget"),
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", False),
        accepted_without_effect=accepted,
    )


def prompt_options(values: dict[str, Any], defaults: ServerDefaults) -> PromptOptions:
    """Thinking, effort and preservation from the fields and chat_template_kwargs over the server's
    defaults. Raises RequestError conflicting_template_option."""
    kwargs = values.get("chat_template_kwargs", {})
    chosen = dict(kwargs)
    for name in ("enable_thinking", "preserve_thinking", "reasoning_effort"):
        if name in values and kwargs.get(name, values[name]) != values[name]:
            raise conflict((name, f"chat_template_kwargs.{name}"), "conflicting_template_option")
        if name in values:
            chosen[name] = values[name]
    effort = chosen.get("reasoning_effort")
    thinking = chosen.get("enable_thinking")
    if effort is not None and thinking not in (None, effort != "none"):
        raise conflict(("enable_thinking", "reasoning_effort"), "conflicting_template_option")
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


def error_type(status: int) -> str:
    """The error type that OpenAI clients expect for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: GInferError) -> dict[str, Any]:
    """The error object, for a response body and for an event of a stream alike."""
    return {
        "error": {
            "message": _cut(error.message, MESSAGE_CHARS),
            "type": error_type(error.status),
            "param": error.param and _cut(error.param, PARAM_CHARS),
            "code": error.code,
        }
    }


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
