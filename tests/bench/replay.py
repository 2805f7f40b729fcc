"""Agent traffic replayed: how much of what could be reused is, and what that saves.

python -m tests.bench.replay [--size full|demo|short] [--cache-only] [--out [FILE]]
                             [--package P] [--backend cuda|cpu] [--parts full half none] [--first N]

Agents share system and tools, and send their growing histories turn by turn, all at once: tool
results, retries of a turn, branches from an earlier turn, edits of the last one, and small title
requests between. `reuse.full` has the memory of all conversations at their end, as the engine sizes
it; `reuse.half` half of its pages and snapshots.

Reusable are the tokens of a prompt in front that some earlier request has computed: up to the end
of that request's history, or, where the two part before, up to the last turn start, rounded down to
a multiple of 64; so a new turn counts whole, an edit up to the turn that it changes.
`--cache-only` plays against the cache alone, with the 27B model's sizes and no device.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ginfer.cache import CacheGeometry, PrefixCache
from ginfer.config import EngineConfig
from ginfer.cpu.arena import slot_nbytes
from ginfer.engine import memory
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams, Started
from ginfer.engine.scheduler import entitled_pages
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.prompt import PreparedPrompt
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ginfer.cache import Sequence as KvSequence
    from ginfer.engine.request import Event
    from ginfer.spec import ModelSpec

    Ids = NDArray[np.int32]

ROOT = Path(__file__).parents[2]
DEMO_PACKAGE = ROOT / "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
SEEDS = (1, 2, 3)  # traffic differs much in branches, and so in what half the memory can hold
SHARES = {"full": 1.0, "half": 0.5}  # of the memory of all conversations at their end
PARTS = (*SHARES, "none")
HEADER = np.arange(5, dtype=np.int32)  # stands for the header of an answer


@dataclass(frozen=True, kw_only=True)
class Size:
    """Numbers of agents and of their turns, and (least, most) tokens of the parts."""

    agents: int
    turns: int
    system: int
    result: tuple[int, int]
    answer: tuple[int, int]

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that there can be."""
        return self.system + self.turns * (len(HEADER) + self.result[1] + self.answer[1])

    @property
    def total(self) -> int:
        """Tokens of all conversations at their end, as can be expected."""
        turn = len(HEADER) + sum(self.result) // 2 + sum(self.answer) // 2
        return self.agents * (self.system + self.turns * turn)


SIZES = {
    "full": Size(agents=8, turns=30, system=20_000, result=(200, 4000), answer=(60, 500)),
    "demo": Size(agents=8, turns=30, system=1600, result=(16, 320), answer=(4, 40)),
    "short": Size(agents=4, turns=8, system=700, result=(16, 160), answer=(4, 16)),
}


@dataclass(frozen=True, eq=False)
class Ask:
    """One request. turns: parts of its prompt; the last of them is open. small: beside the turns of
    a conversation."""

    turns: tuple[Ids, ...]
    max_tokens: int
    small: bool = False

    @cached_property
    def prompt(self) -> PreparedPrompt:
        """As the engine takes it."""
        starts = tuple(accumulate(len(turn) for turn in self.turns))
        return PreparedPrompt(
            token_ids=np.concatenate((*self.turns, HEADER)).astype(np.int32), turn_starts=starts
        )


@dataclass(frozen=True, eq=False)
class Reply:
    """What came back: ids, prompt tokens reused, seconds to the first token."""

    ids: list[int]
    cached_tokens: int
    first_token_s: float = 0.0


class Server(Protocol):
    """Where the traffic goes."""

    def serve(self, wave: Sequence[Ask]) -> list[Reply]:
        """Answer requests that come at the same time."""


