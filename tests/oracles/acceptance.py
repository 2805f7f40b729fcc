"""Acceptance oracle: the rejection and the coupled rule on exact fractions, and their laws.

A distribution is a mapping of token to Fraction; draws are numbers u in [0, 1).
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Law = dict[int, Fraction]
    Path = tuple[int, ...]


def residual(p: Law, q: Law) -> Law:
    """max(p - q, 0), renormalised; p where nothing is left. In p's order."""
    left = {t: max(w - q.get(t, Fraction(0)), Fraction(0)) for t, w in p.items()}
    total = sum(left.values())
    return {t: w / total for t, w in left.items()} if total else p


def draw(law: Law, u: Fraction) -> int:
    """The first token, in the law's order, whose running sum exceeds u."""
    running = Fraction(0)
    for token, w in law.items():
        running += w
        if running > u:
            return token
    raise AssertionError("u is below 1")


def decide(p: Law, q: Law | None, draft: int, u_accept: Fraction, u_other: Fraction) -> int:
    """The token of one column; q None: there is no draft."""
    if q is None:
        return draw(p, u_other)
    if u_accept * q[draft] < p.get(draft, Fraction(0)):
        return draft
    return draw(residual(p, q), u_other)


def column_law(p: Law, q: Law, draft: int) -> Law:
    """Distribution of one column's token given its draft, over all u."""
    share = min(Fraction(1), p.get(draft, Fraction(0)) / q[draft])
    law: Law = defaultdict(Fraction)
    law[draft] += share
    for token, w in residual(p, q).items():
        law[token] += (1 - share) * w
    return {t: w for t, w in law.items() if w}


def round_law(
    p: Callable[[Path], Law], q: Callable[[Path], Law], num_drafts: int
) -> dict[Path, Fraction]:
    """Distribution of a round's tokens followed by plain decode up to num_drafts + 1 tokens, over
    all paths of the drafter. p, q: the laws after a path."""
    out: dict[Path, Fraction] = defaultdict(Fraction)
    for drafts, weight in _paths(q, num_drafts):
        for path, share in _verify(p, q, drafts):
            out[path] += weight * share
    return dict(out)


def _paths(q: Callable[[Path], Law], n: int, path: Path = ()) -> Iterator[tuple[Path, Fraction]]:
    if len(path) == n:
        yield path, Fraction(1)
        return
    for token, w in q(path).items():
        for rest, share in _paths(q, n, (*path, token)):
            yield rest, w * share


def _verify(
    p: Callable[[Path], Law], q: Callable[[Path], Law], drafts: Sequence[int], path: Path = ()
) -> Iterator[tuple[Path, Fraction]]:
    i = len(path)
    if i == len(drafts):
        for token, w in p(path).items():
            yield (*path, token), w
        return
    for token, w in column_law(p(path), q(path), drafts[i]).items():
        onward = (*path, token)
        ends = token != drafts[i]
        rest = _plain(p, len(drafts) + 1, onward) if ends else _verify(p, q, drafts, onward)
        for full, share in rest:
            yield full, w * share


def _plain(p: Callable[[Path], Law], n: int, path: Path) -> Iterator[tuple[Path, Fraction]]:
    if len(path) == n:
        yield path, Fraction(1)
        return
    for token, w in p(path).items():
        for full, share in _plain(p, n, (*path, token)):
            yield full, w * share
