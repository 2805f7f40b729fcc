"""Requests, events and errors as frames, and back.

Tails carry token ids (u32), rotary positions (i32) and logprobs (f64); all else is in the header.
Decoders check every type and length; whatever a frame holds, the only error is WireError.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from appliance.wire import Frame, FrameType, WireError
from ginfer.config import EngineConfig
from ginfer.engine.request import (
    Delta,
    EngineInfo,
    Failed,
    Finished,
    Request,
    SamplingParams,
    Started,
    StopString,
    TokenLogprob,
)
from ginfer.errors import GInferError, error_from_code
from ginfer.prompt import Channel, PreparedPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ginfer.engine.request import Event

MESSAGE_CHARS = 1 << 16  # longest error message that crosses
TEXT_CHARS = 1 << 20  # longest text in one frame: a character takes at most 6 bytes


class _Error(msgspec.Struct):
    kind: str
    message: str
    code: str
    param: str | None


class _Submit(msgspec.Struct):
    """Header of SUBMIT: a Request, its prompt reduced to what the engine reads."""

    request_id: str
    num_tokens: int
    has_positions: bool
    rope_delta: int
    opens_reasoning: bool
    turn_starts: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[StopString, ...]
    reasoning_budget: int | None
    raw: bool
    keep_special_tokens: bool
    ignore_eos: bool
    grammar: str | None


class _Delta(msgspec.Struct):
    """Header of DELTA; num_top: alternatives of each logprob."""

    request_id: str
    channel: Channel
    text: str
    num_tokens: int
    num_top: tuple[int, ...]


class _Failed(msgspec.Struct):
    request_id: str
    error: _Error


@contextmanager
def _reading(frame: Frame) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, GInferError) as error:
        raise WireError(f"malformed {frame.type.name} frame: {error}") from None


def request_id(frame: Frame) -> str:
    """The request that a frame is about."""
    with _reading(frame):
        return msgspec.convert(frame.header["request_id"], str)


def num_rounds(frame: Frame) -> int:
    """How many rounds the engine has run, from ALIVE."""
    with _reading(frame):
        return msgspec.convert(frame.header["rounds"], int)


def error_header(error: GInferError) -> dict[str, Any]:
    """An error as a header member."""
    return {
        "kind": type(error).__name__,
        "message": error.message[:MESSAGE_CHARS],
        "code": error.code,
        "param": error.param,
    }


def decode_error(frame: Frame) -> GInferError:
    """The error in the header of REFUSED or FAULT."""
    with _reading(frame):
        return _error(msgspec.convert(frame.header["error"], _Error))


def _error(header: _Error) -> GInferError:
    return error_from_code(header.kind, header.message, header.code, header.param)


def config_header(config: EngineConfig) -> dict[str, Any]:
    """The engine's configuration as a header member."""
    header = {f.name: getattr(config, f.name) for f in fields(config)}
    return header | {"package": str(config.package.absolute())}


def decode_config(frame: Frame) -> EngineConfig:
    """The configuration in the header of HELLO."""
    with _reading(frame):
        header = msgspec.convert(frame.header["config"], dict[str, Any])
        return EngineConfig(**header | {"package": Path(header["package"])})


def decode_info(frame: Frame) -> EngineInfo:
    """What the engine is, from READY."""
    with _reading(frame):
        return msgspec.convert(frame.header["info"], EngineInfo)


def encode_request(request: Request) -> Frame:
    """SUBMIT for a request."""
    prompt = request.prompt
    tail = prompt.token_ids.astype("<u4").tobytes()
    if prompt.positions is not None:
        tail += prompt.positions.astype("<i4").tobytes()
    header = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "prompt"}
    header |= {
        "num_tokens": prompt.num_tokens,
        "has_positions": prompt.positions is not None,
        "rope_delta": prompt.rope_delta,
        "opens_reasoning": prompt.opens_reasoning,
        "turn_starts": prompt.turn_starts,
    }
    return Frame(FrameType.SUBMIT, header, tail)


