"""Frames between the server and the engine process: u32 length, u8 type, JSON header, binary tail.

Little-endian. The length counts everything after itself: type, u32 header length, header, tail.
Whatever bytes arrive, the only error is WireError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import orjson

from ginfer.errors import GInferError
from ginfer.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL_VERSION = 3
MAX_FRAME_NBYTES = 8 * MIB

_LENGTH = struct.Struct("<I")
_PREFIX = struct.Struct("<BI")


class FrameType(IntEnum):
    """What a frame says. To the engine: HELLO, SUBMIT, CANCEL, STATS. The rest come from it."""

    HELLO = 1  # both ways; the server's carries the engine's configuration
    PROGRESS = 2
    READY = 3
    FAULT = 4  # the engine cannot go on; its process ends
    SUBMIT = 5
    ACCEPTED = 6
    REFUSED = 7
    CANCEL = 8
    STARTED = 9
    DELTAS = 10  # of several requests
    FINISHED = 11
    FAILED = 12
    STATS = 13  # both ways
    ALIVE = 14  # every second from READY on; carries the rounds run so far


_TYPES = {int(kind): kind for kind in FrameType}


class WireError(GInferError):
    """Bytes that are no frame of this protocol, or a frame whose content is malformed."""

    code = "bridge_protocol_error"


@dataclass(frozen=True)
class Frame:
    """One frame, its header decoded."""

    type: FrameType
    header: dict[str, Any]
    tail: bytes = b""


def encode(frame: Frame) -> bytes:
    """Bytes of a frame. Raises WireError when it is too long."""
    header = orjson.dumps(frame.header)
    nbytes = _PREFIX.size + len(header) + len(frame.tail)
    if nbytes > MAX_FRAME_NBYTES:
        raise WireError(f"a {frame.type.name} frame has {nbytes} bytes; limit {MAX_FRAME_NBYTES}")
    prefix = _PREFIX.pack(frame.type, len(header))
    return b"".join((_LENGTH.pack(nbytes), prefix, header, frame.tail))


class FrameDecoder:
    """Frames out of a byte stream cut anywhere; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes and yield every frame that is complete. After WireError the stream is lost."""
        self._data += data
        start = 0
        try:
            while (end := self._frame_end(start)) is not None:
                yield _decode(bytes(self._data[start + _LENGTH.size : end]))
                start = end
        finally:
            del self._data[:start]

    def _frame_end(self, start: int) -> int | None:
        """Where the frame at `start` ends, or None while it is incomplete."""
        if len(self._data) - start < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._data, start)
        if not _PREFIX.size <= nbytes <= MAX_FRAME_NBYTES:
            raise WireError(f"frame length {nbytes}; legal: {_PREFIX.size} to {MAX_FRAME_NBYTES}")
        end: int = start + _LENGTH.size + nbytes
        return end if len(self._data) >= end else None


def _decode(body: bytes) -> Frame:
    """The frame of the bytes after its length."""
    code, header_nbytes = _PREFIX.unpack_from(body)
    end = _PREFIX.size + header_nbytes
    if end > len(body):
        raise WireError(f"frame header of {header_nbytes} bytes in a frame of {len(body)}")
    try:
        frame_type = _TYPES[code]
        header = orjson.loads(memoryview(body)[_PREFIX.size : end])
    except (KeyError, ValueError) as error:
        raise WireError(f"frame type {code}: {error}") from None
    if not isinstance(header, dict):
        raise WireError(f"the header of a {frame_type.name} frame is no object")
    return Frame(frame_type, header, body[end:])
