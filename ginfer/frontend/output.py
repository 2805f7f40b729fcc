"""Output parser of the Qwen family: channel text to reasoning, content and tool calls, streaming.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

Rules:
- Calls are read in content only, only if the request has tools, and not in quoted code
  (`code_spans`).
- A call is announced when `<tool_call><function=NAME>` is complete and NAME is a tool of the
  request. Until then it is only held back; what turns out different is content, every byte of it.
  White space before an announced call is dropped. `<function=NAME>` alone at the start of a line
  counts too.
- A value loses one newline at either end. Data never becomes structure: a value ends at a
  `</parameter>` that is followed by another tag of the call or of the next call, nothing else (but
  `</function></tool_call>` or `</function>` at the very end of the response ends it as well). In a
  string of a value that is JSON nothing ends.
- Between parameters a missing `</function>` or `</tool_call>` is forgiven where the next tag shows
  the end of the call. Anything else there breaks the call; what follows is content. A call that is
  open at the end is broken. Nothing that was sent is repeated as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.frontend.arguments import ArgumentStream
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    ReasoningText,
)
from ginfer.frontend.code_spans import CodeSpans
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ginfer.frontend.base import OutputEvent
    from ginfer.prompt import Tool

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_IN_CALL = (PARAMETER, FUNCTION_END, CALL_END, CALL, FUNCTION)
_SPACE = " \t\r\n"
_MAX_GAP = 64  # white space between two tags that belong together
_MAX_KEY = 256


class QwenOutputParser:
    """Implements `OutputParser` for one response."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._buffer = ""  # text that is not decided yet
        self._space = ""  # white space before it, dropped if a call follows
        self._final = False
        self._code = CodeSpans()
        self._step: Callable[[], bool] = self._text  # one decision; False = needs more text
        self._num_calls = 0
        self.num_unannounced = 0
        self._arguments = ArgumentStream({})
        self._value_started = False
        self._events: list[OutputEvent] = []

    def feed(self, channel: Channel, text: str) -> list[OutputEvent]:
        """Take text; return every event that is now certain."""
        if channel is Channel.REASONING:
            return [ReasoningText(text)] if text else []
        if not self._schemas:
            return [ContentText(text)] if text else []
        self._buffer += text
        return self._run()

    def finish(self) -> list[OutputEvent]:
        """The response has ended; return what was held back and close or break open calls."""
        self._final = True
        events = self._run()
        if self._step in (self._between, self._value):
            self._break("the response ended inside the call")
        elif self._step == self._text:
            self._content(self._space)
        self._space = self._buffer = ""
        events += self._events
        self._events = []
        return events

    def _run(self) -> list[OutputEvent]:
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    # Steps: each takes a decided piece from the front of the buffer.

    def _text(self) -> bool:
        """Content, up to the next announced call."""
        before, tag, _ = self._buffer.partition("<")
        self._show(before)
        self._buffer = self._buffer[len(before) :]
        if not tag:
            return False
        if not self._code.quotes_tag():
            call = self._preamble()
            if call is None:
                return False
            name, size = call
            if size:
                self._announce(name)
                self._buffer = self._buffer[size:]
                return True
            self.num_unannounced += self._buffer.startswith(CALL)
        self._show(tag)
        self._buffer = self._buffer[1:]
        return True

    def _between(self) -> bool:
        """Inside a call, outside a value."""
        self._buffer = self._buffer.lstrip(_SPACE)
        tag = _tag(self._buffer, _IN_CALL)
        if tag is None:
            return False
        if tag == PARAMETER:
            return self._key()
        if tag == "":
            return self._break("there is text between its parameters")
        self._event(CallArguments(self._num_calls - 1, self._arguments.close()))
        self._event(CallEnded(self._num_calls - 1))
        self._step = self._after if tag == FUNCTION_END else self._text
        if tag in (FUNCTION_END, CALL_END):
            self._buffer = self._buffer[len(tag) :]
        return True

    def _key(self) -> bool:
        """The name of a parameter; the buffer begins with its tag."""
        key, closed, rest = self._buffer[len(PARAMETER) :].partition(">")
        legal = len(key) <= _MAX_KEY and "\n" not in key and "<" not in key
        if legal and not closed:
            return False
        if not legal or not key:
            return self._break("a parameter has no legal name")
        if self._arguments.has(key):
            return self._break(f"parameter {key!r} is given twice")
        self._argument(self._arguments.begin(key))
        self._buffer = rest
        self._value_started = False
        self._step = self._value
        return True

    def _value(self) -> bool:
        """The value of a parameter."""
        if not self._value_started and self._buffer:
            self._buffer = self._buffer.removeprefix("\n")
            self._value_started = True
        before, tag, _ = self._buffer.partition("<")
        size = _value_end(self._buffer[len(before) :], final=self._final) if tag else None
        if tag and self._arguments.quotes(before):
            size = -1
        if size is None:
            certain = before.removesuffix("\n")
            self._argument(self._arguments.text(certain))
            self._buffer = self._buffer[len(certain) :]
            return False
        if size < 0:
            self._argument(self._arguments.text(before + tag))
            self._buffer = self._buffer[len(before) + 1 :]
            return True
        self._argument(self._arguments.text(before.removesuffix("\n")) + self._arguments.end())
        self._buffer = self._buffer[len(before) + size :]
        self._step = self._between
        return True

    def _after(self) -> bool:
        """After `</function>`: the closing tag of the envelope, if it is there."""
        tag = _tag_after_space(self._buffer, (CALL_END,))
        if tag is None:
            return False
        if tag:
            self._buffer = self._buffer.lstrip(_SPACE)[len(tag) :]
        self._step = self._text
        return True

    def _preamble(self) -> tuple[str, int] | None:
        """Name and size of the preamble of a call at the front of the buffer; size 0 if it is none,
        None while it may become one."""
        undecided = ("", 0) if self._final else None
        tag = _tag(self._buffer, (CALL, FUNCTION) if self._code.line_is_blank else (CALL,))
        rest = self._buffer
        if tag == CALL:
            tag = _tag_after_space(rest[len(CALL) :], (FUNCTION,))
            rest = rest[len(CALL) :].lstrip(_SPACE)
        if not tag:
            return undecided if tag is None else ("", 0)
        name, closed, rest = rest[len(FUNCTION) :].partition(">")
        if closed:
            return (name, len(self._buffer) - len(rest)) if name in self._schemas else ("", 0)
        return undecided if any(n.startswith(name) for n in self._schemas) else ("", 0)

    # What the steps do.

    def _announce(self, name: str) -> None:
        self._space = ""
        self._code = CodeSpans()
        self._arguments = ArgumentStream(self._schemas[name])
        self._event(CallStarted(self._num_calls, name))
        self._num_calls += 1
        self._step = self._between

    def _break(self, reason: str) -> bool:
        """End the announced call unfinished; what follows is content."""
        self._event(CallBroken(self._num_calls - 1, reason))
        self._step = self._text
        return True

    def _show(self, text: str) -> None:
        """Content text, but white space at its end is kept until it is clear what follows."""
        if not text:
            return
        self._code.feed(text)
        visible = text if self._code.in_fence else text.rstrip(_SPACE)
        if visible:
            self._content(self._space + visible)
            self._space = ""
        self._space += text[len(visible) :]

    def _content(self, text: str) -> None:
        if text:
            self._event(ContentText(text))

    def _argument(self, fragment: str) -> None:
        if fragment:
            self._event(CallArguments(self._num_calls - 1, fragment))

    def _event(self, event: OutputEvent) -> None:
        """Add an event; text of the same kind as the last one's is joined to it."""
        last = self._events[-1] if self._events else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            self._events[-1] = ContentText(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            self._events[-1] = CallArguments(event.index, last.fragment + event.fragment)
        else:
            self._events.append(event)


def _tag(text: str, tags: tuple[str, ...]) -> str | None:
    """The tag that text begins with, '' if none, None while it may become one."""
    for tag in tags:
        if text.startswith(tag):
            return tag
    return None if any(tag.startswith(text) for tag in tags) else ""


def _tag_after_space(text: str, tags: tuple[str, ...]) -> str | None:
    """The same, after a limited amount of white space."""
    rest = text.lstrip(_SPACE)
    return "" if len(text) - len(rest) > _MAX_GAP else _tag(rest, tags)


def _value_end(text: str, *, final: bool) -> int | None:
    """How much of text, which begins with '<', is the tag that ends a value; -1 if it is a part of
    the value, None while both are possible."""
    tag = _tag(text, (PARAMETER_END, FUNCTION_END))
    if tag == PARAMETER_END:
        following = _tag_after_space(text[len(tag) :], _IN_CALL)
        if following is not None:
            return len(tag) if following else -1
    elif tag == FUNCTION_END:
        rest = text[len(tag) :]
        following = _tag_after_space(rest, (CALL_END,))
        if following:
            rest = rest.lstrip(_SPACE)[len(CALL_END) :]
            if len(rest) > _MAX_GAP or rest.strip(_SPACE):
                return -1
        elif following == "":
            return -1
        if final and not rest.strip(_SPACE):
            return 0  # the tag itself ends the call
    elif tag == "":
        return -1
    return -1 if final else None
