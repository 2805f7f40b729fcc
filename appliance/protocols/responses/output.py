"""Output: the items of a response as they open, grow and close, and the events that tell it.

Everything that clients rely on holds here: one item is open at a time; an item keeps its id and
output_index from `added` to `done`; every `added` has its `done` but for a call that was not
completed; the deltas of an item joined are its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from appliance.protocols.responses.custom_input import InputText
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    ReasoningText,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.protocols.responses.tools import Offer, ToolSet
    from ginfer.frontend.base import OutputEvent

    Event = dict[str, Any]
    Item = dict[str, Any]

REASONING, MESSAGE = "reasoning", "message"
FUNCTION, CUSTOM = "function_call", "custom_tool_call"
PREFIXES = {REASONING: "rs", MESSAGE: "msg", FUNCTION: "fc", CUSTOM: "ctc"}
# event that carries an item's text, and its member that holds the whole at the end
STREAMS = {
    REASONING: ("response.reasoning_text", "text"),
    MESSAGE: ("response.output_text", "text"),
    FUNCTION: ("response.function_call_arguments", "arguments"),
    CUSTOM: ("response.custom_tool_call_input", "input"),
}


def derived_id(prefix: str, response_id: str, index: int, nbytes: int = 16) -> str:
    """An id that belongs to one place of one response."""
    digest = blake2b(f"{prefix} {response_id} {index}".encode(), digest_size=nbytes)
    return f"{prefix}_{digest.hexdigest()}"


@dataclass
class _Entry:
    """One output item."""

    kind: str
    index: int
    item_id: str
    offer: Offer | None = None
    call_id: str = ""
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)
    sealed: str | None = None
    custom_input: InputText = field(default_factory=InputText)

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(self.texts)

    @property
    def is_call(self) -> bool:
        """Whether it is a call rather than text."""
        return self.offer is not None

    def part(self) -> Item:
        """The content part, as it stands."""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        logprobs = list(self.logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def item(self) -> Item:
        """The item, as it stands; content comes with the first text."""
        head: Item = {"id": self.item_id, "type": self.kind, "status": self.status}
        if self.offer is None:
            content = [] if self.status == "in_progress" else [self.part()]
            if self.kind == MESSAGE:
                return {**head, "role": "assistant", "content": content}
            return {**head, "summary": [], "content": content, "encrypted_content": self.sealed}
        call = {**head, "call_id": self.call_id, "name": self.offer.name}
        if self.offer.namespace is not None:
            call["namespace"] = self.offer.namespace
        return {**call, STREAMS[self.kind][1]: self.text}


class Output:
    """The output of one response. Every method returns the events that it makes, without
    sequence numbers. seal: makes encrypted_content of reasoning, None = not wanted."""

    def __init__(
        self, response_id: str, toolset: ToolSet, seal: Callable[[str], str] | None = None
    ) -> None:
        self._response_id = response_id
        self._toolset = toolset
        self._seal = seal
        self._entries: list[_Entry] = []
        self._open: _Entry | None = None
        self._space = ""  # white space after a call, which alone is no message
        self.malformed: str | None = None  # why a call cannot count although it ended
        self._held: list[Item] = []  # logprobs of text that is still ambiguous

    @property
    def items(self) -> list[Item]:
        """All items so far."""
        return [entry.item() for entry in self._entries]

    def take(self, events: list[OutputEvent], logprobs: list[Item] | None = None) -> list[Event]:
        """Show output events, and the logprobs of the tokens behind them: those of the text of a
        message are kept."""
        self._held += logprobs or []
        return [shown for event in events for shown in self._take(event)]

    def end(self, status: str) -> list[Event]:
        """The response has ended: completed or incomplete. An item that is open is closed with the
        same status; a call that is still open stays without `done`. Nothing the second time."""
        events: list[Event] = []
        if self._open is not None and self._open.is_call:
            self._leave("incomplete")
        elif self._open is not None:
            events = self._close(status)
        said = any(entry.kind != REASONING for entry in self._entries)
        if status == "completed" and not said:
            events += self._begin(MESSAGE) + self._close(status)
        return events

    def _take(self, event: OutputEvent) -> list[Event]:
        match event:
            case ReasoningText(text):
                return self._text(REASONING, text)
            case ContentText(text):
                return self._content(text)
            case CallStarted(_, name):
                return self._announce(self._toolset.offers[name])
            case CallArguments(_, fragment):
                return self._arguments(fragment)
            case CallEnded():
                self._held = []
                return self._complete()
            case CallBroken():
                self._held = []
                self._leave("incomplete")
        return []

    def _content(self, text: str) -> list[Event]:
        if self._open is None and self._entries and self._entries[-1].is_call:
            text = self._space + text
            self._space = "" if text.strip() else text
            if self._space:
                return []
        return self._text(MESSAGE, text)

    def _text(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open is None or self._open.kind != kind:
            events = self._close("completed") + self._begin(kind)
        return events + self._delta(text)

    def _announce(self, offer: Offer) -> list[Event]:
        self._space, self._held = "", []
        return self._close("completed") + self._begin(CUSTOM if offer.custom else FUNCTION, offer)

    def _arguments(self, fragment: str) -> list[Event]:
        assert self._open is not None
        if self._open.kind == CUSTOM:
            fragment = self._open.custom_input.feed(fragment)
        return self._delta(fragment) if fragment else []

    def _complete(self) -> list[Event]:
        """The call that is open has ended."""
        entry = self._open
        assert entry is not None
        assert entry.offer is not None
        if not entry.custom_input.excess:
            return self._close("completed")
        self.malformed = f"{entry.offer.name} takes one text, and was given more"
        self._leave("incomplete")
        return []

    def _begin(self, kind: str, offer: Offer | None = None) -> list[Event]:
        index = len(self._entries)
        entry = _Entry(kind, index, derived_id(PREFIXES[kind], self._response_id, index), offer)
        if offer is not None:
            entry.call_id = derived_id("call", self._response_id, index, 8)
        self._entries.append(entry)
        self._open = entry
        added = _event("response.output_item.added", output_index=index, item=entry.item())
        if offer is not None:
            return [added]
        return [added, self._at("response.content_part.added", part=entry.part())]

    def _delta(self, text: str) -> list[Event]:
        entry = self._open
        assert entry is not None
        entry.texts.append(text)
        event = self._at(f"{STREAMS[entry.kind][0]}.delta", delta=text)
        if entry.kind == MESSAGE:
            event["logprobs"], self._held = self._held, []
            entry.logprobs += event["logprobs"]
        return [event]

    def _close(self, status: str) -> list[Event]:
        """Close what is open, with the events that say so."""
        entry = self._open
        if entry is None:
            return []
        stream, whole = STREAMS[entry.kind]
        events = [self._at(f"{stream}.done", **{whole: entry.text})]
        if entry.kind == MESSAGE:
            events[0]["logprobs"] = list(entry.logprobs)
        if not entry.is_call:
            events.append(self._at("response.content_part.done", part=entry.part()))
        if entry.kind == REASONING and self._seal is not None:
            entry.sealed = self._seal(entry.text)
        self._leave(status)
        item = entry.item()
        return [*events, _event("response.output_item.done", output_index=entry.index, item=item)]

    def _leave(self, status: str) -> None:
        assert self._open is not None
        self._open.status = status
        self._open = None

    def _at(self, kind: str, **members: Any) -> Event:
        """An event about the open item."""
        assert self._open is not None
        event = _event(kind, item_id=self._open.item_id, output_index=self._open.index, **members)
        return event if self._open.is_call else {**event, "content_index": 0}


def _event(kind: str, **members: Any) -> Event:
    return {"type": kind, **members}
