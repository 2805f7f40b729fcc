"""Gated DeltaNet column after column (decode family), with the gated norm of its results.

Per value head, S [K, V]: S is read once per round into registers, then for each column
  k = unit(k), q = unit(q) / sqrt(K), decay = e^g, g = -e^A_log softplus(a + dt_bias), beta =
  sigmoid(b); d = beta (v - decay S^T k); o = decay S^T q + (k . q) d; S = decay S + k d^T;
  out = o / rms(o) * w * silu(z).
A slot is written once per round; a row with state_out = NOWHERE leaves no trace (verification).
Results of up to AHEAD columns wait in shared memory until the last of them is there.

Legend: T columns, HK key heads, HV value heads, K = V = 128, X = 2 HK K + HV V channels. Columns of
`convolved`: q [HK, K], k [HK, K], v [HV, V]; z follows X in `mix`; `ab`: a [HV], b [HV] FP32.
Oracle: tests.oracles.gdn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.gdn.recurrence import (
    AHEAD,
    GATES,
    HELD,
    PLACE_NBYTES,
    QUERY,
    THREADS,
    WIDTH,
    difference,
    load_column,
    load_state,
    multiply,
    offset_in_head,
    own_column,
    store_state,
    update,
)
from ginfer.cuda.lib.fragment import pair_store, tiles_of
from ginfer.cuda.lib.numeric import (
    follow_late,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    silu,
    warp_sum,
)
from ginfer.cuda.lib.ptx import (
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_u32x4,
    rsqrt_approx,
    shared_address,
    st_shared_f32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.gdn.conv import Rows
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

NOWHERE = 0xFFFFFFFF


@cuda.jit(device=True, inline="always")
def give(results, total, d, gates, kq, thread):
    """One of two lanes that have a column's sums: o = decay S^T q + (k . q) d."""
    if thread & uint32(16) == 0:
        four = uint32((thread >> uint32(5)) * uint32(4) + (thread & uint32(3)))
        at = uint32(four * uint32(4) + own_column(uint32(thread & uint32(31))))
        o = fma_f32(kq, d, gates[0] * total)
        st_shared_f32(uint32(results + at * uint32(4)), o)


def finish_column(store: Any) -> Any:
    """Device function finish, which puts pairs with `store`."""

    @cuda.jit(device=True, inline="always")
    def finish(out, results, z, f, t, h, columns, tiles, eps, lane):
        """One warp: gated norm of a column's results; of the lane z: two words, f: four factors."""
        v = cuda.local.array(4, float32)
        q = ld_shared_u32x4(uint32(results + lane * uint32(16)))
        total = float32(0.0)
        for i in range(4):
            v[i] = f32_from_bits(q[i])
            total = fma_f32(v[i], v[i], total)
        inv = rsqrt_approx(warp_sum(total) / float32(WIDTH) + eps)
        column = uint32(h * uint32(WIDTH) + lane * uint32(4))
        for i in range(2):
            pair = z[i]
            low = v[2 * i] * inv * f[2 * i] * silu(low_f32(pair))
            high = v[2 * i + 1] * inv * f[2 * i + 1] * silu(high_f32(pair))
            place = uint32(column + uint32(2 * i))
            store(out, t, place, columns, tiles[0], tiles[1], pack_bf16(low, high))

    return finish


