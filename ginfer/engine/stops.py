"""Stop strings of one channel: find the first match, and hold back what could become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.engine.request import StopString


class StopMatcher:
    """Feeds on the text of one token at a time. Among matches the one wins that is complete after
    the fewest tokens, then the one that begins first, then the one declared first."""

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: StopString | None = None

    def feed(self, text: str) -> str:
        """Take the text of a token; return what is safe to show. Sets `match` when a stop string is
        complete: it and what follows are withheld, unless it wants to be included."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, i) for i, s in enumerate(self._stops) if (at := text.find(s.text)) >= 0]
        if found:
            at, i = min(found)
            self.match, self._held = self._stops[i], ""
            return text[: at + len(self.match.text)] if self.match.include else text[:at]
        cut = len(text) - max(_overlap(text, s.text) for s in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The channel has ended without a match: return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
