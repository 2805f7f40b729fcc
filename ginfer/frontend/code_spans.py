"""Where running text is quoted code: a fence of three or more backticks, or a span in a paragraph.

A fence opens at the start of a line (at most 3 spaces before it) and closes with a line of at least
as many backticks and nothing else. A span opens with a run of backticks and closes with a run of
the same length; a blank line or a fence ends it too.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_TOKENS = re.compile(r"`+|\n|[^`\n]+")
_BLANK = " \t\r"
_MAX_INDENT = 3
_MIN_FENCE = 3


class _Mode(Enum):
    TEXT = auto()
    SPAN = auto()
    FENCE_LINE = auto()  # the line that opens a fence, unless it holds another backtick
    FENCE = auto()
    FENCE_END = auto()  # the line that closes it, unless it holds something else


class CodeSpans:
    """Follows text piece by piece; how it is cut makes no difference."""

    def __init__(self) -> None:
        self._mode = _Mode.TEXT
        self._size = 0  # backticks that opened the span or fence
        self._run = 0  # backticks seen last, which may go on
        self._indent = 0  # blanks of this line so far, -1 once it holds more
        self._run_indent = 0

    def feed(self, text: str) -> None:
        """Go on over text."""
        for token in _TOKENS.findall(text):
            if token[0] == "`":
                self._run_indent = self._run_indent if self._run else self._indent
                self._run += len(token)
                self._indent = -1
                continue
            self._end_run()
            if token == "\n":
                self._end_line()
            elif self._indent < 0 or token.strip(_BLANK):
                self._indent = -1
                if self._mode is _Mode.FENCE_END and token.strip(_BLANK):
                    self._mode = _Mode.FENCE
            else:
                self._indent += len(token)

    @property
    def in_fence(self) -> bool:
        """Whether this place is inside a fence, whatever comes next."""
        return self._mode is _Mode.FENCE and not self._run

    @property
    def line_is_blank(self) -> bool:
        """Whether the line holds nothing but blanks so far."""
        return self._indent >= 0

    def quotes_tag(self) -> bool:
        """Whether a tag that starts here is quoted. Nothing but the tag may be fed next."""
        self._end_run()
        return self._mode is not _Mode.TEXT

    def _end_run(self) -> None:
        size, self._run = self._run, 0
        if not size:
            return
        starts_line = 0 <= self._run_indent <= _MAX_INDENT
        opens_fence = starts_line and size >= _MIN_FENCE
        if self._mode is _Mode.TEXT or (self._mode is _Mode.SPAN and opens_fence):
            self._mode = _Mode.FENCE_LINE if opens_fence else _Mode.SPAN
            self._size = size
        elif self._mode in (_Mode.SPAN, _Mode.FENCE_LINE):
            self._mode = _Mode.TEXT if size == self._size else _Mode.SPAN
        elif self._mode is _Mode.FENCE and starts_line and size >= self._size:
            self._mode = _Mode.FENCE_END
        else:
            self._mode = _Mode.FENCE

    def _end_line(self) -> None:
        if self._mode is _Mode.FENCE_LINE:
            self._mode = _Mode.FENCE
        elif self._mode is _Mode.FENCE_END or (self._mode is _Mode.SPAN and self.line_is_blank):
            self._mode = _Mode.TEXT
        self._indent = 0
