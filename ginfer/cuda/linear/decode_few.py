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
from ginfer.cuda.linear.decode import ALIGNMENT, NEVER, WARPS, finisher, waited_slices
from ginfer.cuda.linear.decode_beside import row_tiles
from ginfer.cuda.linear.decode_multiply import consume_by_mma, consume_resident
from ginfer.cuda.linear.decode_results import X_TILE, room_nbytes
from ginfer.cuda.linear.decode_ring import Ring, stage_tiles
from ginfer.cuda.linear.decode_runs import (
    duty,
    end_of_items,
    following,
    place,
)
from ginfer.cuda.linear.decode_stream import stream
from ginfer.cuda.linear.decode_tokens import (
    NBYTES,
    NUM_FACTORS,
    NUM_SUMS,
    lane_tokens,
    row_factors,
    row_norm,
)
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel


@kernel(*(int64,) * 8, *(uint32,) * 11, float32)
def linear_decode_few_kernel(  # type: ignore[no-untyped-def]
    fmt: str, groups: int, span: int, stages: int, norm: int
):
    """Arguments w, x, y, workspace, factors, columns, other_w, other_y, k_tiles, blocks, whole,
    runs, T, N, epilogue, ahead, takers, other_N, other_slices, eps.

    groups of eight consumer warps; span: k tiles in a stage of a group. norm: x are rows [.., K]
    BF16 and `columns` says which (0: the first T), normed with `factors` [K] FP32; else x is in
    fragment order, and neither is read. takers: thread blocks that take items; the others take the
    rows of other_w [other_N, K] BF16 to other_y [T, other_N] FP32, which needs a norm. The rest as
    linear_decode_kernel.
    """
    consumers, everyone = WARPS * 32, groups * WARPS * 32
    threads = everyone + groups * (32 if norm else 64)
    form = Ring(span, stages, UNPACK[fmt].tile_nbytes, 0 if norm else X_TILE)
    words, empty, ring_bytes = 2 * stages, stages * 8, stages * form.stage_bytes
    factor, room_bytes = UNPACK[fmt].divisor, room_nbytes(1, consumers)
    all_words, arrivals = groups * words, 1 if norm else 2
    tiles_of, silu_up = stage_tiles(span, 0), int(Epilogue.SILU_UP)
    consume_rows, consume = consume_resident(fmt, form), consume_by_mma(fmt, 1, form)
    bring, _ = waited_slices(1, finisher(1, EPILOGUES[fmt]))
    stream_weights = stream(form, tiles_of, tokens=False)
    stream_tokens = stream(form, tiles_of, tokens=True)
    all_meet, norm_rows = groups + 1, row_norm(groups, groups + 2)
    tokens_bytes = NBYTES if norm else 0
    beside = row_tiles(groups * WARPS, groups + 1)
    rooms_at = tokens_bytes + groups * ring_bytes

    @cuda.jit(device=True, inline="always")
    def work(c, y, workspace, at, barrier, tokens, mine, item, cut, how):
        """The items of a group, from `item` on. mine: its thread, warp and lane."""
        _, warp, lane = mine
        stay, end = end_of_items(cut)
        s, phase = uint32(0), uint32(0)
        while item < end:
            block, first, left, before, after, slot = place(item, cut)
            for i in range(4):
                c[i] = float32(0.0)
            if left > uint32(0):
                rest = (left, before, after)
                if norm:
                    x = uint32(tokens + first * uint32(128))
                    s, phase = consume_rows(c, at, barrier, s, phase, rest, warp, lane, x)
                else:
                    s, phase = consume(c, at, barrier, s, phase, rest, warp, lane)
                for i in range(4):
                    c[i] = c[i] * float32(factor)
            have = duty(item, first, left, cut, stay)
            bring(c, y, workspace, (block, slot, have), cut, mine, how)
            item = following(item, cut[4])

    @cuda.jit(fastmath=True, launch_bounds=(threads, 1))
    def linear_decode_few(
        w,
        x,
        y,
        workspace,
        factors,
        columns,
        other_w,
        other_y,
        k_tiles,
        blocks,
        whole,
        runs,
        T,
        N,
        epilogue,
        ahead,
        takers,
        other_N,
        other_slices,
        eps,
    ):
        barriers = shared_address(cuda.shared.array(all_words, int64))
        squares = shared_address(cuda.shared.array(NUM_SUMS, float32))
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread, index = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for g in range(groups):
                for s in range(stages):
                    at = uint32(barriers + uint32(g * words * 8 + s * 8))
                    mbarrier_init(at, uint32(arrivals))
                    mbarrier_init(uint32(at + uint32(empty)), uint32(WARPS))
            fence_async_proxy()
        cuda.syncthreads()
        if epilogue != uint32(silu_up):
            let_next_kernel_start()  # else its weights take bandwidth from the last of these
        producer, group = uint32(warp - uint32(groups * WARPS)), uint32(warp // uint32(WARPS))
        if warp >= uint32(groups * WARPS):
            group = producer
            if producer >= uint32(groups):
                group = uint32(producer - uint32(groups))
        cut = (k_tiles, blocks, whole, runs, uint32(takers * uint32(groups)))
        item = uint32(uint32(2) * uint32(index + group * takers))
        if index >= takers:
            item = uint32(uint32(2) * uint32(runs + blocks))
        ring = uint32(base + uint32(tokens_bytes) + group * uint32(ring_bytes))
        barrier = uint32(barriers + group * uint32(words * 8))
        if warp >= uint32(groups * WARPS):
            if lane == 0 and producer < uint32(groups):
                stream_weights(w, ring, barrier, item, cut, ahead)
                let_next_kernel_start()
            elif lane == 0:
                wait_for_previous_kernel()
                stream_tokens(x, ring, barrier, item, cut, uint32(NEVER))
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
            c = cuda.local.array(4, float32)
            room = uint32(base + uint32(rooms_at) + group * uint32(room_bytes))
            mine = (uint32(thread & uint32(255)), uint32(warp & uint32(7)), lane)
            how = (room, T, N, epilogue, uint32(group + uint32(1)))
            work(c, y, workspace, ring, barrier, tokens, mine, item, cut, how)
            if norm and index >= takers:
                shares = uint32(index - takers), uint32(cuda.gridDim.x - takers)
                at = uint32(base + uint32(tokens_bytes))
                beside(
                    other_w, other_y, tokens, at, shares, k_tiles, other_slices, T, other_N, thread
                )

    shared = rooms_at + groups * room_bytes + ALIGNMENT
    return Build(linear_decode_few, threads, shared)
