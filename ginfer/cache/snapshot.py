"""Snapshots: recurrent states kept at nodes of the prefix tree, and where a prompt wants them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ginfer.cache.segment import MadeBy
from ginfer.spec import PAGE_TOKENS

if TYPE_CHECKING:
    from ginfer.cache.segment import Seam, Segment

INTERVAL_TOKENS = 8192  # between the snapshots inside long prompts, halved when memory is ample
AMPLE_FRACTION = 0.25  # of the arena


class SnapshotKind(StrEnum):
    """Why a snapshot was taken."""

    SYSTEM = "system"  # end of system and tools: the root that conversations share
    TURN = "turn"  # a prompt's frontier, or where a prefill was cancelled
    INTERVAL = "interval"  # inside a long prompt
    RESPONSE = "response"  # end of a response: the next turn appends here


@dataclass(eq=False, slots=True)
class Snapshot:
    """The recurrent state after `num_tokens` tokens: those of `node`, then those of `rest`.

    units: where the state is. page: copy of the partial last page (-1 without one, when `rest` is
    empty). parked: `units` and `page` are on the host. made_by: of the whole history; last_by: of
    its last token. seams: those in `rest`. hits: sequences that started here; passed: a sequence
    has gone on past it; waiting: requests that will start here. used: tick of the last use.
    """

    node: Segment
    rest: bytes
    num_tokens: int
    kind: SnapshotKind
    units: list[int]
    page: int = -1
    parked: bool = False
    made_by: MadeBy = MadeBy.PREFILL
    last_by: MadeBy = MadeBy.PREFILL
    seams: tuple[Seam, ...] = ()
    hits: int = 0
    passed: bool = False
    waiting: int = 0
    used: int = 0


def snapshot_points(
    num_tokens: int, turn_starts: tuple[int, ...], *, base: int, free_fraction: float
) -> dict[int, SnapshotKind]:
    """Where the prefill of a prompt of `num_tokens` tokens is to take snapshots, ascending: last
    multiples of 64 at or before the end of system and tools (the first of `turn_starts`), the
    assistant header (the last of them; without turns the prompt's end), and every interval.

    Only points above `base`, the tokens that are computed already, and below `num_tokens`.
    free_fraction: of the arena; it decides how long an interval is.
    """
    interval = INTERVAL_TOKENS // 2 if free_fraction > AMPLE_FRACTION else INTERVAL_TOKENS
    last = _page_border(turn_starts[-1] if turn_starts else num_tokens - 1)
    first = base // interval * interval + interval
    points = dict.fromkeys(range(first, last, interval), SnapshotKind.INTERVAL)
    if last > base:
        points[last] = SnapshotKind.TURN
    if turn_starts and (system := _page_border(turn_starts[0])) > base:
        points[system] = SnapshotKind.SYSTEM
    return dict(sorted(points.items()))


def _page_border(num_tokens: int) -> int:
    """Last multiple of 64 at or before `num_tokens`."""
    return num_tokens // PAGE_TOKENS * PAGE_TOKENS
