"""Engine: requests in from any thread, events out from one loop thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ginfer.engine.backends import open_backend
from ginfer.engine.job import Job
from ginfer.engine.loader import load_weights, open_package
from ginfer.engine.loop import RoundLoop
from ginfer.engine.memory import available_nbytes, ledger_line, plan_memory
from ginfer.engine.rank import Rank
from ginfer.engine.request import EngineInfo, Failed, Finished
from ginfer.engine.validate import check_request
from ginfer.errors import (
    DeviceError,
    GInferError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from ginfer.frontend import open_frontend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from ginfer.backend import Backend
    from ginfer.cache import PrefixCache
    from ginfer.config import EngineConfig
    from ginfer.engine.loader import BoundPackage
    from ginfer.engine.memory import Capacity
    from ginfer.engine.request import Event, Request
    from ginfer.frontend.base import Frontend

    Sink = Callable[[Event], None]
    Progress = Callable[[str, int, int], None]  # stage, done, total

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks whether the engine that is waited for lives
REST_AFTER_S = 1.0  # idle time after which an elastic engine gives memory back


class Engine:
    """One model, loaded and serving. `failed` says why it cannot serve any more; `on_failure` is
    called with it, in the loop thread, and `on_told` there after the events of each round.

    `submit` and the other methods may be called from any thread; sinks are called from the loop
    thread and must be quick. A context manager.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        config: EngineConfig,
        capacity: Capacity,
        rank: Rank,
        frontend: Frontend,
        clock: Callable[[], float],
    ) -> None:
        self.info = info
        self.frontend = frontend
        self.failed: GInferError | None = None
        self.on_failure: Callable[[GInferError], None] = lambda error: None
        self.on_told: Callable[[], None] = lambda: None
        self._capacity, self._rank, self._clock = capacity, rank, clock
        self._elastic = config.kv_elastic
        self._loop = RoundLoop(
            rank=rank,
            frontend=frontend,
            capacity=capacity,
            config=config,
            clock=clock,
            on_end=self._forget,
        )
        self._changed = Condition()  # guards everything below
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: dict[str, Job] = {}
        self._refusal: str | None = None  # why no request is accepted any more
        self._closing = False
        self._thread = Thread(target=self._run, name="ginfer-loop", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Load a package and be ready to serve: check, load, allocate, prepare every kernel.

        progress: called with a stage (verify, load, prepare), the amount done and the total.
        clock: seconds, for timeouts and timings.
        Raises ArtifactError with every defect of the package, ConfigError naming an option.
        """
        report: Progress = progress or (lambda stage, done, total: None)
        bound = open_package(config.package, verify=config.verify, progress=report)
        with bound.package as package:
            spec = bound.contract.spec
            frontend = open_frontend(package.identity.model_id, bound.resources())
            backend = open_backend(config, spec, bound.drafter)
            speculation = backend.speculation
            drafts = speculation is not None and speculation.max_drafts > 0
            bound = replace(bound, drafts=drafts)
            try:
                capacity = _fill(backend, bound, config, report)
            except BaseException:
                backend.close()
                raise
            log.info("memory: %s", ledger_line(backend.ledger()))
            info = EngineInfo(
                model_id=package.identity.model_id,
                weights_id=package.identity.weights_id,
                package_digest=package.digest,
                backend=backend.name,
                max_context=capacity.max_context,
                kv_capacity=capacity.kv_capacity,
                max_concurrency=config.max_concurrency,
                max_pending=config.max_pending,
            )
        return cls(
            info=info,
            config=config,
            capacity=capacity,
            rank=Rank(spec, backend, capacity.plan),
            frontend=frontend,
            clock=clock,
        )

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        """Accept a request; its events go to `sink`, the last one is Finished or Failed.

        Raises RequestError naming a field, ContextLengthError, OverloadedError when concurrency and
        queue are full, UnavailableError when the engine cannot serve. A grammar is compiled here,
        in at most `grammar.COMPILE_S`, before the request takes a place.
        """
        try:
            check_request(request, self._rank.spec, self._capacity)
            job = Job(request=request, sink=sink, submitted=self._clock())
            if request.grammar is not None:
                job.constraint = self._loop.grammars.open(request.grammar)
            self._accept(job)
        except GInferError as error:
            with self._changed:
                self._loop.stats.rejected[error.code] += 1
            raise

    def cancel(self, request_id: str) -> None:
        """End a request at the next round boundary; an id that has ended is ignored."""
        self._command(partial(self._loop.cancel, request_id, self._clock()))

    def generate(self, request: Request) -> Iterator[Event]:
        """Submit, then yield the events up to the terminal one. Closing the iterator cancels."""
        events: SimpleQueue[Event] = SimpleQueue()
        self.submit(request, events.put)
        event: Event | None = None
        try:
            while not isinstance(event, Finished | Failed):
                event = events.get()
                yield event
        finally:
            if not isinstance(event, Finished | Failed):
                self.cancel(request.request_id)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain values. A request waits from its acceptance on."""
        gauges = self._loop.gauges()
        return {
            **self._loop.stats.snapshot(),
            **gauges,
            "waiting": max(len(self._jobs) - gauges["running"], 0),
            "grammar": self._loop.grammars.stats(),
            "memory": self._rank.backend.ledger(),
        }

    def between_rounds(self, work: Callable[[PrefixCache, Backend], T]) -> T:
        """Have the loop thread run `work` at a round boundary, and return what it returns: for
        measurements. Raises what it raises, and the engine's own error when it has failed."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work(self._loop.cache, self._rank.backend))
            except Exception as error:
                done.set_exception(error)

        self._command(run)
        while wait([done], LOOK_S).not_done:
            if self.failed is not None:
                raise self.failed
        return done.result()

    @property
    def num_rounds(self) -> int:
        """Rounds run so far: what moves while there is work."""
        stats = self._loop.stats
        return stats.prefill_rounds + stats.decode_rounds

    def check_integrity(self) -> None:
        """Assert, between two rounds, that lanes, pages and slots have exactly one owner each."""
        outcome: SimpleQueue[AssertionError | None] = SimpleQueue()

        def check() -> None:
            try:
                self._loop.check_integrity()
                outcome.put(None)
            except AssertionError as error:
                outcome.put(error)

        self._command(check)
        while outcome.empty():  # an engine that breaks forgets its commands
            self._thread.join(0.001)
            if not self._thread.is_alive() and outcome.empty():
                raise UnavailableError(self._refusal or "the engine is closed")
        error = outcome.get()
        if error is not None:
            raise error

    def drain(self, timeout_s: float) -> bool:
        """Accept nothing more and wait for what is accepted; after `timeout_s` cancel the rest.
        True when nothing had to be cancelled."""
        with self._changed:
            self._refusal = self._refusal or "the engine is shutting down"
            if self._changed.wait_for(lambda: not self._jobs, timeout_s):
                return True
            left = list(self._jobs)
        for request_id in left:
            self.cancel(request_id)
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
        return False

    def close(self) -> None:
        """Cancel what runs, end the loop and give all memory back. Safe to call twice."""
        self.drain(0)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._loop.close()
        with suppress(DeviceError):  # a lost context has nothing to give back
            self._rank.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self, job: Job) -> None:
        request_id = job.request.request_id
        with self._changed:
            if self._refusal is not None:
                raise UnavailableError(self._refusal)
            if request_id in self._jobs:
                raise RequestError(
                    f"request_id {request_id!r} is running already", param="request_id"
                )
            places = self.info.max_concurrency + self.info.max_pending
            if len(self._jobs) >= places:
                raise OverloadedError(
                    f"all {places} places ({self.info.max_concurrency} running, "
                    f"{self.info.max_pending} waiting) are taken; try again later"
                )
            self._jobs[request_id] = job
            self._loop.stats.submitted += 1
            self._inbox.append(partial(self._loop.submit, job))
            self._changed.notify_all()

    def _command(self, command: Callable[[], None]) -> None:
        """Have the loop run `command` at its next round boundary."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify_all()

    def _forget(self, request_id: str) -> None:
        with self._changed:
            del self._jobs[request_id]
            self._changed.notify_all()

    def _run(self) -> None:
        """The loop thread: control, then a round; sleep only while there is nothing to do."""
        try:
            busy = False
            while True:
                if not busy:
                    self._sleep()
                    if self._closing:
                        return
                while self._inbox:
                    self._inbox.popleft()()
                self._loop.expire()
                busy = self._loop.step()
                self.on_told()
        except Exception as error:
            log.exception("the engine failed")
            self._break(UnavailableError(f"the engine failed: {error!r}"))

    def _sleep(self) -> None:
        """Wait for a command. Whatever waits in the loop keeps it busy: no deadline is missed."""
        if not self._elastic:
            self._await_command(None)
        elif not self._await_command(REST_AFTER_S):
            self._loop.rest()
            self._await_command(None)
            self._loop.wake()

    def _await_command(self, timeout_s: float | None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._inbox or self._closing, timeout_s))

    def _break(self, error: GInferError) -> None:
        """The backend is lost: fail every request, refuse new ones, tell the supervisor."""
        with self._changed:
            self.failed, self._refusal = error, error.message
            jobs, self._jobs = list(self._jobs.values()), {}
            self._inbox.clear()
            self._changed.notify_all()
        self._loop.stats.failed[error.code] += len(jobs)
        for job in jobs:
            try:
                job.sink(Failed(request_id=job.request.request_id, error=error))
            except Exception:
                log.exception("the sink of request %s refuses its end", job.request.request_id)
        self.on_failure(error)


def _fill(
    backend: Backend, bound: BoundPackage, config: EngineConfig, report: Progress
) -> Capacity:
    """Give a backend its weights and memory. What does not fit is refused before it is loaded."""
    room = backend.room(bound.weights_nbytes, available_nbytes())
    capacity = plan_memory(config, bound.contract.spec, room)
    load_weights(bound, backend, report)
    report("prepare", 0, 1)
    backend.allocate(capacity.plan)
    report("prepare", 1, 1)
    return capacity
