"""Linear for decode on sm_90: y[t, n] = sum_k x[t, k] * W[n, k], weights read once from HBM.

Legend: N rows of W, K columns of W, T tokens (columns of the batch), NT = tiles of 8 tokens.

Work is a list of items, taken in turns by persistent blocks: an item is all of K, or one of the
slices of K, for RB blocks of 128 rows. Rows that do not fill the machine evenly are sliced and
come first: their exchange hides behind the whole rows that follow. A producer warp streams the
weights of an item into a ring with bulk copies, before the wait for the previous kernel; another
one streams the tokens after it (in one warp the wait would stop the weights too). Consumer warps
own 16 M rows each; their products are in `decode_multiply` and, from 17 tokens on, in
`decode_wide`. A slice's sum starts at zero; the last block to arrive adds the slices in ascending
order. Slices are a function of (N, K), see `k_slices`, and no plan changes an order: a column has
the same bits at every width.

Tokens arrive in the order of `fragment_offset`; padding of K and of tokens is zero there.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    bulk_copy_to_shared,
    fence_async_proxy,
    first_lane_u32,
    let_next_kernel_start,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.lib.wgmma_scaled import declare_sums
from ginfer.cuda.linear.decode_multiply import consume_by_mma
from ginfer.cuda.linear.decode_results import (
    X_TILE,
    item_locator,
    result_writer,
    room_nbytes,
    slice_exchange,
)
from ginfer.cuda.linear.decode_ring import ALONE_NBYTES, Ring, stage_tiles
from ginfer.cuda.linear.decode_wide import consume_by_wgmma
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

ALIGNMENT = 128


@kernel(*(int64,) * 5, *(uint32,) * 7)
def linear_decode_kernel(  # type: ignore[no-untyped-def]
    fmt: str,
    warps: int,
    M: int,
    NT: int,
    span: int,
    stages: int,
    resident: int,
    wgmma: int,
):
    """Arguments w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue.

    blocks: 128-row blocks of W (padded N / 128), of which the first `whole` take all of K and the
    others `slices` slices. warps: consumer warps, each with M 16-row tiles. span: k tiles in a
    stage. resident: thread blocks that must fit on a multiprocessor. wgmma: its products, else mma.
    epilogue: an Epilogue.
    """
    threads, consumers, RB = warps * 32 + 64, warps * 32, warps * M // 8
    tile_bytes, x_bytes = UNPACK[fmt].tile_nbytes, NT * X_TILE  # of a k tile
    form = Ring(span, stages, tile_bytes, x_bytes, RB)
    slab, weight_bytes, stage_bytes = form.slab, form.weight_bytes, form.stage_bytes
    sums, words, empty, ring_bytes = M * NT * 4, 2 * stages, stages * 8, stages * stage_bytes
    factor, room_bytes = UNPACK[fmt].divisor, room_nbytes(M, NT, consumers)
    declare, tiles_of = declare_sums(NT), stage_tiles(span, wgmma)
    consume = (consume_by_wgmma if wgmma else consume_by_mma)(fmt, M, NT, form)
    locate, write = item_locator(RB), result_writer(M, NT, consumers)
    exchange_slices = slice_exchange(sums, consumers, 4 if sums <= 16 else 3)

    @cuda.jit(device=True, inline="always")
    def stream_weights(w, ring, barrier, items, sliced, k_tiles, blocks, whole, slices):
        s, phase, item = uint32(0), uint32(1), uint32(cuda.blockIdx.x)
        while item < items:
            block, end, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            done = uint32(0)
            source = w + (int64(block) * int64(k_tiles) + int64(first)) * tile_bytes
            second = (
                w
                + (
                    int64(min(uint32(block + uint32(1)), uint32(end - uint32(1)))) * int64(k_tiles)
                    + int64(first)
                )
                * tile_bytes
            )
            while left > uint32(0):
                count = tiles_of(left, done)
                num_bytes = uint32(count * uint32(tile_bytes))
                full = uint32(barrier + s * uint32(8))
                at = uint32(ring + s * uint32(stage_bytes))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, uint32(num_bytes * uint32(RB)))
                bulk_copy_to_shared(at, source, num_bytes, full)
                if RB == 2:
                    bulk_copy_to_shared(uint32(at + uint32(slab)), second, num_bytes, full)
                source += int64(num_bytes)
                second += int64(num_bytes)
                left, done = uint32(left - count), uint32(done + count)
                s = uint32(s + uint32(1))
                if s == uint32(stages):
                    s = uint32(0)
                    phase ^= uint32(1)
            item = uint32(item + uint32(cuda.gridDim.x))

    @cuda.jit(device=True, inline="always")
    def stream_tokens(x, ring, barrier, items, sliced, k_tiles, blocks, whole, slices):
        s, phase, item = uint32(0), uint32(1), uint32(cuda.blockIdx.x)
        while item < items:
            _, _, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            done = uint32(0)
            source = x + int64(first) * x_bytes
            while left > uint32(0):
                count = tiles_of(left, done)
                num_bytes = uint32(count * uint32(x_bytes))
                full = uint32(barrier + s * uint32(8))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, num_bytes)
                at = uint32(ring + s * uint32(stage_bytes) + uint32(weight_bytes))
                bulk_copy_to_shared(at, source, num_bytes, full)
                source += int64(num_bytes)
                left, done = uint32(left - count), uint32(done + count)
                s = uint32(s + uint32(1))
                if s == uint32(stages):
                    s = uint32(0)
                    phase ^= uint32(1)
            item = uint32(item + uint32(cuda.gridDim.x))

    @cuda.jit(fastmath=True, launch_bounds=(threads, resident))
    def linear_decode(w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N, epilogue):
        barrier_words = cuda.shared.array(words, int64)
        flag_word = cuda.shared.array(1, uint32)
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        barrier = shared_address(barrier_words)
        flag = shared_address(flag_word)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barrier + s * 8), uint32(2))
                mbarrier_init(uint32(barrier + empty + s * 8), uint32(warps))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        whole_groups = uint32((whole + uint32(RB - 1)) // uint32(RB))
        sliced = uint32(uint32((blocks - whole + uint32(RB - 1)) // uint32(RB)) * slices)
        items = uint32(sliced + whole_groups)
        if warp == uint32(warps):
            if lane == 0:
                stream_weights(w, ring, barrier, items, sliced, k_tiles, blocks, whole, slices)
        elif warp > uint32(warps):
            if lane == 0:
                wait_for_previous_kernel()
                stream_tokens(x, ring, barrier, items, sliced, k_tiles, blocks, whole, slices)
        else:
            wait_for_previous_kernel()
            if wgmma:
                declare()
            c = cuda.local.array(sums, float32)
            s, phase, item = uint32(0), uint32(0), uint32(cuda.blockIdx.x)
            while item < items:
                block, end, _, left = locate(item, sliced, k_tiles, blocks, whole, slices)
                for i in range(sums):
                    c[i] = float32(0.0)
                s, phase = consume(c, ring, barrier, s, phase, left, warp, lane)
                for i in range(sums):
                    c[i] = c[i] * float32(factor)
                complete = item >= sliced
                if not complete:
                    complete = exchange_slices(
                        c, workspace, counters, item, slices, thread, flag, uint32(1)
                    )
                if complete:
                    first_row = uint32(block * uint32(128) + warp * uint32(16 * M))
                    end_row = uint32(end * uint32(128))
                    room = uint32(ring + uint32(ring_bytes))
                    write(c, y, first_row, end_row, warp, lane, room, T, N, epilogue, uint32(1))
                item = uint32(item + uint32(cuda.gridDim.x))

    shared = ring_bytes + room_bytes + ALIGNMENT
    return Build(linear_decode, threads, max(shared, ALONE_NBYTES if resident == 1 else 0))
