"""Input items of the Responses protocol, checked and in one form, as they are stored and listed."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_messages import parse_arguments
from appliance.protocols.chat_tools import tool_name
from appliance.protocols.fields import cache_options
from ginfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    Item = dict[str, Any]
    Checked = tuple[Item, frozenset[str]]

ROLES = ("user", "assistant", "system", "developer")
STATUSES = ("in_progress", "completed", "incomplete")
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
PART_CODES = {
    "input_image": "modality_not_supported",
    "input_video": "modality_not_supported",
    "input_audio": "audio_inputs_not_supported",
    "input_file": "file_inputs_not_supported",
}
CACHE_HINT = "input.prompt_cache_breakpoint"
SUMMARY = "input.reasoning.summary"
MAX_ID_CHARS = 256


def check_input(value: Any, path: str) -> tuple[list[Item], frozenset[str]]:
    """The items of a request, each with an id, and the names of members without effect. References
    and sealed reasoning stay as they are. Raises RequestError with the member's path."""
    if isinstance(value, str):
        return [_with_id(_message_item("user", value))], frozenset()
    if not isinstance(value, list):
        raise checks.wrong(path, value, "a string or an array of items", code="invalid_type")
    if not value:
        raise checks.wrong(path, value, "at least one item")
    items, unused, seen = [], set[str](), set[str]()
    for i, entry in enumerate(value):
        item, accepted = _item(entry, f"{path}.{i}")
        if item["id"] in seen:
            raise checks.wrong(f"{path}.{i}.id", item["id"], "an id not given before")
        seen.add(item["id"])
        items.append(item)
        unused |= accepted
    return items, frozenset(unused)


