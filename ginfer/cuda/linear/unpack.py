"""Tiles of `tile128x64-v1` in shared memory to BF16 mma fragments and FP32 scales, per format.

A lane of a warp loads its words of a 16 x 64 row tile once, turns them into the four registers of
an m16n8k16 fragment per k16 step, and reads the scales of its rows g = lane / 4 and g + 8. Codes
become BF16 exactly; no product is rounded before the FP32 sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, uint32

from ginfer.cuda.lib.ptx import (
    and_or,
    bf16x2_fma,
    f32_from_bits,
    f32_from_f16,
    ld_shared_u32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    permute_bytes,
    u16_high,
    u16_low,
)

_BF16_ONE = 0x3F803F80


@dataclass(frozen=True)
class Unpack:
    """How one format is read. tile_nbytes: of a 128 x 64 tile; words: 32-bit words a lane holds of
    a row tile; groups: scales per row and k tile.

    Device functions: load(v, i, tile, row_tile, lane) fills v[i : i + words] from the tile at a
    shared address; fragment(v, i, step) returns a0..a3 of k16 step 0..3, the codes; codes(v, i,
    step) the same divided by `divisor`, a power of two, in fewer instructions; scales(tile,
    row_tile, lane, group) returns those of rows g and g + 8.
    """

    tile_nbytes: int
    words: int
    groups: int
    load: Any
    fragment: Any
    scales: Any
    codes: Any
    divisor: float = 1.0


@cuda.jit(device=True, inline="always")
def _load_q4(v, i, tile, row_tile, lane):
    q = ld_shared_u32x4(uint32(tile + row_tile * uint32(512) + lane * uint32(16)))
    for j in range(4):
        v[i + j] = q[j]


@cuda.jit(device=True, inline="always")
def _q4_pair(word):
    """Nibbles at bits 0 and 16 of `word` to the codes -8..7: 128 + v is exact, minus 136."""
    biased = and_or(word, uint32(0x000F000F), uint32(0x43004300))
    return bf16x2_fma(biased, uint32(_BF16_ONE), uint32(0xC308C308))


@cuda.jit(device=True, inline="always")
def _fragment_q4(v, i, step):
    word = v[i + step]
    return (
        _q4_pair(word),
        _q4_pair(word >> uint32(4)),
        _q4_pair(word >> uint32(8)),
        _q4_pair(word >> uint32(12)),
    )


@cuda.jit(device=True, inline="always")
def _q4_even(word):
    """Nibbles at bits 0 and 16, minus 8, divided by 64: BF16 numbers of 0 to 255 in the lowest bits
    are those multiples of 2^-133, exactly."""
    masked = uint32(word & uint32(0x000F000F))
    return bf16x2_fma(masked, uint32(0x7F007F00), uint32(0xBE00BE00))


@cuda.jit(device=True, inline="always")
def _q4_odd(word):
    """The same of nibbles at bits 4 and 20."""
    masked = uint32(word & uint32(0x00F000F0))
    return bf16x2_fma(masked, uint32(0x7D007D00), uint32(0xBE00BE00))


@cuda.jit(device=True, inline="always")
def _codes_q4(v, i, step):
    word = v[i + step]
    upper = uint32(word >> uint32(8))
    return _q4_even(word), _q4_odd(word), _q4_even(upper), _q4_odd(upper)


@cuda.jit(device=True, inline="always")
def _scales_q4_bf16(tile, row_tile, lane, group):
    at = uint32(tile + uint32(4096) + row_tile * uint32(32) + (lane >> uint32(2)) * uint32(4))
    word = ld_shared_u32(at)
    return f32_from_bits(word << uint32(16)), f32_from_bits(word & uint32(0xFFFF0000))


@cuda.jit(device=True, inline="always")
def _scales_q4_f16(tile, row_tile, lane, group):
    at = uint32(tile + uint32(4096) + row_tile * uint32(32) + (lane >> uint32(2)) * uint32(4))
    word = ld_shared_u32(at)
    return f32_from_f16(u16_low(word)), f32_from_f16(u16_high(word))


@cuda.jit(device=True, inline="always")
def _load_w8(v, i, tile, row_tile, lane):
    at = uint32(tile + row_tile * uint32(1024) + lane * uint32(8))
    for step in range(4):
        q = ld_shared_u32x2(uint32(at + uint32(step * 256)))
        v[i + 2 * step] = q[0]
        v[i + 2 * step + 1] = q[1]


@cuda.jit(device=True, inline="always")
def _w8_pair(spread):
    """Signed bytes at bits 0 and 16 to BF16: 128 + low seven bits, minus 128 or 256 by sign."""
    biased = and_or(spread, uint32(0x007F007F), uint32(0x43004300))
    return bf16x2_fma(
        biased, uint32(_BF16_ONE), and_or(spread, uint32(0x00800080), uint32(0xC300C300))
    )


@cuda.jit(device=True, inline="always")
def _fragment_w8(v, i, step):
    low, high = v[i + 2 * step], v[i + 2 * step + 1]
    zero = uint32(0)
    return (
        _w8_pair(permute_bytes(low, zero, uint32(0x4140))),
        _w8_pair(permute_bytes(low, zero, uint32(0x4342))),
        _w8_pair(permute_bytes(high, zero, uint32(0x4140))),
        _w8_pair(permute_bytes(high, zero, uint32(0x4342))),
    )


@cuda.jit(device=True, inline="always")
def _scales_w8(tile, row_tile, lane, group):
    at = uint32(tile + uint32(8192) + row_tile * uint32(64) + (lane >> uint32(2)) * uint32(4))
    word = ld_shared_u32(uint32(at + group * uint32(32)))
    return f32_from_f16(u16_low(word)), f32_from_f16(u16_high(word))


@cuda.jit(device=True, inline="always")
def _load_bf16(v, i, tile, row_tile, lane):
    at = uint32(tile + row_tile * uint32(2048) + lane * uint32(16))
    for step in range(4):
        q = ld_shared_u32x4(uint32(at + uint32(step * 512)))
        for j in range(4):
            v[i + 4 * step + j] = q[j]


@cuda.jit(device=True, inline="always")
def _fragment_bf16(v, i, step):
    return v[i + 4 * step], v[i + 4 * step + 1], v[i + 4 * step + 2], v[i + 4 * step + 3]


@cuda.jit(device=True, inline="always")
def _scales_bf16(tile, row_tile, lane, group):
    return float32(1.0), float32(1.0)


UNPACK = {
    "Q4G64_BF16S": Unpack(4352, 4, 1, _load_q4, _fragment_q4, _scales_q4_bf16, _codes_q4, 64.0),
    "Q4G64_F16S": Unpack(4352, 4, 1, _load_q4, _fragment_q4, _scales_q4_f16, _codes_q4, 64.0),
    "W8G32_F16S": Unpack(8704, 8, 2, _load_w8, _fragment_w8, _scales_w8, _fragment_w8),
    "BF16": Unpack(16384, 16, 1, _load_bf16, _fragment_bf16, _scales_bf16, _fragment_bf16),
}
