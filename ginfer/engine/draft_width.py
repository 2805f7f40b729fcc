"""Draft widths: how many drafts each request verifies in a round, from costs and acceptance.

A plan maximises expected tokens per second over the measured cost of rounds. A request whose
drafts from one origin have cost more than they brought gets no more of them until that loss is
small against its time, so that neither origin can cost more than LOSS whatever the estimates say;
what LOSS leaves pays for trials while its width is 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ginfer.engine.cost_table import RoundCosts

LOSS = 0.01  # of a request's time that drafts of an origin may waste
CREDIT_ROUNDS = 16  # plain rounds that count as time before they have passed
SAVED_ROUNDS = 4  # plain rounds of time that drafts have brought and may lose again
KEEP = 0.03  # a new plan must promise this much more than the widths of the last round
TRIAL = 3  # drafts of a trial
DECAY = 0.93  # of what was observed, per observation
PRIOR, PRIOR_WEIGHT = 0.85, 2.0  # acceptance of a draft before anything was observed
WIDE_AFTER = 2  # fully accepted copies in a row before a copy may exceed the learned window
MAX_COLUMNS = 128


class Origin(StrEnum):
    """Where drafts come from."""

    DRAFTER = "drafter"
    COPY = "copy"


@dataclass(frozen=True)
class Offer:
    """What a request can draft this round: at most `limit` drafts."""

    origin: Origin
    limit: int


class Acceptance:
    """Share of drafts accepted at each place, given that those before were; recent rounds count
    more, and places borrow from each other."""

    def __init__(self, max_drafts: int) -> None:
        self._offered = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts

    def observe(self, width: int, accepted: int) -> None:
        """A round verified `width` drafts and accepted the first `accepted`."""
        offered, taken = self._offered, self._accepted
        for i in range(min(width, accepted + 1)):
            offered[i] = DECAY * offered[i] + 1
            taken[i] = DECAY * taken[i] + (i < accepted)

    def gains(self, limit: int) -> list[float]:
        """Probability that drafts 1 .. limit are accepted, each with all before it."""
        offered, accepted = sum(self._offered), sum(self._accepted)
        pooled = (accepted + PRIOR * PRIOR_WEIGHT) / (offered + PRIOR_WEIGHT)
        gains, reach = [], 1.0
        for n, yes in zip(self._offered[:limit], self._accepted[:limit]):
            reach *= (yes + pooled * PRIOR_WEIGHT) / (n + PRIOR_WEIGHT)
            gains.append(reach)
        return gains


@dataclass(slots=True)
class _Row:
    acceptance: dict[Origin, Acceptance]
    elapsed_s: float = 0.0
    loss_s: dict[Origin, float] = field(default_factory=lambda: defaultdict(float))
    widths: dict[Origin, int] = field(default_factory=lambda: defaultdict(int))
    full_copies: int = 0


class _Rows(dict[int, _Row]):
    """What is known of each request; of one that is new, nothing."""

    def __init__(self, sizes: Mapping[Origin, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __missing__(self, key: int) -> _Row:
        row = self[key] = _Row({o: Acceptance(n) for o, n in self._sizes.items()})
        return row


class DraftWidths:
    """Chooses widths for the rounds of one engine and learns from their results. Pure host code;
    requests are known by keys."""

    def __init__(self, costs: RoundCosts, *, learned: int, copied: int) -> None:
        """learned, copied: most drafts of the drafter and of a context copy."""
        self._costs, self._learned, self._copied = costs, learned, copied
        self._rows = _Rows({Origin.DRAFTER: learned, Origin.COPY: copied})
        self.tried: int | None = None  # the request whose drafts in the last plan are a trial

    def forget(self, key: int) -> None:
        """The request has ended."""
        self._rows.pop(key, None)

    def plan(self, offers: Mapping[int, Offer]) -> dict[int, int]:
        """Drafts to verify for each request of the round."""
        may = {origin: self.may_draft(offers, origin, len(offers)) for origin in Origin}
        gains = {
            key: self._rows[key].acceptance[offer.origin].gains(offer.limit)
            if key in may[offer.origin]
            else []
            for key, offer in offers.items()
        }
        self.tried = None
        if not any(gains.values()):
            return dict.fromkeys(offers, 0)
        best = self._best(gains, offers)
        last = {
            key: min(self._rows[key].widths[offer.origin], len(gains[key]))
            for key, offer in offers.items()
        }
        if self._rate(best, gains, offers) < (1 + KEEP) * self._rate(last, gains, offers):
            best = last
        plan = self._with_trial(best, gains, offers)
        self.tried = next((key for key in plan if plan[key] and not best[key]), None)
        return plan

    def pass_round(self, offers: Mapping[int, Offer]) -> None:
        """A plain round of these requests went by."""
        share = self._costs.plain_s(len(offers)) / len(offers)
        rows = self._rows
        for key, offer in offers.items():
            row = rows[key]
            row.elapsed_s += share
            row.widths[offer.origin] = 0

    def record(
        self, offers: Mapping[int, Offer], widths: Mapping[int, int], accepted: Mapping[int, int]
    ) -> None:
        """What became of a round's drafts; its seconds are those that such rounds take."""
        num_rows, total = len(offers), sum(widths.values())
        plain = self._costs.plain_s(num_rows)
        seconds = self._seconds(widths, offers)
        for key, offer in offers.items():
            row, width = self._rows[key], widths[key]
            row.elapsed_s += seconds / num_rows
            row.widths[offer.origin] = width
            if width:
                row.acceptance[offer.origin].observe(width, accepted[key])
                cost = (seconds - plain) * width / total
                loss = row.loss_s[offer.origin] + cost - accepted[key] * plain / num_rows
                row.loss_s[offer.origin] = max(-SAVED_ROUNDS * plain / num_rows, loss)
            if offer.origin is Origin.COPY and width:
                row.full_copies = row.full_copies + 1 if accepted[key] == width else 0

    def charge(self, keys: Mapping[int, Origin], seconds: float) -> None:
        """Time went for nothing to drafts of these requests: looking for them or planning while
        nothing else went on, drafts that no round took, rounds that did not run ahead."""
        for key, origin in keys.items():
            if key in self._rows:
                self._rows[key].loss_s[origin] += seconds / len(keys)

    def may_draft(self, keys: Iterable[int], origin: Origin, num_rows: int) -> set[int]:
        """Those requests whose drafts from an origin can be in a plan of so many rows at all."""
        rows, credit = self._rows, self._credit_s(num_rows)
        return {
            key
            for key in keys
            if (row := rows[key]).loss_s[origin] <= LOSS * (row.elapsed_s + credit)
        }

    def copy_limit(self, key: int) -> int:
        """Most tokens that a copy may propose for the request now."""
        full = self._rows[key].full_copies >= WIDE_AFTER
        return self._copied if full else min(self._learned, self._copied)

    def _credit_s(self, num_rows: int) -> float:
        """Time of each request of a round that counts before it has passed."""
        return CREDIT_ROUNDS * self._costs.plain_s(num_rows) / num_rows

    def _may_lose(self, key: int, origin: Origin, seconds: float, num_rows: int) -> bool:
        """Whether the request's drafts may have cost `seconds` more than they brought; its time is
        its share of its rounds'."""
        row = self._rows[key]
        return row.loss_s[origin] + seconds <= LOSS * (row.elapsed_s + self._credit_s(num_rows))

    def _best(
        self, gains: Mapping[int, Sequence[float]], offers: Mapping[int, Offer]
    ) -> dict[int, int]:
        """The plan of most tokens per second: the likeliest drafts, with or without the drafter."""
        num_rows, best = len(offers), 0
        rate = num_rows / self._costs.plain_s(num_rows)
        chosen: list[tuple[float, int, int]] = []
        for drafter in (False, True):
            ranked = sorted(
                (-gain, i, key)
                for key, offer in offers.items()
                if drafter or offer.origin is Origin.COPY
                for i, gain in enumerate(gains[key])
            )[: MAX_COLUMNS - num_rows]
            tokens = float(num_rows)
            costs = self._costs.drafted_s(num_rows, len(ranked), drafter=drafter)
            for n, ((gain, _, _), seconds) in enumerate(zip(ranked, costs), 1):
                tokens -= gain
                promised = tokens / seconds
                if promised > rate:
                    rate, best, chosen = promised, n, ranked
        plan = dict.fromkeys(offers, 0)
        for _, _, key in chosen[:best]:
            plan[key] += 1
        return plan

    def _rate(
        self,
        plan: Mapping[int, int],
        gains: Mapping[int, Sequence[float]],
        offers: Mapping[int, Offer],
    ) -> float:
        """Expected tokens per second."""
        tokens = len(plan) + sum(sum(gains[key][:width]) for key, width in plan.items())
        return tokens / self._seconds(plan, offers)

    def _seconds(self, plan: Mapping[int, int], offers: Mapping[int, Offer]) -> float:
        drafter = any(w and offers[key].origin is Origin.DRAFTER for key, w in plan.items())
        return self._costs.round_s(len(plan), len(plan) + sum(plan.values()), drafter=drafter)

    def _with_trial(
        self,
        plan: dict[int, int],
        gains: Mapping[int, Sequence[float]],
        offers: Mapping[int, Offer],
    ) -> dict[int, int]:
        """The plan, and a trial for the first request of width 0 that can pay for one."""
        room = MAX_COLUMNS - len(plan) - sum(plan.values())
        for key in plan:
            width = min(TRIAL, len(gains[key]), room)
            if plan[key] or width < 1:
                continue
            tried = plan | {key: width}
            extra = self._seconds(tried, offers) - self._seconds(plan, offers)
            if self._may_lose(key, offers[key].origin, extra, len(plan)):
                return tried
        return plan
