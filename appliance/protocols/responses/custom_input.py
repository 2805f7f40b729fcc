"""InputText: the text of a custom tool's call out of its arguments, as they stream."""

from __future__ import annotations

import json
import re

_OPENING = re.compile(r'\{"(?:[^"\\]|\\.)*": "')  # the one parameter, whatever its name
_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')


class InputText:
    """Takes fragments of a JSON object with one string; returns the string, as far as it came.

    A second parameter is no text: what comes after the first is left out, and `excess` says so."""

    def __init__(self) -> None:
        self._pending = ""
        self._opened = self._closed = False
        self.excess = False

    def feed(self, fragment: str) -> str:
        """Take a fragment; return the text that is now certain."""
        self._pending += fragment
        if self._closed:
            self.excess = self.excess or self._pending.strip() not in ("", "}")
            return ""
        if not self._opened:
            opening = _OPENING.match(self._pending)
            if opening is None:
                return ""
            self._pending = self._pending[opening.end() :]
            self._opened = True
        whole = _WHOLE.match(self._pending)
        assert whole is not None  # it matches nothing, too
        self._pending = self._pending[whole.end() :]
        if self._pending.startswith('"'):
            self._closed = True
            self._pending = self._pending[1:]
            self.feed("")
        text: str = json.loads(f'"{whole[0]}"')
        return text
