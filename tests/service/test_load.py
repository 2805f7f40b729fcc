"""Many clients that come, leave and send rubbish: nothing leaks, nothing is a 500."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.service.chat import ANSWERS, MODEL, ask, endless, head
from tests.service.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_CLIENTS = 8
WARM_S = 5.0
RSS_SLACK_MIB = 48
LEGAL = {200, 400, 404, 413, 429}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Server]:
    """Four requests at once and four waiting, so that eight clients just fit."""
    engine = {"max_concurrency": 4, "max_pending": 4, "max_context": 2048}
    with Server.launch(engine=engine, max_request_mib=1, keepalive_s=0.5) as running:
        yield running
        running.check_log()


@dataclass
class Tally:
    """What happened."""

    statuses: Counter[int] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Client:
    """One client: a loop of random deeds on connections of its own."""

    def __init__(self, server: Server, tally: Tally, seed: int) -> None:
        self._server, self._tally = server, tally
        self._random = random.Random(seed)
        self._deeds = {
            self.whole: 4,
            self.stream: 4,
            self.leave_stream: 5,
            self.leave_whole: 4,
            self.oversize: 1,
            self.malformed: 2,
            self.half_a_body: 1,
            self.bad_http: 1,
        }

    async def run(self, until: float) -> None:
        """Do deeds until a moment of the event loop's clock."""
        deeds, weights = list(self._deeds), list(self._deeds.values())
        while asyncio.get_running_loop().time() < until:
            (deed,) = self._random.choices(deeds, weights)
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            try:
                await deed(reader, writer)
                self._tally.actions[deed.__name__] += 1
            finally:
                if self._random.random() < 0.5:
                    writer.transport.abort()
                writer.close()

    def _question(self) -> tuple[str, str]:
        return self._random.choice(list(ANSWERS.items()))

    async def whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question, answer = self._question()
        status, body = await self._post(reader, writer, orjson.dumps(ask(question)))
        if status == 200:
            self._check(orjson.loads(body)["choices"][0]["message"]["content"], answer)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question, answer = self._question()
        status, body = await self._post(reader, writer, orjson.dumps(ask(question, stream=True)))
        if status == 200:
            events = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e[:1] == b"d"]
            assert events.pop() == b"[DONE]"
            deltas = [orjson.loads(e)["choices"][0]["delta"] for e in events]
            self._check("".join(d.get("content") or "" for d in deltas), answer)

    async def leave_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._send(writer, orjson.dumps(endless(1500, stream=True)))
        await self._first_bytes(reader)
        await asyncio.sleep(self._random.expovariate(5))

    async def leave_whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        padding = b" " * self._random.choice((0, 200_000))
        self._send(writer, orjson.dumps(endless(1500)) + padding)
        await asyncio.sleep(self._random.expovariate(5))

    async def oversize(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, _ = await self._post(reader, writer, b" " * (3 << 20))
        assert status == 413, status

    async def malformed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        good = orjson.dumps(ask(self._question()[0]))
        at = self._random.randrange(len(good))
        bad: Any = self._random.choice(
            (
                good[:at],
                good[:at] + self._random.randbytes(3) + good[at:],
                orjson.dumps(ask("x", n=2)),
                orjson.dumps(ask("x", model="other")),
                orjson.dumps({"model": MODEL}),
            )
        )
        await self._post(reader, writer, bad)

    async def half_a_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = orjson.dumps(ask("Hello!"))
        writer.write(head(body) + body[: self._random.randrange(len(body))])
        await asyncio.sleep(0.02)

    async def bad_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._random.randbytes(100) + b"\r\n\r\n")
        await self._first_bytes(reader)

    def _send(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(head(body, "Connection: close") + body)

    async def _first_bytes(self, reader: asyncio.StreamReader) -> None:
        data = await reader.read(1024)
        if data:
            self._tally.statuses[int(data.split(maxsplit=2)[1])] += 1

    async def _post(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> tuple[int, bytes]:
        """Status and body, chunks joined, of a request that is read to its end."""
        self._send(writer, body)
        data = await reader.read(-1)
        top, _, rest = data.partition(b"\r\n\r\n")
        status = int(top.split(maxsplit=2)[1])
        self._tally.statuses[status] += 1
        if b"transfer-encoding: chunked" in top.lower():
            rest = _joined(rest)
        return status, rest

    def _check(self, text: str, answer: str) -> None:
        if text != answer:
            self._tally.wrong.append(text)


def _joined(data: bytes) -> bytes:
    """A chunked body without its chunk lines."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body += data[:length]
        data = data[length + 2 :]
    return body


async def _storm(server: Server, seconds: float, seed: int) -> Tally:
    tally = Tally()
    until = asyncio.get_running_loop().time() + seconds
    clients = [Client(server, tally, seed * NUM_CLIENTS + i) for i in range(NUM_CLIENTS)]
    await asyncio.gather(*(client.run(until) for client in clients))
    return tally


def _footprint(server: Server) -> dict[str, float]:
    """What may not grow: once nothing runs, or waits to be closed."""
    found = server.settle()
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    sizes = {f"{name} rss": _rss_mib(pid) for name, pid in pids.items()}
    fds = {
        f"{name} fds": len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()
    }
    threads = {
        f"{name} threads": len(list(Path(f"/proc/{pid}/task").iterdir()))
        for name, pid in pids.items()
    }
    return {
        "tasks": found["ginfer_tasks"],
        "promised pages": found["ginfer_engine_promised_pages"],
        "free slots": found["ginfer_engine_free_slots"],
        **sizes,
        **fds,
        **threads,
    }


def _rss_mib(pid: int) -> float:
    (line,) = [
        s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("seconds", [20.0, pytest.param(120.0, marks=pytest.mark.long)])
def test_a_storm_of_clients_leaks_nothing(loaded: Server, seconds: float) -> None:
    asyncio.run(_storm(loaded, WARM_S, seed=1))
    before = _footprint(loaded)
    tally = asyncio.run(_storm(loaded, seconds, seed=2))
    time.sleep(0.2)
    after = _footprint(loaded)
    print(tally, before, after)
    assert set(tally.statuses) <= LEGAL, tally
    assert not tally.wrong
    assert all(tally.actions[deed] for deed in ("whole", "stream", "leave_stream", "malformed"))
    for name, value in before.items():
        slack = RSS_SLACK_MIB if name.endswith("rss") else 1
        assert after[name] <= value + slack, (name, before, after)
    assert (after["promised pages"], after["free slots"]) == (0, 4)
    failed = [n for n in loaded.metrics() if n.startswith("ginfer_engine_failed_total")]
    assert not failed
    for question, answer in ANSWERS.items():
        status, body = loaded.post(ask(question))
        assert (status, body["choices"][0]["message"]["content"]) == (200, answer)


def test_more_than_fits_is_429_and_the_rest_is_right(loaded: Server) -> None:
    async def run() -> Tally:
        tally = Tally()

        async def one(seed: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", loaded.port)
            await Client(loaded, tally, seed).whole(reader, writer)
            writer.close()

        await asyncio.gather(*(one(i) for i in range(40)))
        return tally

    loaded.settle()
    tally = asyncio.run(run())
    assert set(tally.statuses) == {200, 429}
    assert tally.statuses[200] >= 8
    assert not tally.wrong
    loaded.settle()
