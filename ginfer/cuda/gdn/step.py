"""Gated DeltaNet column after column (decode family), with the gated norm of its results.

Per value head, S [K, V]: S is read once per round into registers, then for each column
  k = unit(k), q = unit(q) / sqrt(K), decay = e^g, g = -e^A_log softplus(a + dt_bias), beta =
  sigmoid(b); d = beta (v - decay S^T k); o = decay S^T q + (k . q) d; S = decay S + k d^T;
  out = o / rms(o) * w * silu(z).
A slot is written once per round; a row with state_out = NOWHERE leaves no trace (verification).
Sums over K: eight per thread in ascending order, then 16 of those in ascending order, the same for
one column and for many.

Legend: T columns, HK key heads, HV value heads, K = V = 128, X = 2 HK K + HV V channels. Columns of
`convolved`: q [HK, K], k [HK, K], v [HV, V]; z follows X in `mix`; `ab`: a [HV], b [HV] FP32.
Oracle: tests.oracles.gdn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.fragment import pair_store, tiles_of
from ginfer.cuda.lib.numeric import (
    exp_f32,
    follow_late,
    high_f32,
    low_f32,
    pack_bf16,
    row_of_32,
    sigmoid,
    silu,
    softplus,
    warp_sum,
)
from ginfer.cuda.lib.ptx import (
    div_u32,
    fma_f32,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_f32,
    rsqrt_approx,
    shared_address,
    st_global_f32x4,
    st_shared_f32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.gdn.conv import Rows
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

WIDTH = 128  # of a key head and of a value head
THREADS, WARPS = 512, 16
NOWHERE = 0xFFFFFFFF
FORGOTTEN = -60.0  # e^g below is zero: it would only make subnormal numbers
L2_EPS = 1e-6


@cuda.jit(device=True, inline="always")
def decay_of(g):
    """e^g for g <= 0."""
    return exp_f32(g) if g > float32(FORGOTTEN) else float32(0.0)


@kernel(*(int64,) * 11, *(uint32,) * 4, float32)
def gdn_step_kernel(fragments: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments out, convolved, mix, ab, state, gates, w, indptr, state_in, state_out, W, HK, HV,
    first_tiles, rest_tiles, eps. A block takes a row and a value head.

    state: [slots][HV][K][V] FP32 of the layer. gates: [2][HV] FP32: -e^A_log, dt_bias. w: [V] FP32.
    W, an address-wide count: columns of `mix`.
    """
    (start, wait), store = follow_late(early), pair_store(fragments)
    held, parts = WIDTH * WIDTH // THREADS, 2 * WARPS * WIDTH
    per_warp, four, shorten = WIDTH // WARPS, 4 * WIDTH, WIDTH**-0.5
    resident = 2 if early else 1  # on the sm_80 class two would spill

    @cuda.jit(device=True, inline="always")
    def load_unit(to, at, scale, lane):
        """One warp: a head of q or k to shared memory, of length `scale`."""
        low, high = ld_global_u32(at + int64(lane) * 8), ld_global_u32(at + int64(lane) * 8 + 4)
        a, b, c, d = low_f32(low), high_f32(low), low_f32(high), high_f32(high)
        total = fma_f32(d, d, fma_f32(c, c, fma_f32(b, b, a * a)))
        inv = rsqrt_approx(warp_sum(total) + float32(L2_EPS)) * scale
        place = uint32(to + lane * uint32(16))
        st_shared_f32(place, a * inv)
        st_shared_f32(uint32(place + uint32(4)), b * inv)
        st_shared_f32(uint32(place + uint32(8)), c * inv)
        st_shared_f32(uint32(place + uint32(12)), d * inv)

    @cuda.jit(device=True, inline="always")
    def multiply(s, keys, queries, partial, warp, lane):
        """This thread's share of S^T k and S^T q to partial [k, q][warp][V]."""
        p = cuda.local.array(8, float32)
        for i in range(8):
            p[i] = float32(0.0)
        for i in range(per_warp):
            at = uint32((warp * uint32(per_warp) + uint32(i)) * uint32(4))
            k, q = ld_shared_f32(uint32(keys + at)), ld_shared_f32(uint32(queries + at))
            for j in range(4):
                p[j] = fma_f32(s[4 * i + j], k, p[j])
                p[4 + j] = fma_f32(s[4 * i + j], q, p[4 + j])
        at = uint32(partial + (warp * uint32(WIDTH) + lane * uint32(4)) * uint32(4))
        for j in range(4):
            st_shared_f32(uint32(at + uint32(4 * j)), p[j])
            st_shared_f32(uint32(at + uint32(WARPS * WIDTH * 4 + 4 * j)), p[4 + j])

    @cuda.jit(device=True, inline="always")
    def column_sum(partial, thread):
        """Sum of the warps' shares for element `thread` of [k, q][V]."""
        half = uint32(thread >> uint32(7))
        at = uint32(half * uint32(WARPS * WIDTH) + (thread & uint32(WIDTH - 1)))
        at = uint32(partial + at * uint32(4))
        total = float32(0.0)
        for i in range(WARPS):
            total = total + ld_shared_f32(uint32(at + uint32(i * WIDTH * 4)))
        return total

    @cuda.jit(device=True, inline="always")
    def finish(out, results, mix, w, t, h, X, columns, tiles, eps, lane):
        """One warp: gated norm of a column's results."""
        v = cuda.local.array(4, float32)
        total = float32(0.0)
        for i in range(4):
            v[i] = ld_shared_f32(uint32(results + (lane * uint32(4) + uint32(i)) * uint32(4)))
            total = fma_f32(v[i], v[i], total)
        inv = rsqrt_approx(warp_sum(total) / float32(WIDTH) + eps)
        column = uint32(h * uint32(WIDTH) + lane * uint32(4))
        z = mix + (int64(t) * columns[0] + int64(X) + int64(column)) * 2
        for i in range(2):
            pair = ld_global_u32(z + 4 * i)
            at = w + (int64(lane) * 4 + 2 * i) * 4
            low = v[2 * i] * inv * ld_global_f32(at) * silu(low_f32(pair))
            high = v[2 * i + 1] * inv * ld_global_f32(at + 4) * silu(high_f32(pair))
            place, width = uint32(column + uint32(2 * i)), columns[1]
            store(out, t, place, width, tiles[0], tiles[1], pack_bf16(low, high))

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
        partial = shared_address(cuda.shared.array(parts, float32))
        vectors = shared_address(cuda.shared.array(four, float32))
        s = cuda.local.array(held, float32)
        start()
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        row = div_u32(uint32(cuda.blockIdx.x), HV)
        h = uint32(uint32(cuda.blockIdx.x) - row * HV)
        key = div_u32(h, div_u32(HV, HK))
        X = uint32((HK * uint32(2) + HV) * uint32(WIDTH))
        keys, queries = uint32(vectors), uint32(vectors + uint32(4 * WIDTH))
        deltas, results = uint32(vectors + uint32(8 * WIDTH)), uint32(vectors + uint32(12 * WIDTH))
        slot = ld_global_u32(row_of_32(state_in, row))
        place = (int64(slot) * int64(HV) + int64(h)) * (WIDTH * WIDTH * 4)
        place += (int64(warp) * (per_warp * WIDTH) + int64(lane) * 4) * 4
        for i in range(per_warp):
            q = ld_global_f32x4(state + place + i * (WIDTH * 4))
            for j in range(4):
                s[4 * i + j] = q[j]
        t = ld_global_u32(row_of_32(indptr, row))
        end = ld_global_u32(row_of_32(indptr, uint32(row + uint32(1))))
        tiles, widths = (first_tiles, rest_tiles), (W, uint32(HV * uint32(WIDTH)))
        wait()
        while t < end:
            x = convolved + int64(t) * int64(X) * 2
            if warp == 0:
                load_unit(queries, x + int64(key) * (2 * WIDTH), float32(shorten), lane)
            elif warp == 1:
                load_unit(keys, x + int64(HK + key) * (2 * WIDTH), float32(1.0), lane)
            at = ab + (int64(t) * int64(HV) * 2 + int64(h)) * 4
            g = ld_global_f32(gates + int64(h) * 4) * softplus(
                ld_global_f32(at) + ld_global_f32(gates + int64(HV + h) * 4)
            )
            decay, beta = decay_of(g), sigmoid(ld_global_f32(at + int64(HV) * 4))
            cuda.syncthreads()
            multiply(s, keys, queries, partial, warp, lane)
            cuda.syncthreads()
            if thread < uint32(WIDTH):
                remembered = decay * column_sum(partial, thread)
                word = x + (int64(HK) * (2 * WIDTH) + int64(h) * WIDTH + int64(thread & ~1)) * 2
                pair = ld_global_u32(word)
                value = high_f32(pair) if thread & uint32(1) else low_f32(pair)
                delta = beta * (value - remembered)
                st_shared_f32(uint32(deltas + thread * uint32(4)), delta)
            elif thread < uint32(2 * WIDTH):
                to = uint32(results + (thread - uint32(WIDTH)) * uint32(4))
                st_shared_f32(to, decay * column_sum(partial, thread))
            cuda.syncthreads()
            for i in range(per_warp):
                at_k = uint32(keys + (warp * uint32(per_warp) + uint32(i)) * uint32(4))
                k = ld_shared_f32(at_k)
                for j in range(4):
                    d = ld_shared_f32(uint32(deltas + (lane * uint32(4) + uint32(j)) * uint32(4)))
                    s[4 * i + j] = fma_f32(k, d, decay * s[4 * i + j])
            if warp == 0:
                total = float32(0.0)
                for i in range(4):
                    at_k = uint32((lane * uint32(4) + uint32(i)) * uint32(4))
                    k = ld_shared_f32(uint32(keys + at_k))
                    total = fma_f32(k, ld_shared_f32(uint32(queries + at_k)), total)
                kq = warp_sum(total)
                for i in range(4):
                    at_v = uint32((lane * uint32(4) + uint32(i)) * uint32(4))
                    old = ld_shared_f32(uint32(results + at_v))
                    d = ld_shared_f32(uint32(deltas + at_v))
                    st_shared_f32(uint32(results + at_v), fma_f32(kq, d, old))
                finish(out, results, mix, w, t, h, X, widths, tiles, eps, lane)
            t = uint32(t + uint32(1))
            cuda.syncthreads()
        slot = ld_global_u32(row_of_32(state_out, row))
        if slot != uint32(NOWHERE):
            place = (int64(slot) * int64(HV) + int64(h)) * (WIDTH * WIDTH * 4)
            place += (int64(warp) * (per_warp * WIDTH) + int64(lane) * 4) * 4
            for i in range(per_warp):
                to = state + place + i * (WIDTH * 4)
                st_global_f32x4(to, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3])

    return Build(gdn_step, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Row-major results, and the fragment order that decode linear kernels read."""
    early = starts_early(capability)
    yield gdn_step_kernel(0, early)
    yield gdn_step_kernel(1, early)


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
    fragments: bool,
) -> None:
    """out [T, HV V] BF16, row-major or in fragment order; slots state_in are read, state_out
    written."""
    rows, layer = tables
    queue.launch(
        gdn_step_kernel(fragments, queue.early),
        (rows.B * layer.HV,),
        *(out, inputs.convolved, inputs.mix, inputs.ab, layer.state, layer.gates, layer.w),
        *(rows.indptr, rows.state_in, rows.state_out, layer.W),
        *(layer.HK, layer.HV, *tiles_of(T), layer.eps),
    )
