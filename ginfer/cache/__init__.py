"""Host bookkeeping of K/V pages, recurrent slots and reusable prefixes; no device code."""

from ginfer.cache.arena import Pool
from ginfer.cache.prefix import AppendPrefixCache, Prefix, PrefixCache
from ginfer.cache.segment import MadeBy
from ginfer.cache.sequence import Sequence, SequenceCache

__all__ = [
    "AppendPrefixCache",
    "MadeBy",
    "Pool",
    "Prefix",
    "PrefixCache",
    "Sequence",
    "SequenceCache",
]
