"""Memory plan of an engine: one curve from options and what is there to units, slots and bytes.

    bytes = cost of slots and workspace + units x unit
    units = pages of `num_pages` + snapshots, as many as fit, up to SNAPSHOTS_PER_LANE per lane

Requests are promised `num_pages` together; what they do not use, and the rest, holds prefixes and
snapshots. Where memory is plentiful, automatic capacity takes all of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ginfer.backend import MemoryPlan
from ginfer.cache import CacheGeometry
from ginfer.config import CHUNK_MULTIPLE, MAX_DRAFT_TOKENS
from ginfer.errors import ConfigError
from ginfer.sizes import MIB, align_up, div_ceil, human_bytes
from ginfer.spec import PAGE_TOKENS, KvCodec

if TYPE_CHECKING:
    from ginfer.backend import Room
    from ginfer.config import EngineConfig
    from ginfer.spec import ModelSpec

log = logging.getLogger(__name__)

UNIT_NBYTES = 2 * MIB
AUTO_KV_NBYTES = 128 * MIB  # modest automatic K/V; one request of max_context always fits
SNAPSHOTS_PER_LANE = 4  # system and tools, two prompt frontiers, a response end
LEAST_CHUNK = 1024  # an automatic prefill chunk is not made shorter
CHUNK_SHARE = 8  # its workspace takes at most 1 / so much of the memory
SNAPSHOT_SHARE = 4  # where memory is plentiful, snapshots are promised at most 1 / so much


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


def page_nbytes(spec: ModelSpec, codec: KvCodec = KvCodec.BF16) -> int:
    """Bytes of one page, without its scales."""
    return spec.page_nbytes(codec)


def unit_nbytes(spec: ModelSpec, codec: KvCodec = KvCodec.BF16) -> int:
    """Bytes of one arena unit: 2 MiB; the page of a model whose pages do not tile that."""
    page = page_nbytes(spec, codec)
    return UNIT_NBYTES if UNIT_NBYTES % page == 0 or page % UNIT_NBYTES == 0 else page


def plan_memory(config: EngineConfig, spec: ModelSpec, room: Room) -> Capacity:
    """Resolve every 'auto'. Raises ConfigError with both numbers when the options do not fit the
    model, each other, or the memory that is available."""
    _check_parking(config, room)
    if config.prefill_chunk is None:
        config = replace(config, prefill_chunk=_automatic_chunk(config, spec, room))
    codec = KvCodec(config.kv_dtype)
    page, unit = page_nbytes(spec, codec), unit_nbytes(spec, codec)
    unit_cost = unit + spec.scales_nbytes(codec) * unit // page
    longest = min(config.max_context or spec.max_context, spec.max_context)
    fixed = room.cost(_plan(config, spec, room, max_context=longest))
    affordable_units = max(room.nbytes - fixed, 0) // unit_cost
    max_context = _max_context(config, spec, affordable_units * unit // page)
    context_pages = div_ceil(max_context, PAGE_TOKENS)
    snapshots = SNAPSHOTS_PER_LANE * config.max_concurrency * div_ceil(room.slot_nbytes, unit)
    snapshots *= config.prefix_reuse
    automatic = AUTO_KV_NBYTES // page
    if room.plentiful:
        snapshots = min(snapshots, affordable_units // SNAPSHOT_SHARE)
        automatic = (affordable_units - snapshots) * unit // page
    automatic = min(automatic, affordable_units * unit // page)
    num_pages = _num_pages(config, context_pages, automatic)
    num_units = div_ceil(num_pages * page, unit)
    num_units += max(0, min(snapshots, affordable_units - num_units))
    if room.plentiful and config.prefix_reuse and config.kv_capacity is None:
        num_units = max(num_units, affordable_units)
    plan = _plan(config, spec, room, max_context=max_context, num_units=num_units)
    nbytes = room.cost(plan)
    if nbytes > room.nbytes:
        raise ConfigError(
            f"K/V, state and workspace need {human_bytes(nbytes)} for max_context {max_context} "
            f"and max_concurrency {config.max_concurrency}, but {human_bytes(room.nbytes)} is "
            "available; lower max_context, kv_capacity, park_mib or max_concurrency",
            param="max_context" if config.kv_capacity is None else "kv_capacity",
        )
    geometry = CacheGeometry(
        num_units=num_units,
        page_nbytes=page,
        state_nbytes=room.slot_nbytes,
        num_slots=config.max_concurrency,
        park_nbytes=config.park_mib * MIB,
        unit_nbytes=unit,
    )
    return Capacity(
        plan=plan, geometry=geometry, max_context=max_context, num_pages=num_pages, nbytes=nbytes
    )


def _plan(
    config: EngineConfig, spec: ModelSpec, room: Room, *, max_context: int, num_units: int = 0
) -> MemoryPlan:
    """The plan of a context; without units, what the rest costs."""
    codec = KvCodec(config.kv_dtype)
    unit = unit_nbytes(spec, codec)
    parking = CacheGeometry(
        num_units=0,
        page_nbytes=page_nbytes(spec, codec),
        state_nbytes=0,
        num_slots=0,
        park_nbytes=config.park_mib * MIB,
        unit_nbytes=unit,
    )
    columns = 1 + (config.draft_tokens or MAX_DRAFT_TOKENS)
    recorded = min(columns * config.max_concurrency, room.max_recorded)
    return MemoryPlan(
        num_rows=config.max_concurrency,
        num_units=num_units,
        unit_nbytes=unit,
        num_slots=room.slots_per_lane * config.max_concurrency,
        max_columns=max(prefill_chunk(config, max_context), config.max_concurrency, recorded),
        max_pages_per_row=div_ceil(max_context, PAGE_TOKENS),
        num_park_units=parking.num_host_units,
        max_recorded=recorded,
        kv=codec,
    )


def _automatic_chunk(config: EngineConfig, spec: ModelSpec, room: Room) -> int:
    """The chunk that the backend prefers, or the half, quarter .. whose workspace is a modest part
    of the memory that slots leave."""

    def cost(chunk: int) -> int:
        wanted = replace(config, prefill_chunk=chunk)
        longest = min(config.max_context or spec.max_context, spec.max_context)
        return room.cost(_plan(wanted, spec, room, max_context=longest))

    chunk, least = room.prefill_chunk, cost(CHUNK_MULTIPLE)
    while chunk > LEAST_CHUNK and (cost(chunk) - least) * CHUNK_SHARE > room.nbytes - least:
        chunk //= 2
    if chunk < room.prefill_chunk:
        log.info(
            "prefill_chunk is %d: %d would take %s of %s beside the slots",
            chunk,
            2 * chunk,
            human_bytes(cost(2 * chunk) - least),
            human_bytes(max(room.nbytes - least, 0)),
        )
    return chunk


def _check_parking(config: EngineConfig, room: Room) -> None:
    wanted = config.park_mib * MIB
    if wanted > room.host_nbytes:
        raise ConfigError(
            f"park_mib is {config.park_mib}, {human_bytes(wanted)}; "
            f"{human_bytes(room.host_nbytes)} of host memory are available; lower park_mib",
            param="park_mib",
        )


def prefill_chunk(config: EngineConfig, max_context: int) -> int:
    """Most tokens of a prefill forward; never more than the longest prompt."""
    return min(config.prefill_chunk or CHUNK_MULTIPLE, align_up(max_context, PAGE_TOKENS))


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


def _num_pages(config: EngineConfig, context_pages: int, automatic: int) -> int:
    """Pages asked for; without a wish enough for all lanes, at most `automatic`."""
    least = max(context_pages, config.max_concurrency)
    if config.kv_capacity is None:
        return max(least, min(automatic, config.max_concurrency * context_pages))
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
