"""Slices of K in decode linear: who computes which, their sums in turn, and results to memory.

Legend: N rows of W, T tokens, NT tiles of 8 tokens; c: a thread's sums of a 16-row tile,
[NT][rows g and g + 8][two tokens].
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint16, uint32

from ginfer.cuda.lib.fragment import fragment_offset
from ginfer.cuda.lib.numeric import silu
from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    bf16_from_f32,
    div_u32,
    f32_from_bits,
    ld_global_f32x4,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32,
    named_barrier,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_shared_f32,
    st_shared_u32,
)
from ginfer.cuda.linear.epilogue import Epilogue

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


def row_writer(NT: int) -> Any:
    """Device function: the sums of a warp's rows to a row-major y."""
    add_bf16, store_f32, sums = int(Epilogue.ADD_BF16), int(Epilogue.STORE_F32), NT * 4

    @cuda.jit(device=True, inline="always")
    def add(c, y, first_row, end_row, lane, T, N):
        """c += what is there, all of which is asked for before any of it is used."""
        old, last = cuda.local.array(sums, uint16), uint32(end_row - uint32(1))
        for n in range(NT):
            for i in range(4):
                row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1) * 8))
                t = uint32((lane & uint32(3)) * uint32(2) + uint32(n * 8 + (i & 1)))
                at = int64(min(t, uint32(T - uint32(1)))) * int64(N) + int64(min(row, last))
                old[n * 4 + i] = ld_global_u16(y + at * 2)
        for i in range(sums):
            c[i] = f32_from_bits(uint32(old[i]) << uint32(16)) + c[i]

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, lane, T, N, epilogue):
        if epilogue == uint32(add_bf16):
            add(c, y, first_row, end_row, lane, T, N)
        for n in range(NT):
            for i in range(4):
                row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1) * 8))
                t = uint32((lane & uint32(3)) * uint32(2) + uint32(n * 8 + (i & 1)))
                if t < T and row < end_row:
                    value = c[n * 4 + i]
                    at = int64(t) * int64(N) + int64(row)
                    if epilogue == uint32(store_f32):
                        st_global_f32(y + at * 4, value)
                    else:
                        st_global_u16(y + at * 2, bf16_from_f32(value))

    return write


def old_results(NT: int) -> Any:
    """Device function fetch(old, y, first_row, lane, T, N): what results are added to, BF16, of a
    warp of one row tile."""

    @cuda.jit(device=True, inline="always")
    def fetch(old, y, first_row, lane, T, N):
        for i in range(4 * NT):
            row = uint32(first_row + (lane >> uint32(2)) + uint32(((i >> 1) & 1) * 8))
            t = uint32((lane & uint32(3)) * uint32(2) + uint32((i >> 2) * 8 + (i & 1)))
            row, t = min(row, uint32(N - uint32(1))), min(t, uint32(T - uint32(1)))
            old[i] = ld_global_u16(y + (int64(t) * int64(N) + int64(row)) * 2)

    return fetch


@cuda.jit(device=True, inline="always")
def gated_place(y, first_row, lane, NT):
    """Where a lane's first sum of gate and up goes, in fragment order, of a pair of row tiles."""
    row = uint32((first_row >> uint32(5)) * uint32(16) + (lane >> uint32(2)))
    return y + int64(_offset(uint32((lane & uint32(3)) * uint32(2)), row, uint32(NT)))


@cuda.jit(device=True, inline="always")
def put_gated(at, i, gate, up):
    """silu(gate) * up of sum i to its place; at: `gated_place`."""
    to = at + (i >> 2) * X_TILE + (i & 1) * 16 + ((i >> 1) & 1) * 128
    st_global_u16(to, bf16_from_f32(silu(gate) * up))


def _write_silu(NT: int, threads: int) -> Any:
    """Device function: silu(gate) * up in fragment order; 16-row tiles alternate gate and up, so
    that two warps have the rows of both. Each takes half of the columns.

    Padding of rows and tokens has sums of zero and stays zero.
    """
    first = NT - NT // 2  # tiles of columns that the warp of the gates writes
    sums, mine = NT * 4, first * 4

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
                for i in range(mine, sums):
                    put_gated(at, i, ld_shared_f32(uint32(place + uint32(i * 128))), c[i])
            else:
                for i in range(mine):
                    put_gated(at, i, c[i], ld_shared_f32(uint32(place + uint32(i * 128))))
        named_barrier(meet, uint32(threads))

    return write


def room_nbytes(NT: int, threads: int) -> int:
    """Shared memory that result_writer's function needs as `room`."""
    return threads // 2 * NT * 16


def result_writer(NT: int, threads: int) -> Any:
    """Device function of `threads` threads, which meet at named barrier `meet`: the sums of a
    warp's rows from `first_row`, those below `end_row`, a multiple of 128, to y by the epilogue."""
    write_rows, write_silu = row_writer(NT), _write_silu(NT, threads)
    silu_up = int(Epilogue.SILU_UP)

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, warp, lane, room, T, N, epilogue, meet):
        if epilogue == uint32(silu_up):
            write_silu(c, y, first_row, end_row, warp, lane, room, meet)
        else:
            write_rows(c, y, first_row, min(end_row, N), lane, T, N, epilogue)

    return write
