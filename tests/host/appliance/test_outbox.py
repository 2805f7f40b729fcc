"""What the engine process sends: a round in one piece, everything in order, nobody waits."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from appliance import wire_values
from appliance.engine_process import Outbox
from appliance.wire import Frame, FrameDecoder, FrameType
from ginfer.engine.request import Delta, Failed, Started
from ginfer.errors import UnavailableError
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.engine.request import Event

NUM_ROUNDS = 1200
TEXT = "word " * 20
END = Frame(FrameType.FAULT, {})


@pytest.fixture
def pair() -> Iterator[tuple[Outbox, socket.socket]]:
    """A running outbox and the server's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(theirs)
    thread = threading.Thread(target=outbox.run)
    thread.start()
    yield outbox, ours
    ours.close()
    outbox.put(END)  # notices that nobody is there
    thread.join(60)
    assert not thread.is_alive()
    theirs.close()


def _delta(name: str, token_id: int) -> Delta:
    return Delta(request_id=name, channel=Channel.CONTENT, text=TEXT, token_ids=(token_id,))


def _read(sock: socket.socket, *until: FrameType) -> list[Frame]:
    """Frames up to and including the first of each type."""
    decoder, frames = FrameDecoder(), list[Frame]()
    while not set(until) <= {frame.type for frame in frames}:
        frames += decoder.feed(sock.recv(1 << 16))
    return frames


def _events(frames: list[Frame]) -> list[Event]:
    own = (FrameType.STARTED, FrameType.DELTAS, FrameType.FINISHED, FrameType.FAILED)
    return [e for f in frames if f.type in own for e in wire_values.decode_events(f)]


def test_a_round_is_one_frame_once_it_is_over(pair: tuple[Outbox, socket.socket]) -> None:
    outbox, sock = pair
    for i in range(8):
        outbox.push(_delta(f"r{i}", i))
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    outbox.end_round()
    (frame,) = FrameDecoder().feed(sock.recv(1 << 16))
    assert _events([frame]) == [_delta(f"r{i}", i) for i in range(8)]


def test_an_answer_takes_along_what_waits_and_beats_wait_their_turn(
    pair: tuple[Outbox, socket.socket],
) -> None:
    outbox, sock = pair
    outbox.push(Started(request_id="r", prompt_tokens=1, cached_tokens=0, reuse_path="none"))
    outbox.put(Frame(FrameType.STATS, {"running": 1}))
    outbox.beat(Frame(FrameType.ALIVE, {"rounds": 1}))
    assert {f.type for f in _read(sock, FrameType.ALIVE)} == {
        FrameType.STATS,
        FrameType.STARTED,
        FrameType.ALIVE,
    }


def test_a_slow_server_delays_no_round_and_finds_merged_deltas(
    pair: tuple[Outbox, socket.socket],
) -> None:
    outbox, sock = pair
    for i in range(NUM_ROUNDS):  # far more than the socket holds; nobody reads
        outbox.push(_delta("a", i))
        outbox.push(_delta("b", i))
        outbox.end_round()
        outbox.beat(Frame(FrameType.ALIVE, {"rounds": i}))
    outbox.push(Failed(request_id="b", error=UnavailableError("over")))
    outbox.put(END)
    frames = _read(sock, FrameType.FAULT, FrameType.FAILED)
    events = _events(frames)
    assert len(frames) < NUM_ROUNDS / 4
    assert sum(frame.type is FrameType.ALIVE for frame in frames) < NUM_ROUNDS / 4
    for name in ("a", "b"):
        deltas = [e for e in events if isinstance(e, Delta) and e.request_id == name]
        assert [i for d in deltas for i in d.token_ids] == list(range(NUM_ROUNDS))
        assert "".join(d.text for d in deltas) == TEXT * NUM_ROUNDS
    outbox.flush(60)
