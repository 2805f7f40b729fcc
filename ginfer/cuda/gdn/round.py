"""A column of every row of a decode round: convolution, delta rule and gated norm in one kernel.

The numbers of `conv` and `step`. A block takes a row and a value head; the value heads of a key
head are a cluster, for they share its channels and their history: the first of them writes it, once
all have read it. Legend as in `step` and `conv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.gdn.conv import TAPS
from ginfer.cuda.gdn.recurrence import (
    GATES,
    HELD,
    PLACE_NBYTES,
    QUERY,
    THREADS,
    WIDTH,
    difference,
    load_state,
    multiply,
    offset_in_head,
    place_column,
    store_state,
    update,
)
from ginfer.cuda.gdn.step import NOWHERE, finish_column, give
from ginfer.cuda.lib.fragment import pair_store, tiles_of
from ginfer.cuda.lib.numeric import high_f32, low_f32, pack_bf16, row_of_32, silu
from ginfer.cuda.lib.ptx import (
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    let_next_kernel_start,
    ptx_op,
    shared_address,
    st_global_u32,
    st_shared_u32,
    wait_for_previous_kernel,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.gdn.step import GdnLayer
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

MOST_SHARING = 8  # value heads of a key head: blocks of a cluster
PARTS = 3  # query, key, value: four channels of a lane each

cluster_arrive = ptx_op("barrier.cluster.arrive.aligned;")
cluster_wait = ptx_op("barrier.cluster.wait.aligned;")


@cuda.jit(device=True, inline="always")
def nothing():
    """In place of a barrier."""


@kernel(*(int64,) * 11, *(uint32,) * 4, float32)
def gdn_round_kernel(clusters: int):  # type: ignore[no-untyped-def]
    """Arguments out, mix, ab, state, gates, w, taps, history, state_in, state_out, W, HK, HV,
    first_tiles, rest_tiles, eps. Column t of `mix` is that of row t. clusters: of HV / HK
    blocks."""
    finish = finish_column(pair_store(1))
    arrive, meet = (cluster_arrive, cluster_wait) if clusters else (nothing, nothing)
    place_words, num_words, num_taps = PLACE_NBYTES // 4, TAPS * 2, TAPS * 4
    newest, all_parts = (TAPS - 1) * 2, PARTS * 64

    @cuda.jit(device=True, inline="always")
    def channel(part, heads, lane):
        """The lane's first channel of a part: query, key or value."""
        h, key, HK, _ = heads
        head = uint32(HK * uint32(2) + h)
        if part < uint32(2):
            head = uint32(HK * part + key)
        return int64(head) * WIDTH + int64(lane) * 4

    @cuda.jit(device=True, inline="always")
    def load_before(v, f, history, taps, X, c):
        """History and taps of four channels."""
        for k in range(TAPS):
            q = ld_global_f32x4(taps + (X * k + c) * 4)
            for j in range(4):
                f[4 * k + j] = q[j]
        for k in range(TAPS - 1):
            at = history + (X * k + c) * 2
            v[2 * k], v[2 * k + 1] = ld_global_u32(at), ld_global_u32(at + 4)

    @cuda.jit(device=True, inline="always")
    def convolved(v, f, j):
        """Word j of a part: two channels."""
        i = 2 * j
        low, high = f[i] * low_f32(v[j]), f[i + 1] * high_f32(v[j])
        for k in range(1, TAPS):
            word, at = v[2 * k + j], 4 * k + i
            low, high = fma_f32(f[at], low_f32(word), low), fma_f32(f[at + 1], high_f32(word), high)
        return pack_bf16(silu(low), silu(high))

    @cuda.jit(device=True, inline="always")
    def words_of(words, part, lane):
        at = uint32(words + uint32(part * 8 * 32) + lane * uint32(8))
        return ld_shared_u32x2(at)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 2))
    def gdn_round(
        out,
        mix,
        ab,
        state,
        gates,
        w,
        taps,
        history,
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
        words = shared_address(cuda.shared.array(all_parts, uint32))
        s, z = cuda.local.array(HELD, float32), cuda.local.array(2, uint32)
        p, o = cuda.local.array(4, float32), cuda.local.array(4, float32)
        v, f = cuda.local.array(num_words, uint32), cuda.local.array(num_taps, float32)
        let_next_kernel_start()
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        t = div_u32(uint32(cuda.blockIdx.x), HV)
        h = uint32(uint32(cuda.blockIdx.x) - t * HV)
        sharing = div_u32(HV, HK)
        key = div_u32(h, sharing)
        heads, X = (h, key, HK, HV), int64(HK * uint32(2) + HV) * WIDTH
        slot = ld_global_u32(row_of_32(state_in, t))
        share = int64(h) * (WIDTH * WIDTH * 4) + offset_in_head(thread)
        slot_nbytes, history_nbytes = int64(HV) * (WIDTH * WIDTH * 4), X * (2 * TAPS - 2)
        load_state(s, state + int64(slot) * slot_nbytes + share)
        part = channel(warp, heads, lane)
        if warp < uint32(PARTS):
            load_before(v, f, history + int64(slot) * history_nbytes, taps, X, part)
        wait_for_previous_kernel()
        row = mix + int64(t) * W * 2
        if warp < uint32(PARTS):
            v[newest], v[newest + 1] = (
                ld_global_u32(row + part * 2),
                ld_global_u32(row + part * 2 + 4),
            )
            at = uint32(words + thread * uint32(8))
            st_shared_u32(at, convolved(v, f, 0))
            st_shared_u32(uint32(at + uint32(4)), convolved(v, f, 1))
        arrive()
        cuda.syncthreads()
        if warp == 0:
            at = row + (X + int64(h) * WIDTH + int64(lane) * 4) * 2
            z[0], z[1] = ld_global_u32(at), ld_global_u32(at + 4)
            all_words = (
                words_of(words, 0, lane),
                words_of(words, 1, lane),
                words_of(words, 2, lane),
            )
            place_column(place, all_words, ab + int64(t) * int64(HV) * 8, gates, heads, lane)
        cuda.syncthreads()
        rows = uint32(place + (lane >> uint32(2)) * uint32(16))
        scalars = ld_shared_u32x4(uint32(place + uint32(GATES)))
        both = (f32_from_bits(scalars[0]), f32_from_bits(scalars[1]))
        multiply(p, s, rows)
        multiply(o, s, uint32(rows + uint32(QUERY)))
        difference(p, place, both, thread)
        give(results, o, p, both, f32_from_bits(scalars[2]), thread)
        update(s, p, both[0], rows)
        cuda.syncthreads()
        meet()
        slot = ld_global_u32(row_of_32(state_out, t))
        if warp == 0:
            tiles, width = (first_tiles, rest_tiles), uint32(HV * uint32(WIDTH))
            finish(out, results, z, w, t, h, width, tiles, eps, lane)
        if slot == uint32(NOWHERE):
            return
        if warp < uint32(PARTS) and (warp == uint32(2) or h == key * sharing):
            new = history + int64(slot) * history_nbytes + part * 2
            for k in range(TAPS - 1):
                at = new + X * k * 2
                st_global_u32(at, v[2 * k + 2])
                st_global_u32(at + 4, v[2 * k + 3])
        store_state(state + int64(slot) * slot_nbytes + share, s)

    return Build(gdn_round, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel, where kernels start early."""
    if starts_early(capability):
        yield gdn_round_kernel(1)


@dataclass(frozen=True)
class RoundRows:
    """Device addresses of the slots read and written [B], u32; B rows of one column each."""

    state_in: int
    state_out: int
    B: int


@dataclass(frozen=True)
class RawInputs:
    """Addresses: mix [B][W] BF16, ab [B][2 HV] FP32, taps [taps][X] FP32, and the layer's history
    [slots][taps - 1][X] BF16."""

    mix: int
    ab: int
    taps: int
    history: int


def has_round(queue: Queue, layer: GdnLayer) -> bool:
    """Whether `gdn_round` has a variant for this layer here."""
    return queue.early and layer.HV % layer.HK == 0 and layer.HV // layer.HK <= MOST_SHARING


def gdn_round(
    queue: Queue, out: int, inputs: RawInputs, *, tables: tuple[RoundRows, GdnLayer]
) -> None:
    """out [B, HV V] BF16 in fragment order; state and history move from slot state_in to
    state_out."""
    rows, layer = tables
    queue.launch(
        gdn_round_kernel(1),
        (rows.B * layer.HV,),
        *(out, inputs.mix, inputs.ab, layer.state, layer.gates, layer.w),
        *(inputs.taps, inputs.history, rows.state_in, rows.state_out, layer.W),
        *(layer.HK, layer.HV, *tiles_of(rows.B), layer.eps),
        cluster=layer.HV // layer.HK,
    )
