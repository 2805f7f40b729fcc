"""Frames survive any cutting; whatever bytes arrive, the only error is WireError."""

from __future__ import annotations

import struct
from contextlib import suppress

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.wire import MAX_FRAME_NBYTES, Frame, FrameDecoder, FrameType, WireError, encode

HEADERS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 99))
FRAMES = st.builds(Frame, st.sampled_from(FrameType), HEADERS, st.binary(max_size=40))


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted(c % (len(data) + 1) for c in cuts)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(st.lists(FRAMES, max_size=5), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_any_cutting_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    pieces = _cut(b"".join(map(encode, frames)), cuts)
    assert [f for piece in pieces for f in decoder.feed(piece)] == frames


@settings(max_examples=300)
@given(st.lists(FRAMES, min_size=1, max_size=3), st.integers(0), st.integers(0, 255))
def test_a_changed_byte_is_a_typed_error_or_another_frame(
    frames: list[Frame], at: int, value: int
) -> None:
    data = bytearray(b"".join(map(encode, frames)))
    data[at % len(data)] = value
    with suppress(WireError):
        for frame in FrameDecoder().feed(bytes(data)):
            assert isinstance(frame.header, dict)


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(data: bytes) -> None:
    with suppress(WireError):
        list(FrameDecoder().feed(data))


@pytest.mark.parametrize("nbytes", [0, 4, MAX_FRAME_NBYTES + 1, (1 << 32) - 1])
def test_a_forged_length_is_refused_before_memory_is_taken(nbytes: int) -> None:
    with pytest.raises(WireError, match="frame length"):
        list(FrameDecoder().feed(struct.pack("<I", nbytes)))


def test_a_header_longer_than_its_frame_is_refused() -> None:
    body = struct.pack("<BI", FrameType.STATS, 100) + b"{}"
    with pytest.raises(WireError, match="frame header"):
        list(FrameDecoder().feed(struct.pack("<I", len(body)) + body))


@pytest.mark.parametrize("header", [b"[]", b"7", b"{", b"\xff", orjson.dumps(None)])
def test_a_header_that_is_no_object_is_refused(header: bytes) -> None:
    body = struct.pack("<BI", FrameType.STATS, len(header)) + header
    with pytest.raises(WireError):
        list(FrameDecoder().feed(struct.pack("<I", len(body)) + body))


def test_frames_before_the_bad_one_are_delivered() -> None:
    good = Frame(FrameType.CANCEL, {"request_id": "r"})
    frames = FrameDecoder().feed(encode(good) + b"\0\0\0\0")
    assert next(frames) == good
    with pytest.raises(WireError):
        next(frames)


def test_a_frame_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match="limit"):
        encode(Frame(FrameType.SUBMIT, {}, bytes(MAX_FRAME_NBYTES)))
    largest = Frame(FrameType.SUBMIT, {}, bytes(MAX_FRAME_NBYTES - 7))
    assert list(FrameDecoder().feed(encode(largest))) == [largest]
