"""Slices of K in decode linear: who computes which, their sums in turn, and results to memory.

Legend: N rows of W, T tokens, NT tiles of 8 tokens; c: a thread's sums of a 16-row tile,
[NT][rows g and g + 8][two tokens].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint16, uint32

from ginfer.cuda.lib.fragment import fragment_offset
from ginfer.cuda.lib.numeric import high_f32, low_f32, pack_bf16, silu
from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    div_u32,
    ld_global_f32x4,
    ld_global_u16,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32,
    named_barrier,
    shfl_xor_u32,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_global_u32,
    st_shared_f32,
    st_shared_u32,
    transpose_u16,
)
from ginfer.cuda.linear.epilogue import Epilogue

if TYPE_CHECKING:
    from collections.abc import Collection

X_TILE = 1024  # bytes of 8 tokens x 64 columns
SLICE_TILES = 4  # slices of K begin at multiples of 256 columns
MAX_SLICES = 16  # of a row block that shares none of them

_offset = cuda.jit(device=True, inline="always")(fragment_offset)


def item_locator() -> Any:
    """Device function: (row block, end of the row blocks of its kind, first k tile, k tiles) of an
    item, of which the first `sliced` are slices."""

    @cuda.jit(device=True, inline="always")
    def locate(item, sliced, k_tiles, blocks, whole, slices):
        if item >= sliced:
            return uint32(item - sliced), whole, uint32(0), k_tiles
        group = div_u32(item, slices)
        s = uint32(item - group * slices)
        steps = uint32((k_tiles + uint32(SLICE_TILES - 1)) >> uint32(2))
        base = div_u32(steps, slices)
        extra = uint32(steps - base * slices)
        first = uint32(uint32(s * base + min(s, extra)) << uint32(2))
        count = uint32(uint32(base + (uint32(1) if s < extra else uint32(0))) << uint32(2))
        block = uint32(whole + group)
        return block, blocks, first, min(count, uint32(k_tiles - first))

    return locate


def slice_exchange(sums: int, threads: int) -> Any:
    """Device function of `threads` threads, which meet at named barrier `meet`: publish a slice;
    the last block to arrive gets c = all slices, ascending, and True. place: (counter, first slot
    of its slices, own slot)."""
    quarters, slot_bytes = sums // 4, sums * threads * 4
    batch = 4 if sums <= 8 else 1  # slices that it reads before it adds them: registers
    batch_sums = batch * sums

    @cuda.jit(device=True, inline="always")
    def exchange(c, workspace, counters, place, slices, thread, flag, meet):
        group, first, slot = place
        at = workspace + int64(slot) * slot_bytes + int64(thread) * 16
        for i in range(quarters):
            to = at + i * (threads * 16)
            st_global_f32x4(to, c[i * 4], c[i * 4 + 1], c[i * 4 + 2], c[i * 4 + 3])
        last = uint32(slices - uint32(1))
        named_barrier(meet, uint32(threads))
        if thread == 0:  # its release covers what the barrier has ordered before it
            st_shared_u32(flag, atomic_inc_u32(counters + int64(group) * 4, last))
        named_barrier(meet, uint32(threads))
        if ld_shared_u32(flag) != last:
            return False
        at += (int64(first) - int64(slot)) * slot_bytes
        for i in range(sums):
            c[i] = float32(0.0)
        values = cuda.local.array(batch_sums, float32)
        done = uint32(0)
        while done < slices:
            for b in range(batch):
                source = at + int64(min(uint32(done + uint32(b)), last)) * slot_bytes
                for i in range(quarters):
                    q = ld_global_f32x4(source + i * (threads * 16))
                    for j in range(4):
                        values[b * sums + i * 4 + j] = q[j]
            for b in range(batch):
                if uint32(done + uint32(b)) <= last:
                    for i in range(sums):
                        c[i] = c[i] + values[b * sums + i]
            done = uint32(done + uint32(batch))
        return True

    return exchange


@cuda.jit(device=True, inline="always")
def _swap_halves(a, b, lane):
    """a and b, once the lower 16 lanes have given b for the a of the upper ones."""
    upper = lane >= uint32(16)
    got = shfl_xor_u32(a if upper else b, uint32(16))
    return (got if upper else a), (b if upper else got)


@cuda.jit(device=True, inline="always")
def _row_place(first_row, lane):
    """(row, token) of a lane's first word of BF16 results in row-major order: two rows of a token,
    so that eight lanes have 32 bytes in a row. The second word's token is four further."""
    row = uint32(first_row + (lane >> uint32(4)) * uint32(8) + (lane & uint32(3)) * uint32(2))
    return row, uint32((lane >> uint32(2)) & uint32(3))


