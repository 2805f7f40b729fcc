"""PrefillQueue: the requests whose prompts are being computed, and how much of them is next."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from ginfer.engine.chunk_plan import ChunkClock, ChunkCost, ChunkLimits, PromptView
from ginfer.spec import PAGE_TOKENS, KvCodec, LayerKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.backend import MemoryPlan
    from ginfer.batch import I32
    from ginfer.cache import Sequence
    from ginfer.engine.chunk_plan import Piece
    from ginfer.engine.job import Job
    from ginfer.prompt import PreparedPrompt
    from ginfer.spec import ModelSpec

_FIXED_S, _WORK_S = 0.005, 100e-6  # a first guess; one chunk corrects it
_WITHIN = 0.94  # of a pause that a predicted time fills: some chunks take longer


class PrefillQueue:
    """Jobs in prefill, in the order of their entry, and the limits of their next chunk.

    plan: what one forward can hold. pause_ms: the longest pause of decode that a chunk may cause.
    goes_on: see ChunkLimits.
    """

    def __init__(
        self, spec: ModelSpec, plan: MemoryPlan, pause_ms: float, *, goes_on: bool = False
    ) -> None:
        self.jobs: list[Job] = []
        self._goes_on = goes_on
        self._pause_s, self._most = _WITHIN * pause_ms / 1e3, plan.max_columns
        packed = plan.kv is not KvCodec.BF16
        self._pages = plan.max_pages_per_row + plan.num_rows if packed else None
        self._clock = ChunkClock(ChunkCost(_FIXED_S, _WORK_S, pair_share(spec)))
        self._ordered: deque[tuple[Piece, ...]] = deque()
        self._limits: dict[bool, ChunkLimits] = {}  # as long as costs stay

    def views(self, frontier: I32) -> tuple[PromptView, ...]:
        """What plans see of the jobs. frontier: computed tokens by lane."""
        views = []
        for job in self.jobs:
            assert job.sequence is not None
            start, num_prompt = int(frontier[job.lane]), job.request.prompt.num_tokens
            views.append(PromptView(job.lane, start, num_prompt, tuple(job.sequence.points)))
        return tuple(views)

    def limits(self, *, decoding: bool) -> ChunkLimits:
        """Bounds of the next chunk; `decoding`: beside rows that decode."""
        if decoding not in self._limits:
            self._limits[decoding] = ChunkLimits(
                columns=self._most,
                cost=self._clock.cost,
                pages=self._pages,
                pause_s=self._pause_s if decoding else inf,
                goes_on=self._goes_on,
            )
        return self._limits[decoding]

    def chunk_beside(self, num_tokens: int) -> int:
        """Columns of a chunk behind so many tokens, while rows decode."""
        cost = self._clock.cost
        return max(cost.columns_within(num_tokens, self._pause_s, self._most), PAGE_TOKENS)

    def ordered(self, pieces: tuple[Piece, ...]) -> None:
        """A chunk of these pieces is on its way."""
        self._ordered.append(pieces)

    def observe(self, times: Iterable[float]) -> None:
        """The oldest chunks on their way took so many seconds; without any, others ordered them."""
        for seconds in times:
            if self._ordered:
                self._clock.observe(self._ordered.popleft(), seconds)
                self._limits.clear()

    def will_help(self, prompt: PreparedPrompt, known: int) -> bool:
        """Whether a prompt in prefill is going to leave a state that this one could start from,
        behind the `known` tokens that it finds now."""
        return any(_shared_point(job, prompt) > known for job in self.jobs)


def pair_share(spec: ModelSpec) -> float:
    """See ChunkCost."""
    a, g, layers = spec.attention, spec.gdn, len(spec.layers)
    attending = len(spec.layers_of(LayerKind.FULL_ATTENTION))
    inner = attending * 2 * (a.q_width + a.kv_width)
    inner += (layers - attending) * (g.conv_channels + g.value_width)
    outer = attending * a.q_width + (layers - attending) * g.value_width
    matrices = spec.hidden_size * (inner + outer + 3 * layers * spec.mlp_width)
    return 2 * attending * a.q_width / matrices


def _shared_point(job: Job, prompt: PreparedPrompt) -> int:
    """The furthest point of a job's sequence inside what its prompt has in common with another."""
    sequence: Sequence | None = job.sequence
    assert sequence is not None
    if not sequence.points or prompt.positions is not None:
        return 0
    n = min(job.request.prompt.num_tokens, prompt.num_tokens - 1)
    differ = job.request.prompt.token_ids[:n] != prompt.token_ids[:n]
    common = int(differ.argmax()) if differ.any() else n
    return max((point for point in sequence.points if point <= common), default=0)
