"""The bridge and the real engine process, without HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from appliance import wire_values
from appliance.bridge import EngineBridge, _Child
from appliance.engine_client import EnginePhase
from appliance.wire import (
    PROTOCOL_VERSION,
    Frame,
    FrameDecoder,
    FrameType,
    WireError,
    encode,
)
from ginfer import EngineConfig
from ginfer.engine.request import (
    Delta,
    EngineInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    Started,
    Timings,
    Usage,
)
from ginfer.errors import (
    ContextLengthError,
    GInferError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from ginfer.prompt import Channel, PreparedPrompt
from tests.service.launch import PACKAGE
from tests.service.server import ROOT, kill9, wait_gone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

HELLO_IDS = [4097, 320, 198, 1908, 0, 4098, 198, 4097, 333, 198, 4108, 275, 4109, 275]
HELLO = "Hello! I am the GInfer demo model. How can I help you?"


def _config(**options: Any) -> EngineConfig:
    return EngineConfig(
        **{"package": PACKAGE, "max_context": 1024, "max_concurrency": 1, "max_pending": 1}
        | options
    )


def _request(name: str, **fields: Any) -> Request:
    defaults: dict[str, Any] = {
        "prompt": PreparedPrompt(token_ids=np.array(HELLO_IDS, np.int32)),
        "max_tokens": 64,
        "sampling": SamplingParams(temperature=0),
    }
    return Request(request_id=name, **defaults | fields)


def _endless(name: str) -> Request:
    return _request(name, max_tokens=900, ignore_eos=True)


def _text(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta))


def _with_bridge(body: Callable[[EngineBridge], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        bridge = EngineBridge(_config(**options))
        bridge.start()
        try:
            await bridge.wait_ready()
            await body(bridge)
        finally:
            await bridge.close()

    asyncio.run(run())


def test_requests_refusals_cancels_and_restarts() -> None:
    """One engine start for the whole life of a bridge."""
    _with_bridge(_life)


async def _life(bridge: EngineBridge) -> None:
    assert bridge.info is not None
    assert (bridge.info.max_concurrency, bridge.info.model_id) == (1, "qwen3.8-demo")
    events = [event async for event in await bridge.submit(_request("a"))]
    assert _text(events) == HELLO
    assert isinstance(events[-1], Finished)
    await _refuse(bridge)
    await _cancel(bridge)
    await _constrain(bridge)
    await _merge(bridge)
    await _restart(bridge)


async def _refuse(bridge: EngineBridge) -> None:
    long = PreparedPrompt(token_ids=np.full(2000, 320, np.int32))
    with pytest.raises(ContextLengthError):
        await bridge.submit(_request("b", prompt=long))
    with pytest.raises(RequestError):
        await bridge.submit(_request("c", stop_token_ids=(1 << 20,)))
    first, second = await bridge.submit(_endless("d")), await bridge.submit(_endless("e"))
    with pytest.raises(OverloadedError):
        await bridge.submit(_endless("f"))
    first.close()
    second.close()
    await _idle(bridge)


async def _cancel(bridge: EngineBridge) -> None:
    async for event in (stream := await bridge.submit(_endless("g"))):
        if isinstance(event, Delta):
            stream.close()
    await _idle(bridge)
    assert (await bridge.stats())["finished"]["cancelled"] == 3


async def _constrain(bridge: EngineBridge) -> None:
    grammar = 'start: "a b" "!"'
    events = [event async for event in await bridge.submit(_request("l", grammar=grammar))]
    assert _text(events) == "a b!"
    with pytest.raises(RequestError, match="does not compile") as caught:
        await bridge.submit(_request("m", grammar="start: nothing"))
    assert caught.value.param == "grammar"
    many = " | ".join(f'"{i:05} {i:x}"' for i in range(20_000))  # seconds to compile
    slow = asyncio.create_task(bridge.submit(_request("n", grammar=f"start: ({many})")))
    await asyncio.sleep(0)
    assert _text([event async for event in await bridge.submit(_request("o"))]) == HELLO
    slow.cancel()
    with suppress(asyncio.CancelledError, RequestError):
        (await slow).close()
    await _idle(bridge)


async def _merge(bridge: EngineBridge) -> None:
    stream = await bridge.submit(_endless("h"))
    await _idle(bridge)
    events = [event async for event in stream]
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 900
    assert len(events) < 20
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.OUTPUT_LIMIT


async def _restart(bridge: EngineBridge) -> None:
    stream = await bridge.submit(_endless("i"))
    assert bridge.pid is not None
    kill9(bridge.pid)
    while bridge.pid is not None:
        await asyncio.sleep(0)
    assert bridge.state.phase is EnginePhase.RESTARTING  # before the process has been waited for
    with pytest.raises(UnavailableError, match="restarting"):
        await bridge.stats()
    last = [event async for event in stream][-1]
    assert isinstance(last, Failed)
    assert (last.error.code, last.error.status) == ("engine_restarted", 503)
    assert bridge.state.phase is EnginePhase.RESTARTING
    with pytest.raises(UnavailableError, match="SIGKILL"):
        await bridge.submit(_request("j"))
    while not bridge.state.ready:
        await asyncio.sleep(0.02)
    assert bridge.num_restarts == 1
    assert _text([event async for event in await bridge.submit(_request("k"))]) == HELLO


async def _idle(bridge: EngineBridge) -> None:
    while True:
        stats = await bridge.stats()
        if stats["running"] == stats["waiting"] == 0:
            return
        await asyncio.sleep(0.01)


def test_an_engine_that_never_started_is_not_tried_again(tmp_path: Path) -> None:
    async def run() -> EngineBridge:
        bridge = EngineBridge(_config(package=tmp_path / "missing.ginfer"))
        bridge.start()
        with pytest.raises(GInferError, match=r"missing\.ginfer"):
            await bridge.wait_ready()
        assert bridge.state.phase is EnginePhase.FAILED
        with pytest.raises(UnavailableError, match=r"missing\.ginfer"):
            await bridge.submit(_request("a"))
        await bridge.close()
        return bridge

    assert asyncio.run(run()).state.phase is EnginePhase.STOPPED


class Recorder:
    """Stands for the child of a bridge: takes frames, says nothing."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        """Keep a frame."""
        self.sent.append(frame)


EVENTS: tuple[Event, ...] = (
    Started(request_id="a", prompt_tokens=3, cached_tokens=0, reuse_path="none"),
    Delta(request_id="a", channel=Channel.CONTENT, text="x", token_ids=(5,)),
    Finished(
        request_id="a",
        reason=FinishReason.OUTPUT_LIMIT,
        usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1, reasoning_tokens=0),
        timings=Timings(),
    ),
)


@pytest.mark.parametrize("num_before", range(len(EVENTS) + 1))
def test_events_that_come_before_the_acceptance_are_kept_in_order(num_before: int) -> None:
    """The engine's loop may be faster than the thread that answers a submission."""

    async def run() -> list[Event]:
        bridge, child = EngineBridge(_config()), Recorder()
        bridge._child = child  # type: ignore[assignment]
        info = EngineInfo(
            **dict.fromkeys(("model_id", "weights_id", "package_digest", "backend"), "x"),
            **dict.fromkeys(("max_context", "kv_capacity", "max_concurrency", "max_pending"), 1),
        )
        bridge._dispatch(_frame(Frame(FrameType.READY, {"info": info})))
        submission = asyncio.create_task(bridge.submit(_request("a")))
        await asyncio.sleep(0)
        frames = [frame for event in EVENTS for frame in wire_values.encode_events([event])]
        frames.insert(num_before, Frame(FrameType.ACCEPTED, {"request_id": "a"}))
        for frame in frames:
            bridge._dispatch(_frame(frame))
        stream = await submission
        events = [event async for event in stream]
        stream.close()
        assert [frame.type for frame in child.sent] == [FrameType.SUBMIT], "nothing to cancel"
        assert not bridge._streams
        assert not bridge._answers
        return events

    assert asyncio.run(run()) == list(EVENTS)


