"""What decode rounds cost: seconds measured at start, corrected by the rounds of the service."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

RATE = 1 / 16  # of a new measurement against what is known
STEP = 1.5  # an outlier moves an estimate as if it were at most this factor away
MOST = 64.0  # bound of a correction, and of its inverse
FIRST = 3  # measurements whose median replaces what was measured at start


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of rounds, measured at start. columns: ascending. plain_round_s: [rows - 1].
    verify_s: [rows - 1][columns], of rounds that verify. draft_s: [rows - 1], of the drafter for a
    batch."""

    columns: tuple[int, ...]
    plain_round_s: tuple[float, ...]
    verify_s: tuple[tuple[float, ...], ...]
    draft_s: tuple[float, ...]

    def round_s(self, num_rows: int, num_columns: int, *, drafter: bool) -> float:
        """Seconds of a round, linear between measured numbers of columns."""
        if num_columns == num_rows:
            return self.plain_round_s[num_rows - 1]
        known, costs = self.columns, self.verify_s[num_rows - 1]
        i = min(bisect_left(known, num_columns), len(known) - 1)
        cost = costs[i]
        if i and num_columns < known[i]:
            share = (known[i] - num_columns) / (known[i] - known[i - 1])
            cost += share * (costs[i - 1] - cost)
        return cost + (self.draft_s[num_rows - 1] if drafter else 0.0)

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a plain round."""
        return self.round_s(num_rows, num_rows, drafter=False)


class _Factor:
    """Ratio to what was measured at start: the median of the first few, then an exponential
    mean."""

    def __init__(self) -> None:
        self.value = 1.0
        self._first: list[float] = []

    @property
    def known(self) -> bool:
        """Whether enough was measured to trust it."""
        return len(self._first) == FIRST

    def observe(self, ratio: float) -> None:
        """Take a ratio into the mean."""
        if self.known:
            low, high = self.value / STEP, self.value * STEP
            self.value += RATE * (min(max(ratio, low), high) - self.value)
        else:
            self._first = sorted((*self._first, ratio))
            self.value = self._first[(len(self._first) - 1) // 2]
        self.value = min(max(self.value, 1 / MOST), MOST)


class RoundCosts:
    """A table, and how far rounds of so many rows are from it: all of them, which contexts make
    longer, and beside that those that verify, with the drafter and without."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._rows: defaultdict[int, _Factor] = defaultdict(_Factor)
        self._verify: defaultdict[tuple[int, bool], _Factor] = defaultdict(_Factor)
        self._curves: dict[tuple[int, bool], list[float]] = {}

    def observe(self, num_rows: int, num_columns: int, seconds: float, *, drafter: bool) -> None:
        """A round took so long."""
        expected = self._table.round_s(num_rows, num_columns, drafter=drafter)
        rows = self._rows[num_rows]
        if num_columns == num_rows:
            rows.observe(seconds / expected)
        else:
            self._verify[num_rows, drafter].observe(seconds / (expected * rows.value))

    def known(self, num_rows: int) -> bool:
        """Whether enough plain rounds of so many rows were measured to compare others with them."""
        return self._rows[num_rows].known

    def round_s(self, num_rows: int, num_columns: int, *, drafter: bool) -> float:
        """Seconds of a round."""
        seconds = self._table.round_s(num_rows, num_columns, drafter=drafter)
        if num_columns > num_rows:
            seconds *= self._verify[num_rows, drafter].value
        return seconds * self._rows[num_rows].value

    def drafted_s(self, num_rows: int, most: int, *, drafter: bool) -> list[float]:
        """Seconds of rounds that verify 1 .. `most` drafts together."""
        key = num_rows, drafter
        curve = self._curves.get(key, [])
        if len(curve) < most:
            columns = range(num_rows + 1, num_rows + most + 1)
            curve = [self._table.round_s(num_rows, n, drafter=drafter) for n in columns]
            self._curves[key] = curve
        factor = self._verify[key].value * self._rows[num_rows].value
        return [seconds * factor for seconds in curve[:most]]

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a plain round."""
        return self._table.plain_round_s[num_rows - 1] * self._rows[num_rows].value

    def draft_s(self, num_rows: int) -> float:
        """Seconds of the drafter alone."""
        return self._table.draft_s[num_rows - 1] * self._rows[num_rows].value
