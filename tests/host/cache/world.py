"""A naive world around a PrefixCache: memory that knows which history each place holds, an engine
without arithmetic, and conversations that branch, repeat and are rewritten.

What a token's K/V and a state hold is a function of all tokens before it and of how each of them
was computed, so the content of a place is a digest of just that, and a count of tokens. Equal
content means equal bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cache.prefix_cache import PrefixCache
from ginfer.cache.segment import MadeBy
from ginfer.prompt import PreparedPrompt

if TYPE_CHECKING:
    from ginfer.cache.geometry import CacheGeometry
    from ginfer.cache.prefix_cache import Sequence

PREFILL, DECODE, RESUMED = 0, 1, 2  # how a token was computed; RESUMED: a block was entered midway
EMPTY = (0, 0)


@dataclass
class History:
    """Computed tokens, how each was computed, and digests at its page borders."""

    ids: np.ndarray
    how: bytearray = field(default_factory=bytearray)
    borders: list[int] = field(default_factory=lambda: [0])

    def content(self, n: int) -> tuple[int, int]:
        """What a place holds after n tokens."""
        while len(self.borders) * 64 <= n:
            self.borders.append(self._digest(len(self.borders) * 64))
        return (n, self.borders[n // 64] if n % 64 == 0 else self._digest(n))

    def _digest(self, n: int) -> int:
        begin = (n - 1) // 64 * 64
        page = self.ids[begin:n].tobytes(), bytes(self.how[begin:n])
        return hash((self.borders[begin // 64], *page))


class Memory:
    """The Moves of a device whose places hold contents; units of one state hold parts of it."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.slots = [EMPTY] * geometry.num_slots
        self.units, self.pages = {}, {}
        self.host_units, self.host_pages = {}, {}
        self.num_loads = self.num_copies = 0

    def _claim(self, units, pages, *, unit=None, page=None):
        """Writing units destroys the pages that share their bytes, and the other way round."""
        span, share = self.geometry.units_per_page, self.geometry.pages_per_unit
        if unit is not None:
            for p in range(unit // span * share, unit // span * share + share):
                pages.pop(p, None)
        else:
            for u in range(page // share * span, page // share * span + span):
                units.pop(u, None)

    def write_page(self, page, content):
        self._claim(self.units, self.pages, page=page)
        self.pages[page] = content

    def _write_unit(self, unit, content):
        self._claim(self.units, self.pages, unit=unit)
        self.units[unit] = content

    def clear_slot(self, slot):
        self.slots[slot] = EMPTY

    def save_state(self, slot, units):
        assert len(units) == self.geometry.state_units
        for i, unit in enumerate(units):
            self._write_unit(unit, (i, self.slots[slot]))

    def _state(self, units, space):
        parts = [space[unit] for unit in units]
        assert parts == [(i, parts[0][1]) for i in range(self.geometry.state_units)]
        return parts[0][1]

    def load_state(self, units, slot):
        self.slots[slot] = self._state(units, self.units)
        self.num_loads += 1

    def load_parked_state(self, host_units, slot):
        self.slots[slot] = self._state(host_units, self.host_units)
        self.num_loads += 1

    def copy_page(self, source, target):
        self.write_page(target, self.pages[source])
        self.num_copies += 1

    def park_pages(self, pages, host_pages):
        for page, host_page in zip(pages, host_pages, strict=True):
            self._claim(self.host_units, self.host_pages, page=host_page)
            self.host_pages[host_page] = self.pages[page]

    def unpark_pages(self, host_pages, pages):
        for host_page, page in zip(host_pages, pages, strict=True):
            self.write_page(page, self.host_pages[host_page])

    def park_units(self, units, host_units):
        for unit, host_unit in zip(units, host_units, strict=True):
            self._claim(self.host_units, self.host_pages, unit=host_unit)
            self.host_units[host_unit] = self.units[unit]

    def unpark_units(self, host_units, units):
        for host_unit, unit in zip(host_units, units, strict=True):
            self._write_unit(unit, self.host_units[host_unit])

    def state_of(self, snapshot):
        """The content of a snapshot's state."""
        return self._state(snapshot.units, self.host_units if snapshot.parked else self.units)


@dataclass(eq=False)
class Run:
    """A running request: its sequence, what it has computed, and how far it goes."""

    sequence: Sequence
    history: History
    num_prompt: int
    stop: int
    n: int


class World:
    """One cache with its memory and its running requests; every step verifies what it touches."""

    def __init__(self, geometry: CacheGeometry, *, seed: int = 0, chunk: int = 192) -> None:
        self.memory = Memory(geometry)
        self.cache = PrefixCache(geometry, self.memory)
        self.random = random.Random(seed)
        self.chunk = chunk
        self.runs: list[Run] = []
        self.histories: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.reused = self.admitted = 0

    # -- one request ------------------------------------------------------------------------------

    def admit(self, prompt: PreparedPrompt, num_output: int) -> Run | None:
        """Acquire and verify the hit against a search through all live snapshots."""
        cache, n = self.cache, prompt.num_tokens
        num_pages = -(-(n + num_output) // 64)
        best, prefill = self._best(prompt)
        hit, cost, promised = (
            cache.match(prompt),
            cache.cost(prompt, num_pages),
            cache.promised_pages,
        )
        assert hit.num_tokens == best
        fits = cache.can_admit(prompt, num_pages)
        sequence = cache.acquire(prompt, num_pages)
        assert (sequence is not None) == fits
        if sequence is None:
            assert (
                promised + cost > cache.num_pages
                or len(self.runs) == self.memory.geometry.num_slots
            )
            return None
        assert cache.promised_pages == promised + cost
        assert sequence.cached_tokens == best
        run = Run(sequence, self._history(prompt, sequence, prefill), n, n + num_output, best)
        self.runs.append(run)
        self.verify(run)
        self.reused += best
        self.admitted += n
        return run

    def serve(self, ids, *, turns=(), answer=(), keep: bool = True) -> Run:
        """A whole request: prompt `ids`, turn starts, the tokens it says, of which the last is
        drawn but not computed."""
        prompt = PreparedPrompt(token_ids=np.array(ids, np.int32), turn_starts=tuple(turns))
        run = self.admit(prompt, len(answer) + 1)
        assert run is not None
        while run.n < run.num_prompt:
            self.prefill(run)
        self.decode(run, len(answer), np.array(answer, np.int32))
        if keep:
            self.release(run)
        self.cache.check_integrity()
        return run

    def _best(self, prompt: PreparedPrompt) -> tuple[int, bool]:
        """Most tokens of the prompt that a live snapshot covers; whether one is prefill-made."""
        data, memory = prompt.token_ids.tobytes(), self.cache._memory
        live = [self.memory.state_of(s) for kind in (memory.resident, memory.parked) for s in kind]
        found = [(0, True)]
        for content in live:
            ids, how = self.histories[content]
            if content[0] < prompt.num_tokens and data.startswith(ids):
                found.append((content[0], not any(how)))
        return max(found)

    def _history(self, prompt: PreparedPrompt, sequence: Sequence, prefill: bool) -> History:
        """How the state that was loaded was computed; it must be a history of this prompt."""
        n = sequence.cached_tokens
        state = self.memory.slots[sequence.slot]
        ids, how = self.histories[state] if n else (b"", b"")
        assert state[0] == n
        assert prompt.token_ids.tobytes().startswith(ids)
        assert (sequence.made_by is MadeBy.PREFILL) == prefill == (not any(how))
        return History(prompt.token_ids, bytearray(how))

    def prefill(self, run: Run) -> None:
        """One chunk."""
        start, sequence = run.n, run.sequence
        stop = min((start + self.chunk) // 64 * 64, run.num_prompt)
        stop = sequence.chunk_end(start, stop)
        how = bytearray([PREFILL]) * (stop - start)
        if start == sequence.cached_tokens and start % 64:
            how[0] = RESUMED
        self._compute(run, stop, how)
        self.cache.commit(sequence, stop)
        self.verify(run)

    def decode(self, run: Run, count: int, ids: np.ndarray) -> None:
        """`count` tokens, `ids` is what the model would say from here on."""
        run.history.ids = np.concatenate((run.history.ids[: run.n], ids[:count]))
        self._compute(run, run.n + count, bytearray([DECODE]) * count)

    def _compute(self, run: Run, stop: int, how: bytearray) -> None:
        history, sequence, memory = run.history, run.sequence, self.memory
        self.cache.grow(sequence, stop)
        assert memory.slots[sequence.slot] == history.content(run.n)
        if run.n % 64:
            assert memory.pages[sequence.pages[run.n // 64]] == history.content(run.n)
        history.how += how
        for j in range(run.n // 64, -(-stop // 64)):
            memory.write_page(sequence.pages[j], history.content(min(stop, 64 * j + 64)))
        run.n = stop
        memory.slots[sequence.slot] = content = history.content(stop)
        self.histories[content] = history.ids[:stop].tobytes(), bytes(history.how)

    def release(self, run: Run, *, sound: bool = True) -> None:
        """End a request where it is."""
        self.verify(run)
        freed, promised = self.cache.freed_by([run.sequence]), self.cache.promised_pages
        self.cache.release(run.sequence, run.history.ids[: run.n], sound=sound)
        self.runs.remove(run)
        assert self.cache.promised_pages == promised - freed

    def verify(self, run: Run) -> None:
        """The pages and the slot of a request hold its history."""
        pages, memory, history = run.sequence.pages, self.memory, run.history
        assert len(pages) >= -(-run.n // 64)
        for j in range(-(-run.n // 64)):
            assert memory.pages[pages[j]] == history.content(min(run.n, 64 * j + 64)), j
        assert memory.slots[run.sequence.slot] == history.content(run.n)

    def forget(self) -> None:
        """Drop the records of states that exist no more."""
        memory = self.cache._memory
        live = {self.memory.state_of(s) for kind in (memory.resident, memory.parked) for s in kind}
        live.update(self.memory.slots)
        self.histories = {c: h for c, h in self.histories.items() if c in live}


HEADER = np.arange(90, 95, dtype=np.int32)  # of an assistant's turn


class Conversations:
    """Prompts as agents send them: few systems, turns from a small pool, so that histories meet."""

    def __init__(self, rng: random.Random, *, longest: int = 12) -> None:
        self.random = rng
        self._longest = longest
        seeds = np.random.default_rng(rng.randrange(1 << 30))

        def draw(n: int) -> np.ndarray:
            return seeds.integers(0, 50, n).astype(np.int32)

        self.systems = [draw(n) for n in (64, 150, 20)]
        self.turns = [draw(rng.choice((3, 20, 59, 64, 100, 200))) for _ in range(6)]
        self.answers = [draw(300) for _ in range(3)]
        self.unfinished: list[tuple[list[np.ndarray], np.ndarray, np.ndarray]] = []
        self.live = [[system] for system in self.systems for _ in range(2)]

    def next(self) -> tuple[PreparedPrompt, np.ndarray]:
        """The next turn of a conversation, a retry, an edit, or a new one; and what the model will
        say. Now and then a client sends an unfinished answer back to have it continued."""
        if self.unfinished and self.random.random() < 0.5:
            turns, said, rest = self.unfinished.pop()
            count = self.random.choice((0, 1, 30, 64))
            self.last, ids, answer = turns, np.concatenate((said, rest[:count])), rest[count:]
        else:
            self.last = turns = self._turns()
            ids, answer = np.concatenate((*turns, HEADER)), self.answers[len(turns) % 3]
        starts = tuple(accumulate(len(turn) for turn in turns))
        return PreparedPrompt(token_ids=ids, turn_starts=starts), answer

    def _turns(self) -> list[np.ndarray]:
        turns, dice = self.random.choice(self.live), self.random.random()
        if dice < 0.1 or len(turns) > self._longest:
            del turns[1:]
        elif dice < 0.2:
            del turns[self.random.randrange(1, len(turns) + 1) :]
        elif dice < 0.25 and len(turns) > 2:
            turns[self.random.randrange(1, len(turns))] = self.random.choice(self.turns)
        if dice < 0.85:
            turns.append(self.random.choice(self.turns))
        return turns

    def answered(self, turns: list[np.ndarray], run: Run, answer: np.ndarray) -> None:
        """The assistant's turn joins the history, now and then without its reasoning, or the client
        will have the rest of `answer` as well."""
        count = run.n - run.num_prompt
        if self.random.random() < 0.2 and len(answer) > count + 70:
            self.unfinished.append((turns, run.history.ids[: run.n], answer[count:]))
            return
        answer = answer[:count]
        if self.random.random() < 0.2:
            answer = answer[len(answer) // 2 :]
        if len(answer):
            turns.append(np.concatenate((HEADER, answer)))
