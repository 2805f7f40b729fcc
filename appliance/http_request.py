"""HttpRequest: a Sanic request with an id, an age and the name of the key that it came with."""

from __future__ import annotations

import re
import time
from functools import cached_property
from secrets import token_hex
from typing import Any

from sanic import Request

HEADER = "x-request-id"
LEGAL_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class HttpRequest(Request[Any, Any]):
    """A request. The one that Sanic makes up to answer a malformed head repeats the malformed URL,
    and would be refused itself."""

    def __init__(self, url_bytes: bytes, *args: Any, **kwargs: Any) -> None:
        super().__init__(b"*" if kwargs.get("method") == "NONE" else url_bytes, *args, **kwargs)
        self._began = time.perf_counter()
        self.key_name: str | None = None

    @property
    def age_s(self) -> float:
        """Seconds since its head was read."""
        return time.perf_counter() - self._began

    @cached_property
    def request_id(self) -> str:
        """What logs and answers call it: the client's x-request-id if it is short and plain, else
        `req_` and 24 hexadecimal digits."""
        given = str(self.headers.get(HEADER, ""))
        return given if LEGAL_ID.fullmatch(given) else f"req_{token_hex(12)}"
