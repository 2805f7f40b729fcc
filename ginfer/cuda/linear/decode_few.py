"""Linear for decode of up to 8 tokens on sm_90: y[t, n] = sum_k norm(x)[t, k] * W[n, k].

The numbers of `decode`, from the same items; see there. Two things differ. A thread block has
groups of consumer warps, each with a ring and producers of its own, so that one group multiplies
while another waits. And the tokens may be rows of the residual stream: weights are under way before
the wait for the previous kernel, after it consumers norm the rows into shared memory
(`decode_tokens`).

Legend: N rows of W, K columns of W, T tokens.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    fence_async_proxy,
    first_lane_u32,
    let_next_kernel_start,
    mbarrier_init,
    named_barrier,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.linear.decode_beside import row_tiles
from ginfer.cuda.linear.decode_multiply import consume_by_mma, consume_resident
from ginfer.cuda.linear.decode_results import (
    X_TILE,
    item_locator,
    result_writer,
    room_nbytes,
    slice_exchange,
)
from ginfer.cuda.linear.decode_ring import Ring, stage_tiles
from ginfer.cuda.linear.decode_stream import token_stream, weight_stream
from ginfer.cuda.linear.decode_tokens import (
    NBYTES,
    NUM_FACTORS,
    NUM_SUMS,
    lane_tokens,
    row_factors,
    row_norm,
)
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

ALIGNMENT = 128


@kernel(*(int64,) * 9, *(uint32,) * 10, float32)
def linear_decode_few_kernel(  # type: ignore[no-untyped-def]
    fmt: str, groups: int, warps: int, M: int, span: int, stages: int, norm: int
):
    """Arguments w, x, y, workspace, counters, factors, columns, other_w, other_y, k_tiles, blocks,
    whole, slices, T, N, epilogue, takers, other_N, other_slices, eps.

    groups of `warps` consumer warps, each with M 16-row tiles; span: k tiles in a stage of a group.
    norm: x are rows [.., K] BF16 and `columns` says which (0: the first T), normed with `factors`
    [K] FP32; else x is in fragment order, and neither is read. takers: thread blocks that take
    items; the others take the rows of other_w [other_N, K] BF16 to other_y [T, other_N] FP32, which
    needs a norm. The rest as linear_decode_kernel.
    """
    consumers, RB = warps * 32, warps * M // 8
    everyone = groups * consumers
    threads = everyone + groups * (32 if norm else 64)
    tile_bytes = UNPACK[fmt].tile_nbytes
    form = Ring(span, stages, tile_bytes, 0 if norm else X_TILE, RB)
    sums, words, empty, ring_bytes = M * 4, 2 * stages, stages * 8, stages * form.stage_bytes
    factor, room_bytes = UNPACK[fmt].divisor, room_nbytes(M, 1, consumers)
    all_words, arrivals = groups * words, 1 if norm else 2
    tiles_of, locate = stage_tiles(span, 0), item_locator(RB)
    consume_rows, consume = consume_resident(fmt, M, form), consume_by_mma(fmt, M, 1, form)
    exchange_slices, write = slice_exchange(sums, consumers), result_writer(M, 1, consumers)
    stream_weights = weight_stream(form, locate, tiles_of)
    stream_tokens = token_stream(form, locate, tiles_of)
    sets, all_meet = everyone // 256, groups + 1
    norm_rows = row_norm(max(sets, 1), groups + 2)
    tokens_bytes = NBYTES if norm else 0
    beside = row_tiles(groups * warps, groups + 1)
    rooms_at = tokens_bytes + groups * ring_bytes

    @cuda.jit(device=True, inline="always")
    def work(c, y, workspace, counters, at, barrier, flag, room, tokens, me, sizes, epilogue):
        """A group's items. me: group, its thread, warp; sizes: first item, step, items, sliced,
        k_tiles, blocks, whole, slices, T, N."""
        group, thread, warp = me
        item, step, items, sliced, k_tiles, blocks, whole, slices, T, N = sizes
        s, phase, lane = uint32(0), uint32(0), uint32(thread & uint32(31))
        meet = uint32(group + uint32(1))
        while item < items:
            block, end, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            for i in range(sums):
                c[i] = float32(0.0)
            if norm:
                x = uint32(tokens + first * uint32(128))
                s, phase = consume_rows(c, at, barrier, s, phase, left, warp, lane, x)
            else:
                s, phase = consume(c, at, barrier, s, phase, left, warp, lane)
            for i in range(sums):
                c[i] = c[i] * float32(factor)
            complete = item >= sliced
            if not complete:
                complete = exchange_slices(c, workspace, counters, item, slices, thread, flag, meet)
            if complete:
                first_row = uint32(block * uint32(128) + warp * uint32(16 * M))
                end_row = uint32(end * uint32(128))
                write(c, y, first_row, end_row, warp, lane, room, T, N, epilogue, meet)
            item = uint32(item + step)

    @cuda.jit(fastmath=True, launch_bounds=(threads, 1))
    def linear_decode_few(
        w,
        x,
        y,
        workspace,
        counters,
        factors,
        columns,
        other_w,
        other_y,
        k_tiles,
        blocks,
        whole,
        slices,
        T,
        N,
        epilogue,
        takers,
        other_N,
        other_slices,
        eps,
    ):
        barriers = shared_address(cuda.shared.array(all_words, int64))
        flags = shared_address(cuda.shared.array(groups, uint32))
        squares = shared_address(cuda.shared.array(NUM_SUMS, float32))
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread = uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for g in range(groups):
                for s in range(stages):
                    at = uint32(barriers + uint32(g * words * 8 + s * 8))
                    mbarrier_init(at, uint32(arrivals))
                    mbarrier_init(uint32(at + uint32(empty)), uint32(warps))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        whole_groups = uint32((whole + uint32(RB - 1)) // uint32(RB))
        sliced = uint32(uint32((blocks - whole + uint32(RB - 1)) // uint32(RB)) * slices)
        items, step = uint32(sliced + whole_groups), uint32(takers * uint32(groups))
        producer = uint32(warp - uint32(groups * warps))
        group = uint32(warp // uint32(warps))
        if warp >= uint32(groups * warps):
            group = producer
            if producer >= uint32(groups):
                group = uint32(producer - uint32(groups))
        item = uint32(uint32(cuda.blockIdx.x) + group * takers)
        if uint32(cuda.blockIdx.x) >= takers:
            item = items
        ring = uint32(base + uint32(tokens_bytes) + group * uint32(ring_bytes))
        barrier = uint32(barriers + group * uint32(words * 8))
        if warp >= uint32(groups * warps):
            if lane == 0 and producer < uint32(groups):
                stream_weights(
                    w, ring, barrier, item, step, items, sliced, k_tiles, blocks, whole, slices
                )
            elif lane == 0:
                wait_for_previous_kernel()
                stream_tokens(
                    x, ring, barrier, item, step, items, sliced, k_tiles, blocks, whole, slices
                )
        else:
            tokens = uint32(0)
            if norm:
                f, C = cuda.local.array(NUM_FACTORS, float32), uint32(k_tiles * uint32(64))
                row_factors(f, factors, C, uint32(thread & uint32(255)))
                wait_for_previous_kernel()
                norm_rows(base, squares, x, f, columns, T, C, eps, thread)
                named_barrier(uint32(all_meet), uint32(everyone))
                tokens = lane_tokens(base, T, C, lane)
            else:
                wait_for_previous_kernel()
            c = cuda.local.array(sums, float32)
            flag = uint32(flags + group * uint32(4))
            room = uint32(base + uint32(rooms_at) + group * uint32(room_bytes))
            mine = uint32(thread - group * uint32(consumers))
            me = (group, mine, uint32(warp - group * uint32(warps)))
            sizes = (item, step, items, sliced, k_tiles, blocks, whole, slices, T, N)
            work(c, y, workspace, counters, ring, barrier, flag, room, tokens, me, sizes, epilogue)
            if norm and uint32(cuda.blockIdx.x) >= takers:
                shares = uint32(cuda.blockIdx.x - takers), uint32(cuda.gridDim.x - takers)
                at = uint32(base + uint32(tokens_bytes))
                beside(
                    other_w, other_y, tokens, at, shares, k_tiles, other_slices, T, other_N, thread
                )

    shared = rooms_at + groups * room_bytes + ALIGNMENT
    return Build(linear_decode_few, threads, shared)
