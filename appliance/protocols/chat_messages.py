"""Messages of Chat Completions as conversation values; all else refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_tools import tool_name
from ginfer.errors import RequestError
from ginfer.prompt import ContentPart, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable

CALL_MEMBERS = ("name", "arguments", "parsed_arguments")
MEDIA_PARTS = ("image_url", "image", "video_url", "video", "input_audio", "audio")
# members of an assistant message that clients send back empty
UNSAID = ("refusal", "audio", "function_call", "annotations", "parsed")
NAME_REFUSED = "the model's template has no place for participant names; write it into the content"


def parse_messages(value: Any, path: str = "messages") -> tuple[Message, ...]:
    """The conversation. Results of one turn's tool calls are put into the order of the calls,
    because the model sees the order and not the ids. Raises RequestError with the member's path."""
    entries = checks.array(value, path)
    if not entries:
        raise checks.wrong(path, value, "at least one message")
    messages = [_message(entry, f"{path}.{i}") for i, entry in enumerate(entries)]
    names = [entry.get("name") if m.role == "tool" else None for entry, m in zip(entries, messages)]
    return tuple(_order_results(messages, names, path))


@dataclass(frozen=True)
class _Role:
    """Members of one role's messages, and how such a message is read."""

    known: frozenset[str]
    read: Callable[[dict[str, Any], str], Message]


def _message(value: Any, path: str) -> Message:
    """One message; its role decides which members it may have."""
    name = checks.string(checks.required(checks.mapping(value, path), path, "role"), f"{path}.role")
    role = _ROLES.get(name)
    if role is None:
        code = "unsupported_role" if name == "function" else "invalid_value"
        raise checks.wrong(f"{path}.role", name, "one of " + ", ".join(_ROLES), code=code)
    found = checks.members(value, path, role.known)
    if "name" in found and name != "tool":
        raise checks.refused(f"{path}.name", NAME_REFUSED, code="name_not_supported")
    return role.read(found, path)


def _plain(found: dict[str, Any], path: str) -> Message:
    """A system, developer or user message."""
    content = _content(checks.required(found, path, "content"), f"{path}.content")
    return Message(role=found["role"], content=content)


def _tool_result(found: dict[str, Any], path: str) -> Message:
    """A tool message."""
    content = _content(checks.required(found, path, "content"), f"{path}.content")
    call_id = checks.string(checks.required(found, path, "tool_call_id"), f"{path}.tool_call_id")
    return Message(role="tool", content=content, tool_call_id=call_id)


def _assistant(found: dict[str, Any], path: str) -> Message:
    """An assistant message: content, calls, reasoning, in any combination that says something."""
    for name in UNSAID:
        if found.get(name):
            why = "cannot be rendered for this model; put it into content or remove it"
            raise checks.refused(f"{path}.{name}", why, code="unsupported_parameter")
    content = _content(found["content"], f"{path}.content") if "content" in found else ()
    entries = checks.array(found.get("tool_calls", []), f"{path}.tool_calls")
    calls = tuple(_call(entry, f"{path}.tool_calls.{i}") for i, entry in enumerate(entries))
    reasoning = _reasoning(found, path)
    if "content" not in found and not calls and reasoning is None:
        raise RequestError(
            f"{path}: an assistant message needs content, tool_calls or reasoning_content",
            code="missing_required_parameter",
            param=f"{path}.content",
        )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def _reasoning(found: dict[str, Any], path: str) -> str | None:
    """The reasoning sent back, under either of its two names."""
    given = {
        name: checks.string(found[name], f"{path}.{name}")
        for name in ("reasoning_content", "reasoning")
        if name in found
    }
    if len(set(given.values())) > 1:
        raise checks.wrong(
            f"{path}.reasoning", given["reasoning"], "the same text as reasoning_content, or one"
        )
    return next(iter(given.values()), None)


def _content(value: Any, path: str) -> tuple[ContentPart, ...]:
    """A string, or text parts; adjacent ones are joined with a newline."""
    if isinstance(value, str):
        return (ContentPart(kind="text", text=value),)
    if not isinstance(value, list) or not value:
        raise checks.wrong(path, value, "a string or an array of parts", code="invalid_type")
    texts = [_text_part(part, f"{path}.{i}") for i, part in enumerate(value)]
    return (ContentPart(kind="text", text="\n".join(texts)),)


