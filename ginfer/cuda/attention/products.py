"""Products of 64-token tiles in shared memory: scores Q K^T, and weights times values.

Tiles are panels as in `pages`. A warp multiplies 16 rows; sums are FP32, in ascending dims (scores)
or tokens (values). A lane 4 g + t holds of a 16 x 8 tile rows g and g + 8, columns 2 t and 2 t + 1.
"""

from __future__ import annotations

from numba import cuda, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES, chunk_at
from ginfer.cuda.lib.ptx import ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16_bf16


@cuda.jit(device=True, inline="always")
def mma_add(c, p, a, b0, b1):
    """c[p : p + 4] += A B of one 16-deep step."""
    r = mma_m16n8k16_bf16(a[0], a[1], a[2], a[3], b0, b1, c[p], c[p + 1], c[p + 2], c[p + 3])
    for i in range(4):
        c[p + i] = r[i]


@cuda.jit(device=True, inline="always")
def row_fragment(tile, row, step, panel_nbytes, lane):
    """A operand: rows row .. row + 15 and 16-element step of a tile of panels."""
    r = uint32(row + (lane & uint32(15)))
    chunk = uint32((uint32(step) & uint32(3)) * uint32(2) + (lane >> uint32(4)))
    panel = uint32(uint32(step) >> uint32(2))
    return ldmatrix_x4(uint32(tile + panel * uint32(panel_nbytes) + chunk_at(r, chunk)))


@cuda.jit(device=True, inline="always")
def key_pair(tile, token, step, lane):
    """B operands of two steps, from `step` (even): eight tokens of a plane of keys."""
    r = uint32(token + (lane & uint32(7)))
    chunk = uint32((uint32(step) & uint32(3)) * uint32(2) + (lane >> uint32(3)))
    panel = uint32(uint32(step) >> uint32(2))
    return ldmatrix_x4(uint32(tile + panel * uint32(PANEL_NBYTES) + chunk_at(r, chunk)))


@cuda.jit(device=True, inline="always")
def value_pair(plane, step, dim, lane):
    """B operands of two tiles of eight dims from `dim` (a multiple of 16): tokens 16 step ..
    16 step + 15 of a plane of values."""
    r = uint32(uint32(step * 16) + (lane & uint32(15)))
    chunk = uint32(((dim & uint32(63)) >> uint32(3)) + (lane >> uint32(4)))
    panel = uint32(dim >> uint32(6))
    return ldmatrix_x4_trans(uint32(plane + panel * uint32(PANEL_NBYTES) + chunk_at(r, chunk)))
