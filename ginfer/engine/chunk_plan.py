"""Chunk plans: which prompts the next prefill forward takes, and how far each of them gets.

A chunk is the largest legal piece of the first prompt; when that ends the prompt, or where it takes
a snapshot, the next prompts fill the columns that are left, in order. Where the backend allows it,
what is left of a prompt behind a snapshot goes on in the same forward: it is short, and alone would
read all weights for a few tokens. While rows decode, a chunk is
cut so that its predicted time is at most the pause that decode may suffer. Where a prompt is cut,
and what is computed beside it, changes none of its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FORGET = 0.9  # weight of an observation after the next one
_LEAST_SPREAD = 0.25  # of work, relative to its mean: below, one time says nothing of another
_GROWTH = 0.7  # of the seconds per column that more columns than seen cost at most
_NEWEST = 0.5  # weight of the last time of a width
_CHUNKS_KNOWN = 256  # after so many others a width is tried again, whatever disturbed it once


@dataclass(frozen=True)
class PromptView:
    """A prompt in prefill: its lane, computed tokens, all tokens, and the ascending tokens at which
    a chunk must end."""

    lane: int
    start: int
    num_prompt: int
    points: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Tokens `start` .. `stop` of a prompt; `last` ends it."""

    lane: int
    start: int
    stop: int
    last: bool

    @property
    def num_columns(self) -> int:
        """Columns of the forward that it takes."""
        return self.stop - self.start


