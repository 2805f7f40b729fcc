"""Requests, events and errors cross the bridge unchanged; malformed ones are typed errors."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import wire_values
from appliance.wire import Frame, FrameDecoder, FrameType, WireError, encode
from ginfer.config import EngineConfig
from ginfer.engine.request import Delta, EngineInfo, Event, Failed, Request
from ginfer.errors import InternalError, OverloadedError
from ginfer.prompt import Channel
from tests.host.appliance.strategies import EVENTS, REQUESTS

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
INFO = EngineInfo(
    model_id="m",
    weights_id="w",
    package_digest="d",
    backend="cpu",
    max_context=2048,
    kv_capacity=4096,
    max_concurrency=8,
    max_pending=16,
)


def _crossed(frame: Frame) -> Frame:
    (arrived,) = FrameDecoder().feed(encode(frame))
    return arrived


def _without_prompt(request: Request) -> dict[str, Any]:
    return {f.name: getattr(request, f.name) for f in fields(request) if f.name != "prompt"}


@given(REQUESTS)
def test_a_request_crosses_unchanged(request: Request) -> None:
    arrived = wire_values.decode_request(_crossed(wire_values.encode_request(request)))
    assert _without_prompt(arrived) == _without_prompt(request)
    sent, got = request.prompt, arrived.prompt
    assert got.turn_starts == sent.turn_starts
    assert (got.rope_delta, got.opens_reasoning) == (sent.rope_delta, sent.opens_reasoning)
    np.testing.assert_array_equal(got.token_ids, sent.token_ids)
    assert got.token_ids.dtype == np.int32
    assert (got.positions is None) == (sent.positions is None)
    if sent.positions is not None:
        np.testing.assert_array_equal(got.positions, sent.positions)


@given(st.lists(EVENTS, max_size=6))
def test_events_cross_unchanged_and_in_order(events: list[Event]) -> None:
    frames = [_crossed(frame) for frame in wire_values.encode_events(events)]
    arrived = [event for frame in frames for event in wire_values.decode_events(frame)]
    assert len(frames) <= 1 + 2 * sum(not isinstance(e, Delta) for e in events)
    for event, got in zip(events, arrived, strict=True):
        if isinstance(event, Failed):
            assert isinstance(got, Failed)
            assert type(got.error) is type(event.error)
            for name in ("message", "code", "param", "status"):
                assert getattr(got.error, name) == getattr(event.error, name)
        else:
            assert got == event


def test_very_long_text_crosses_in_several_frames() -> None:
    text = "\0é" * wire_values.TEXT_CHARS
    long = Delta(request_id="r", channel=Channel.CONTENT, text=text, token_ids=(1, 2))
    short = Delta(request_id="s", channel=Channel.REASONING, text="x", token_ids=(3,))
    frames = [_crossed(f) for f in wire_values.encode_events([short, long, short])]
    deltas = [e for f in frames for e in wire_values.decode_events(f) if isinstance(e, Delta)]
    assert "".join(d.text for d in deltas[1:-1]) == text
    assert [d.token_ids for d in deltas] == [(3,), (1, 2), (), (3,)]


@settings(max_examples=300)
@given(st.sampled_from(FrameType), st.data(), st.binary(max_size=16))
def test_malformed_frames_are_typed_errors(
    kind: FrameType, data: st.DataObject, tail: bytes
) -> None:
    good = _good_header(kind)
    header = dict(good)
    for name in data.draw(st.sets(st.sampled_from(sorted(good)), min_size=1)):
        header[name] = data.draw(JUNK)
    frame = Frame(kind, header, tail)
    for decode in (
        wire_values.decode_request,
        wire_values.decode_events,
        wire_values.decode_config,
        wire_values.decode_info,
        wire_values.decode_error,
        wire_values.request_id,
    ):
        try:
            decode(frame)
        except WireError:
            continue


def _good_header(kind: FrameType) -> dict[str, Any]:
    if kind is FrameType.DELTAS:
        return {"request_id": "r", "deltas": [["r", "content", "", 1, []]]}
    event = {"request_id": "r", "prompt_tokens": 1, "cached_tokens": 0, "reuse_path": "none"}
    error = wire_values.error_header(OverloadedError("full"))
    config = wire_values.config_header(EngineConfig(package=Path("p")))
    return {"request_id": "r", "event": event, "error": error, "config": config, "info": {}}


@pytest.mark.parametrize("count", [-1, 0, 2, 1 << 40])
def test_a_tail_that_does_not_fit_its_header_is_refused(count: int) -> None:
    for deltas, tail in (
        ([["r", "content", "", count, []]], bytes(4)),
        ([["r", "content", "", 1, [count - 1]]], bytes(8)),
        ([["r", "content", "", 1, []], ["s", "content", "", count, []]], bytes(8)),
    ):
        with pytest.raises(WireError):
            wire_values.decode_events(Frame(FrameType.DELTAS, {"deltas": deltas}, tail))


def test_configuration_and_info_cross_unchanged() -> None:
    config = EngineConfig(package=Path("/p/q.ginfer"), max_context=128, backend="cpu", threads=2)
    hello = _crossed(Frame(FrameType.HELLO, {"config": wire_values.config_header(config)}))
    assert wire_values.decode_config(hello) == config
    assert wire_values.decode_info(_crossed(Frame(FrameType.READY, {"info": INFO}))) == INFO


def test_a_relative_package_path_becomes_absolute() -> None:
    header = wire_values.config_header(EngineConfig(package=Path("q.ginfer")))
    assert header["package"] == str(Path("q.ginfer").absolute())


def test_an_unknown_error_kind_becomes_internal() -> None:
    header = {"error": wire_values.error_header(OverloadedError("full")) | {"kind": "Weird"}}
    error = wire_values.decode_error(Frame(FrameType.REFUSED, header))
    assert type(error) is InternalError
    assert error.message == "full"


def test_a_wrong_sampling_value_is_refused() -> None:
    request = Request(request_id="r", prompt=_prompt(), max_tokens=1)
    frame = wire_values.encode_request(replace(request))
    header = frame.header | {"sampling": {"temperature": 9}}
    with pytest.raises(WireError, match="temperature is 9"):
        wire_values.decode_request(Frame(FrameType.SUBMIT, header, frame.tail))


def _prompt() -> Any:
    from ginfer.prompt import PreparedPrompt

    return PreparedPrompt(token_ids=np.array([1], np.int32))
