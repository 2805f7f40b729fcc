"""The `tokenizers` library behind our interface; ids are cached per piece between control tokens.

Two kinds of added tokens: *control* tokens are flagged special in the tokenizer files and structure
the prompt (`<|im_start|>`); *markup* tokens are not (`<think>`). A piece is the text between two
control tokens, in a chat one whole turn. Pieces are encoded on their own, as the library does it.

`MARK` lets a caller write text that must not become control tokens: see `escape` and `encode`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer

from ginfer.errors import ArtifactError, InternalError, RequestError
from ginfer.frontend.bytelevel import token_to_bytes
from ginfer.frontend.piece_cache import PieceCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

CACHE_NBYTES = 64 << 20
MARK = "\ufdd0"  # a noncharacter; in escaped text always followed by one of the letters below
_BREAK, _LITERAL = MARK + "0", MARK + "1"


class Tokenizer:
    """Text to ids and ids to bytes, of one package. Safe to share between threads.

    Raises ArtifactError when the resources do not describe a tokenizer that we can follow exactly.
    """

    def __init__(
        self, tokenizer_json: bytes, config_json: bytes = b"{}", *, cache_nbytes: int = CACHE_NBYTES
    ) -> None:
        document = _parse("tokenizer.json", tokenizer_json)
        added = _added_tokens(document, _parse("tokenizer_config.json", config_json))
        self._library = _library_without_added_tokens(document)
        self._id_of_added = {str(t["content"]): int(t["id"]) for t in added}
        control = [str(t["content"]) for t in added if t.get("special")]
        markup = set(self._id_of_added) - set(control)
        self._control_split = re.compile(f"({_either(map(re.escape, control))})")
        self._markup_split = re.compile(f"({_either(map(re.escape, markup))})")
        self._spelled = re.compile(_either(f"{t[:-1]}(?={t[-1]})" for t in map(re.escape, control)))
        begun = {re.escape(t[:n]) for t in control for n in range(1, len(t))}
        self._begun = re.compile(rf"(?:{_either(begun)})\Z")
        self._longest = max(map(len, control), default=1)
        self._cache = PieceCache(cache_nbytes)
        self._bytes = {i: token_to_bytes(t) for t, i in self._library.get_vocab().items()}
        self._bytes |= {i: t.encode() for t, i in self._id_of_added.items()}
        self.texts: dict[int, str] = {}  # of tokens that `Detokenizer` has seen stand alone
        self.control_ids = frozenset(self._id_of_added[t] for t in control)
        self._single = {i: np.array([i], np.int32) for i in self._id_of_added.values()}

    @property
    def cache(self) -> PieceCache:
        """The piece cache."""
        return self._cache

    def added_token_id(self, token: str) -> int:
        """Id of an added token. Raises ArtifactError when the package lacks it."""
        try:
            return self._id_of_added[token]
        except KeyError:
            raise ArtifactError(f"the tokenizer has no token {token!r}") from None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token. Raises InternalError for an id without a token."""
        try:
            return self._bytes[token_id]
        except KeyError:
            raise InternalError(f"token id {token_id} is outside the vocabulary") from None

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of several tokens, added tokens included."""
        return b"".join(map(self.token_bytes, token_ids))

    def escape(self, text: str) -> str:
        """Mark text so that `encode` and `unescape` give it back with the control tokens spelled
        inside it, or begun at its end, as ordinary text."""
        if MARK in text:
            text = text.replace(MARK, _LITERAL)
        if self._spelled.search(text):
            text = self._spelled.sub(r"\g<0>" + _BREAK, text)
        inner = text.rstrip()  # what a template that strips its input leaves
        if self._begun.search(inner[-self._longest :]):
            text = inner + _BREAK + text[len(inner) :]
        return text

    def unescape(self, text: str) -> str:
        """The text without marks."""
        if MARK not in text:
            return text
        return text.replace(_BREAK, "").replace(_LITERAL, MARK)

    def encode(self, text: str, *, escaped: bool = False) -> NDArray[np.int32]:
        """Token ids [T] of text, added tokens recognised. `escaped`: text holds marks of `escape`.

        Raises RequestError for text with lone surrogates.
        """
        parts = self._control_split.split(text)
        pieces = parts[::2]
        if escaped and MARK in text:
            pieces = [self.unescape(p) for p in pieces]
        found = self._cache.get_many(pieces)
        arrays = []
        for i, (piece, ids) in enumerate(zip(pieces, found)):
            if i:
                arrays.append(self._single[self._id_of_added[parts[2 * i - 1]]])
            if piece:
                arrays.append(self._encode_piece(piece) if ids is None else ids)
        return np.concatenate(arrays) if arrays else np.empty(0, np.int32)

    def remember(self, text: str, token_ids: Sequence[int]) -> bool:
        """Bind the text of a piece to the ids that generated it, so that it is replayed exactly.

        False, and nothing is bound, unless the ids are one piece and spell the text."""
        ids = np.array(token_ids, np.int32)
        if not text or not self.control_ids.isdisjoint(token_ids):
            return False
        if self.decode_bytes(token_ids) != text.encode(errors="surrogatepass"):
            return False
        self._cache.put(text, ids)
        return True

    def _encode_piece(self, piece: str) -> NDArray[np.int32]:
        try:
            piece.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text holds the lone surrogate U+{ord(piece[error.start]):04X}; send valid Unicode"
            ) from None
        ids: list[int] = []
        for i, part in enumerate(self._markup_split.split(piece)):
            if i % 2:
                ids.append(self._id_of_added[part])
            elif part:
                # The batch form lets other threads run; the plain one keeps the interpreter lock.
                (found,) = self._library.encode_batch_fast([part], add_special_tokens=False)
                ids += found.ids
        array = np.array(ids, np.int32)
        array.flags.writeable = False
        self._cache.put(piece, array)
        return array


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{name} is not a JSON object")
    return document


def _added_tokens(document: dict[str, Any], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Added tokens of tokenizer.json, then those that only tokenizer_config.json has."""
    if document.get("truncation") is not None:
        raise ArtifactError("tokenizer.json has a truncation rule; it must be null")
    added = list(document.get("added_tokens") or ())
    known = {t["content"] for t in added}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if token["content"] not in known:
            added.append({**token, "id": int(token_id)})
    for token in added:
        if any(token.get(rule) for rule in ("lstrip", "rstrip", "single_word", "normalized")):
            raise ArtifactError(f"added token {token['content']!r} has a matching rule; none may")
    tokens = [t["content"] for t in added]
    for a in tokens:
        for b in tokens:
            if (a != b and a in b) or any(a.endswith(b[:n]) for n in range(1, len(b))):
                raise ArtifactError(f"added tokens {a!r} and {b!r} can overlap")
    return added


def _library_without_added_tokens(document: dict[str, Any]) -> LibraryTokenizer:
    plain = {**document, "added_tokens": [], "post_processor": None, "padding": None}
    try:
        return LibraryTokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"tokenizer.json is not a usable tokenizer: {error}") from None


def _either(patterns: Iterable[str]) -> str:
    return "|".join(sorted(patterns)) or r"(?!)"