def test_concurrent_scrapes_cost_one_frame() -> None:
    async def run() -> None:
        bridge, child = EngineBridge(_config()), Recorder()
        bridge._child = child  # type: ignore[assignment]
        bridge._set_state(EnginePhase.READY)
        for answer in ({"running": 1}, {"running": 2}):
            scrapes = [asyncio.create_task(bridge.stats()) for _ in range(5)]
            await asyncio.sleep(0)
            bridge._dispatch(_frame(Frame(FrameType.STATS, answer)))
            assert await asyncio.gather(*scrapes) == [answer] * 5
        assert [frame.type for frame in child.sent] == [FrameType.STATS] * 2

    asyncio.run(run())


def test_what_is_no_frame_ends_the_connection_after_those_before_it() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        theirs.settimeout(30)
        seen: list[Frame] = []
        loop = asyncio.get_running_loop()
        _, child = await loop.create_connection(lambda: _Child(seen.append), sock=ours)
        theirs.sendall(encode(Frame(FrameType.STATS, {})) + b"\xff" * 64)
        with pytest.raises(WireError, match="frame length"):
            await child.ended
        assert [frame.type for frame in seen] == [FrameType.STATS]
        with theirs:
            assert await asyncio.to_thread(theirs.recv, 1) == b""
        child.send(Frame(FrameType.STATS, {}))  # to a dead child: nothing

    asyncio.run(run())


