"""Storage formats and payload layouts of tensors: what the bytes of a package mean.

A represented weight is `code * scale`, exact in float32 (every code is a small integer or a
BF16/E4M3 value).

Adding a format touches five places: the table here, the packer's encoder, `artifact` (legal
layouts), the CPU and CUDA unpack functions, and the round-trip test.

Layouts
- `contiguous-le-v1`: C order, little-endian; BF16, FP32, I32; any rank up to 16.
- `rows-v1` (embeddings [N, K]): per row K codes, then K/32 F16 scales (BF16: 2K bytes), row padded
  to 16 B.
- `tile128x64-v1` (matrices [N, K]): tiles [N/128][K/64], each contiguous; N padded to 128 and K to
  64 with value 0 and scale 0. A tile is the codes of 8 row tiles of 16 rows, then their scales.
  With lane = 4 g + t (g = 0..7, t = 0..3) a lane's fragment of 16 rows x 16 columns is
  a0 = (row g, columns 2t, 2t + 1), a1 = the same of row g + 8, a2 = a0 with columns + 8,
  a3 = a1 with columns + 8.
  Q4: 512 B per row tile, [lane 32][k16 step 4] u32; a_s has its lower column at bits 4s and its
  upper one at bits 16 + 4s; stored nibble = code + 8. Scales: 32 B per row tile, 8 pairs
  (row g, row g + 8).
  W8: 1,024 B per row tile, [k16 step 4][lane 32][8 B] in the order a0..a3, lower column first.
  Scales: 64 B per row tile, [group 0..1][8 pairs (row g, row g + 8)].
  BF16: 2,048 B per row tile, [k16 step 4][lane 32][16 B] in the same order.
  FP8: codes as W8; BF16 row scales [N padded] after the last tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from ginfer.sizes import align_up

TILE_N = 128
TILE_K = 64
ROW_TILE = 16  # rows of one mma fragment
ROW_ALIGNMENT = 16  # bytes, rows-v1


class Layout(StrEnum):
    """How the elements of a tensor lie in its payload."""

    CONTIGUOUS = "contiguous-le-v1"
    TILE = "tile128x64-v1"
    ROWS = "rows-v1"


@dataclass(frozen=True)
class StorageFormat:
    """One way to store numbers. `code` is stable and never reused.

    bits: per element, without scales. group_size: elements along K that share a scale (0: no
    scale, -1: the row).
    scale: element type of a scale, 'BF16', 'F16' or '' without scales.
    """

    code: int
    name: str
    bits: int
    group_size: int = 0
    scale: str = ""
    layouts: tuple[Layout, ...] = ()


_ANY = (Layout.CONTIGUOUS,)
_MATRIX = (Layout.TILE,)

BF16 = StorageFormat(1, "BF16", 16, layouts=(Layout.CONTIGUOUS, Layout.TILE, Layout.ROWS))
FP32 = StorageFormat(2, "FP32", 32, layouts=_ANY)
I32 = StorageFormat(3, "I32", 32, layouts=_ANY)
Q4G64_BF16S = StorageFormat(4, "Q4G64_BF16S", 4, 64, "BF16", _MATRIX)
Q4G64_F16S = StorageFormat(5, "Q4G64_F16S", 4, 64, "F16", _MATRIX)
W8G32_F16S = StorageFormat(6, "W8G32_F16S", 8, 32, "F16", (Layout.TILE, Layout.ROWS))
FP8_ROW = StorageFormat(7, "FP8_E4M3FN_ROW_BF16S", 8, -1, "BF16", _MATRIX)
NVFP4 = StorageFormat(
    8, "NVFP4", 4, 16, "E4M3"
)  # registered; its tile is laid down with its first package

FORMATS = {
    f.name: f for f in (BF16, FP32, I32, Q4G64_BF16S, Q4G64_F16S, W8G32_F16S, FP8_ROW, NVFP4)
}

TILE_NBYTES = {  # bytes of one 128 x 64 tile, scales included
    "BF16": 16_384,
    "Q4G64_BF16S": 4_352,
    "Q4G64_F16S": 4_352,
    "W8G32_F16S": 8_704,
    "FP8_E4M3FN_ROW_BF16S": 8_192,
}


def row_nbytes(fmt: StorageFormat, K: int) -> int:
    """Bytes of one row of a `rows-v1` tensor with K columns."""
    codes = K * fmt.bits // 8
    scales = K // fmt.group_size * 2 if fmt.group_size > 0 else 0
    return align_up(codes + scales, ROW_ALIGNMENT)


def payload_nbytes(fmt: StorageFormat, layout: Layout, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's payload. Raises ValueError for a pair or rank that is not legal.

    shape: [N, K] for tiles and rows (K a multiple of the group size for rows), anything up to rank
    16 for contiguous.
    """
    if layout not in fmt.layouts:
        raise ValueError(f"format {fmt.name} has no layout {layout}")
    if layout is Layout.CONTIGUOUS:
        if len(shape) > 16:
            raise ValueError(f"rank {len(shape)} exceeds 16")
        return prod(shape) * fmt.bits // 8
    if len(shape) != 2:
        raise ValueError(f"layout {layout} takes matrices, not rank {len(shape)}")
    N, K = shape
    if layout is Layout.ROWS:
        if fmt.group_size > 0 and K % fmt.group_size:
            raise ValueError(f"K = {K} is not a multiple of the group size {fmt.group_size}")
        return N * row_nbytes(fmt, K)
    padded_n = align_up(N, TILE_N)
    tiles = padded_n // TILE_N * (align_up(K, TILE_K) // TILE_K)
    row_scales = 2 * padded_n if fmt.group_size < 0 else 0
    return tiles * TILE_NBYTES[fmt.name] + row_scales