@kernel(*(int64,) * 11, *(uint32,) * 4, float32)
def gdn_step_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments out, convolved, mix, ab, state, gates, w, indptr, state_in, state_out, W, HK, HV,
    first_tiles, rest_tiles, eps. A block takes a row and a value head. Results are in fragment
    order.

    state: [slots][HV][K][V] FP32 of the layer. gates: [2][HV] FP32: -e^A_log, dt_bias. w: [V] FP32.
    W, an address-wide count: columns of `mix`.
    """
    (start, wait), finish = follow_late(early), finish_column(pair_store(1))
    place_words, result_words = AHEAD * PLACE_NBYTES // 4, AHEAD * WIDTH
    resident = 2 if early else 1  # on the sm_80 class two would spill

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, resident))
    def gdn_step(
        out,
        convolved,
        mix,
        ab,
        state,
        gates,
        w,
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
        places = shared_address(cuda.shared.array(place_words, float32))
        results = shared_address(cuda.shared.array(result_words, float32))
        s, z = cuda.local.array(HELD, float32), cuda.local.array(2, uint32)
        p = cuda.local.array(4, float32)
        start()
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        row = div_u32(uint32(cuda.blockIdx.x), HV)
        h = uint32(uint32(cuda.blockIdx.x) - row * HV)
        heads = (h, div_u32(h, div_u32(HV, HK)), HK, HV)
        X = int64(HK * uint32(2) + HV) * WIDTH
        slot = ld_global_u32(row_of_32(state_in, row))
        share = int64(h) * (WIDTH * WIDTH * 4) + offset_in_head(thread)
        slot_nbytes = int64(HV) * (WIDTH * WIDTH * 4)
        load_state(s, state + int64(slot) * slot_nbytes + share)
        t = ld_global_u32(row_of_32(indptr, row))
        end = ld_global_u32(row_of_32(indptr, uint32(row + uint32(1))))
        tiles, width = (first_tiles, rest_tiles), uint32(HV * uint32(WIDTH))
        rows = uint32(places + (lane >> uint32(2)) * uint32(16))
        mine = uint32(places + warp * uint32(PLACE_NBYTES))
        wait()
        while t < end:
            n, own = min(uint32(end - t), uint32(AHEAD)), int64(t + warp)
            if warp < n:
                at = ab + own * int64(HV) * 8
                load_column(mine, convolved + own * X * 2, at, gates, heads, lane)
                at = mix + (own * W + X + int64(h) * WIDTH + int64(lane) * 4) * 2
                z[0], z[1] = ld_global_u32(at), ld_global_u32(at + 4)
            cuda.syncthreads()
            c = uint32(0)
            while c < n:
                skip = uint32(c * uint32(PLACE_NBYTES))
                place, key = uint32(places + skip), uint32(rows + skip)
                scalars = ld_shared_u32x4(uint32(place + uint32(GATES)))
                both = (f32_from_bits(scalars[0]), f32_from_bits(scalars[1]))
                total = multiply(s, key, lane)
                o = multiply(s, uint32(key + uint32(QUERY)), lane)
                d = difference(p, total, place, both, thread)
                at_c = uint32(results + c * uint32(4 * WIDTH))
                give(at_c, o, d, both, f32_from_bits(scalars[2]), thread)
                update(s, p, both[0], key)
                c = uint32(c + uint32(1))
            cuda.syncthreads()
            if warp < n:
                at_c = uint32(results + warp * uint32(4 * WIDTH))
                f = ld_global_f32x4(w + int64(lane) * 16)
                finish(out, at_c, z, f, uint32(t + warp), h, width, tiles, eps, lane)
            t = uint32(t + n)
        slot = ld_global_u32(row_of_32(state_out, row))
        if slot != uint32(NOWHERE):
            store_state(state + int64(slot) * slot_nbytes + share, s)

    return Build(gdn_step, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel."""
    yield gdn_step_kernel(starts_early(capability))


@dataclass(frozen=True)
class GdnLayer:
    """Addresses of a layer's state [slots][HV][K][V], gates [2][HV] (-e^A_log, dt_bias) and norm w
    [V], all FP32; key and value heads; columns of `mix`; eps of the norm."""

    state: int
    gates: int
    w: int
    HK: int
    HV: int
    W: int
    eps: float


@dataclass(frozen=True)
class GdnInputs:
    """Addresses: convolved [T][X] and mix [T][W] BF16, ab [T][2 HV] FP32."""

    convolved: int
    mix: int
    ab: int


def gdn_step(
    queue: Queue,
    out: int,
    inputs: GdnInputs,
    *,
    T: int,
    tables: tuple[Rows, GdnLayer],
) -> None:
    """out [T, HV V] BF16 in fragment order; slots state_in are read, state_out written."""
    rows, layer = tables
    queue.launch(
        gdn_step_kernel(queue.early),
        (rows.B * layer.HV,),
        *(out, inputs.convolved, inputs.mix, inputs.ab, layer.state, layer.gates, layer.w),
        *(rows.indptr, rows.state_in, rows.state_out, layer.W),
        *(layer.HK, layer.HV, *tiles_of(T), layer.eps),
    )