def _frame(frame: Frame) -> Frame:
    """A frame as it arrives."""
    (arrived,) = FrameDecoder().feed(encode(frame))
    return arrived


def test_a_start_tells_where_it_stands() -> None:
    """A first start compiles for a minute; here it is asked every few milliseconds."""
    ours, theirs = socket.socketpair()
    hasty = (
        "import socket, sys; from appliance import engine_process as p; p.PROGRESS_S = 0.01;"
        "p.EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", hasty, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
    with ours:
        ours.settimeout(280)
        ours.sendall(HELLO_FRAME)
        decoder, frames = FrameDecoder(), list[Frame]()
        while all(frame.type is not FrameType.READY for frame in frames):
            frames += decoder.feed(ours.recv(65536))
    assert process.wait(10) == 0
    lines = [f.header["text"] for f in frames if f.type is FrameType.PROGRESS]
    assert len(lines) > 3
    assert all(line.endswith(" s") for line in lines)
    assert any(line.startswith("Preparing kernels") for line in lines)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """The bare engine process and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance.engine_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
    ours.settimeout(30)
    yield process, ours
    ours.close()
    process.kill()
    process.wait()


HELLO_FRAME = encode(
    Frame(
        FrameType.HELLO,
        {"version": PROTOCOL_VERSION, "config": wire_values.config_header(_config())},
    )
)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0",
        b"\xff" * 64,
        encode(Frame(FrameType.SUBMIT, {})),
        encode(Frame(FrameType.HELLO, {"version": 99})),
        encode(Frame(FrameType.HELLO, {"version": PROTOCOL_VERSION, "config": {"package": 7}})),
        HELLO_FRAME + encode(Frame(FrameType.CANCEL, {})),
    ],
    ids=("length", "noise", "no greeting", "version", "configuration", "too early"),
)
def test_the_engine_process_answers_bad_frames_with_a_fault(
    child: tuple[subprocess.Popen[bytes], socket.socket], data: bytes
) -> None:
    process, sock = child
    sock.sendall(data)
    decoder = FrameDecoder()
    frames: list[Frame] = []
    while received := sock.recv(65536):
        frames += decoder.feed(received)
    assert frames[-1].type is FrameType.FAULT
    assert wire_values.decode_error(frames[-1]).message
    assert process.wait(10) == 1


def test_the_engine_process_ends_when_its_socket_closes(
    child: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    process, sock = child
    sock.sendall(HELLO_FRAME)
    assert sock.recv(65536)
    sock.close()
    assert process.wait(10) == 0
    wait_gone(process.pid)
    assert not os.path.exists(f"/proc/{process.pid}/fd")
