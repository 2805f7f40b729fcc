"""API keys: their salted hashes, and who sent `Authorization: Bearer KEY` or `x-api-key: KEY`."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from secrets import token_bytes, token_urlsafe
from typing import TYPE_CHECKING

from appliance.errors import HttpError
from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.config import ApplianceConfig
    from appliance.http_request import HttpRequest

OPEN_PATHS = ("/health", "/ready")  # probes carry no keys
MAX_KEYS = 256
LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64}) sha256\$(?P<salt>[0-9a-f]{32})\$([0-9a-f]{64})")
PARAM = "api_keys_file"


@dataclass(frozen=True)
class HashedKey:
    """A key that the server knows by its salted SHA-256. Our keys are 256 random bits, so nothing
    slower is needed against guessing."""

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, key: str) -> HashedKey:
        """The hash of a key under a fresh salt."""
        salt = token_bytes(16)
        return cls(name, salt, _digest(salt, key))

    @property
    def line(self) -> str:
        """Its line in a file of keys."""
        return f"{self.name} sha256${self.salt.hex()}${self.digest.hex()}"


class KeyRing:
    """The keys of one server; none = no authentication."""

    def __init__(self, keys: tuple[HashedKey, ...] = ()) -> None:
        self._keys = keys

    @classmethod
    def load(cls, config: ApplianceConfig) -> KeyRing:
        """The keys of the options and of the file. Raises ConfigError naming the line."""
        given = tuple(HashedKey.of(f"key-{i}", k) for i, k in enumerate(config.api_keys, 1))
        path = config.api_keys_file
        return cls(given + (read_keys(path) if path is not None else ()))

    def __len__(self) -> int:
        return len(self._keys)

    def name_of(self, key: str) -> str | None:
        """The name of a key, None if it is unknown; the time does not depend on which it is."""
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, _digest(known.salt, key)):
                found = known.name
        return found


def read_keys(path: Path) -> tuple[HashedKey, ...]:
    """The keys of a file: one `NAME sha256$SALT$HASH` per line; empty lines and those that begin
    with # are skipped. Raises ConfigError for a line of any other form, a name given twice, or no
    key at all: an empty file must not open the server."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys of {path}: {error}", param=PARAM) from None
    keys: dict[str, HashedKey] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None or match["name"] in keys:
            why = "is no NAME sha256$SALT$HASH" if match is None else "repeats a name"
            raise ConfigError(
                f"{path}: line {number} {why}; `ginfer key` makes such lines", param=PARAM
            )
        name = match["name"]
        keys[name] = HashedKey(name, bytes.fromhex(match["salt"]), bytes.fromhex(match[3]))
    if not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"{path} holds {len(keys)} keys; legal: 1 to {MAX_KEYS}", param=PARAM)
    return tuple(keys.values())


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return f"gi-{token_urlsafe(32)}"


def check_key(request: HttpRequest, keys: KeyRing) -> None:
    """Let the request pass if the server has no keys, the path is open or a key is right, whose
    name the request then bears.

    Raises HttpError 401 invalid_api_key."""
    if not keys or request.path in OPEN_PATHS:
        return
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    given.append(request.headers.get("x-api-key", ""))
    names = [name for key in given if (name := keys.name_of(key)) is not None]
    if not names:
        raise HttpError(
            401,
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
    request.key_name = names[0]


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogateescape")).digest()