def decode_request(frame: Frame) -> Request:
    """The request of SUBMIT."""
    with _reading(frame):
        header = msgspec.convert(frame.header, _Submit)
        count = header.num_tokens
        tail = np.frombuffer(frame.tail, "<i4")
        if len(tail) != count * (4 if header.has_positions else 1):
            raise WireError(f"{len(frame.tail)} tail bytes for {count} tokens")
        prompt = PreparedPrompt(
            token_ids=tail[:count].astype(np.int32),
            positions=tail[count:].reshape(3, count).copy() if header.has_positions else None,
            rope_delta=header.rope_delta,
            opens_reasoning=header.opens_reasoning,
            turn_starts=header.turn_starts,
        )
        names = [f.name for f in fields(Request) if f.name != "prompt"]
        return Request(prompt=prompt, **{name: getattr(header, name) for name in names})


def encode_event(event: Event) -> Iterator[Frame]:
    """Frames of an event; only a delta with very long text needs more than one."""
    if isinstance(event, Delta):
        yield from _encode_delta(event)
    elif isinstance(event, Started):
        yield Frame(FrameType.STARTED, {"request_id": event.request_id, "event": event})
    elif isinstance(event, Finished):
        yield Frame(FrameType.FINISHED, {"request_id": event.request_id, "event": event})
    else:
        header = {"request_id": event.request_id, "error": error_header(event.error)}
        yield Frame(FrameType.FAILED, header)


def _encode_delta(event: Delta) -> Iterator[Frame]:
    ids = np.array(event.token_ids, "<u4")
    entries = [pair for p in event.logprobs for pair in ((p.token_id, p.logprob), *p.top)]
    tail = ids.tobytes()
    tail += np.array([i for i, _ in entries], "<u4").tobytes()
    tail += np.array([value for _, value in entries], "<f8").tobytes()
    header = {
        "request_id": event.request_id,
        "channel": event.channel,
        "text": event.text[:TEXT_CHARS],
        "num_tokens": len(ids),
        "num_top": [len(p.top) for p in event.logprobs],
    }
    yield Frame(FrameType.DELTA, header, tail)
    for start in range(TEXT_CHARS, len(event.text), TEXT_CHARS):
        text = event.text[start : start + TEXT_CHARS]
        yield Frame(FrameType.DELTA, header | {"text": text, "num_tokens": 0, "num_top": ()})


def decode_event(frame: Frame) -> Event:
    """The event of STARTED, DELTA, FINISHED or FAILED."""
    with _reading(frame):
        if frame.type is FrameType.DELTA:
            return _decode_delta(frame)
        if frame.type is FrameType.STARTED:
            return msgspec.convert(frame.header["event"], Started)
        if frame.type is FrameType.FINISHED:
            return msgspec.convert(frame.header["event"], Finished)
        if frame.type is FrameType.FAILED:
            failed = msgspec.convert(frame.header, _Failed)
            return Failed(request_id=failed.request_id, error=_error(failed.error))
    raise WireError(f"a {frame.type.name} frame is no event")


def _decode_delta(frame: Frame) -> Delta:
    header = msgspec.convert(frame.header, _Delta)
    count = header.num_tokens
    num_entries = sum(header.num_top) + len(header.num_top)
    if min((count, *header.num_top)) < 0 or len(frame.tail) != 4 * count + 12 * num_entries:
        raise WireError(f"{len(frame.tail)} tail bytes for {count} tokens, {num_entries} logprobs")
    ids = np.frombuffer(frame.tail, "<u4", count + num_entries)
    values = np.frombuffer(frame.tail, "<f8", num_entries, offset=4 * (count + num_entries))
    return Delta(
        request_id=header.request_id,
        channel=header.channel,
        text=header.text,
        token_ids=tuple(ids[:count].tolist()),
        logprobs=tuple(_logprobs(header.num_top, ids[count:], values)),
    )


def _logprobs(
    num_top: Sequence[int], ids: NDArray[np.uint32], values: NDArray[np.float64]
) -> Iterator[TokenLogprob]:
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    start = 0
    for count in num_top:
        (token_id, logprob), *top = pairs[start : start + 1 + count]
        yield TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(top))
        start += 1 + count
