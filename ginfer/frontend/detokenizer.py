"""Incremental detokeniser: token ids to text, never half a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from ginfer.frontend.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feeds tokens one by one; the pieces joined are the whole byte string decoded with `replace`.

    `hidden`: ids that show no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden: Container[int] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = hidden
        self._decoder = _Utf8Decoder("replace")

    def feed(self, token_id: int) -> str:
        """Text that is now certain; an incomplete character is held back."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """An incomplete character that was held back, as U+FFFD. Starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
