"""Linear for decode without bulk copies (sm_80 and later): y[t, n] = sum_k x[t, k] * W[n, k].

Legend: N rows of W, K columns of W, T tokens (columns of the batch), NT = tiles of 8 tokens.

A block takes one item: all of K, or one of the slices of K, for 128 rows of W, 16 per warp. Slices
come first, so that their exchange hides behind the rows that are whole. Stages of k tiles come
through a ring by cp.async. Numbers are those of `decode`: a scale group is one chain of
mma.m16n8k16 from zero, scaled and added in FP32 in ascending k; the last block to arrive adds the
slices in ascending order. Tokens lie in fragment order, see `ginfer.cuda.lib.fragment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.fragment import fragment_offset
from ginfer.cuda.lib.numeric import silu
from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    bf16_from_f32,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_2,
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32x4,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32,
    ldmatrix_x4,
    mma_m16n8k16_bf16,
    shared_address,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_shared_f32,
    st_shared_u32,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.plan import LaunchPlan, Shape

THREADS = 256
X_TILE = 1024  # bytes of 8 tokens x 64 columns
SLICE_TILES = 4  # slices of K begin at multiples of 256 columns
STAGES = 4
RING_NBYTES = 48 << 10  # two blocks share the smallest multiprocessors

_offset = cuda.jit(device=True, inline="always")(fragment_offset)


def _multiply(fmt: str, NT: int) -> Any:
    """Device function multiply(c, weights, tokens, warp, lane): c += one k tile."""
    f = UNPACK[fmt]
    load, fragment, scales, groups, words = f.load, f.fragment, f.scales, f.groups, f.words

    @cuda.jit(device=True, inline="always")
    def step(d, a, i, b0, b1):
        r = mma_m16n8k16_bf16(a[i], a[i + 1], a[i + 2], a[i + 3], b0, b1, d[0], d[1], d[2], d[3])
        for j in range(4):
            d[j] = r[j]

    @cuda.jit(device=True, inline="always")
    def multiply(c, weights, tokens, warp, lane):
        v = cuda.local.array(words, uint32)
        a = cuda.local.array(16, uint32)
        s = cuda.local.array(4, float32)  # rows g and g + 8 of each group
        d = cuda.local.array(4, float32)
        load(v, 0, weights, warp, lane)
        for i in range(4):
            r = fragment(v, 0, i)
            for j in range(4):
                a[4 * i + j] = r[j]
        for g in range(groups):
            s[2 * g], s[2 * g + 1] = scales(weights, warp, lane, uint32(g))
        at = uint32(tokens + lane * uint32(16))
        for n in range(NT):
            for half in range(2):
                q = ldmatrix_x4(uint32(at + uint32(n * X_TILE + half * 512)))
                if half < groups:
                    for j in range(4):
                        d[j] = float32(0.0)
                step(d, a, 8 * half, q[0], q[1])
                step(d, a, 8 * half + 4, q[2], q[3])
                if half >= 2 - groups:
                    g = 2 * half * (groups - 1)
                    for j in range(4):
                        c[4 * n + j] = fma_f32(d[j], s[g + (j >> 1)], c[4 * n + j])

    return multiply


def _write_rows(NT: int) -> Any:
    """Device function: the sums of a warp's rows to a row-major y."""
    add_bf16, store_f32 = int(Epilogue.ADD_BF16), int(Epilogue.STORE_F32)

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, lane, T, N, epilogue):
        for i in range(NT * 4):
            row = uint32(first_row + (lane >> uint32(2)) + uint32((i >> 1 & 1) * 8))
            t = uint32((lane & uint32(3)) * uint32(2) + uint32((i >> 2) * 8 + (i & 1)))
            if t < T and row < N:
                at = int64(t) * int64(N) + int64(row)
                if epilogue == uint32(store_f32):
                    st_global_f32(y + at * 4, c[i])
                elif epilogue == uint32(add_bf16):
                    old = f32_from_bits(uint32(uint32(ld_global_u16(y + at * 2)) << uint32(16)))
                    st_global_u16(y + at * 2, bf16_from_f32(old + c[i]))
                else:
                    st_global_u16(y + at * 2, bf16_from_f32(c[i]))

    return write


