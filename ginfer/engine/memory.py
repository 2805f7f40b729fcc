"""Memory plan of an engine: one curve from options and what is there to units, slots and bytes.

    bytes = slots x state + units x unit
    units = pages of `num_pages` + snapshots, as many as fit, up to SNAPSHOTS_PER_LANE per lane

Requests are promised `num_pages` together; what they do not use, and the rest, holds prefixes and
snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.backend import MemoryPlan
from ginfer.cache import CacheGeometry
from ginfer.errors import ConfigError
from ginfer.sizes import MIB, align_up, div_ceil, human_bytes
from ginfer.spec import PAGE_TOKENS, LayerKind

if TYPE_CHECKING:
    from ginfer.config import EngineConfig
    from ginfer.spec import ModelSpec

UNIT_NBYTES = 2 * MIB
AUTO_KV_NBYTES = 128 * MIB  # automatic K/V stays modest; one request of max_context always fits
SNAPSHOTS_PER_LANE = 4  # system and tools, two prompt frontiers, a response end


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """A memory plan with the context that it serves, the K/V pages that requests are promised
    together, what the arena is made of, and the bytes of all that."""

    plan: MemoryPlan
    geometry: CacheGeometry
    max_context: int
    num_pages: int
    nbytes: int

    @property
    def kv_capacity(self) -> int:
        """Tokens of K/V for all requests together."""
        return self.num_pages * PAGE_TOKENS


def page_nbytes(spec: ModelSpec) -> int:
    """Bytes of one page: BF16 K and V of 64 tokens in all attention layers."""
    return len(spec.layers_of(LayerKind.FULL_ATTENTION)) * spec.attention.kv_width * PAGE_TOKENS * 4


def unit_nbytes(spec: ModelSpec) -> int:
    """Bytes of one arena unit: 2 MiB; the page of a model whose pages do not tile that."""
    page = page_nbytes(spec)
    return UNIT_NBYTES if UNIT_NBYTES % page == 0 or page % UNIT_NBYTES == 0 else page


def slot_nbytes(spec: ModelSpec) -> int:
    """Bytes of one recurrent slot: FP32 state and convolution history of all GDN layers."""
    g = spec.gdn
    state = g.num_v_heads * g.k_head_dim * g.v_head_dim + (g.conv_taps - 1) * g.conv_channels
    return len(spec.layers_of(LayerKind.GATED_DELTANET)) * state * 4


def plan_memory(config: EngineConfig, spec: ModelSpec, available_nbytes: int) -> Capacity:
    """Resolve every 'auto'. Raises ConfigError with both numbers when the options do not fit the
    model, each other, or the memory that is available."""
    page, unit = page_nbytes(spec), unit_nbytes(spec)
    fixed = config.max_concurrency * slot_nbytes(spec) + config.park_mib * MIB
    affordable_units = max(available_nbytes - fixed, 0) // unit
    affordable = affordable_units * unit // page
    max_context = _max_context(config, spec, affordable)
    context_pages = div_ceil(max_context, PAGE_TOKENS)
    modest = min(AUTO_KV_NBYTES // page, affordable)
    num_pages = _num_pages(config, context_pages, modest)
    num_units = div_ceil(num_pages * page, unit)
    if config.prefix_reuse:
        wanted = config.max_concurrency * SNAPSHOTS_PER_LANE * div_ceil(slot_nbytes(spec), unit)
        num_units += max(0, min(wanted, affordable_units - num_units))
    nbytes = num_units * unit + fixed
    if nbytes > available_nbytes:
        raise ConfigError(
            f"K/V and state need {human_bytes(nbytes)} for max_context {max_context} and "
            f"max_concurrency {config.max_concurrency}, but {human_bytes(available_nbytes)} is "
            "available; lower max_context, kv_capacity, park_mib or max_concurrency",
            param="max_context" if config.kv_capacity is None else "kv_capacity",
        )
    geometry = CacheGeometry(
        num_units=num_units,
        page_nbytes=page,
        state_nbytes=slot_nbytes(spec),
        num_slots=config.max_concurrency,
        park_nbytes=config.park_mib * MIB,
        unit_nbytes=unit,
    )
    plan = MemoryPlan(
        num_rows=config.max_concurrency,
        num_units=num_units,
        unit_nbytes=unit,
        num_slots=geometry.num_slots,
        max_columns=max(prefill_chunk(config, max_context), config.max_concurrency),
        max_pages_per_row=context_pages,
        num_park_units=geometry.num_host_units,
    )
    return Capacity(
        plan=plan, geometry=geometry, max_context=max_context, num_pages=num_pages, nbytes=nbytes
    )


def prefill_chunk(config: EngineConfig, max_context: int) -> int:
    """Most tokens of a prefill forward; never more than the longest prompt."""
    return min(config.prefill_chunk, align_up(max_context, PAGE_TOKENS))


def _max_context(config: EngineConfig, spec: ModelSpec, affordable_pages: int) -> int:
    """The context asked for; without a wish the native one, or as much of it as K/V can hold."""
    if config.max_context is None:
        pages = affordable_pages
        if config.kv_capacity is not None:
            pages = config.kv_capacity // PAGE_TOKENS
        return min(spec.max_context, max(pages, config.max_concurrency) * PAGE_TOKENS)
    if config.max_context > spec.max_context:
        raise ConfigError(
            f"max_context is {config.max_context}; the model's native context is "
            f"{spec.max_context}",
            param="max_context",
        )
    return config.max_context


def _num_pages(config: EngineConfig, context_pages: int, modest: int) -> int:
    """Pages asked for; without a wish enough for all lanes, within what is modest."""
    least = max(context_pages, config.max_concurrency)
    if config.kv_capacity is None:
        return max(least, min(modest, config.max_concurrency * context_pages))
    num_pages = config.kv_capacity // PAGE_TOKENS
    if num_pages < least:
        raise ConfigError(
            f"kv_capacity is {config.kv_capacity} tokens; max_context and max_concurrency need at "
            f"least {least * PAGE_TOKENS}; raise kv_capacity or lower the others",
            param="kv_capacity",
        )
    return num_pages


def ledger_line(ledger: dict[str, int]) -> str:
    """What a backend holds, by use and in all, for people."""
    uses = ", ".join(f"{use} {human_bytes(nbytes)}" for use, nbytes in ledger.items() if nbytes)
    return f"{human_bytes(sum(ledger.values()))}: {uses}"


def available_nbytes() -> int:
    """Host memory that can still be taken without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("the system does not tell its available memory", param="kv_capacity")
