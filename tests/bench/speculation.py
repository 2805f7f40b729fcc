"""Speculation at full size with forced acceptance, beside plain decode of the same package.

    python -m tests.bench.speculation PACKAGE [--out]

The package has a drafter; its weights may be random. Plain decode tells how greedy requests go on.
Then all kernels of the drafter run, but what they propose is replaced, before it is verified, by so
many tokens of that continuation and wrong ones behind them: 2.7 tokens a round, with every draft
verified or with the widths that the engine chooses (`own27`), and none at all. Answers must be
equal. `verify`: forward, acceptance and what is kept of a round of which all drafts are verified,
over a plain round.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import cycle, pairwise
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import numpy as np

from ginfer.config import EngineConfig
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams
from ginfer.prompt import PreparedPrompt
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ginfer.batch import DraftBatch
    from ginfer.engine.draft_width import Offer, Origin
    from ginfer.engine.request import Event

    Figures = dict[str, tuple[float, str]]
    Answers = dict[str, list[int]]

ACCEPTED = (1, 0, 3, 2, 1, 0, 4, 2, 1, 3)  # of the drafts of rounds in turn: 2.7 tokens a round
ROWS = (1, 8)  # requests together
CAPACITY = 32768  # tokens of K/V
MARKS = 8192


def requests_of(engine: Engine, rows: int, context: int, tokens: int) -> list[Request]:
    """Greedy requests over random tokens, the same ones every time."""
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, min(engine.frontend.stop_token_ids), (rows, context), dtype=np.int32)
    return [
        Request(
            request_id=f"row {i} of {rows}",
            prompt=PreparedPrompt(token_ids=prompt),
            max_tokens=tokens,
            sampling=SamplingParams(temperature=0.0),
            raw=True,
            ignore_eos=True,
        )
        for i, prompt in enumerate(ids)
    ]


class Answer:
    """Sink of a request: its tokens, and when they came."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []  # of each token
        self.end: SimpleQueue[Finished | Failed] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        """Take an event, in the loop thread."""
        if isinstance(event, Delta):
            self.ids += event.token_ids
            self.times += [perf_counter()] * len(event.token_ids)
        elif isinstance(event, Finished | Failed):
            self.end.put(event)

    def wait(self) -> None:
        """Wait for the end. Raises the request's error."""
        end = self.end.get()
        if isinstance(end, Failed):
            raise end.error


