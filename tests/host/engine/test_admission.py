"""Admission in simulated time: nobody starves, the head's wait is bounded, memory suffices."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from ginfer.engine.admission import Admission, Claim
from ginfer.engine.chunk_plan import ChunkCost, ChunkLimits, PromptView
from ginfer.engine.round import DecodeUnit, PrefillUnit, RoundView
from ginfer.engine.scheduler import entitled_pages, may_admit, next_unit

CHUNK = 256
LIMITS = ChunkLimits(columns=CHUNK, cost=ChunkCost(0.0, 0.0, 0.0))


def claim(key, reserve, work, pages=()):
    return Claim(key=key, pages=np.array(pages, np.int32), reserve=reserve, work=work)


def test_the_oldest_enters_first_while_everything_fits():
    admission = Admission(8, 10)
    assert admission.choose([claim("a", 4, 9), claim("b", 4, 1)], []) == "a"
    assert admission.choose([], []) is None
    assert admission.epoch is None


def test_shared_pages_count_once():
    admission = Admission(8, 10)
    shared = range(6)
    running = [claim("a", 2, 5, shared)]
    assert admission.choose([claim("b", 2, 5, shared)], running) == "b"
    assert admission.choose([claim("b", 3, 5, shared)], running) is None


def test_lanes_are_a_component_of_their_own():
    admission = Admission(2, 100)
    running = [claim("a", 1, 7), claim("b", 1, 3)]
    assert admission.choose([claim("head", 1, 1), claim("c", 0, 1)], running) is None
    assert admission.epoch.donors == {"b"}


def test_donors_are_the_shortest_prefix_by_remaining_work():
    admission = Admission(8, 10)
    running = [claim("slow", 4, 90), claim("quick", 2, 3), claim("middle", 3, 40)]
    assert admission.choose([claim("head", 6, 1)], running) is None
    assert admission.epoch.donors == {"quick", "middle"}
    assert admission.epoch.credit == 40


def test_persistent_backfill_leaves_room_for_the_head():
    admission = Admission(8, 10)
    running = [claim("donor", 6, 10), claim("stays", 2, 99)]
    queue = [claim("head", 6, 50), claim("large", 3, 500), claim("small", 2, 500)]
    assert admission.choose(queue, running) == "small"
    running.append(queue[2])
    more = claim("more", 1, 500)  # head, stays and small fill the memory: nothing lasting may enter
    assert admission.choose([queue[0], more], running) is None


def test_temporal_backfill_is_within_distance_and_credit_and_never_refunded():
    admission = Admission(8, 10)
    donor = claim("donor", 8, 10)
    head, long, first, second = (
        claim("head", 10, 5),
        claim("long", 1, 11),
        claim("first", 1, 6),
        claim("second", 1, 5),
    )
    assert admission.choose([head, long, first, second], [donor]) == "first"
    assert admission.epoch.credit == 4
    assert (
        admission.choose([head, long, second], [donor]) is None
    )  # first is gone, its charge stays
    last = claim("last", 1, 4)
    nearer = claim("donor", 8, 3)
    assert (
        admission.choose([head, last], [nearer]) is None
    )  # within the credit, beyond the distance
    assert admission.choose([head, last], [donor]) == "last"


def test_drain_lets_nobody_pass_once_only_borrowers_are_in_the_way():
    admission = Admission(8, 10)
    donor, stays = claim("donor", 4, 10), claim("stays", 4, 50)
    head, borrower, tiny = claim("head", 6, 5), claim("borrower", 1, 6), claim("tiny", 1, 1)
    assert admission.choose([head, borrower], [donor, stays]) == "borrower"
    assert admission.choose([head, tiny], [donor, borrower]) is None  # stays ended early
    assert admission.choose([head, tiny], [donor]) == "head"
    assert admission.epoch is None


def test_a_head_that_leaves_the_queue_ends_its_epoch():
    admission = Admission(8, 10)
    donor = claim("donor", 8, 10)
    assert admission.choose([claim("head", 10, 5)], [donor]) is None
    assert admission.choose([claim("next", 2, 5)], [donor]) == "next"
    assert admission.epoch is None


def test_donors_are_chosen_again_without_credit_when_their_end_was_not_enough():
    admission = Admission(8, 10)
    donor, stays = claim("donor", 4, 5), claim("stays", 4, 50, [0, 1])
    head = claim("head", 4, 5, [0, 1])
    assert admission.choose([head], [donor, stays]) is None
    assert admission.epoch.donors == {"donor"}
    lonely = claim("head", 6, 5)  # its shared pages were lost
    assert admission.choose([lonely, claim("brief", 1, 1)], [stays]) is None
    assert admission.epoch.donors == {"stays"}
    assert admission.epoch.credit == 0


@dataclass
class Visitor:
    """A request of a random workload. output: tokens that it may draw; drawn: when it stops."""

    key: str
    arrival: float
    prompt: int
    output: int
    stops: int
    shared: range
    deadline: float
    cancelled: float
    computed: int = 0
    drawn: int = 0
    ended: str = ""
    ended_at: float = 0.0

    def claim(self):
        chunks = -(-(self.prompt - self.computed) // CHUNK)
        pages = entitled_pages(self.prompt, self.output)
        held = np.array(self.shared[: self.prompt // 64], np.int32)
        work = chunks + self.output - 1 if self.computed < self.prompt else self.output - self.drawn
        return Claim(key=self.key, pages=held, reserve=pages - len(held), work=work)


@dataclass
class Workload:
    """A random workload in simulated time, run with the scheduler and the admission of the loop."""

    seed: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("passed", "waits", "packed"), 0)
    )

    def __post_init__(self):
        rng = self.rng = random.Random(self.seed)
        self.num_lanes, self.num_pages = rng.randint(1, 8), rng.randint(30, 120)
        self.admission = Admission(self.num_lanes, self.num_pages)
        self.round_s, self.chunk_s = 1.0, rng.choice((0.5, 2.0, 8.0))
        self.now, self.prefilling, self.decoded_last = 0.0, [], False
        self.waiting, self.running, self.changed = [], [], True
        self.rounds = self.head_rounds = 0
        self.head, self.bound = None, 0
        impatient = rng.random() < 0.3
        self.visitors = [self.visitor(i, impatient) for i in range(rng.randint(5, 40))]

    def visitor(self, i, impatient):
        rng = self.rng
        long = rng.random() < 0.2
        prompt = rng.randint(1, self.num_pages * 40 if long else 400)
        output = rng.randint(1, min(self.num_pages * 64 - prompt + 1, 400 if long else 60))
        stops = output if rng.random() < 0.5 else rng.randint(1, output)
        shared = range(16 * (g := rng.randrange(3)), 16 * g + rng.choice((0, 8, 16)))
        arrival = rng.random() * rng.choice((1, 500))
        never = float("inf")
        return Visitor(
            key=f"{i:02}",
            arrival=arrival,
            prompt=prompt,
            output=output,
            stops=stops,
            shared=range(0) if self.num_pages < 48 else shared,
            deadline=arrival + rng.choice((50, 500)) if impatient else never,
            cancelled=arrival + rng.random() * 300 if rng.random() < 0.1 else never,
        )

    def run(self):
        pending = sorted(self.visitors, key=lambda v: v.arrival)
        while pending or self.waiting or self.running:
            while pending and pending[0].arrival <= self.now:
                self.waiting.append(pending.pop(0))
                self.changed = True
            self.control()
            self.admit()
            if not self.work():
                assert not self.waiting, "an empty engine lets nobody in"
                self.now = pending[0].arrival if pending else self.now
        assert all(v.ended for v in self.visitors)
        return self

    def end(self, visitor, how):
        visitor.ended, visitor.ended_at, self.changed = how, self.now, True
        for group in (self.waiting, self.running, self.prefilling):
            if visitor in group:
                group.remove(visitor)

    def control(self):
        for visitor in (*self.waiting, *self.running):
            if visitor.cancelled <= self.now:
                self.end(visitor, "cancelled")
        for visitor in list(self.waiting):
            if visitor.deadline <= self.now:
                self.end(visitor, "expired")

    def view(self):
        prompts = tuple(
            PromptView(self.running.index(v), v.computed, v.prompt) for v in self.prefilling
        )
        ready = tuple(i for i, v in enumerate(self.running) if v not in self.prefilling)
        return RoundView(prompts=prompts, ready=ready, decoded_last=self.decoded_last)

    def may_join(self):
        claims = [v.claim() for v in (*self.running, self.waiting[0])]
        return not self.prefilling or self.admission.fits(claims)

    def admit(self):
        while self.admit_one():
            pass

    def admit_one(self):
        if self.waiting and self.waiting[0] is not self.head:
            self.head, self.head_rounds, self.bound = self.waiting[0], 0, 0
        if not self.waiting or not self.changed or not may_admit(self.view(), LIMITS):
            return False
        if not self.may_join():
            return False
        self.counts["packed"] += bool(self.prefilling)
        running = [v.claim() for v in self.running]
        key = self.admission.choose((v.claim() for v in self.waiting), running)
        if self.admission.epoch and not self.bound:
            donors = [c.work for c in running if c.key in self.admission.epoch.donors]
            self.bound = max(donors) + max(-(-v.prompt // CHUNK) for v in self.visitors) + 1
            self.head_rounds = 0
        self.changed = key is not None
        if key is not None:
            visitor = next(v for v in self.waiting if v.key == key)
            if visitor is not self.head:
                self.counts["passed"] += 1
            self.waiting.remove(visitor)
            self.running.append(visitor)
            self.prefilling.append(visitor)
            assert self.admission.fits([v.claim() for v in self.running])
        return self.changed

    def work(self):
        unit = next_unit(self.view(), LIMITS)
        if isinstance(unit, PrefillUnit):
            self.now += self.chunk_s
            self.decoded_last = False
            for visitor, piece in [(self.running[p.lane], p) for p in unit.pieces]:
                visitor.computed = piece.stop
                if piece.last:
                    self.prefilling.remove(visitor)
                    self.draw(visitor)
        elif isinstance(unit, DecodeUnit):
            self.now += self.round_s
            self.decoded_last = True
            self.head_rounds += 1
            if self.bound and self.waiting:
                self.counts["waits"] += 1
                assert self.head_rounds <= self.bound, "the head waits longer than its bound"
            for visitor in [self.running[i] for i in unit.lanes]:
                self.draw(visitor)
        return unit is not None

    def draw(self, visitor):
        visitor.drawn += 1
        if visitor.drawn >= visitor.stops:
            self.end(visitor, "finished")


def check_workloads(seeds):
    passed = waits = packed = expired = 0
    for seed in seeds:
        workload = Workload(seed).run()
        passed += workload.counts["passed"]
        waits += workload.counts["waits"]
        packed += workload.counts["packed"]
        for visitor in workload.visitors:
            expired += visitor.ended == "expired"
            late = visitor.ended_at - visitor.deadline
            assert visitor.ended != "expired" or 0 <= late <= max(1, workload.chunk_s)
            assert visitor.ended != "finished" or visitor.drawn == visitor.stops
    assert passed > len(seeds)
    assert waits > len(seeds)
    assert packed > len(seeds)
    assert expired > len(seeds) // 10


def test_nobody_starves_in_random_workloads():
    check_workloads(range(500))


@pytest.mark.long
def test_nobody_starves_in_many_random_workloads():
    check_workloads(range(500, 10_500))
