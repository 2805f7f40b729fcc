"""Checked items of the Responses protocol to the messages that the template renders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_messages import parse_arguments
from appliance.protocols.responses.items import shown_name, text_of
from ginfer.errors import RequestError
from ginfer.prompt import ContentPart, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    Item = dict[str, Any]

CUSTOM_INPUT = "input"  # parameter that carries the text of a custom tool's call


def to_messages(items: Iterable[tuple[Item, str]]) -> tuple[Message, ...]:
    """Messages of (item, path) pairs: adjacent items of the assistant are one turn; the results of
    a turn's calls come in the order of the calls, because the model sees the order and not the ids.

    Raises RequestError naming the path of a result that answers no call."""
    conversation = _Conversation()
    for item, path in items:
        conversation.add(item, path)
    return conversation.end()


@dataclass
class _Turn:
    """An assistant turn that is being read, and the results of its calls by place."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: dict[int, Message] = field(default_factory=dict)

    def takes(self, item: Item) -> bool:
        """Whether an assistant's item belongs to this turn: not once it was answered, and a turn
        that has text and no call has ended."""
        if self.results:
            return False
        return item["type"].endswith("call") or bool(self.calls) or not self.content

    def messages(self) -> list[Message]:
        """The turn, then the results in the order of the calls; nothing of a turn that says
        nothing."""
        if not (self.reasoning or self.content or self.calls):
            return []
        said = Message(
            role="assistant",
            content=_text("".join(self.content)) if self.content else (),
            reasoning="\n\n".join(self.reasoning) if self.reasoning else None,
            tool_calls=tuple(self.calls),
        )
        return [said, *(self.results[place] for place in sorted(self.results))]


class _Conversation:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def add(self, item: Item, path: str) -> None:
        """The next item."""
        kind = item["type"]
        if kind.endswith("call_output"):
            self._answer(item, path)
        elif kind == "message" and item["role"] != "assistant":
            self._close()
            self._messages.append(
                Message(role=item["role"], content=_text(text_of(item["content"])))
            )
        else:
            self._say(item, path)

    def end(self) -> tuple[Message, ...]:
        """All messages."""
        self._close()
        return tuple(self._messages)

    def _say(self, item: Item, path: str) -> None:
        if self._turn is None or not self._turn.takes(item):
            self._close()
            self._turn = _Turn()
        match item["type"]:
            case "reasoning":
                self._turn.reasoning += [part["text"] for part in item.get("content", ())]
            case "message":
                self._turn.content.append(text_of(item["content"]))
            case _:
                self._call(self._turn, item, path)

    def _call(self, turn: _Turn, item: Item, path: str) -> None:
        call_id = item["call_id"]
        if any(call.call_id == call_id for call in turn.calls):
            raise checks.wrong(
                f"{path}.call_id", call_id, "an id that no other call of the turn has"
            )
        custom = item["type"] == "custom_tool_call"
        arguments = (
            {CUSTOM_INPUT: item["input"]}
            if custom
            else parse_arguments(item["arguments"], f"{path}.arguments")
        )
        turn.calls.append(ToolCall(call_id=call_id, name=shown_name(item), arguments=arguments))

    def _answer(self, item: Item, path: str) -> None:
        turn = self._turn or _Turn()
        for place, call in enumerate(turn.calls):
            if call.call_id == item["call_id"] and place not in turn.results:
                turn.results[place] = Message(
                    role="tool", content=_text(text_of(item["output"])), tool_call_id=call.call_id
                )
                return
        raise RequestError(
            f"{path}.call_id is {checks.shown(item['call_id'])}; give the id of an unanswered call "
            "of the assistant's turn before it",
            code="invalid_message_order",
            param=f"{path}.call_id",
        )

    def _close(self) -> None:
        if self._turn is not None:
            self._messages += self._turn.messages()
        self._turn = None


def _text(text: str) -> tuple[ContentPart, ...]:
    return (ContentPart(kind="text", text=text),)
