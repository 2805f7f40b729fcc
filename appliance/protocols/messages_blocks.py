"""Conversation of Anthropic Messages: system, turns and their blocks, as conversation values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.messages_tools import parse_cache_control, tool_name
from ginfer.errors import RequestError
from ginfer.prompt import ContentPart, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROLES = ("user", "assistant", "system")
ERROR_PREFIX = "Error: "
# blocks that Anthropic's servers or other inputs would need, and the code that refuses them
REFUSED_BLOCKS = {
    "image": "modality_not_supported",
    "document": "file_inputs_not_supported",
    "container_upload": "file_inputs_not_supported",
}


@dataclass(frozen=True)
class Thinking:
    """A thinking block that came back, at `path`, in turn number `turn` of the conversation."""

    text: str
    signature: str
    path: str
    turn: int


@dataclass(kw_only=True)
class Conversation:
    """The turns of a request, those of one role in a row merged; `thinking` has yet to be checked
    and put into its turns. cached: whether a block carries cache_control."""

    messages: list[Message] = field(default_factory=list)
    thinking: list[Thinking] = field(default_factory=list)
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class SystemPrompt:
    """The texts of the system prompt's blocks. cached: whether one carries cache_control."""

    texts: tuple[str, ...]
    cached: bool = False


def parse_system(value: Any, path: str = "system") -> SystemPrompt:
    """A string, or text blocks. Raises RequestError with the member's path."""
    if isinstance(value, str):
        return SystemPrompt(texts=(value,))
    reader = _Reader()
    blocks = list(reader.blocks(value, path))
    return SystemPrompt(texts=tuple(reader.text(*block) for block in blocks), cached=reader.cached)


def parse_messages(value: Any, path: str = "messages") -> Conversation:
    """The conversation; results of one turn's calls are put into the order of the calls, because
    the model sees the order and not the ids. Raises RequestError with the member's path."""
    entries = checks.array(value, path)
    if not entries:
        raise checks.wrong(path, value, "at least one message")
    reader = _Reader()
    for i, entry in enumerate(entries):
        reader.entry(entry, f"{path}.{i}")
    if reader.role == "assistant":
        where = f"{path}.{len(entries) - 1}"
        why = "the answer cannot be begun for the model; end with a user message"
        raise checks.refused(where, why, code="prefill_not_supported")
    reader.end_turn()
    reader.order_results()
    return Conversation(messages=reader.messages, thinking=reader.thinking, cached=reader.cached)


