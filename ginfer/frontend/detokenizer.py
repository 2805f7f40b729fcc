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
        self._token_bytes, self._texts = tokenizer.token_bytes, tokenizer.texts
        self._hidden = hidden
        self._decoder = _Utf8Decoder("replace")
        self._is_whole = True  # no incomplete character is held back

    def feed(self, token_id: int) -> str:
        """Text that is now certain; an incomplete character is held back."""
        if token_id in self._hidden:
            return ""
        alone = self._is_whole
        text = self._texts.get(token_id) if alone else None
        if text is None:
            text = self._decoder.decode(self._token_bytes(token_id))
            self._is_whole = not self._decoder.getstate()[0]
            if alone and self._is_whole:
                self._texts[token_id] = text
        return text

    def finish(self) -> str:
        """An incomplete character that was held back, as U+FFFD. Starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._is_whole = True
        return text
