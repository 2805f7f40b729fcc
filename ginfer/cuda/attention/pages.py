"""Where keys and values lie: pages of 64 tokens, [page][layer][K, V][head][D/64][64][64] BF16.

A panel is 64 tokens by 64 dims, 128 bytes per token, and its 16-byte chunk c of token i lies at
chunk c ^ (i % 8), so that eight tokens of one chunk are in different banks. Tiles of queries and
weights in shared memory have the same form.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import cp_async_16_or_zero

TILE = 64  # tokens of a page
PANEL_NBYTES = TILE * 128


@dataclass(frozen=True)
class PageShape:
    """Attention layers L of G K/V heads of D dims."""

    L: int
    G: int
    D: int

    @property
    def plane_nbytes(self) -> int:
        """Keys or values of one head."""
        return TILE * self.D * 2

    @property
    def page_nbytes(self) -> int:
        """All layers of a page."""
        return self.L * 2 * self.G * self.plane_nbytes

    def layer_offset(self, layer_idx: int) -> int:
        """Of an attention layer inside a page."""
        return layer_idx * 2 * self.G * self.plane_nbytes

    @property
    def value_offset(self) -> int:
        """From the keys of a head to its values."""
        return self.G * self.plane_nbytes


@cuda.jit(device=True, inline="always")
def chunk_at(token, chunk):
    """Byte offset inside a panel of 16-byte chunk 0..7 of a token."""
    return uint32(token * uint32(128) + (chunk ^ (token & uint32(7))) * uint32(16))


@cuda.jit(device=True, inline="always")
def fetch_tile(to, source, valid, thread, threads, chunks):
    """Start copying a plane of `chunks` 16-byte chunks to shared memory as it lies; tokens from
    `valid` on become zero, so that nothing that a page held before is multiplied."""
    i = thread
    while i < uint32(chunks):
        token = uint32((i >> uint32(3)) & uint32(TILE - 1))
        there = token < valid
        at = source + int64(i) * 16 if there else source
        cp_async_16_or_zero(uint32(to + i * uint32(16)), at, uint32(16) if there else uint32(0))
        i = uint32(i + uint32(threads))