def _text_part(value: Any, path: str) -> str:
    """The text of one part; media and files are refused by name."""
    kind = checks.string(checks.required(checks.mapping(value, path), path, "type"), f"{path}.type")
    if kind in MEDIA_PARTS:
        raise checks.refused(
            f"{path}.type", f"{kind} is not supported; text only", code="modality_not_supported"
        )
    if kind == "file":
        raise checks.refused(
            f"{path}.type", "files are not supported; text only", code="file_inputs_not_supported"
        )
    if kind != "text":
        raise checks.wrong(f"{path}.type", kind, "'text'")
    found = checks.members(value, path, ("type", "text"))
    return checks.string(checks.required(found, path, "text"), f"{path}.text")


def _call(value: Any, path: str) -> ToolCall:
    """A call that the assistant made earlier. `index` is what streamed calls carry."""
    found = checks.members(value, path, ("id", "type", "function", "index"))
    if found.get("type", "function") != "function":
        raise checks.refused(
            f"{path}.type", "only function calls are supported", code="tool_type_not_supported"
        )
    where = f"{path}.function"
    function = checks.members(checks.required(found, path, "function"), where, CALL_MEMBERS)
    if "parsed_arguments" in function:
        why = "send the arguments as a string in `arguments`"
        raise checks.refused(f"{where}.parsed_arguments", why, code="unsupported_parameter")
    return ToolCall(
        call_id=checks.string(checks.required(found, path, "id"), f"{path}.id"),
        name=tool_name(checks.required(function, where, "name"), f"{where}.name"),
        arguments=parse_arguments(function.get("arguments", ""), f"{where}.arguments"),
    )


def parse_arguments(value: Any, path: str) -> dict[str, Any]:
    """Arguments as sent on the wire: a string that holds a JSON object; empty means no argument."""
    text = checks.string(value, path)
    if not text.strip():
        return {}
    try:
        parsed = checks.decoded(text)
    except RequestError as error:
        if error.code == "duplicate_member":
            raise RequestError(f"{path}: {error.message}", code=error.code, param=path) from None
        parsed = None
    if not isinstance(parsed, dict):
        raise checks.wrong(path, text, "a string that holds a JSON object")
    return checks.shallow(parsed, path)


def _order_results(messages: list[Message], names: list[str | None], path: str) -> list[Message]:
    """Each run of tool results in the order of the calls that it answers."""
    ordered: list[Message] = []
    calls: tuple[ToolCall, ...] = ()  # of the turn that is being answered
    run: dict[int, Message] = {}  # place of the call -> its result
    for i, (message, name) in enumerate(zip(messages, names)):
        if message.role == "tool":
            place = _place(message, name, calls, f"{path}.{i}")
            if place in run:
                raise _unanswerable(message, f"{path}.{i}")
            run[place] = message
            continue
        ordered += [run[place] for place in sorted(run)]
        ordered.append(message)
        run, calls = {}, message.tool_calls
        if len({call.call_id for call in calls}) < len(calls):
            where = f"{path}.{i}.tool_calls"
            raise RequestError(f"{where}: two calls have the same id", param=where)
    return ordered + [run[place] for place in sorted(run)]


def _place(message: Message, name: str | None, calls: tuple[ToolCall, ...], path: str) -> int:
    """Which call of the assistant turn before it a tool result answers."""
    for place, call in enumerate(calls):
        if call.call_id == message.tool_call_id:
            if name not in (None, call.name):
                raise checks.wrong(f"{path}.name", name, f"{call.name}, the function called")
            return place
    raise _unanswerable(message, path)


def _unanswerable(message: Message, path: str) -> RequestError:
    want = "the id of an unanswered call of the assistant message before it"
    return checks.wrong(
        f"{path}.tool_call_id", message.tool_call_id, want, code="invalid_message_order"
    )


_PLAIN = frozenset({"role", "content", "name"})
_ROLES = {
    "system": _Role(_PLAIN, _plain),
    "developer": _Role(_PLAIN, _plain),
    "user": _Role(_PLAIN, _plain),
    "assistant": _Role(
        _PLAIN | {*UNSAID, "tool_calls", "reasoning_content", "reasoning"},
        _assistant,
    ),
    "tool": _Role(_PLAIN | {"tool_call_id"}, _tool_result),
}
