"""Unread events stay bounded and lose nothing; a stream survives a reader's timeouts."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine_client import MERGED_TOKENS, EventBuffer, EventStream
from ginfer.engine.request import Delta, Event, Failed
from ginfer.errors import UnavailableError
from ginfer.prompt import Channel
from tests.host.appliance.strategies import DELTAS, EVENTS

END = Failed(request_id="r", error=UnavailableError("gone"))


def _word(text: str, channel: Channel = Channel.CONTENT) -> Delta:
    return Delta(request_id="r", channel=channel, text=text, token_ids=(1,))


def _contents(events: list[Event]) -> list[object]:
    """Everything the events say, in an order that merging may not change."""
    said: list[object] = []
    for event in events:
        if isinstance(event, Delta):
            said += [(event.channel, c) for c in event.text]
        else:
            said.append(event)
    return said


@given(st.lists(EVENTS, max_size=12))
def test_merging_loses_and_reorders_nothing(events: list[Event]) -> None:
    buffer = EventBuffer()
    for event in events:
        buffer.push(event)
    popped = [buffer.pop() for _ in range(len(buffer))]
    assert _contents(popped) == _contents(events)
    for name in ("token_ids", "logprobs"):
        flat = [
            [x for e in es if isinstance(e, Delta) for x in getattr(e, name)]
            for es in (popped, events)
        ]
        assert flat[0] == flat[1]


@given(st.lists(DELTAS, min_size=1))
def test_deltas_of_one_channel_become_few(deltas: list[Delta]) -> None:
    buffer = EventBuffer()
    for delta in deltas:
        buffer.push(delta)
    changes = sum(a.channel is not b.channel for a, b in pairwise(deltas))
    tokens = sum(len(d.token_ids) for d in deltas)
    assert len(buffer) <= 1 + changes + 2 * tokens // MERGED_TOKENS


def test_a_slow_reader_finds_merged_text() -> None:
    async def run() -> list[Event]:
        stream = EventStream("r", lambda _id: None)
        for _ in range(3 * MERGED_TOKENS):
            stream.push(_word("x"))
        stream.push(END)
        return [event async for event in stream]

    events = asyncio.run(run())
    assert [len(e.text) for e in events if isinstance(e, Delta)] == [MERGED_TOKENS] * 3
    assert events[-1] is END


def test_a_timeout_while_reading_loses_no_event() -> None:
    async def run() -> list[Event]:
        stream = EventStream("r", lambda _id: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(stream)
        stream.push(_word("a"))
        stream.push(END)
        return [event async for event in stream]

    assert asyncio.run(run()) == [_word("a"), END]


def test_close_ends_a_waiting_reader_and_reports_once() -> None:
    async def run() -> list[str]:
        closed: list[str] = []
        stream = EventStream("r", closed.append)
        reader = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        assert await reader is None
        stream.push(_word("late"))
        assert await anext(stream, None) is None
        return closed

    assert asyncio.run(run()) == ["r"]


def test_a_reader_is_woken_without_an_event_and_takes_all_that_came() -> None:
    async def run() -> None:
        stream = EventStream("r", lambda _id: None)
        waiting = asyncio.create_task(stream.wait())
        await asyncio.sleep(0)
        stream.wake()
        await waiting
        assert stream.pop() is None
        assert not stream.over
        stream.push(_word("a"))
        stream.push(_word("b", Channel.REASONING))
        stream.push(END)
        await stream.wait()
        assert [stream.pop() for _ in range(3)] == [_word("a"), _word("b", Channel.REASONING), END]
        assert stream.over

    asyncio.run(run())


def test_nothing_follows_the_terminal_event() -> None:
    async def run() -> list[Event]:
        stream = EventStream("r", lambda _id: None)
        stream.push(END)
        stream.push(_word("late"))
        return [event async for event in stream]

    assert asyncio.run(run()) == [END]
