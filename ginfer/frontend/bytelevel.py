"""The byte alphabet of byte-level BPE: each byte is written as one printable character."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _alphabet()


def token_to_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()