class _Reader:
    """Reads entries in order; keeps the turn that is being put together."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.thinking: list[Thinking] = []
        self.cached = False
        self.role = ""  # of the turn that is being put together
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._open: dict[str, int] = {}  # unanswered calls: id -> place among the turn's calls
        self._results: list[tuple[int, int]] = []  # (index in messages, place of the call)

    def entry(self, value: Any, path: str) -> None:
        """One element of `messages`."""
        found = checks.members(value, path, ("role", "content"))
        role = checks.one_of(
            checks.required(found, path, "role"), f"{path}.role", ROLES, code="unsupported_role"
        )
        if role != self.role:
            self.end_turn()
            if role == "assistant":
                self.order_results()
            self.role = role
        content = checks.required(found, path, "content")
        if content == [] and role == "user":
            raise checks.wrong(f"{path}.content", content, "at least one block")
        for block, where in self.blocks(content, f"{path}.content"):
            _READERS[role](self, block, where)

    def blocks(self, value: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
        """The blocks of a content and their paths; a string is one block of text."""
        if isinstance(value, str):
            yield {"type": "text", "text": value}, path
            return
        if not isinstance(value, list):
            raise checks.wrong(path, value, "a string or an array of blocks", code="invalid_type")
        for i, block in enumerate(value):
            where = f"{path}.{i}"
            found = checks.mapping(block, where)
            checks.string(checks.required(found, where, "type"), f"{where}.type")
            if found.get("cache_control") is not None:
                parse_cache_control(found["cache_control"], f"{where}.cache_control")
                self.cached = True
            yield found, where

    def text(self, block: dict[str, Any], path: str) -> str:
        """The text of a text block; every other kind is refused by its name."""
        kind = block["type"]
        if kind in REFUSED_BLOCKS:
            why = f"{kind} is not supported; text only"
            raise checks.refused(f"{path}.type", why, code=REFUSED_BLOCKS[kind])
        if kind != "text":
            why = f"{kind} blocks are not supported here"
            raise checks.refused(f"{path}.type", why, code="block_type_not_supported")
        found = checks.members(block, path, ("type", "text", "cache_control", "citations"))
        if checks.array(found.get("citations", []), f"{path}.citations"):
            why = "citations cannot be rendered for this model; remove them"
            raise checks.refused(f"{path}.citations", why, code="citations_not_supported")
        return checks.string(checks.required(found, path, "text"), f"{path}.text")

    def system_block(self, block: dict[str, Any], path: str) -> None:
        """A block of a system entry, rendered where it stands."""
        self._texts.append(self.text(block, path))

    def user_block(self, block: dict[str, Any], path: str) -> None:
        """A block of a user entry: text, or the result of a call."""
        if block["type"] != "tool_result":
            self._texts.append(self.text(block, path))
            return
        known = ("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name")
        found = checks.members(block, path, known)
        _no_toolset(found, path)
        call_id = checks.string(checks.required(found, path, "tool_use_id"), f"{path}.tool_use_id")
        if call_id not in self._open:
            want = "the id of an unanswered tool_use of the assistant turn before it"
            where = f"{path}.tool_use_id"
            raise checks.wrong(where, call_id, want, code="invalid_message_order")
        content = f"{path}.content"
        texts = [self.text(*inner) for inner in self.blocks(found.get("content", ""), content)]
        text = "\n".join(texts)
        if checks.boolean(found.get("is_error", False), f"{path}.is_error"):
            text = text if text.lower().startswith("error") else ERROR_PREFIX + text
        self._flush_texts()
        self._results.append((len(self.messages), self._open.pop(call_id)))
        self.messages.append(Message(role="tool", content=_parts(text), tool_call_id=call_id))

    def assistant_block(self, block: dict[str, Any], path: str) -> None:
        """A block of an assistant entry."""
        match block["type"]:
            case "thinking":
                self._thinking(block, path)
            case "redacted_thinking":  # nothing that this model could read
                found = checks.members(block, path, ("type", "data"))
                checks.string(checks.required(found, path, "data"), f"{path}.data")
            case "tool_use":
                self._call(block, path)
            case _:
                self._texts.append(self.text(block, path))

    def end_turn(self) -> None:
        """Close the turn that is being put together."""
        if self.role != "assistant":
            self._flush_texts()
            return
        self.messages.append(
            Message(
                role="assistant",
                content=_parts("".join(self._texts)),
                tool_calls=tuple(self._calls),
            )
        )
        self._open = {call.call_id: place for place, call in enumerate(self._calls)}
        self._texts, self._calls = [], []

    def order_results(self) -> None:
        """Put the results of a turn's calls into the order of the calls, in the places that they
        take; no more of them can come."""
        ordered = [self.messages[index] for index, _ in sorted(self._results, key=lambda r: r[1])]
        for (index, _), message in zip(self._results, ordered):
            self.messages[index] = message
        self._results, self._open = [], {}

    def _flush_texts(self) -> None:
        """The texts so far as one message of the turn's role."""
        if self._texts:
            content = _parts("\n".join(self._texts))
            self.messages.append(Message(role=self.role, content=content))
            self._texts = []

    def _thinking(self, block: dict[str, Any], path: str) -> None:
        found = checks.members(block, path, ("type", "thinking", "signature"))
        text = checks.string(checks.required(found, path, "thinking"), f"{path}.thinking")
        signature = checks.string(found.get("signature", ""), f"{path}.signature")
        self.thinking.append(Thinking(text, signature, path, len(self.messages)))

    def _call(self, block: dict[str, Any], path: str) -> None:
        known = ("type", "id", "name", "input", "cache_control", "caller", "toolset_name")
        found = checks.members(block, path, known)
        _no_toolset(found, path)
        if "caller" in found:
            caller = checks.members(found["caller"], f"{path}.caller", ("type",))
            checks.one_of(caller.get("type"), f"{path}.caller.type", ("direct",))
        call_id = checks.string(checks.required(found, path, "id"), f"{path}.id")
        if any(call.call_id == call_id for call in self._calls):
            raise RequestError(f"{path}.id: two calls have the same id", param=f"{path}.id")
        arguments = checks.mapping(checks.required(found, path, "input"), f"{path}.input")
        self._calls.append(
            ToolCall(
                call_id=call_id,
                name=tool_name(checks.required(found, path, "name"), f"{path}.name"),
                arguments=checks.shallow(arguments, f"{path}.input"),
            )
        )


_READERS: dict[str, Callable[[_Reader, dict[str, Any], str], None]] = {
    "system": _Reader.system_block,
    "user": _Reader.user_block,
    "assistant": _Reader.assistant_block,
}


def _no_toolset(found: dict[str, Any], path: str) -> None:
    if "toolset_name" in found:
        why = "toolsets do not run here; remove it"
        raise checks.refused(f"{path}.toolset_name", why, code="unsupported_parameter")


def _parts(text: str) -> tuple[ContentPart, ...]:
    return (ContentPart(kind="text", text=text),) if text else ()
