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

from ginfer.cuda.lib.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait_2,
    div_u32,
    fma_f32,
    ldmatrix_x4,
    mma_m16n8k16_bf16,
    shared_address,
)
from ginfer.cuda.linear.decode_results import (
    X_TILE,
    item_locator,
    result_writer,
    slice_exchange,
)
from ginfer.cuda.linear.epilogue import EPILOGUES
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.plan import LaunchPlan, Shape

THREADS = 256
STAGES = 4
RING_NBYTES = 48 << 10  # two blocks share the smallest multiprocessors


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


@kernel(*(int64,) * 5, *(uint32,) * 7)
def linear_decode_mma_kernel(fmt: str, NT: int, span: int) -> Build:
    """Arguments w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue; grid:
    items.

    blocks: 128-row blocks of W (padded N / 128), of which the first `whole` take all of K and the
    others `slices` slices. span: k tiles in a stage of the ring.
    """
    tile_bytes, x_bytes, ahead = UNPACK[fmt].tile_nbytes, NT * X_TILE, STAGES - 1
    w_bytes, sums = span * tile_bytes, NT * 4
    stage_bytes = w_bytes + span * x_bytes
    multiply, write = _multiply(fmt, NT), result_writer(NT, THREADS, EPILOGUES[fmt])
    locate, exchange_slices = item_locator(), slice_exchange(sums, THREADS)

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

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def linear_decode_mma(
        w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue
    ):
        flag = shared_address(cuda.shared.array(1, uint32))
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread, item = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        sliced = uint32(uint32(blocks - whole) * slices) if slices > uint32(1) else uint32(0)
        block, end, first, count = locate(item, sliced, k_tiles, blocks, whole, slices)
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
        complete = item >= sliced
        if not complete:
            group = div_u32(item, slices)
            place = (group, uint32(group * slices), item)
            complete = exchange_slices(
                c, workspace, counters, place, slices, thread, flag, uint32(1)
            )
        cuda.syncthreads()  # nobody reads the ring any more
        if complete:
            first_row = uint32(block * uint32(128) + warp * uint32(16))
            end_row = uint32(end * uint32(128))
            write(c, y, first_row, end_row, warp, lane, ring, T, N, epilogue, uint32(1))

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
