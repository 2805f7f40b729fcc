"""OpenAI Responses: wire JSON to a request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from appliance.protocols import checks
from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.fields import check_fields, conflict
from appliance.protocols.generation import Generation
from appliance.protocols.openai_chat import SAMPLING_FIELDS, prompt_options
from appliance.protocols.responses.fields import CONTEXTS, FIELDS, LOGPROBS, SEALED
from appliance.protocols.responses.formats import FORMAT, at_its_tool
from appliance.protocols.responses.items import resolve
from appliance.protocols.responses.tools import Choice, ToolSet, chosen
from appliance.protocols.responses.turns import to_messages
from ginfer.errors import RequestError
from ginfer.prompt import ContentPart, Message

if TYPE_CHECKING:
    from appliance.protocols.defaults import ServerDefaults
    from ginfer.prompt import PromptOptions

    Item = dict[str, Any]

ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")
ECHOED_HINTS = ("prompt_cache_key", "safety_identifier", "user")


class ResponseNotFoundError(RequestError):
    """No response of that id is stored."""

    code = "response_not_found"
    status = 404


class Previous(Protocol):
    """What a follow-up needs of a stored response."""

    @property
    def preserve_thinking(self) -> bool:
        """Whether its earlier turns kept their reasoning."""

    def conversation(self) -> list[Item]:
        """Its items, those it was generated from and its own."""


class Memory(Protocol):
    """What the server remembers for its clients, and what they keep for it."""

    def previous(self, response_id: str) -> Previous | None:
        """A stored response; None if it is not held."""

    def item(self, item_id: str) -> Item | None:
        """An item of a stored response; None if it is not held."""

    def unseal(self, sealed: str, path: str) -> str:
        """The reasoning in an encrypted_content. Raises RequestError naming `path`."""


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(Generation):
    """A checked request. items: the new ones, as they are stored. toolset: what the tools are
    called on the wire. previous: the stored response that this one follows. echo: members of the
    response that repeat the request."""

    items: tuple[Item, ...] = ()
    toolset: ToolSet = field(default_factory=ToolSet)
    previous: Any = None
    store: bool = True
    seals_reasoning: bool = False
    echo: dict[str, Any] = field(default_factory=dict)

    def content_grammar(self) -> str | None:
        """What the content must match, None = anything. Raises RequestError naming the member that
        cannot be enforced."""
        try:
            return super().content_grammar()
        except RequestError as error:
            raise at_its_tool(error, self.active_tools, self.toolset) from None


def parse_request(body: Any, *, defaults: ServerDefaults, memory: Memory) -> ResponsesRequest:
    """Check a decoded body. Raises RequestError (400) whose `param` is the path of the member, as
    in input.3.content.0.text; UnsupportedError when the member is refused."""
    values, accepted = check_fields(checks.mapping(body, "body"), FIELDS)
    model = checks.required(values, "", "model")
    new, unused = checks.required(values, "", "input")
    items = resolve(new, find=memory.item, unseal=memory.unseal)
    previous = _previous(values, memory)
    tools, choice = values.get("tools", ToolSet()), values.get("tool_choice", Choice())
    if "stream_options" in values and not values.get("stream"):
        raise checks.wrong("stream_options", body["stream_options"], "stream: true with it")
    own = SamplingOverrides(**{k: values[k] for k in SAMPLING_FIELDS if k in values})
    include, text = values.get("include", frozenset()), values.get("text", {})
    shown, named = chosen(tools, choice)
    return ResponsesRequest(
        model=model,
        messages=_messages(values, previous, items),
        options=_options(values, defaults, previous),
        max_tokens=values.get("max_output_tokens", defaults.max_tokens),
        tools=shown,
        tool_choice=choice.mode if named is None else "named",
        named_tool=named,
        parallel_tool_calls=values.get("parallel_tool_calls", True),
        schema=text.get("schema"),
        schema_path=f"{FORMAT}.schema",
        sampling=own.over(defaults.sampling),
        logit_bias=values.get("logit_bias", ()),
        logprobs=_logprobs(values, include),
        stop=values.get("stop", ()),
        thinking_budget=values.get("thinking_budget"),
        stream=values.get("stream", False),
        accepted_without_effect=(*accepted, *sorted(_unused(values, tools, unused))),
        items=tuple(items),
        toolset=tools,
        previous=previous,
        store=values.get("store", True),
        seals_reasoning=SEALED in include,
        echo=_echo(values, tools, choice),
    )


def _previous(values: dict[str, Any], memory: Memory) -> Previous | None:
    if "previous_response_id" not in values:
        return None
    response_id = values["previous_response_id"]
    previous = memory.previous(response_id)
    if previous is None:
        raise ResponseNotFoundError(
            f"previous_response_id names {checks.shown(response_id)}, which is not stored; send "
            "its items as input",
            param="previous_response_id",
        )
    return previous


def _messages(
    values: dict[str, Any], previous: Previous | None, items: list[Item]
) -> tuple[Message, ...]:
    before = previous.conversation() if previous else []
    pairs = [(item, "previous_response_id") for item in before]
    pairs += [(item, f"input.{i}") for i, item in enumerate(items)]
    messages = to_messages(pairs)
    if "instructions" not in values:
        return messages
    content = (ContentPart(kind="text", text=values["instructions"]),)
    return (Message(role="developer", content=content), *messages)


def _options(
    values: dict[str, Any], defaults: ServerDefaults, previous: Previous | None
) -> PromptOptions:
    """Thinking options from the fields; whether earlier turns keep their reasoning is inherited."""
    reasoning = values.get("reasoning", {})
    given = {k: v for k, v in values.items() if k in ("preserve_thinking", "chat_template_kwargs")}
    if "effort" in reasoning:
        given["reasoning.effort"] = reasoning["effort"]
    context = CONTEXTS[reasoning.get("context", "auto")]
    if context is not None and given.setdefault("preserve_thinking", context) is not context:
        raise conflict(("preserve_thinking", "reasoning.context"), "conflicting_template_option")
    options = prompt_options(given, defaults, effort_field="reasoning.effort")
    asked = {**values.get("chat_template_kwargs", {}), **given}
    if previous is None or "preserve_thinking" in asked:
        return options
    return replace(options, preserve_thinking=previous.preserve_thinking)


def _logprobs(values: dict[str, Any], include: frozenset[str]) -> int | None:
    wanted = int(values.get("top_logprobs", 0))
    if LOGPROBS in include:
        return wanted
    if wanted:
        raise checks.wrong("top_logprobs", wanted, f"include: ['{LOGPROBS}'] with it")
    return None


def _unused(values: dict[str, Any], tools: ToolSet, unused: frozenset[str]) -> set[str]:
    """Members of fields that are obeyed otherwise, and hosted tools."""
    summaries = ("summary", "generate_summary")
    found = {f"reasoning.{name}" for name in summaries if name in values.get("reasoning", {})}
    if values.get("text", {}).get("format", {}).get("description"):
        found.add("text.format.description")
    return found | unused | tools.unused | {f"tools.{kind}" for kind in tools.hosted}


def _echo(values: dict[str, Any], tools: ToolSet, choice: Choice) -> dict[str, Any]:
    """Members of the response that repeat the request."""
    reasoning, text = values.get("reasoning", {}), values.get("text", {})
    return {
        **{name: values.get(name) for name in ECHOED},
        **{name: values[name] for name in ECHOED_HINTS if name in values},
        "background": False,
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": values.get("store", True),
        "text": {"format": text.get("format", {"type": "text"}), "verbosity": "medium"},
        "tool_choice": choice.echo,
        "tools": list(tools.echo),
        "top_logprobs": values.get("top_logprobs", 0),
        "truncation": "disabled",
    }