def decode(engine: Engine, requests: list[Request]) -> tuple[float, Answers]:
    """Tokens/s of requests while all of them decode, and the tokens of each."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.submit(request, answers[request.request_id])
    for answer in answers.values():
        answer.wait()
    start = max(answer.times[0] for answer in answers.values())
    stop = min(answer.times[-1] for answer in answers.values())
    count = sum(start < at <= stop for answer in answers.values() for at in answer.times)
    return count / (stop - start), {name: answer.ids for name, answer in answers.items()}


class Forced:
    """Replaces what an engine drafts. truth: how its requests go on; accepted: of the drafts of
    each row and round in turn, the rest is wrong."""

    def __init__(self, engine: Engine, truth: Answers, accepted: tuple[int, ...]) -> None:
        self._rank: Any = engine._rank
        self._loop: Any = engine._loop
        self._backend, self._truth = self._rank.backend, truth
        self._counts: dict[int, Iterator[int]] = defaultdict(lambda: cycle(accepted))
        self._given: dict[int, int] = {}  # drafts of a lane's last round that are right
        lanes, most = len(self._loop._lanes), self._backend.speculation.max_drafts
        self._drafts = np.zeros((most, lanes), np.int32)
        self._write = self._writer()

    def _writer(self) -> Callable[[], None]:
        """What puts `_drafts` where the backend keeps its own."""
        if self._backend.name == "cpu":
            head = self._backend._head

            def put() -> None:
                head.tokens[1:] = self._drafts

            return put
        from ginfer.cuda.runtime.memory import PinnedBuffer, copy_to_device

        turns = cycle([PinnedBuffer(self._drafts.nbytes) for _ in range(8)])
        to = self._backend._selector.tokens + self._drafts[0].nbytes
        stream = self._backend._queue.stream

        def send() -> None:
            buffer = next(turns)
            buffer.bytes[:] = self._drafts.reshape(-1).view(np.uint8)
            copy_to_device(to, buffer.host, buffer.nbytes, stream=stream)

        return send

    def draft(self, batch: DraftBatch) -> None:
        """Replace the drafts of a batch that is ordered."""
        for lane, start in zip(batch.lanes.tolist(), batch.starts.tolist()):
            request = self._rank._requests[lane]
            right = next(self._counts[lane])
            used = 0 if batch.rows is None else self._given.get(lane, 0) + 1
            at = start + used - request.prompt.num_tokens + 1
            ids = self._truth[request.request_id][at : at + batch.num_drafts]
            ids += [0] * (batch.num_drafts - len(ids))
            for i, token in enumerate(ids):
                self._drafts[i, lane] = token if i < right else wrong(token)
            self._given[lane] = min(right, batch.num_drafts)
        self._write()


def wrong(token: int) -> int:
    """Another legal token."""
    return token - 1 if token else 1


@contextmanager
def forced(
    engine: Engine, truth: Answers, accepted: tuple[int, ...], *, every: bool = False
) -> Iterator[None]:
    """Have an engine draft that, without copies of the context or, where nothing is accepted, with
    wrong ones. every: each row verifies all drafts; else the engine chooses widths."""
    replaced, drafting = Forced(engine, truth, accepted), engine._loop._drafting
    assert drafting is not None
    speculation, widths = engine._rank.backend.speculation, drafting.widths
    assert speculation is not None
    draft, copy = speculation.draft, drafting._copy

    def instead(batch: DraftBatch) -> Any:
        pending = draft(batch)
        replaced.draft(batch)
        return pending

    with ExitStack() as held:
        held.enter_context(patch.object(speculation, "draft", instead))
        none = any(accepted)
        wrongly = lambda *job: [] if none else [wrong(t) for t in copy(*job)]  # noqa: E731
        held.enter_context(patch.object(drafting, "_copy", wrongly))
        if every:
            held.enter_context(patch.object(widths, "plan", _all_offered))
            held.enter_context(patch.object(widths, "may_draft", _always))
            held.enter_context(patch.object(drafting, "costs", Mock()))  # nothing is learned
        yield


def _always(lanes: Iterable[int], origin: Origin, rows: int) -> set[int]:
    return set(lanes)


def _all_offered(offers: Mapping[int, Offer]) -> dict[int, int]:
    return {lane: offer.limit for lane, offer in offers.items()}


class Parts:
    """Times of the parts of rounds, in the order of the device's work: on a GPU by events of its
    stream, elsewhere by the clock."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._marks: list[tuple[str, Any]] = []  # (part that begins, "" for none, when)
        self._events: list[Any] = []
        if backend.name == "cuda":
            from ginfer.cuda.runtime.stream import Event as DeviceEvent

            self._events = [DeviceEvent(timed=True) for _ in range(MARKS)]

    def _mark(self, begins: str) -> None:
        if self._backend.name != "cuda":
            self._marks.append((begins, perf_counter()))
        elif len(self._marks) < MARKS:
            event = self._events[len(self._marks)]
            event.record(self._backend._queue.stream)
            self._marks.append((begins, event))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Mark what the backend is asked for meanwhile."""
        speculation, backend = self._backend.speculation, self._backend
        with ExitStack() as held:
            for owner, name, part in (
                (backend, "embed", "forward"),
                (backend, "select", "select"),
                (speculation, "draft", "draft"),
                (speculation, "accept", "accept"),
                (speculation, "keep", "keep"),
            ):
                marking = self._marking(getattr(owner, name), part)
                held.enter_context(patch.object(owner, name, marking))
            yield

    def _marking(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(work)
        def marking(*args: Any, **how: Any) -> Any:
            self._mark(part)
            found = work(*args, **how)
            if part != "forward":  # which goes on to what follows
                self._mark("")
            return found

        return marking

    def medians_us(self) -> dict[str, float]:
        """Microseconds of each part, and of `gap`, what is between parts, in rounds that draft."""
        rounds: list[dict[str, float]] = []
        for (part, start), (_, stop) in pairwise(self._marks):
            seconds = stop.elapsed_ms(start) / 1e3 if self._events else stop - start
            if part == "forward":
                rounds.append(defaultdict(float))
            if rounds:
                rounds[-1][part or "gap"] += 1e6 * seconds
        for event in self._events:
            event.close()
        drafted = [times for times in rounds if "draft" in times and "accept" in times]
        names = ("draft", "forward", "accept", "keep", "gap")
        return {name: statistics.median(times[name] for times in drafted) for name in names}


class Bench:
    """Figures of a package, by name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._plain: dict[int, tuple[float, Answers]] = {}
        self.figures: Figures = {}

    def _open(self, spec: str) -> Engine:
        options = self._options
        return Engine.open(
            EngineConfig(
                package=options.package,
                backend=options.backend,
                max_context=CAPACITY // max(ROWS),
                kv_capacity=CAPACITY,
                spec=spec,
            )
        )

    def _best(self, engine: Engine, rows: int) -> tuple[float, Answers]:
        """Of a few runs the highest speed; all answers are equal."""
        requests = requests_of(engine, rows, self._options.context, self._options.tokens)
        runs = [decode(engine, requests) for _ in range(self._options.repeats)]
        assert all(answers == runs[0][1] for _, answers in runs)
        return max(speed for speed, _ in runs), runs[0][1]

    def plain(self) -> None:
        """How requests go on, and how fast."""
        with self._open("none") as engine:
            for rows in ROWS:
                self._plain[rows] = self._best(engine, rows)
                print(f"C{rows} plain: {self._plain[rows][0]:.1f} tokens/s", flush=True)

    def speculative(self) -> None:
        """Forced acceptance against it."""
        with self._open("auto") as engine:
            for rows in ROWS:
                self._figure(engine, rows, f"forced27.c{rows}.speedup", ACCEPTED, every=True)
                self._parts(engine, rows)
                self._figure(engine, rows, f"own27.c{rows}.speedup", ACCEPTED)
                self._figure(engine, rows, f"forced0.c{rows}.slowdown", (0,))
            engine.check_integrity()

    def _figure(
        self,
        engine: Engine,
        rows: int,
        name: str,
        accepted: tuple[int, ...],
        *,
        every: bool = False,
    ) -> None:
        speed, truth = self._plain[rows]
        before = engine.stats()
        with forced(engine, truth, accepted, every=every):
            got, answers = self._best(engine, rows)
        assert answers == truth, "an answer differs from plain decode"
        after = engine.stats()
        given = sum(map(len, truth.values())) * self._options.repeats
        rounds = after["row_rounds"] - before["row_rounds"]
        drafted = sum(after["drafted"].values()) - sum(before["drafted"].values())
        ratio = got / speed if any(accepted) else speed / got
        self.figures[f"spec.{name.replace('.c1', '')}"] = (ratio, "ratio")
        print(
            f"{name}: {ratio:.3f} ({got:.1f} tokens/s, {given / rounds:.2f} a round and row, "
            f"{drafted} drafts)",
            flush=True,
        )

    def _parts(self, engine: Engine, rows: int) -> None:
        parts, truth = Parts(engine._rank.backend), self._plain[rows][1]
        requests = requests_of(engine, rows, self._options.context, self._options.tokens)
        with forced(engine, truth, ACCEPTED, every=True), parts.measured():
            decode(engine, requests)
        found = engine.between_rounds(lambda cache, backend: parts.medians_us())
        for part, us in found.items():
            self.figures[f"spec.c{rows}.{part}_us"] = (us, "us")
        plain_us = 1e6 * rows / self._plain[rows][0]
        verify = (found["forward"] + found["accept"] + found["keep"]) / plain_us
        self.figures[f"spec.verify.c{rows}"] = (verify, "ratio")
        print("   ", ", ".join(f"{part} {us:.0f}" for part, us in found.items()), "us", flush=True)
        print(f"    verify {verify:.3f} of a plain round, {plain_us:.0f} us", flush=True)
        if rows == 1:
            self.figures["spec.draft_share"] = (found["draft"] / plain_us, "fraction")


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--backend", default="cuda", help="cpu or cuda")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=384, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the best counts")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    bench = Bench(options)
    bench.plain()
    bench.speculative()
    if options.out:
        device = "CPU"
        if options.backend == "cuda":
            from ginfer.cuda.runtime.device import Device

            device = Device().info.name
        record(bench.figures, device, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
