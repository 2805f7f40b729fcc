"""Requests, events and errors as frames, and back.

Tails carry token ids (u32), rotary positions (i32) and logprobs (f64); all else is in the header.
Decoders check every type and length; whatever a frame holds, the only error is WireError.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
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
    from collections.abc import Iterable, Iterator, Sequence

    from ginfer.engine.request import Event

MESSAGE_CHARS = 1 << 16  # longest error message that crosses
DELTAS_CHARS = 5 << 18  # most text in one frame: a character takes at most 6 bytes
TEXT_CHARS = 1 << 20  # longest text of one delta
DELTA_CHARS = 32  # what a delta takes beside its text


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


_Deltas = list[tuple[str, Channel, str, int, tuple[int, ...]]]  # the last: tokens, tops
_DELTAS = FrameType.DELTAS  # members of an enumeration are slow to find


class _Failed(msgspec.Struct):
    request_id: str
    error: _Error


class _Reading:
    """A block whose errors are those of a malformed frame."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ValueError | TypeError | KeyError | GInferError):
            raise WireError(f"malformed {self._frame.type.name} frame: {error}") from None


def request_id(frame: Frame) -> str:
    """The request that a frame is about."""
    with _Reading(frame):
        return msgspec.convert(frame.header["request_id"], str)


def num_rounds(frame: Frame) -> int:
    """How many rounds the engine has run, from ALIVE."""
    with _Reading(frame):
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
    with _Reading(frame):
        return _error(msgspec.convert(frame.header["error"], _Error))


def _error(header: _Error) -> GInferError:
    return error_from_code(header.kind, header.message, header.code, header.param)


def config_header(config: EngineConfig) -> dict[str, Any]:
    """The engine's configuration as a header member."""
    header = {f.name: getattr(config, f.name) for f in fields(config)}
    return header | {"package": str(config.package.absolute())}


def decode_config(frame: Frame) -> EngineConfig:
    """The configuration in the header of HELLO."""
    with _Reading(frame):
        header = msgspec.convert(frame.header["config"], dict[str, Any])
        return EngineConfig(**header | {"package": Path(header["package"])})


def decode_info(frame: Frame) -> EngineInfo:
    """What the engine is, from READY."""
    with _Reading(frame):
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
    with _Reading(frame):
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


def encode_events(events: Iterable[Event]) -> Iterator[Frame]:
    """Frames of events, in order; neighbouring deltas share frames."""
    deltas: list[Delta] = []
    weight = 0
    for event in events:
        if isinstance(event, Delta):
            for delta in _divided(event):
                added = _weight(delta)
                if deltas and weight + added > DELTAS_CHARS:
                    yield _encode_deltas(deltas)
                    deltas, weight = [], 0
                deltas.append(delta)
                weight += added
            continue
        if deltas:
            yield _encode_deltas(deltas)
            deltas, weight = [], 0
        yield _encode_event(event)
    if deltas:
        yield _encode_deltas(deltas)


def _encode_event(event: Started | Finished | Failed) -> Frame:
    if isinstance(event, Started):
        return Frame(FrameType.STARTED, {"request_id": event.request_id, "event": event})
    if isinstance(event, Finished):
        return Frame(FrameType.FINISHED, {"request_id": event.request_id, "event": event})
    header = {"request_id": event.request_id, "error": error_header(event.error)}
    return Frame(FrameType.FAILED, header)


def _weight(delta: Delta) -> int:
    """What a delta takes of a frame, in characters of 6 bytes."""
    entries = len(delta.token_ids) + sum(3 + 2 * len(p.top) for p in delta.logprobs)
    return len(delta.request_id) + len(delta.text) + entries + DELTA_CHARS


def _divided(delta: Delta) -> Iterator[Delta]:
    """A delta with its text in pieces that frames can hold."""
    if len(delta.text) <= TEXT_CHARS:
        yield delta
        return
    yield delta._replace(text=delta.text[:TEXT_CHARS])
    for start in range(TEXT_CHARS, len(delta.text), TEXT_CHARS):
        text = delta.text[start : start + TEXT_CHARS]
        yield delta._replace(text=text, token_ids=(), logprobs=())


def _encode_deltas(deltas: list[Delta]) -> Frame:
    """One list per delta in the header; the tail has all token ids, then the ids and then the
    values of all logprobs."""
    lists = [
        (d.request_id, d.channel, d.text, len(d.token_ids), [len(p.top) for p in d.logprobs])
        for d in deltas
    ]
    tail = np.array([i for d in deltas for i in d.token_ids], "<u4").tobytes()
    entries = [e for d in deltas for p in d.logprobs for e in ((p.token_id, p.logprob), *p.top)]
    if entries:
        tail += np.array([i for i, _ in entries], "<u4").tobytes()
        tail += np.array([value for _, value in entries], "<f8").tobytes()
    return Frame(FrameType.DELTAS, {"deltas": lists}, tail)


def decode_events(frame: Frame) -> Sequence[Event]:
    """The events of STARTED, DELTAS, FINISHED or FAILED."""
    with _Reading(frame):
        if frame.type is _DELTAS:
            return _decode_deltas(frame)
        if frame.type is FrameType.STARTED:
            return [msgspec.convert(frame.header["event"], Started)]
        if frame.type is FrameType.FINISHED:
            return [msgspec.convert(frame.header["event"], Finished)]
        if frame.type is FrameType.FAILED:
            failed = msgspec.convert(frame.header, _Failed)
            return [Failed(request_id=failed.request_id, error=_error(failed.error))]
    raise WireError(f"a {frame.type.name} frame is no event")


def _decode_deltas(frame: Frame) -> list[Delta]:
    lists = msgspec.convert(frame.header["deltas"], _Deltas)
    num_ids = num_entries = least = 0
    for _, _, _, count, num_top in lists:
        num_ids += count
        num_entries += len(num_top) + sum(num_top)
        least = min(least, count, *num_top)
    if least < 0 or len(frame.tail) != 4 * num_ids + 12 * num_entries:
        raise WireError(f"{len(frame.tail)} tail bytes for {num_ids} tokens, {num_entries} entries")
    ids = np.frombuffer(frame.tail, "<u4", num_ids + num_entries).tolist()
    pairs: Iterator[tuple[int, float]] = iter(())
    if num_entries:
        values = np.frombuffer(frame.tail, "<f8", offset=4 * len(ids))
        pairs = zip(ids[num_ids:], values.tolist(), strict=True)
    deltas, start = [], 0
    for name, channel, text, count, num_top in lists:
        deltas.append(
            Delta(
                request_id=name,
                channel=channel,
                text=text,
                token_ids=tuple(ids[start : start + count]),
                logprobs=tuple([_logprob(pairs, n) for n in num_top]) if num_top else (),
            )
        )
        start += count
    return deltas


def _logprob(pairs: Iterator[tuple[int, float]], num_top: int) -> TokenLogprob:
    token_id, logprob = next(pairs)
    return TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(islice(pairs, num_top)))
