"""Gated DeltaNet of rows of one column (decode rounds): convolution, step and gated norm in one.

The numbers of `gdn.conv` and `gdn.step`, formula by formula; see there. A thread block takes a row
and a value head, and convolves what the head reads: its values, and with the other value heads of
its group the query and the key. Six warps have two channels a thread, the last one the norms. Old
state and history are read before the wait for the previous kernel, so a row's slots must differ.

Legend: as in `gdn.step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.gdn.conv import TAPS
from ginfer.cuda.gdn.recurrence import (
    GATES,
    HELD,
    PLACE_NBYTES,
    QUERY,
    THREADS,
    VALUE,
    WARPS,
    WIDTH,
    difference,
    load_state,
    multiply,
    offset_in_head,
    place_gates,
    place_key_query,
    store_state,
    update,
)
from ginfer.cuda.gdn.step import finish_column, give
from ginfer.cuda.lib.fragment import pair_store, tiles_of
from ginfer.cuda.lib.numeric import (
    follow_late,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    silu,
)
from ginfer.cuda.lib.ptx import (
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    shared_address,
    st_global_u32,
    st_shared_u32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.gdn.conv import Channels, Rows
    from ginfer.cuda.gdn.step import GdnInputs, GdnLayer
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

WORDS = WIDTH // 2  # of two channels in a head
LEAST_ROWS = 2  # one is as fast in two kernels


@kernel(*(int64,) * 12, *(uint32,) * 4, float32)
def gdn_column_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments out, mix, ab, state, gates, w, taps, history, indptr, state_in, state_out, W, HK,
    HV, first_tiles, rest_tiles, eps, as those of `conv_kernel` and `gdn_step_kernel`. Results are
    in fragment order."""
    (start, wait), finish = follow_late(early), finish_column(pair_store(1))
    place_words, raw_words, num_factors = PLACE_NBYTES // 4, 2 * WORDS, 2 * TAPS
    resident = 2 if early else 1  # as in the step
    last = WARPS - 1

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, resident))
    def gdn_column(
        out,
        mix,
        ab,
        state,
        gates,
        w,
        taps,
        history,
        indptr,
        state_in,
        state_out,
        W,
        HK,
        HV,
        first_tiles,
        rest_tiles,
        eps,
    ):
        place = shared_address(cuda.shared.array(place_words, float32))
        results = shared_address(cuda.shared.array(WIDTH, float32))
        raw = shared_address(cuda.shared.array(raw_words, uint32))
        s, f = cuda.local.array(HELD, float32), cuda.local.array(num_factors, float32)
        p, z = cuda.local.array(4, float32), cuda.local.array(2, uint32)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        row = div_u32(uint32(cuda.blockIdx.x), HV)
        h = uint32(uint32(cuda.blockIdx.x) - row * HV)
        group = div_u32(HV, HK)
        key = div_u32(h, group)
        X = int64(HK * uint32(2) + HV) * WIDTH
        slot = int64(ld_global_u32(row_of_32(state_in, row)))
        to_slot = int64(ld_global_u32(row_of_32(state_out, row)))
        t = ld_global_u32(row_of_32(indptr, row))
        share = int64(h) * (WIDTH * WIDTH * 4) + offset_in_head(thread)
        slot_nbytes = int64(HV) * (WIDTH * WIDTH * 4)
        load_state(s, state + slot * slot_nbytes + share)
        part, word = uint32(thread >> uint32(6)), uint32(thread & uint32(WORDS - 1))
        head = uint32(uint32(2) * HK + h)
        if part < uint32(2):
            head = uint32(part * HK + key)
        c = int64(head) * WIDTH + int64(word) * 2
        a, b, d = uint32(0), uint32(0), uint32(0)
        if part < uint32(3):
            old = history + (slot * (TAPS - 1) * X + c) * 2
            a, b, d = ld_global_u32(old), ld_global_u32(old + X * 2), ld_global_u32(old + X * 4)
            for k in range(TAPS):
                at = taps + (int64(k) * X + c) * 4
                f[2 * k], f[2 * k + 1] = ld_global_f32(at), ld_global_f32(at + 4)
        else:
            q = ld_global_f32x4(w + int64(lane) * 16)
            for j in range(4):
                f[j] = q[j]
            f[4] = ld_global_f32(gates + int64(h) * 4)
            f[5] = ld_global_f32(gates + int64(HV + h) * 4)
        wait()
        start()  # not before: weights that are asked for early hold up the linear in front
        mix += int64(t) * W * 2
        if part < uint32(3):
            e = ld_global_u32(mix + c * 2)
            low = fma_f32(f[2], low_f32(b), f[0] * low_f32(a))
            low = fma_f32(f[6], low_f32(e), fma_f32(f[4], low_f32(d), low))
            high = fma_f32(f[3], high_f32(b), f[1] * high_f32(a))
            high = fma_f32(f[7], high_f32(e), fma_f32(f[5], high_f32(d), high))
            to = uint32(raw + thread * uint32(4))
            if part == uint32(2):
                to = uint32(place + uint32(VALUE) + word * uint32(4))
            st_shared_u32(to, pack_bf16(silu(low), silu(high)))
            if part == uint32(2) or h == key * group:
                new = history + (to_slot * (TAPS - 1) * X + c) * 2
                st_global_u32(new, b)
                st_global_u32(new + X * 2, d)
                st_global_u32(new + X * 4, e)
        else:
            at = ab + (int64(t) * int64(HV) * 2 + int64(h)) * 4
            f[6], f[7] = ld_global_f32(at), ld_global_f32(at + int64(HV) * 4)
            at = mix + (X + int64(h) * WIDTH + int64(lane) * 4) * 2
            z[0], z[1] = ld_global_u32(at), ld_global_u32(at + 4)
        cuda.syncthreads()
        if warp == uint32(last):
            at = uint32(raw + lane * uint32(8))
            query, other = ld_shared_u32x2(at), ld_shared_u32x2(uint32(at + uint32(4 * WORDS)))
            product = place_key_query(place, other, query, lane)
            place_gates(place, (f[6], f[7]), (f[4], f[5]), product, lane)
        cuda.syncthreads()
        keys = uint32(place + (lane >> uint32(2)) * uint32(16))
        scalars = ld_shared_u32x4(uint32(place + uint32(GATES)))
        both = (f32_from_bits(scalars[0]), f32_from_bits(scalars[1]))
        total = multiply(s, keys, lane)
        o = multiply(s, uint32(keys + uint32(QUERY)), lane)
        delta = difference(p, total, place, both, thread)
        give(results, o, delta, both, f32_from_bits(scalars[2]), thread)
        cuda.syncthreads()
        if warp == uint32(last):
            width, tiles = uint32(HV * uint32(WIDTH)), (first_tiles, rest_tiles)
            finish(out, results, z, f, t, h, width, tiles, eps, lane)
        update(s, p, both[0], keys)
        store_state(state + to_slot * slot_nbytes + share, s)

    return Build(gdn_column, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel."""
    yield gdn_column_kernel(starts_early(capability))


def gdn_column(
    queue: Queue,
    out: int,
    inputs: GdnInputs,
    *,
    T: int,
    tables: tuple[Rows, GdnLayer, Channels],
) -> None:
    """out [T, HV V] BF16 in fragment order, from inputs.mix and .ab of T rows of one column; slots
    state_in are read, state_out, which are others, written: state and history."""
    rows, layer, channels = tables
    queue.launch(
        gdn_column_kernel(queue.early),
        (rows.B * layer.HV,),
        *(out, inputs.mix, inputs.ab, layer.state, layer.gates, layer.w),
        *(channels.taps, channels.history, rows.indptr, rows.state_in, rows.state_out, layer.W),
        *(layer.HK, layer.HV, *tiles_of(T), layer.eps),
    )
