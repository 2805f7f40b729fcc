"""Channel splitter of the Qwen family: token ids to reasoning and content text, as they come.

Rules:
- `</think>` ends the reasoning, as token or spelled out; the newlines right after it are dropped.
- Everything else inside the reasoning is text, tool markup included. Only the `<think>` token there
  is dropped: it repeats what the prompt opened.
- In content a `</think>` token that closes nothing shown repeats the end of the reasoning and is
  dropped; one that closes a shown `<think>`, or stands inside a tool call, is text.
- Control tokens show no text, except in content when the caller keeps them. Stop tokens never do.
- Raw: one channel, content, with every token visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.frontend.detokenizer import Detokenizer
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from ginfer.frontend.tokenizer import Tokenizer

CLOSE = "</think>"


class QwenStreamDecoder:
    """Implements `StreamDecoder` for one response."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: tuple[int, ...],
        opens_reasoning: bool,
        raw: bool = False,
        keep_special_tokens: bool = False,
    ) -> None:
        self._raw = raw
        reasons = opens_reasoning and not raw
        self.channel = Channel.REASONING if reasons else Channel.CONTENT  # of the next token
        self._open_id, self._close_id, self._call_id, self._call_end_id = map(
            tokenizer.added_token_id, ("<think>", CLOSE, "<tool_call>", "</tool_call>")
        )
        self._hidden = tokenizer.control_ids
        self._hidden_in_content = frozenset(stop_token_ids) if keep_special_tokens else self._hidden
        self._detokenizer = Detokenizer(tokenizer)
        self._held = ""  # reasoning that may begin CLOSE
        self._skip_newlines = False
        self._num_open = 0  # <think> shown in content and not closed yet
        self._in_call = False

    def feed(self, token_id: int) -> list[tuple[Channel, str]]:
        """Take one token; return the text that is now certain, in order."""
        if self._raw:
            return _pieces(Channel.CONTENT, self._detokenizer.feed(token_id))
        if self.channel is Channel.REASONING:
            return self._reasoning(token_id)
        return self._content(token_id)

    def finish(self) -> list[tuple[Channel, str]]:
        """Return what was held back; an incomplete UTF-8 tail becomes U+FFFD."""
        if self.channel is Channel.REASONING:
            return _pieces(Channel.REASONING, self._end_reasoning())
        return self._shown(self._detokenizer.finish())

    def _reasoning(self, token_id: int) -> list[tuple[Channel, str]]:
        if token_id == self._close_id:
            text = self._end_reasoning()
            self._open_content()
            return _pieces(Channel.REASONING, text)
        if token_id == self._open_id or token_id in self._hidden:
            return []
        before, closed, after = (self._held + self._detokenizer.feed(token_id)).partition(CLOSE)
        if closed:
            self._held = ""
            self._open_content()
            return _pieces(Channel.REASONING, before) + self._shown(after)
        size = _held_size(before)
        self._held = before[len(before) - size :]
        return _pieces(Channel.REASONING, before[: len(before) - size])

    def _content(self, token_id: int) -> list[tuple[Channel, str]]:
        if token_id in self._hidden_in_content:
            return []
        if token_id == self._close_id and not self._in_call:
            if not self._num_open:
                return []
            self._num_open -= 1
        elif token_id == self._open_id and not self._in_call:
            self._num_open += 1
        elif token_id == self._call_id:
            self._in_call = True
        elif token_id == self._call_end_id:
            self._in_call = False
        return self._shown(self._detokenizer.feed(token_id))

    def _end_reasoning(self) -> str:
        text, self._held = self._held + self._detokenizer.finish(), ""
        return text

    def _open_content(self) -> None:
        self.channel = Channel.CONTENT
        self._skip_newlines = True

    def _shown(self, text: str) -> list[tuple[Channel, str]]:
        if self._skip_newlines and text:
            text = text.lstrip("\n")
            self._skip_newlines = not text
        return _pieces(Channel.CONTENT, text)


def _pieces(channel: Channel, text: str) -> list[tuple[Channel, str]]:
    return [(channel, text)] if text else []


def _held_size(text: str) -> int:
    """Length of the longest end of text that may begin CLOSE, whose first character is in it once.
    text: without CLOSE."""
    at = text.rfind(CLOSE[0])
    return len(text) - at if at >= 0 and CLOSE.startswith(text[at:]) else 0