def _write_silu(NT: int) -> Any:
    """Device function: silu(gate) * up in fragment order; odd warps hold the up rows of the even
    warp before them. Padding of rows and tokens has sums of zero and stays zero."""
    sums = NT * 4

    @cuda.jit(device=True, inline="always")
    def write(c, y, block, warp, lane, exchange):
        pair = uint32(warp >> uint32(1))
        place = uint32(exchange + (pair * uint32(32) + lane) * uint32(NT * 16))
        cuda.syncthreads()  # nobody reads the ring any more
        if warp & uint32(1):
            for i in range(sums):
                st_shared_f32(uint32(place + uint32(i * 4)), c[i])
        cuda.syncthreads()
        if warp & uint32(1) == 0:
            row = uint32(block * uint32(64) + pair * uint32(16) + (lane >> uint32(2)))
            at = y + int64(_offset(uint32((lane & uint32(3)) * uint32(2)), row, uint32(NT)))
            for i in range(sums):
                up = ld_shared_f32(uint32(place + uint32(i * 4)))
                to = at + (i >> 2) * X_TILE + (i & 1) * 16 + ((i >> 1) & 1) * 128
                st_global_u16(to, bf16_from_f32(silu(c[i]) * up))

    return write


@kernel(*(int64,) * 5, *(uint32,) * 7)
def linear_decode_mma_kernel(fmt: str, NT: int, span: int) -> Build:
    """Arguments w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue; grid:
    items.

    blocks: 128-row blocks of W (padded N / 128), of which the first `whole` take all of K and the
    others `slices` slices. span: k tiles in a stage of the ring.
    """
    tile_bytes, x_bytes, ahead = UNPACK[fmt].tile_nbytes, NT * X_TILE, STAGES - 1
    w_bytes, sums = span * tile_bytes, NT * 4
    stage_bytes, slot_bytes = w_bytes + span * x_bytes, NT * 16 * THREADS
    silu_up = int(Epilogue.SILU_UP)
    multiply, write_rows, write_silu = _multiply(fmt, NT), _write_rows(NT), _write_silu(NT)

    @cuda.jit(device=True, inline="always")
    def locate(item, sliced, k_tiles, whole, slices):
        """(row block, first k tile, k tiles) of an item."""
        if item >= sliced:
            return uint32(item - sliced), uint32(0), k_tiles
        group = div_u32(item, slices)
        s = uint32(item - group * slices)
        steps = uint32((k_tiles + uint32(SLICE_TILES - 1)) >> uint32(2))
        base = div_u32(steps, slices)
        extra = uint32(steps - base * slices)
        first = uint32(uint32(s * base + min(s, extra)) << uint32(2))
        count = uint32(uint32(base + (uint32(1) if s < extra else uint32(0))) << uint32(2))
        return uint32(whole + group), first, min(count, uint32(k_tiles - first))

    @cuda.jit(device=True, inline="always")
    def copy(to, source, num_bytes, thread):
        """Begin a copy of a multiple of 16 bytes."""
        at = uint32(thread * uint32(16))
        while at < num_bytes:
            cp_async_16(uint32(to + at), source + int64(at))
            at = uint32(at + uint32(THREADS * 16))

    @cuda.jit(device=True, inline="always")
    def fetch(ring, stage, w, x, count, thread):
        """Begin the copies of `stage`, if it exists: span of the item's `count` k tiles at w, x."""
        first = uint32(stage * uint32(span))
        if first < count:
            some = min(uint32(span), uint32(count - first))
            to = uint32(ring + (stage & uint32(STAGES - 1)) * uint32(stage_bytes))
            copy(to, w + int64(first) * tile_bytes, uint32(some * uint32(tile_bytes)), thread)
            to = uint32(to + uint32(w_bytes))
            copy(to, x + int64(first) * x_bytes, uint32(some * uint32(x_bytes)), thread)
        cp_async_commit()

    @cuda.jit(device=True, inline="always")
    def exchange_slices(c, workspace, counters, item, slices, thread, flag):
        """Publish a slice; the last block to arrive gets c = all slices, ascending, and 1."""
        group, last = div_u32(item, slices), uint32(slices - uint32(1))
        at = workspace + int64(item) * slot_bytes + int64(thread) * 16
        for i in range(NT):
            to = at + i * (THREADS * 16)
            st_global_f32x4(to, c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3])
        cuda.syncthreads()
        if thread == 0:  # its release covers what the barrier has ordered before it
            st_shared_u32(flag, atomic_inc_u32(counters + int64(group) * 4, last))
        cuda.syncthreads()
        if ld_shared_u32(flag) != last:
            return uint32(0)
        at += (int64(group) * int64(slices) - int64(item)) * slot_bytes
        for i in range(sums):
            c[i] = float32(0.0)
        for _ in range(slices):
            for i in range(NT):
                q = ld_global_f32x4(at + i * (THREADS * 16))
                for j in range(4):
                    c[4 * i + j] = c[4 * i + j] + q[j]
            at += slot_bytes
        return uint32(1)

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def linear_decode_mma(
        w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue
    ):
        flag = shared_address(cuda.shared.array(1, uint32))
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread, item = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        sliced = uint32(uint32(blocks - whole) * slices) if slices > uint32(1) else uint32(0)
        block, first, count = locate(item, sliced, k_tiles, whole, slices)
        w += (int64(block) * int64(k_tiles) + int64(first)) * tile_bytes
        x += int64(first) * x_bytes
        c = cuda.local.array(sums, float32)
        for i in range(sums):
            c[i] = float32(0.0)
        for i in range(ahead):
            fetch(ring, uint32(i), w, x, count, thread)
        stage = uint32(0)
        while uint32(stage * uint32(span)) < count:
            cp_async_wait_2()
            cuda.syncthreads()
            fetch(ring, uint32(stage + uint32(ahead)), w, x, count, thread)
            weights = uint32(ring + (stage & uint32(STAGES - 1)) * uint32(stage_bytes))
            tokens = uint32(weights + uint32(w_bytes))
            left = min(uint32(span), uint32(count - stage * uint32(span)))
            while left > uint32(0):
                multiply(c, weights, tokens, warp, lane)
                weights = uint32(weights + uint32(tile_bytes))
                tokens = uint32(tokens + uint32(x_bytes))
                left = uint32(left - uint32(1))
            stage = uint32(stage + uint32(1))
        complete = uint32(1)
        if item < sliced:
            complete = exchange_slices(c, workspace, counters, item, slices, thread, flag)
        if complete != uint32(0):
            if epilogue == uint32(silu_up):
                write_silu(c, y, block, warp, lane, ring)
            else:
                first_row = uint32(block * uint32(128) + warp * uint32(16))
                write_rows(c, y, first_row, lane, T, N, epilogue)

    return Build(linear_decode_mma, THREADS, STAGES * stage_bytes + 128)


@dataclass(frozen=True)
class DecodeMmaPlan(LaunchPlan):
    """span: k tiles in a stage of the ring. Shapes are those of LinearDecodePlan."""

    span: int

    def supports(self, capability: str, shape: Shape) -> bool:
        """A ring that fits into the smallest shared memory of these capabilities."""
        _, _, column_tiles, tile_nbytes = shape
        stage = self.span * (tile_nbytes + column_tiles * X_TILE)
        return capability != "90a" and self.span >= 1 and STAGES * stage <= 98 << 10

    @classmethod
    def default(cls, capability: str, shape: Shape) -> DecodeMmaPlan:
        """The longest stages of which a ring lets two blocks onto a multiprocessor, else one."""
        _, _, column_tiles, tile_nbytes = shape
        tile = STAGES * (tile_nbytes + column_tiles * X_TILE)
        return cls(next((s for s in (4, 2) if s * tile <= RING_NBYTES), 1))

    @classmethod
    def candidates(cls, capability: str, shape: Shape) -> tuple[DecodeMmaPlan, ...]:
        """Shorter and longer stages."""
        return tuple(p for p in map(cls, (1, 2, 3, 4)) if p.supports(capability, shape))
