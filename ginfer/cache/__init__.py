"""Host bookkeeping of K/V pages, recurrent states and reusable prefixes; no device code."""

from ginfer.cache.geometry import CacheGeometry
from ginfer.cache.moves import Moves
from ginfer.cache.prefix_cache import Hit, PrefixCache, Sequence
from ginfer.cache.segment import MadeBy
from ginfer.cache.snapshot import INTERVAL_TOKENS, Snapshot, SnapshotKind, snapshot_points

__all__ = [
    "INTERVAL_TOKENS",
    "CacheGeometry",
    "Hit",
    "MadeBy",
    "Moves",
    "PrefixCache",
    "Sequence",
    "Snapshot",
    "SnapshotKind",
    "snapshot_points",
]
