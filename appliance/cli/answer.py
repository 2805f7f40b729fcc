"""One answer in the terminal: text on stdout, reasoning (dimmed) and the summary on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click
import orjson

from ginfer.engine.request import Delta, Failed, Finished
from ginfer.errors import InternalError
from ginfer.frontend.base import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    ContentText,
    ReasoningText,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.engine.request import Event
    from ginfer.frontend.base import OutputEvent, OutputParser

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Answer:
    """Prints one answer as it comes and keeps what it was.

    parser: channel text to output events; None prints the raw text. Tool calls are printed as one
    JSON object per line."""

    def __init__(self, parser: OutputParser | None) -> None:
        self.reasoning = ""
        self.content = ""
        self.token_ids: list[int] = []
        self.finished: Finished | None = None
        self._parser = parser
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._last = ""  # last character written to the terminal, wherever
        self._reasons = False

    def follow(self, events: Iterable[Event]) -> Finished:
        """Print an answer to its end. Raises the error of Failed."""
        try:
            for event in events:
                if isinstance(event, Delta):
                    self._take(event)
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Finished):
                    self._show(self._parser.finish() if self._parser else [])
                    self.finished = event
                    return event
        finally:
            self._leave_reasoning()
            self._end_line()
        raise InternalError("the engine ended the request without a result")

    def summary(self) -> str:
        """Token counts and speed of the finished answer, in one line."""
        assert self.finished is not None
        usage, times = self.finished.usage, self.finished.timings
        parts = [
            f"prompt {usage.prompt_tokens} tokens"
            + (f" ({usage.cached_tokens} reused)" if usage.cached_tokens else ""),
            f"answer {usage.completion_tokens} tokens"
            + (f" ({usage.reasoning_tokens} reasoning)" if usage.reasoning_tokens else ""),
            f"first token {times.first_token_s:.2f} s",
        ]
        if usage.completion_tokens > 1 and times.decode_s > 0:
            parts.append(f"{(usage.completion_tokens - 1) / times.decode_s:.1f} tokens/s")
        if usage.draft_tokens:
            decoded = usage.completion_tokens - 1  # the prompt draws the first
            rounds = max(decoded - usage.accepted_tokens, 1)
            parts.append(
                f"{decoded / rounds:.2f} tokens a round, {usage.accepted_tokens} of "
                f"{usage.draft_tokens} drafts accepted"
            )
        return ", ".join([*parts, str(self.finished.reason)])

    def _take(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        if self._parser is None:
            self._write_content(delta.text)
        else:
            self._show(self._parser.feed(delta.channel, delta.text))

    def _show(self, events: list[OutputEvent]) -> None:
        for event in events:
            match event:
                case ReasoningText(text):
                    self._write_reasoning(text)
                case ContentText(text):
                    self._write_content(text)
                case CallStarted(index, name):
                    self._calls[index] = (name, [])
                case CallArguments(index, fragment):
                    self._calls[index][1].append(fragment)
                case CallEnded(index):
                    self._write_call(index)
                case CallBroken(index, reason):
                    self._leave_reasoning()
                    click.echo(f"unfinished call of {self._calls[index][0]}: {reason}", err=True)

    def _write_call(self, index: int) -> None:
        name, fragments = self._calls[index]
        arguments = orjson.loads("".join(fragments))
        self._end_line()
        self._write_content(orjson.dumps({"name": name, "arguments": arguments}).decode() + "\n")

    def _write_reasoning(self, text: str) -> None:
        if text and not self._reasons:
            self._reasons = True
            self._err(DIM if self._dim else "")
        self.reasoning += text
        self._err(text)

    def _write_content(self, text: str) -> None:
        self._leave_reasoning()
        self.content += text
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text[-1:] or self._last

    def _leave_reasoning(self) -> None:
        if self._reasons:
            self._reasons = False
            self._err("" if self._last == "\n" else "\n")
            self._err(f"{PLAIN}\n" if self._dim else "\n")

    def _err(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
        self._last = text[-1:] or self._last

    def _end_line(self) -> None:
        if self.content and not self.content.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._last = "\n"