def old_results(NT: int) -> Any:
    """Device function fetch(old, y, first_row, lane, T, N): what results are added to, BF16, of a
    warp of one row tile: 2 * NT words as they lie in memory, for `add_old`."""

    @cuda.jit(device=True, inline="always")
    def fetch(old, y, first_row, lane, T, N):
        row, token = _row_place(first_row, lane)
        row = min(row, uint32(N - uint32(1)) & uint32(0xFFFFFFFE))
        for i in range(2 * NT):
            t = min(uint32(token + uint32(4 * i)), uint32(T - uint32(1)))
            at = y + (int64(t) * int64(N) + int64(row)) * 2
            if N & uint32(1) == 0:
                old[i] = ld_global_u32(at)
            else:
                next_row = min(uint32(row + uint32(1)), uint32(N - uint32(1)))
                high = ld_global_u16(y + (int64(t) * int64(N) + int64(next_row)) * 2)
                old[i] = uint32(ld_global_u16(at)) | uint32(uint32(high) << uint32(16))

    return fetch


@cuda.jit(device=True, inline="always")
def add_old(c, p, old, i, lane):
    """c[p : p + 4], the sums of a tile, += its old results, old[i : i + 2]."""
    low, high = _swap_halves(old[i], old[i + 1], lane)
    for h in range(2):
        pair = transpose_u16(high if h else low)
        c[p + 2 * h] = low_f32(pair) + c[p + 2 * h]
        c[p + 2 * h + 1] = high_f32(pair) + c[p + 2 * h + 1]


def stores(epilogues: Collection[Epilogue]) -> set[Epilogue]:
    """What is left of epilogues once old results have been added."""
    return {Epilogue.STORE_BF16 if e == Epilogue.ADD_BF16 else e for e in epilogues}


def row_writer(NT: int, epilogues: Collection[Epilogue]) -> Any:
    """Device function: the sums of a warp's rows to a row-major y, by one of the epilogues, or
    stored as they are (FP32)."""
    add_bf16, store_f32 = int(Epilogue.ADD_BF16), int(Epilogue.STORE_F32)
    adds, fetch, num_old = Epilogue.ADD_BF16 in epilogues, old_results(NT), 2 * NT

    @cuda.jit(device=True, inline="always")
    def write_f32(c, y, first_row, end_row, lane, T, N):
        for n in range(NT):
            for i in range(4):
                row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1) * 8))
                t = uint32((lane & uint32(3)) * uint32(2) + uint32(n * 8 + (i & 1)))
                if t < T and row < end_row:
                    st_global_f32(y + (int64(t) * int64(N) + int64(row)) * 4, c[n * 4 + i])

    @cuda.jit(device=True, inline="always")
    def put(y, row, end_row, t, T, N, word):
        """Two rows of a token. Where N is odd words of 4 bytes are not aligned, and the last row
        is alone."""
        at = y + (int64(t) * int64(N) + int64(row)) * 2
        if t < T and row < end_row:
            if N & uint32(1) == 0:
                st_global_u32(at, word)
            else:
                st_global_u16(at, uint16(word & uint32(0xFFFF)))
                if uint32(row + uint32(1)) < end_row:
                    st_global_u16(at + 2, uint16(word >> uint32(16)))

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, lane, T, N, epilogue):
        if epilogue == uint32(store_f32):
            write_f32(c, y, first_row, end_row, lane, T, N)
        else:
            if adds and epilogue == uint32(add_bf16):  # all are asked for before any is used
                old = cuda.local.array(num_old, uint32)
                fetch(old, y, first_row, lane, T, N)
                for n in range(NT):
                    add_old(c, 4 * n, old, 2 * n, lane)
            row, token = _row_place(first_row, lane)
            for n in range(NT):
                low = transpose_u16(pack_bf16(c[4 * n], c[4 * n + 1]))
                high = transpose_u16(pack_bf16(c[4 * n + 2], c[4 * n + 3]))
                low, high = _swap_halves(low, high, lane)
                t = uint32(token + uint32(8 * n))
                put(y, row, end_row, t, T, N, low)
                put(y, row, end_row, uint32(t + uint32(4)), T, N, high)

    return write


