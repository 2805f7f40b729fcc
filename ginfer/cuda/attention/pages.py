"""Where keys and values lie: pages of 64 tokens, [page][layer][K, V][head][D/64][64][64].

A panel is 64 tokens by 64 dims. In BF16 it has 128 bytes per token, and its 16-byte chunk c of
token i lies at chunk c ^ (i % 8), so that eight tokens of one chunk are in different banks. Tiles
of queries and weights in shared memory have the same form. Packed pages have INT8 codes in plain
order, and apart from them, in the same order of panels, an F16 scale per token and panel: 1 byte
of scales per 32 of codes. Such a plane is opened before use: codes of keys are exact in BF16, and
their scales are factors of scores; a value is code * scale in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import pack_bf16
from ginfer.cuda.lib.ptx import (
    and_or,
    bf16x2_fma,
    cp_async_16_or_zero,
    f32_from_bits,
    f32_from_f16,
    ld_shared_u32,
    ld_shared_u32x4,
    permute_bytes,
    st_shared_u32x4,
    u16_high,
    u16_low,
)

TILE = 64  # tokens of a page
PANEL_NBYTES = TILE * 128


@dataclass(frozen=True)
class PageShape:
    """Attention layers L of G K/V heads of D dims. packed: INT8 codes; scales: address of those of
    page 0."""

    L: int
    G: int
    D: int
    packed: bool = False
    scales: int = 0

    @property
    def plane_nbytes(self) -> int:
        """Keys or values of one head, without scales."""
        return TILE * self.D * (1 if self.packed else 2)

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


def packed_plane(D: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a packed plane."""
    return TILE * D, TILE * D // 32


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


@cuda.jit(device=True, inline="always")
def copy_bytes(to, source, nbytes, thread, threads):
    """Start copying bytes, a multiple of 16, to shared memory."""
    i = uint32(thread * uint32(16))
    while i < uint32(nbytes):
        cp_async_16_or_zero(uint32(to + i), source + int64(i), uint32(16))
        i = uint32(i + uint32(threads * 16))


@cuda.jit(device=True, inline="always")
def four_values(word, scale):
    """Codes of a word times the scale: two BF16 pairs."""
    v = cuda.local.array(4, float32)
    biased = uint32(word ^ uint32(0x80808080))
    for i in range(4):
        # the float 2^23 + code + 128
        bits = permute_bytes(biased, uint32(0x4B000000), uint32(0x7440 + i))
        v[i] = (f32_from_bits(bits) - float32(8388736.0)) * scale
    return pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])


@cuda.jit(device=True, inline="always")
def _pair(spread):
    """Signed bytes at bits 0 and 16 in BF16: 128 + low seven bits, minus 128 or 256 by sign."""
    biased = and_or(spread, uint32(0x007F007F), uint32(0x43004300))
    less = and_or(spread, uint32(0x00800080), uint32(0xC300C300))
    return bf16x2_fma(biased, uint32(0x3F803F80), less)


@cuda.jit(device=True, inline="always")
def _four_codes(word):
    """Codes of a word: two BF16 pairs."""
    low = permute_bytes(word, uint32(0), uint32(0x4140))
    return _pair(low), _pair(permute_bytes(word, uint32(0), uint32(0x4342)))


def plane_opener(D: int, threads: int) -> Any:
    """Device function open_plane(to, packed, valid, is_value, thread): the BF16 plane `to` of a
    packed plane, its codes and then its scales, both in shared memory: code * scale, zero from
    token `valid` on; of keys, the codes."""
    codes, _ = packed_plane(D)

    @cuda.jit(device=True, inline="always")
    def store(at, first, second):
        st_shared_u32x4(at, first[0], first[1], second[0], second[1])

    @cuda.jit(device=True, inline="always")
    def open_plane(to, packed, valid, is_value, thread):
        i = thread
        while i < uint32(codes // 16):
            panel, token = uint32(i >> uint32(8)), uint32((i >> uint32(2)) & uint32(TILE - 1))
            q = ld_shared_u32x4(uint32(packed + i * uint32(16)))
            chunk = uint32((i & uint32(3)) * uint32(2))
            plane = uint32(to + panel * uint32(PANEL_NBYTES))
            low = uint32(plane + chunk_at(token, chunk))
            high = uint32(plane + chunk_at(token, uint32(chunk + uint32(1))))
            if is_value:
                at = uint32(packed + uint32(codes) + panel * uint32(2 * TILE))
                pair = ld_shared_u32(uint32(at + (token >> uint32(1)) * uint32(4)))
                half = u16_high(pair) if token & uint32(1) else u16_low(pair)
                scale = f32_from_f16(half) if token < valid else float32(0.0)
                store(low, four_values(q[0], scale), four_values(q[1], scale))
                store(high, four_values(q[2], scale), four_values(q[3], scale))
            else:
                store(low, _four_codes(q[0]), _four_codes(q[1]))
                store(high, _four_codes(q[2]), _four_codes(q[3]))
            i = uint32(i + uint32(threads))

    return open_plane
