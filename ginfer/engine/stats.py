"""Counters and histograms of one engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.engine.request import Timings

TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Histogram:
    """Counts of observed seconds per bucket; `bounds` are inclusive upper ends, the last bucket is
    open."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def snapshot(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "count": sum(self.counts),
            "sum": self.total,
        }


class Stats:
    """What one engine has done so far. The loop thread writes; anybody may take a snapshot.

    finished counts by finish reason, failed by error code, rejected by error code at submission.
    reuse counts admitted requests by path; recomputed_tokens, prompt tokens that were computed
    again although their K/V was here. passed counts entries before an older request.
    token_s: between two tokens of a request, its mean; total_s: from submission to the end of a
    complete request.
    Of speculation: rounds that verified drafts (spec_rounds), with more than a learned window in a
    row (expanded_rounds); drafted and accepted count drafts by origin, accepted_at by place in the
    row, from 1; fallback_rows are rows without drafts in such rounds.
    forward_s is time inside the backend, wait_s the part of it that waits for values of a backend
    that runs ahead or computes them, busy_s the time of whole rounds. Rows of a decode round whose
    request has ended before it is read do not count.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.reuse: Counter[str] = Counter()
        self.passed = 0
        self.prefill_tokens = 0
        self.completion_tokens = 0
        self.prefill_rounds = 0
        self.decode_rounds = 0
        self.row_rounds = 0
        self.spec_rounds = 0
        self.expanded_rounds = 0
        self.fallback_rows = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.accepted_at: Counter[str] = Counter()
        self.forward_s = 0.0
        self.wait_s = 0.0
        self.busy_s = 0.0
        self.queue_s = Histogram()
        self.first_token_s = Histogram()
        self.token_s = Histogram(TOKEN_SECONDS)
        self.total_s = Histogram()
        self.cancel_to_free_s = Histogram()

    def drafts(
        self, origins: Sequence[str], widths: Sequence[int], accepted: Sequence[int], *, wide: int
    ) -> None:
        """Count a round that verified `widths` drafts; more than `wide` of a row expand it."""
        self.spec_rounds += 1
        self.expanded_rounds += max(widths) > wide
        self.fallback_rows += sum(not width for width in widths)
        for origin, width, taken in zip(origins, widths, accepted, strict=True):
            self.drafted[origin] += width
            self.accepted[origin] += taken
            for place in range(1, taken + 1):
                self.accepted_at[str(place)] += 1

    def wait(self, seconds: float, *, round_s: float) -> None:
        """Count a wait for values together with the time of its round so far: whoever looks at the
        counters while the values are handed out sees both."""
        self.forward_s += seconds
        self.wait_s += seconds
        self.busy_s += round_s

    def finish(self, reason: str, timings: Timings, completion_tokens: int) -> None:
        """Count a request that is complete."""
        self.finished[reason] += 1
        self.total_s.observe(timings.total_s)
        if completion_tokens > 1:
            self.token_s.observe(timings.decode_s / (completion_tokens - 1))

    def snapshot(self) -> dict[str, Any]:
        """Plain values, safe to send anywhere."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: object) -> Any:
    if isinstance(value, Histogram):
        return value.snapshot()
    return dict(value) if isinstance(value, Counter) else value