def piece_of(prompt: PromptView, columns: int) -> Piece | None:
    """The largest piece in so many columns: to the prompt's end, a point, or an absolute multiple
    of 64; None when they do not reach any."""
    limit = prompt.start + columns
    stop = prompt.num_prompt
    if limit < stop:
        stop = limit // PAGE_TOKENS * PAGE_TOKENS
    stop = next((point for point in prompt.points if prompt.start < point < stop), stop)
    if stop <= prompt.start:
        return None
    return Piece(prompt.lane, prompt.start, stop, last=stop == prompt.num_prompt)


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of a forward: fixed_s + work * work_s, where the work of n tokens behind a history
    is n + pair_share * (pairs of a token and one that it sees).

    pair_share: multiply-adds of attention per pair over those of all matrices per token. seen: by
    the columns of a chunk, how many tokens it was behind and its seconds. Tiles that do not fill
    the device make steps, so a width that was seen counts for itself and bounds the others.
    """

    fixed_s: float
    work_s: float
    pair_share: float
    seen: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    def work(self, start: int, columns: int) -> float:
        """Work in tokens without attention."""
        return columns + self.pair_share * columns * (start + (columns + 1) / 2)

    def seconds(self, start: int, columns: int) -> float:
        """Predicted time."""
        if columns in self.seen:
            at, seconds = self.seen[columns]
            return seconds + self.work_s * self.pair_share * columns * (start - at)
        guess = self.fixed_s + self.work_s * self.work(start, columns)
        fewer = max((n for n in self.seen if n < columns), default=0)
        more = min((n for n in self.seen if n > columns), default=0)
        if fewer:
            least = self.seconds(start, fewer)
            guess = min(max(guess, least), least * (1 + _GROWTH * (columns / fewer - 1)))
        return min(guess, self.seconds(start, more)) if more else guess

    def columns_within(self, start: int, pause_s: float, most: int) -> int:
        """The largest multiple of 64 columns from `start` on, up to `most`, whose time is at most
        pause_s, as far as more columns take longer; 0 when 64 take longer."""
        low, high = 0, most // PAGE_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(start, middle * PAGE_TOKENS) <= pause_s:
                low = middle
            else:
                high = middle - 1
        return low * PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class ChunkLimits:
    """Bounds of one forward. columns: most of all its pieces. pages: K/V pages of its prompts
    together, None without a bound. pause_s: seconds that it may take while rows decode, as `cost`
    predicts; 64 columns are legal whatever they take. goes_on: a prompt whose piece ends at a point
    may end in the same forward, with a piece behind that one."""

    columns: int
    cost: ChunkCost
    pages: int | None = None
    pause_s: float = inf
    goes_on: bool = False


def plan_chunk(prompts: Sequence[PromptView], limits: ChunkLimits) -> tuple[Piece, ...]:
    """Pieces of one forward, one per prompt, or two, see ChunkLimits. A prompt follows another only
    where that one ends or has a point."""
    return _plan(prompts, limits)[0]


def has_room(prompts: Sequence[PromptView], limits: ChunkLimits) -> bool:
    """Whether the next forward over these prompts has columns left for one more; without any it
    has."""
    return not prompts or _plan(prompts, limits)[1] >= PAGE_TOKENS


def _plan(prompts: Sequence[PromptView], limits: ChunkLimits) -> tuple[tuple[Piece, ...], int]:
    """(pieces, columns that a fresh prompt may add)."""
    pieces: list[Piece] = []
    room = _Room(limits)
    for prompt in prompts:
        piece = room.piece(prompt, least=0 if pieces else PAGE_TOKENS)
        if piece is None or (pieces and not room.has_pages(piece)):
            return tuple(pieces), 0
        pieces.append(piece)
        room.take(piece)
        if not piece.last and piece.stop not in prompt.points:
            return tuple(pieces), 0
        if limits.goes_on and not piece.last:
            rest = room.piece(replace(prompt, start=piece.stop))
            if rest is not None and rest.last and room.has_pages(rest):
                pieces.append(rest)
                room.take(rest)
    return tuple(pieces), room.columns_behind(0)


class _Room:
    """What is left of the bounds of a forward."""

    def __init__(self, limits: ChunkLimits) -> None:
        self._cost, self._columns, self._pause_s = limits.cost, limits.columns, limits.pause_s
        self._pages = inf if limits.pages is None else limits.pages

    def columns_behind(self, start: int) -> int:
        """Columns that a piece may have behind so many tokens."""
        return self._cost.columns_within(start, self._pause_s, self._columns)

    def piece(self, prompt: PromptView, *, least: int = 0) -> Piece | None:
        """The next piece of a prompt; `least` columns are legal whatever they take."""
        return piece_of(prompt, max(self.columns_behind(prompt.start), least))

    def has_pages(self, piece: Piece) -> bool:
        """Whether the pages of a piece fit."""
        return div_ceil(piece.stop, PAGE_TOKENS) <= self._pages

    def take(self, piece: Piece) -> None:
        """A piece is in the forward."""
        self._columns -= piece.num_columns
        self._pause_s -= self._cost.work_s * self._cost.work(piece.start, piece.num_columns)
        self._pages -= div_ceil(piece.stop, PAGE_TOKENS)


class ChunkClock:
    """Learns the cost of chunks from their times; recent ones count more."""

    def __init__(self, guess: ChunkCost) -> None:
        self.cost = guess
        self._sums = [0.0] * 5  # of 1, x, y, x x, x y; x: work, y: seconds
        self._count = 0
        self._times: dict[int, tuple[int, float, int]] = {}  # with the count at that time

    def observe(self, pieces: Sequence[Piece], seconds: float) -> None:
        """A forward of these pieces took so long."""
        if len(pieces) == 1 and pieces[0].num_columns % PAGE_TOKENS == 0:
            self._note(pieces[0], seconds)
        fixed_s, work_s = self._fit(pieces, seconds)
        seen = {n: (start, time) for n, (start, time, _) in self._times.items()}
        self.cost = ChunkCost(fixed_s, work_s, self.cost.pair_share, seen)

    def _note(self, piece: Piece, seconds: float) -> None:
        """The time of a width."""
        self._count += 1
        start, columns = piece.start, piece.num_columns
        if columns in self._times:
            expected = self.cost.seconds(start, columns)
            seconds = max(expected + _NEWEST * (seconds - expected), 0.0)
        self._times[columns] = (start, seconds, self._count)
        old = [n for n, (*_, at) in self._times.items() if at < self._count - _CHUNKS_KNOWN]
        for n in old:
            del self._times[n]

    def _fit(self, pieces: Sequence[Piece], seconds: float) -> tuple[float, float]:
        """(fixed_s, work_s) of all times."""
        cost = self.cost
        x = sum(cost.work(piece.start, piece.num_columns) for piece in pieces)
        new = (1.0, x, seconds, x * x, x * seconds)
        self._sums = [_FORGET * a + b for a, b in zip(self._sums, new)]
        mean_x, mean_y, mean_xx, mean_xy = (s / self._sums[0] for s in self._sums[1:])
        variance = mean_xx - mean_x * mean_x
        fixed_s, work_s = cost.fixed_s, cost.work_s
        if variance > (_LEAST_SPREAD * mean_x) ** 2:
            work_s = (mean_xy - mean_x * mean_y) / variance
            work_s = min(max(work_s, 0.0), mean_y / mean_x)
            return mean_y - work_s * mean_x, work_s
        # the same chunk again and again: keep the proportion of the two parts
        scale = mean_y / max(fixed_s + work_s * mean_x, 1e-9)
        return fixed_s * scale, work_s * scale
