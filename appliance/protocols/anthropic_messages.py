"""Anthropic Messages: wire JSON to a request. Pure.

Everything a client can observe in a body is decided in `anthropic_messages` and
`messages_response`; the route keeps the stream alive and turns errors into bodies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.fields import check_fields, conflict
from appliance.protocols.generation import Generation
from appliance.protocols.messages_blocks import Conversation, SystemPrompt
from appliance.protocols.messages_fields import FIELDS, OutputConfig, ThinkingWish
from appliance.protocols.messages_tools import OfferedTools, check_choice
from appliance.protocols.volatile_header import NAME, without_header
from ginfer.frontend.grammar import ToolChoice
from ginfer.prompt import ContentPart, Message, PromptOptions

if TYPE_CHECKING:
    from appliance.protocols.defaults import ServerDefaults
    from appliance.protocols.messages_fields import ClearThinking
    from appliance.protocols.thinking_signature import ThinkingSigner

SAMPLING_FIELDS = tuple(SamplingOverrides.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(Generation):
    """A checked request. canonicalised: names of the volatile headers left out of the prompt.
    cleared: thinking that context_management took out of the history, None = not asked to.
    hide_thinking: thinking blocks show no text, their signatures carry it. unstreamed: names of the
    tools whose input is sent in one piece."""

    canonicalised: tuple[str, ...] = ()
    cleared: tuple[str, ...] | None = None
    hide_thinking: bool = False
    unstreamed: frozenset[str] = frozenset()


def parse_request(
    body: Any, *, defaults: ServerDefaults, signer: ThinkingSigner
) -> MessagesRequest:
    """Check a decoded body. Raises RequestError (400) whose `param` is the path of the member, as
    in messages.3.content.0.text; UnsupportedError when the member is refused."""
    values, accepted = check_fields(checks.mapping(body, "body"), FIELDS)
    own = SamplingOverrides(**{k: values[k] for k in SAMPLING_FIELDS if k in values})
    model = checks.required(values, "", "model")
    conversation: Conversation = checks.required(values, "", "messages")
    system: SystemPrompt = values.get("system", SystemPrompt(texts=()))
    texts, stripped = system.texts, False
    if defaults.canonical_headers:
        texts, stripped = without_header(texts)
    wish: ThinkingWish = values.get("thinking", ThinkingWish())
    offered: OfferedTools = values.get("tools", OfferedTools())
    choice: ToolChoice = values.get("tool_choice", ToolChoice())
    check_choice(choice, offered)
    history = _with_thinking(conversation, signer)
    messages, cleared = _clear_thinking(history, values.get("context_management"))
    options = prompt_options(values, defaults)
    return MessagesRequest(
        model=model,
        messages=(*_system_message(texts), *messages),
        options=options,
        max_tokens=values.get("max_tokens", defaults.max_tokens),
        tools=offered.tools,
        tool_choice=choice.mode,
        named_tool=choice.name,
        parallel_tool_calls=choice.parallel,
        schema=values.get("output_config", OutputConfig()).schema,
        schema_path="output_config.format.schema",
        tool_schema_path="tools.{}.input_schema",
        sampling=own.over(defaults.sampling),
        stop=values.get("stop_sequences", ()),
        thinking_budget=wish.budget,
        stream=values.get("stream", False),
        accepted_without_effect=(*accepted, *_unheeded(values, options)),
        canonicalised=(NAME,) if stripped else (),
        cleared=cleared,
        hide_thinking=wish.hidden,
        unstreamed=offered.unstreamed,
    )


def prompt_options(values: dict[str, Any], defaults: ServerDefaults) -> PromptOptions:
    """Thinking, effort and preservation over the server's defaults; an effort alone does not turn
    thinking on. Raises RequestError conflicting_template_option."""
    wish: ThinkingWish = values.get("thinking", ThinkingWish())
    effort = values.get("output_config", OutputConfig()).effort
    thinking = defaults.thinking if wish.enabled is None else wish.enabled
    preserve = values.get("preserve_thinking", defaults.preserve_thinking)
    if values.get("context_management") is not None:
        if not values.get("preserve_thinking", True):
            fields = ("context_management", "preserve_thinking")
            raise conflict(fields, "conflicting_template_option")
        preserve = True
    return PromptOptions(
        thinking=thinking,
        effort=(effort or defaults.effort) if thinking else None,
        preserve_thinking=preserve,
    )


def _system_message(texts: tuple[str, ...]) -> tuple[Message, ...]:
    if not any(texts):
        return ()
    return (Message(role="system", content=(ContentPart(kind="text", text="\n".join(texts)),)),)


def _unheeded(values: dict[str, Any], options: PromptOptions) -> list[str]:
    """What was accepted without effect inside of fields that are obeyed."""
    offered = values.get("tools", OfferedTools())
    found = [f"tools.{kind}" for kind in dict.fromkeys(offered.hosted.values())]
    carriers = (offered, values.get("system"), values["messages"])
    marked = any(carrier is not None and carrier.cached for carrier in carriers)
    if marked and "cache_control" not in values:
        found.append("cache_control")
    if not options.thinking and values.get("output_config", OutputConfig()).effort:
        found.append("output_config.effort")
    return found


def _with_thinking(conversation: Conversation, signer: ThinkingSigner) -> list[Message]:
    """The turns with the thinking that came back. Raises invalid_thinking_signature."""
    texts: dict[int, list[str]] = {}
    for block in conversation.thinking:
        if text := signer.read(block.text, block.signature, block.path):
            texts.setdefault(block.turn, []).append(text)
    return [
        replace(message, reasoning="\n".join(texts[i])) if i in texts else message
        for i, message in enumerate(conversation.messages)
    ]


def _clear_thinking(
    messages: list[Message], clear: ClearThinking | None
) -> tuple[list[Message], tuple[str, ...] | None]:
    """The history with the thinking of its latest turns only, and the thinking that went."""
    if clear is None or clear.keep is None:
        return messages, None if clear is None else ()
    kept = list(messages)
    turns = [i for i, message in enumerate(messages) if message.reasoning]
    old = turns[: -clear.keep]
    for i in old:
        kept[i] = replace(messages[i], reasoning=None)
    return kept, tuple(messages[i].reasoning or "" for i in old)
