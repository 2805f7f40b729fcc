"""Order of activations: row-major, or the fragment order that the decode linear kernels read.

Fragment order keeps the first 64 tokens in tiles of 8, NT of them beside each other, and the others
behind them; see `ginfer.cuda.linear.decode`. Padding of tokens may hold anything finite.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int64, uint32

from ginfer.cuda.lib.ptx import st_global_u32, st_global_u32x4

GROUP = 64  # tokens of a launch


def fragment_offset(t: Any, k: Any, num_col_tiles: Any) -> Any:
    """Byte offset of element (token t of a group, column k): [k tile of 64][token tile of 8][8
    columns][token][column], the core matrices of wgmma and ldmatrix."""
    block = (k >> 6) * num_col_tiles + (t >> 3)
    return block * 1024 + ((k >> 3) & 7) * 128 + (t & 7) * 16 + (k & 7) * 2


_offset = cuda.jit(device=True, inline="always")(fragment_offset)


def column_tiles(T: int) -> int:
    """NT of T <= 64 tokens: the least width of the decode kernels that holds them."""
    return next(n for n in (1, 2, 4, 8) if n * 8 >= T)


def tiles_of(T: int) -> tuple[int, int]:
    """NT of the first 64 of T tokens, and of those behind them: scalars of the kernels, which use
    them for at most 128 tokens."""
    return column_tiles(min(T, GROUP)), column_tiles(min(max(T - GROUP, 1), GROUP))


def pair_store(fragments: int) -> Any:
    """Device function store(y, t, k, K, first, rest, pair): a BF16 pair to columns k and k + 1 (k
    even) of token t of activations [T, K]; first, rest: `tiles_of(T)`, unused when row-major. K is
    a multiple of 64 in fragment order."""

    @cuda.jit(device=True, inline="always")
    def store_fragment(y, t, k, K, first, rest, pair):
        if t < uint32(GROUP):
            st_global_u32(y + int64(_offset(t, k, first)), pair)
        else:
            behind = y + int64(K) * (2 * GROUP)
            st_global_u32(behind + int64(_offset(uint32(t - uint32(GROUP)), k, rest)), pair)

    @cuda.jit(device=True, inline="always")
    def store_row(y, t, k, K, first, rest, pair):
        st_global_u32(y + (int64(t) * int64(K) + int64(k)) * 2, pair)

    return store_fragment if fragments else store_row


def eight_store(fragments: int) -> Any:
    """As pair_store, of four pairs: columns k to k + 7, k a multiple of 8, in one store."""

    @cuda.jit(device=True, inline="always")
    def store_fragment(y, t, k, K, first, rest, pairs):
        at = y + int64(_offset(t, k, first))
        if t >= uint32(GROUP):
            at = y + int64(K) * (2 * GROUP) + int64(_offset(uint32(t - uint32(GROUP)), k, rest))
        st_global_u32x4(at, pairs[0], pairs[1], pairs[2], pairs[3])

    @cuda.jit(device=True, inline="always")
    def store_row(y, t, k, K, first, rest, pairs):
        at = y + (int64(t) * int64(K) + int64(k)) * 2
        st_global_u32x4(at, pairs[0], pairs[1], pairs[2], pairs[3])

    return store_fragment if fragments else store_row