def text_of(content: list[dict[str, Any]] | str) -> str:
    """The text of a checked content or output; adjacent parts are joined with a newline."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def shown_name(item: Item) -> str:
    """The name under which the model knows the function of a call."""
    return f"{item['namespace']}.{item['name']}" if item.get("namespace") else str(item["name"])


def _item(value: Any, path: str) -> Checked:
    found = checks.mapping(value, path)
    kind = found.get("type")
    if kind is None:
        kind = "message" if "role" in found else "item_reference"
    reader = _READERS.get(checks.string(kind, f"{path}.type"))
    if reader is None:
        known = ", ".join(_READERS)
        raise checks.refused(
            f"{path}.type", f"{checks.shown(kind)} is not one of {known}", code=_item_code(kind)
        )
    found = {k: v for k, v in found.items() if k != "type" and v is not None}
    item, unused = reader(found, path)
    if "status" in found:
        checks.one_of(found["status"], f"{path}.status", STATUSES)
    if "id" in found:
        item_id = checks.string(found["id"], f"{path}.id")
        if not 0 < len(item_id) <= MAX_ID_CHARS:
            raise checks.wrong(f"{path}.id", item_id, f"1 to {MAX_ID_CHARS} characters")
        item = {"id": item_id, **item}
    return _with_id(item), unused


def _item_code(kind: str) -> str:
    return "compaction_not_supported" if "compaction" in kind else "item_type_not_supported"


def _with_id(item: Item) -> Item:
    return item if "id" in item else {"id": f"{ID_PREFIXES[item['type']]}_{token_hex(16)}", **item}


def _members(found: Item, path: str, known: Collection[str]) -> None:
    checks.members(found, path, {"id", "status", *known})


def _reference(found: Item, path: str) -> Checked:
    checks.members(found, path, ("id",))
    return {"type": "item_reference", "id": checks.required(found, path, "id")}, frozenset()


def _message(found: Item, path: str) -> Checked:
    _members(found, path, ("role", "content", "phase"))
    role = checks.one_of(
        checks.required(found, path, "role"), f"{path}.role", ROLES, code="unsupported_role"
    )
    if "phase" in found:
        raise checks.refused(
            f"{path}.phase", "the template has no place for it", code="phase_not_supported"
        )
    kinds = ("output_text", "input_text", "text") if role == "assistant" else ("input_text", "text")
    content = checks.required(found, path, "content")
    texts, unused = _texts(content, f"{path}.content", kinds)
    return _message_item(role, *texts), unused


def _message_item(role: str, *texts: str) -> Item:
    if role == "assistant":
        parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "status": "completed", "content": parts}


def _texts(value: Any, path: str, kinds: Collection[str]) -> tuple[list[str], frozenset[str]]:
    """Texts of a string or of text parts; media and files are refused by name."""
    if isinstance(value, str):
        return [value], frozenset()
    if not isinstance(value, list):
        raise checks.wrong(path, value, "a string or an array of parts", code="invalid_type")
    texts, unused = [], set[str]()
    for i, part in enumerate(value):
        texts.append(_part(part, f"{path}.{i}", kinds))
        if part.get("prompt_cache_breakpoint") is not None:
            cache_options(part["prompt_cache_breakpoint"], f"{path}.{i}.prompt_cache_breakpoint")
            unused.add(CACHE_HINT)
    return texts, frozenset(unused)


def _part(value: Any, path: str, kinds: Collection[str]) -> str:
    found = checks.mapping(value, path)
    kind = checks.string(checks.required(found, path, "type"), f"{path}.type")
    if kind in PART_CODES:
        raise checks.refused(f"{path}.type", f"{kind}; text only", code=PART_CODES[kind])
    if kind not in kinds:
        raise checks.wrong(f"{path}.type", kind, "one of " + ", ".join(kinds))
    known = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")
    found = checks.members(found, path, known)
    for name in ("annotations", "logprobs", "prompt_cache_breakpoint"):
        if name in found and (name == "prompt_cache_breakpoint") == (kind == "output_text"):
            raise checks.unknown(f"{path}.{name}")
    if checks.array(found.get("annotations", []), f"{path}.annotations"):
        why = "the model would not see them; write them into the text or remove them"
        raise checks.refused(f"{path}.annotations", why, code="unsupported_parameter")
    return checks.string(checks.required(found, path, "text"), f"{path}.text")


def _reasoning(found: Item, path: str) -> Checked:
    _members(found, path, ("summary", "content", "encrypted_content"))
    item: Item = {
        "type": "reasoning",
        "summary": _typed_texts(found.get("summary", []), f"{path}.summary", "summary_text"),
    }
    if "content" in found:
        item["content"] = _typed_texts(found["content"], f"{path}.content", "reasoning_text")
    if "encrypted_content" in found:
        sealed = found["encrypted_content"]
        item["encrypted_content"] = checks.string(sealed, f"{path}.encrypted_content")
    return item, frozenset({SUMMARY} if item["summary"] else ())


def _typed_texts(value: Any, path: str, kind: str) -> list[dict[str, Any]]:
    """Parts of one type, each with a text."""
    for i, part in enumerate(checks.array(value, path)):
        found = checks.members(part, f"{path}.{i}", ("type", "text"))
        checks.one_of(
            checks.required(found, f"{path}.{i}", "type"), f"{path}.{i}.type", ("text", kind)
        )
        checks.string(checks.required(found, f"{path}.{i}", "text"), f"{path}.{i}.text")
    return [{"type": kind, "text": part["text"]} for part in value]


def _call(kind: str, said: str, check: Callable[[Any, str], Any]) -> Callable[[Item, str], Checked]:
    """A reader of calls whose member `said` holds what the model wrote."""

    def read(found: Item, path: str) -> Checked:
        _members(found, path, ("call_id", "name", "namespace", said))
        name = tool_name(checks.required(found, path, "name"), f"{path}.name")
        text = checks.string(checks.required(found, path, said), f"{path}.{said}")
        check(text, f"{path}.{said}")
        item = {"type": kind, "call_id": _call_id(found, path), "name": name, said: text}
        if "namespace" in found:
            item["namespace"] = tool_name(found["namespace"], f"{path}.namespace")
        return {**item, "status": "completed"}, frozenset()

    return read


def _output(kind: str) -> Callable[[Item, str], Checked]:
    def read(found: Item, path: str) -> Checked:
        _members(found, path, ("call_id", "output", "name", "namespace"))
        output = checks.required(found, path, "output")
        texts, unused = _texts(output, f"{path}.output", ("input_text", "output_text", "text"))
        if not isinstance(output, str):
            output = [{"type": "input_text", "text": text} for text in texts]
        item = {"type": kind, "call_id": _call_id(found, path), "output": output}
        return {**item, "status": "completed"}, unused

    return read


def _call_id(found: Item, path: str) -> str:
    call_id = checks.string(checks.required(found, path, "call_id"), f"{path}.call_id")
    if not 0 < len(call_id) <= MAX_ID_CHARS:
        raise checks.wrong(f"{path}.call_id", call_id, f"1 to {MAX_ID_CHARS} characters")
    return call_id


def resolve(
    items: list[Item],
    *,
    find: Callable[[str], Item | None],
    unseal: Callable[[str, str], str],
    path: str = "input",
) -> list[Item]:
    """The items with references replaced by what `find` gives for their id, and sealed reasoning
    opened by `unseal(sealed, path)`. Raises RequestError item_not_found, or what `unseal` does."""
    return [_resolved(item, find, unseal, f"{path}.{i}") for i, item in enumerate(items)]


def _resolved(
    item: Item,
    find: Callable[[str], Item | None],
    unseal: Callable[[str, str], str],
    path: str,
) -> Item:
    if item["type"] == "item_reference":
        found = find(item["id"])
        if found is None:
            raise RequestError(
                f"{path}.id names {checks.shown(item['id'])}, which is not stored; send the item",
                code="item_not_found",
                param=f"{path}.id",
            )
        return found
    if "encrypted_content" not in item:
        return item
    text = unseal(item["encrypted_content"], f"{path}.encrypted_content")
    content = [{"type": "reasoning_text", "text": text}]
    if item.get("content", content) != content:
        want = "the reasoning that encrypted_content holds, or nothing"
        raise checks.wrong(f"{path}.content", item["content"], want)
    return {**item, "content": content}


_READERS: dict[str, Callable[[Item, str], Checked]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call("function_call", "arguments", parse_arguments),
    "function_call_output": _output("function_call_output"),
    "custom_tool_call": _call("custom_tool_call", "input", checks.string),
    "custom_tool_call_output": _output("custom_tool_call_output"),
    "item_reference": _reference,
}