@cuda.jit(device=True, inline="always")
def gated_place(y, first_row, lane, NT):
    """Where a lane's first word of a pair of row tiles goes, gate times up in fragment order: two
    rows of a token."""
    row = uint32((first_row >> uint32(5)) * uint32(16) + (lane & uint32(3)) * uint32(2))
    return y + int64(_offset(uint32(lane >> uint32(2)), row, uint32(NT)))


@cuda.jit(device=True, inline="always")
def put_gated(at, n, half, gates, ups):
    """silu(gate) * up of two tokens of a lane's row of tile n to `at` (`gated_place`)."""
    pair = pack_bf16(silu(gates[0]) * ups[0], silu(gates[1]) * ups[1])
    st_global_u32(at + n * X_TILE + half * 128, transpose_u16(pair))


def _write_silu(NT: int, threads: int) -> Any:
    """Device function: silu(gate) * up in fragment order; 16-row tiles alternate gate and up, so
    that two warps have the rows of both. Each takes half of the columns.

    Padding of rows and tokens has sums of zero and stays zero.
    """
    first = NT - NT // 2  # tiles of columns that the warp of the gates writes
    sums, mine = NT * 4, first * 4

    @cuda.jit(device=True, inline="always")
    def other_pair(at):
        return ld_shared_f32(at), ld_shared_f32(uint32(at + uint32(128)))

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, warp, lane, room, meet):
        at = gated_place(y, first_row, lane, NT)
        place = uint32(room + (warp >> uint32(1)) * uint32(sums * 128) + lane * uint32(4))
        if warp & uint32(1):
            for i in range(mine):
                st_shared_f32(uint32(place + uint32(i * 128)), c[i])
        else:
            for i in range(mine, sums):
                st_shared_f32(uint32(place + uint32(i * 128)), c[i])
        named_barrier(meet, uint32(threads))
        if first_row < end_row:
            if warp & uint32(1):
                for i in range(mine, sums, 2):
                    gates = other_pair(uint32(place + uint32(i * 128)))
                    put_gated(at, i >> 2, (i >> 1) & 1, gates, (c[i], c[i + 1]))
            else:
                for i in range(0, mine, 2):
                    ups = other_pair(uint32(place + uint32(i * 128)))
                    put_gated(at, i >> 2, (i >> 1) & 1, (c[i], c[i + 1]), ups)
        named_barrier(meet, uint32(threads))

    return write


def room_nbytes(NT: int, threads: int) -> int:
    """Shared memory that result_writer's function needs as `room`."""
    return threads // 2 * NT * 16


def result_writer(NT: int, threads: int, epilogues: Collection[Epilogue]) -> Any:
    """Device function of `threads` threads, which meet at named barrier `meet`: the sums of a
    warp's rows from `first_row`, those below `end_row`, a multiple of 128, to y by one of the
    epilogues."""
    write_rows, write_silu = row_writer(NT, epilogues), _write_silu(NT, threads)
    gates, silu_up = Epilogue.SILU_UP in epilogues, int(Epilogue.SILU_UP)

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, warp, lane, room, T, N, epilogue, meet):
        if gates and epilogue == uint32(silu_up):
            write_silu(c, y, first_row, end_row, warp, lane, room, meet)
        else:
            write_rows(c, y, first_row, min(end_row, N), lane, T, N, epilogue)

    return write
