"""EngineConfig: every engine option, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAX_CONCURRENCY = 8
CHUNK_MULTIPLE = 64
MAX_DRAFT_TOKENS = 15  # with the token before them 16 columns, what a row of a decode forward has
MAX_DECODE_GAP_MS = 60_000
MAX_PREFILL_CHUNK = 16384  # bounds the activation buffers, which are allocated at start


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises ConfigError naming the field, the value and what is legal.

    max_context: tokens per request, prompt and answer; None = the model's native length.
    kv_capacity: tokens of K/V for all requests together; None = auto. kv_elastic: when idle, give
    memory that holds nothing back to the system, and take it again with the next request.
    park_mib: host memory for prefixes that leave the arena, 0 = none.
    prefill_chunk: most prompt tokens per forward; None = what the backend prefers, or less where
    memory is short. decode_gap_ms: longest pause of decode that a prefill forward may cause; 64
    prompt tokens are legal whatever they take. threads: CPU image only, None = all cores.
    spec: auto drafts what pays, none never; drafts change no answer. draft_tokens: most drafts of a
    request and round, None = as many as there are.
    cuda_graphs: CUDA image only; False launches rounds kernel by kernel, with the same values.
    """

    package: Path
    backend: str = "auto"  # auto, cpu, cuda
    max_context: int | None = None
    kv_capacity: int | None = None
    kv_elastic: bool = False
    park_mib: int = 0
    kv_dtype: str = "bf16"
    max_concurrency: int = 8
    max_pending: int = 16
    pending_timeout_s: float = 600.0
    prefill_chunk: int | None = None
    decode_gap_ms: int = 30
    prefix_reuse: bool = True
    tp: int | None = None  # None = auto
    spec: str = "auto"
    draft_tokens: int | None = None
    threads: int | None = None
    cuda_graphs: bool = True
    verify: bool = False  # check every digest before loading

    def __post_init__(self) -> None:
        self._one_of("backend", self.backend, ("auto", "cpu", "cuda"))
        self._one_of("kv_dtype", self.kv_dtype, ("bf16", "int8"))
        self._one_of("spec", self.spec, ("auto", "none"))
        self._one_of("tp", self.tp, (None, 1))
        self._within("max_concurrency", self.max_concurrency, 1, MAX_CONCURRENCY)
        self._within("max_pending", self.max_pending, 1, 1 << 20)
        self._within("park_mib", self.park_mib, 0, 1 << 20)
        self._within("decode_gap_ms", self.decode_gap_ms, 1, MAX_DECODE_GAP_MS)
        chunk = CHUNK_MULTIPLE if self.prefill_chunk is None else self.prefill_chunk
        self._within("prefill_chunk", chunk, CHUNK_MULTIPLE, MAX_PREFILL_CHUNK)
        if chunk % CHUNK_MULTIPLE:
            raise ConfigError(
                f"prefill_chunk is {self.prefill_chunk}; give a multiple of {CHUNK_MULTIPLE}",
                param="prefill_chunk",
            )
        if not self.pending_timeout_s > 0:
            raise ConfigError(
                f"pending_timeout_s is {self.pending_timeout_s}; give seconds above 0",
                param="pending_timeout_s",
            )
        if self.draft_tokens is not None:
            self._within("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
            if self.spec == "none":
                raise ConfigError(
                    f"draft_tokens is {self.draft_tokens}, but spec is none; leave one of them out",
                    param="draft_tokens",
                )
        for name in ("max_context", "kv_capacity", "threads"):
            value = getattr(self, name)
            if value is not None:
                self._within(name, value, 1, 1 << 30)

    def _one_of(self, name: str, value: object, legal: tuple[object, ...]) -> None:
        if value not in legal:
            choices = ", ".join("auto" if v is None else str(v) for v in legal)
            raise ConfigError(f"{name} is {value!r}; legal: {choices}", param=name)

    def _within(self, name: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}; legal: {low} to {high}", param=name)