class Agent:
    """One conversation; `asks` are its next requests, `take` their replies."""

    def __init__(self, size: Size, system: Ids, rng: random.Random) -> None:
        self._size, self._rng = size, rng
        self._turns = [system, self._text(size.result)]
        self._system = system
        self.left = size.turns

    def _text(self, bounds: tuple[int, int]) -> Ids:
        n = self._rng.randint(*bounds)
        return np.array([self._rng.randrange(10, 4000) for _ in range(n)], np.int32)

    def asks(self) -> list[Ask]:
        """The turn, and now and then a small request beside it."""
        dice = self._rng.random()
        if dice < 0.06 and len(self._turns) > 4:  # a branch: back to an earlier turn
            del self._turns[2 * self._rng.randrange(1, len(self._turns) // 2) :]
        elif dice < 0.12:  # an edit of what was said last
            self._turns[-1] = np.concatenate((self._turns[-1][:-4], self._text((3, 9))))
        asks = [Ask(tuple(self._turns), self._rng.randint(*self._size.answer))]
        if dice > 0.85:
            title = self._system[: self._size.system // 40]
            asks.append(Ask((title, self._turns[1][: self._size.result[0]]), 8, small=True))
        return asks

    def take(self, reply: Reply) -> None:
        """Go on with the answer, or ask the same again."""
        self.left -= 1
        if self._rng.random() < 0.94:
            answer = np.array(reply.ids, np.int32)
            self._turns += [np.concatenate((HEADER, answer)), self._text(self._size.result)]


@dataclass
class Score:
    """Sums over all requests, in tokens and seconds. of_turns: what turns reused of `reused`."""

    prompt: int = 0
    common: int = 0
    reusable: int = 0
    reused: int = 0
    of_turns: int = 0
    cached: int = 0
    first_token_s: float = 0.0
    histories: list[Ids] = field(default_factory=list, repr=False)

    @property
    def reuse(self) -> float:
        """Share of the reusable tokens that is reused."""
        return self.reused / self.reusable

    def count(self, ask: Ask, reply: Reply) -> None:
        """Take a request of the present wave into account."""
        prompt = ask.prompt
        common, reusable = _reusable(prompt, self.histories)
        self.prompt += prompt.num_tokens
        self.common += common
        self.reusable += reusable
        self.reused += min(reply.cached_tokens, reusable)
        self.of_turns += 0 if ask.small else min(reply.cached_tokens, reusable)
        self.cached += reply.cached_tokens
        self.first_token_s += reply.first_token_s


def _reusable(prompt: PreparedPrompt, histories: list[Ids]) -> tuple[int, int]:
    """(tokens in front that a history has, those of them that count as reusable)."""
    ids, best, most = prompt.token_ids, 0, 0
    for history in histories:
        n = min(len(history), len(ids) - 1)
        differs = np.flatnonzero(ids[:n] != history[:n])
        common = int(differs[0]) if len(differs) else n
        best = max(best, common)
        if common == len(history):
            most = max(most, common)
        else:
            start = max((s for s in prompt.turn_starts if s <= common), default=0)
            most = max(most, start // PAGE_TOKENS * PAGE_TOKENS)
    return best, most


def replay(size: Size, server: Server, seed: int = 1, *, small: bool = True) -> Score:
    """All turns of all agents, in waves; small: and what is asked beside them."""
    rng = random.Random(seed)
    system = np.array([rng.randrange(10, 4000) for _ in range(size.system)], np.int32)
    agents = [Agent(size, system, random.Random(rng.random())) for _ in range(size.agents)]
    score = Score()
    while agents := [agent for agent in agents if agent.left]:
        asks = [agent.asks() for agent in agents]
        wave = [ask for several in asks for ask in several if small or not ask.small]
        replies = dict(zip(wave, server.serve(wave), strict=True))
        for ask in wave:
            score.count(ask, replies[ask])
        for agent, several in zip(agents, asks, strict=True):
            agent.take(replies[several[0]])
        for ask in wave:
            drawn = np.array(replies[ask].ids[:-1], np.int32)
            score.histories.append(np.concatenate((ask.prompt.token_ids, drawn)))
    return score


# -- servers --------------------------------------------------------------------------------------


class EngineServer:
    """A running engine; raw greedy answers of the length asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    def serve(self, wave: Sequence[Ask]) -> list[Reply]:
        """Submit all, wait for all."""
        sinks: list[SimpleQueue[Event]] = [SimpleQueue() for _ in wave]
        for ask, sink in zip(wave, sinks, strict=True):
            self._count += 1
            request = Request(
                request_id=f"replay-{self._count}",
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                sampling=SamplingParams(temperature=0.0),
                raw=True,
                ignore_eos=True,
            )
            self._engine.submit(request, sink.put)
        return [_reply(sink) for sink in sinks]


def _reply(events: SimpleQueue[Event]) -> Reply:
    ids: list[int] = []
    cached = 0
    while True:
        event = events.get()
        if isinstance(event, Started):
            cached = event.cached_tokens
        elif isinstance(event, Delta):
            ids += event.token_ids
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Finished):
            return Reply(ids, cached, event.timings.first_token_s)


class CacheServer:
    """The cache alone: every answer is random, nothing is computed. Requests are promised
    `num_pages` together."""

    def __init__(self, geometry: CacheGeometry, num_pages: int) -> None:
        self._cache, self._num_pages = PrefixCache(geometry, Nowhere()), num_pages
        self._rng = random.Random(0)

    def serve(self, wave: Sequence[Ask]) -> list[Reply]:
        """Prefill one after the other; the first ones end when the next does not fit."""
        running: deque[tuple[Ask, KvSequence]] = deque()
        cache = self._cache
        replies: list[Reply] = []
        for ask in wave:
            cache.expect(ask.prompt)
        for ask in wave:
            pages = entitled_pages(ask.prompt.num_tokens, ask.max_tokens)
            while (sequence := self._admit(ask, pages)) is None:
                replies.append(self._end(*running.popleft()))
            for point in (*sequence.points, ask.prompt.num_tokens):
                cache.grow(sequence, point)
                cache.commit(sequence, point)
            running.append((ask, sequence))
        replies += [self._end(*pair) for pair in running]
        cache.check_integrity()
        return replies

    def _admit(self, ask: Ask, pages: int) -> KvSequence | None:
        promised = self._cache.promised_pages + self._cache.cost(ask.prompt, pages)
        return self._cache.acquire(ask.prompt, pages) if promised <= self._num_pages else None

    def _end(self, ask: Ask, sequence: KvSequence) -> Reply:
        ids = [self._rng.randrange(10, 4000) for _ in range(ask.max_tokens)]
        history = np.concatenate((ask.prompt.token_ids, np.array(ids[:-1], np.int32)))
        self._cache.grow(sequence, len(history))
        self._cache.release(sequence, history)
        return Reply(ids, sequence.cached_tokens)


class Nowhere:
    """Moves without a device."""

    def __getattr__(self, name: str) -> object:
        return lambda *places: None


# -- measurements ---------------------------------------------------------------------------------


def engine_config(size: Size, package: Path, share: float = 1.0, **options: object) -> EngineConfig:
    """Memory for a share of all conversations at their end, at least for the longest one."""
    tokens = max(int(share * size.total), size.longest)
    return EngineConfig(
        package=package,
        max_context=size.longest,
        kv_capacity=tokens,
        max_concurrency=size.agents,
        max_pending=2 * size.agents,
        **options,  # type: ignore[arg-type]
    )


def measure_cache(size: Size, spec: ModelSpec) -> dict[str, tuple[float, str]]:
    """Reuse with all memory and with half of it, by the cache alone, and what turns lose of it to
    the small requests between them."""
    page = memory.page_nbytes(spec)
    figures = {}
    for name, share in SHARES.items():
        pages = div_ceil(max(int(size.total * share), size.longest), PAGE_TOKENS)
        states = int(size.agents * memory.SNAPSHOTS_PER_LANE * share)
        state = slot_nbytes(spec)
        geometry = CacheGeometry(
            num_units=div_ceil(pages * page, memory.UNIT_NBYTES)
            + states * div_ceil(state, memory.UNIT_NBYTES),
            page_nbytes=page,
            state_nbytes=state,
            num_slots=size.agents,
        )
        scores, alone = (
            [replay(size, CacheServer(geometry, pages), seed, small=small) for seed in SEEDS]
            for small in (True, False)
        )
        print(f"{name}: {scores}")
        reuse = sum(s.reused for s in scores) / sum(s.reusable for s in scores)
        lost = 1 - sum(s.of_turns for s in scores) / sum(s.of_turns for s in alone)
        figures[f"reuse.cache.{name}"] = (reuse, "of reusable tokens")
        figures[f"reuse.cache.{name}.lost_to_small"] = (lost, "of what turns reuse without them")
    return figures


def measure_engine(
    size: Size, package: Path, parts: Sequence[str], *, first: int, backend: str
) -> Iterator[dict[str, tuple[float, str]]]:
    """Figures as they come. full, half: reuse with all memory and with half of it; none: what reuse
    saves over the `first` turns of all agents."""
    snapshots = memory.SNAPSHOTS_PER_LANE

    def play(name: str, share: float, turns: int, **options: object) -> Score:
        memory.SNAPSHOTS_PER_LANE = int(snapshots * share)
        config = engine_config(size, package, share, backend=backend, **options)
        with Engine.open(config) as engine:
            score = replay(replace(size, turns=turns), EngineServer(engine))
            engine.check_integrity()
        print(f"{name}: {score}", flush=True)
        return score

    full = None
    try:
        for name, share in SHARES.items():
            if name in parts:
                score = play(name, share, size.turns)
                full = score if name == "full" else full
                factor = score.prompt / (score.prompt - score.cached)
                yield {
                    f"reuse.{name}": (score.reuse, "of reusable tokens"),
                    f"reuse.{name}.prefill_factor": (factor, "x fewer prompt tokens computed"),
                }
        if "none" in parts:
            none = play("none", 1.0, first, prefix_reuse=False)
            if full is None or first < size.turns:
                full = play("full, so many turns", 1.0, first)
            factor = none.first_token_s / full.first_token_s
            yield {"reuse.ttft_factor": (factor, f"x sooner first token, of {first} turns")}
    finally:
        memory.SNAPSHOTS_PER_LANE = snapshots


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--cache-only", action="store_true")
    parser.add_argument("--package", type=Path, default=DEMO_PACKAGE)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--first", type=int, help="turns of `none`; default: all")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--device", default=platform.processor() or platform.machine())
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    size = SIZES[options.size]
    found: Iterable[dict[str, tuple[float, str]]]
    if options.cache_only:
        spec = QWEN_27B.spec if options.size == "full" else QWEN_DEMO.spec
        found = [measure_cache(size, spec)]
    else:
        first = options.first or size.turns
        found = measure_engine(
            size, options.package, options.parts, first=first, backend=options.backend
        )
    for figures in found:
        for name, (value, unit) in figures.items():
            print(f"{name:32} {value:8.4f} {unit}", flush=True)
        if options.out:
            record(figures, options.device, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
