"""Seal: text that a client keeps for us, unreadable to it and safe from changes.

A sealed text is base64url of version, nonce, text XOR SHAKE-256(key, nonce) and HMAC-SHA-256 over
all before it; each of the two keys is derived from the server's own.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import shake_256
from secrets import token_bytes

from ginfer.errors import RequestError

VERSION = b"\x01"
NONCE_NBYTES = 16
MAC_NBYTES = 32


class Seal:
    """Seals and opens texts of one purpose; only the same key and purpose open them again."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._cipher_key = hmac.digest(key, b"seal cipher " + purpose.encode(), "sha256")
        self._mac_key = hmac.digest(key, b"seal mac " + purpose.encode(), "sha256")

    def seal(self, text: str) -> str:
        """The text, sealed; different every time."""
        nonce = token_bytes(NONCE_NBYTES)
        payload = VERSION + nonce + self._xor(nonce, text.encode())
        return urlsafe_b64encode(payload + self._mac(payload)).decode()

    def open(self, sealed: str, path: str) -> str:
        """The text again. Raises RequestError invalid_encrypted_content, naming `path`, for what
        this server did not seal or what was changed since."""
        try:
            data = urlsafe_b64decode(sealed)
        except ValueError:
            data = b""
        payload, mac = data[:-MAC_NBYTES], data[-MAC_NBYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)) or not payload.startswith(VERSION):
            raise RequestError(
                f"{path} was not made by this server, or was changed; send it back as it came, or "
                "leave the item out",
                code="invalid_encrypted_content",
                param=path,
            )
        nonce, body = payload[1 : 1 + NONCE_NBYTES], payload[1 + NONCE_NBYTES :]
        return self._xor(nonce, body).decode()

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._mac_key, payload, "sha256")

    def _xor(self, nonce: bytes, data: bytes) -> bytes:
        stream = shake_256(self._cipher_key + nonce).digest(len(data))
        mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(len(data), "big")
