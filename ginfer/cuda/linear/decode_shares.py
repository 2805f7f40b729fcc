"""Slices of many columns in decode linear on sm_90: who sends one finishes a share of the columns.

The slices of a row block are 32 KB each at 64 columns, and whoever brought all of them together
would be late by the time of some k tiles. So everyone sends and goes on; later, when the others
have sent theirs, a sender takes every so many-th tile of 8 columns of all slices, adds them in
ascending order to zero, writes the results, and frees the words (`decode_runs`).

Legend: NT tiles of 8 columns; own: which of a row block's slices the sender's is. A slot: [NT]
[thread][rows g and g + 8][two columns].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    any_lane_u32,
    bits_from_f32,
    f32_from_bits,
    ld_relaxed_u32x4,
    ld_shared_u32x4,
    named_barrier,
    st_relaxed_u32x4,
    st_shared_u32x4,
)
from ginfer.cuda.linear.decode_results import (
    X_TILE,
    add_old,
    gated_place,
    old_results,
    put_gated,
    row_writer,
    stores,
)
from ginfer.cuda.linear.epilogue import Epilogue

if TYPE_CHECKING:
    from collections.abc import Collection

AT_ONCE = 12  # tiles of slices that a thread asks for together
TILE = 4  # sums of a thread in a tile


def _gather(NT: int, threads: int) -> Any:
    """Device function gather(place, workspace, first, own, slices, thread): the share's tiles, sums
    of all slices, to `place` of shared memory, 16 bytes a thread and tile."""
    tile_bytes, slot_bytes = threads * 16, NT * threads * 16
    num_words = AT_ONCE * TILE

    @cuda.jit(device=True, inline="always")
    def following(n, s, slices):
        s = uint32(s + uint32(1))
        if s == slices:
            return uint32(n + slices), uint32(0)
        return n, s

    @cuda.jit(device=True, inline="always")
    def ask(v, at, n, s, slices):
        """Words of the next tiles; whether all have come."""
        for i in range(num_words):
            v[i] = uint32(1)
        for p in range(AT_ONCE):
            if n < uint32(NT):
                q = ld_relaxed_u32x4(at + int64(s) * slot_bytes + int64(n) * tile_bytes)
                for i in range(TILE):
                    v[p * TILE + i] = q[i]
            n, s = following(n, s, slices)
        missing = uint32(0)
        for i in range(num_words):
            missing = uint32(1) if v[i] == uint32(0) else missing
        return any_lane_u32(missing) == uint32(0)

    @cuda.jit(device=True, inline="always")
    def gather(place, workspace, first, own, slices, thread):
        at = workspace + int64(first) * slot_bytes + int64(thread) * 16
        v, total = cuda.local.array(num_words, uint32), cuda.local.array(TILE, float32)
        n, s, zero = own, uint32(0), uint32(0)
        for i in range(TILE):
            total[i] = float32(0.0)
        while n < uint32(NT):
            while not ask(v, at, n, s, slices):
                pass
            for p in range(AT_ONCE):
                if n < uint32(NT):
                    to = at + int64(s) * slot_bytes + int64(n) * tile_bytes
                    st_relaxed_u32x4(to, zero, zero, zero, zero)
                    for i in range(TILE):
                        total[i] = total[i] + f32_from_bits(v[p * TILE + i])
                    n, s = following(n, s, slices)
                    if s == zero:
                        a, b = bits_from_f32(total[0]), bits_from_f32(total[1])
                        c, d = bits_from_f32(total[2]), bits_from_f32(total[3])
                        st_shared_u32x4(place, a, b, c, d)
                        place = uint32(place + uint32(tile_bytes))
                        for i in range(TILE):
                            total[i] = float32(0.0)

    return gather


def _gated_writer(NT: int, threads: int) -> Any:
    """Device function: silu(gate) * up of the share's tiles in fragment order; even warps have the
    gates of the ups of the warp behind them."""
    tile_bytes = threads * 16

    @cuda.jit(device=True, inline="always")
    def write(y, place, first_row, own, slices, mine, meet):
        _, warp, lane = mine
        named_barrier(meet, uint32(threads))
        if warp & uint32(1) == 0:
            at, n = gated_place(y, first_row, lane, NT), own
            while n < uint32(NT):
                gates, ups = ld_shared_u32x4(place), ld_shared_u32x4(uint32(place + uint32(512)))
                to = at + int64(n) * X_TILE
                for h in range(2):
                    a = f32_from_bits(gates[2 * h]), f32_from_bits(gates[2 * h + 1])
                    b = f32_from_bits(ups[2 * h]), f32_from_bits(ups[2 * h + 1])
                    put_gated(to, 0, h, a, b)
                n, place = uint32(n + slices), uint32(place + uint32(tile_bytes))
        named_barrier(meet, uint32(threads))

    return write


def share_finisher(NT: int, threads: int, epilogues: Collection[Epilogue]) -> Any:
    """Device function finish(y, workspace, block, share, mine, how): this sender's share of a row
    block, once all slices are there. share: first slot, own, slices, two at least. mine: thread,
    warp and lane; epilogues and how: as `finisher`'s in `decode`."""
    tiles, tile_bytes = NT // 2, threads * 16  # of a share, at most
    num_old = 2 * tiles
    gather, write_gated = _gather(NT, threads), _gated_writer(NT, threads)
    adds, gates = Epilogue.ADD_BF16 in epilogues, Epilogue.SILU_UP in epilogues
    fetch, write_rows = old_results(1), row_writer(1, stores(epilogues))
    add_bf16, silu_up = int(Epilogue.ADD_BF16), int(Epilogue.SILU_UP)
    store_bf16, store_f32 = int(Epilogue.STORE_BF16), int(Epilogue.STORE_F32)

    @cuda.jit(device=True, inline="always")
    def write(y, place, old, rows, own, slices, lane, sizes):
        """Rows of y. rows: the warp's first, and their end."""
        T, N, epilogue = sizes
        last = uint32(store_bf16) if adds and epilogue == uint32(add_bf16) else epilogue
        nbytes = int64(4) if epilogue == uint32(store_f32) else int64(2)
        c = cuda.local.array(TILE, float32)
        for j in range(tiles):
            t = uint32((own + uint32(j) * slices) * uint32(8))
            if t < min(T, uint32(8 * NT)):
                q = ld_shared_u32x4(uint32(place + uint32(j * tile_bytes)))
                for i in range(TILE):
                    c[i] = f32_from_bits(q[i])
                if adds and epilogue == uint32(add_bf16):
                    add_old(c, 0, old, 2 * j, lane)
                at = y + int64(t) * int64(N) * nbytes
                write_rows(c, at, rows[0], rows[1], lane, uint32(T - t), N, last)

    @cuda.jit(device=True, inline="always")
    def finish(y, workspace, block, share, mine, how):
        thread, warp, lane = mine
        room, T, N, epilogue, meet = how
        first, own, slices = share
        first_row = uint32(block * uint32(128) + warp * uint32(16))
        old, some = cuda.local.array(num_old, uint32), cuda.local.array(2, uint32)
        for i in range(num_old):
            old[i] = uint32(0)
        if adds and epilogue == uint32(add_bf16):  # asked for while the slices are waited for
            for j in range(tiles):
                t = uint32((own + uint32(j) * slices) * uint32(8))
                if t < T:
                    fetch(some, y + int64(t) * int64(N) * 2, first_row, lane, uint32(T - t), N)
                    for i in range(2):
                        old[2 * j + i] = some[i]
        place = uint32(room + thread * uint32(16))
        gather(place, workspace, first, own, slices, thread)
        if gates and epilogue == uint32(silu_up):
            write_gated(y, place, first_row, own, slices, mine, meet)
        else:
            rows = (first_row, min(uint32(uint32(block + uint32(1)) * uint32(128)), N))
            write(y, place, old, rows, own, slices, lane, (T, N, epilogue))

    return finish
