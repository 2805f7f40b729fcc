"""Signatures of thinking blocks: the text that comes back is the text that was sent, or hidden."""

from __future__ import annotations

import hmac
from hashlib import blake2b

from appliance.protocols.sealing import Seal
from ginfer.errors import RequestError

VERSION = "ginfer1"


class ThinkingSigner:
    """Signs reasoning with the key of this server: `ginfer1.KEY.mac.MAC`, KEY naming the key, for
    text that is shown, `ginfer1.KEY.seal.TEXT` for text that is not.

    A signature under another key, or of another form, says nothing that could be checked: such a
    block counts as what its client says it is, as reasoning does in the other protocols.
    """

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"thinking", "sha256")
        self._seal = Seal(key, "thinking")
        name = blake2b(self._key, digest_size=6, person=b"name").hexdigest()
        self._prefix = f"{VERSION}.{name}."

    def sign(self, text: str) -> str:
        """The signature of a thinking text that is shown."""
        mac = blake2b(text.encode(), key=self._key, digest_size=24).hexdigest()
        return f"{self._prefix}mac.{mac}"

    def seal(self, text: str) -> str:
        """The signature that carries a thinking text, for a block that does not show it."""
        return f"{self._prefix}seal.{self._seal.seal(text)}"

    def read(self, text: str, signature: str, path: str) -> str:
        """The thinking of a block that came back.

        Raises RequestError invalid_thinking_signature if `signature` is ours and not that of
        `text`."""
        if not signature.startswith(self._prefix):
            return text
        kind, _, value = signature.removeprefix(self._prefix).partition(".")
        if kind == "seal" and not text:
            try:
                return self._seal.open(value, path)
            except RequestError:
                raise _invalid(path) from None
        if not hmac.compare_digest(signature.encode(), self.sign(text).encode()):
            raise _invalid(path)
        return text


def _invalid(path: str) -> RequestError:
    return RequestError(
        f"{path}.signature does not belong to this thinking; send the block back as it came, or "
        "leave it out",
        code="invalid_thinking_signature",
        param=f"{path}.signature",
    )
