"""The linears between two mixers for up to 8 rows in one kernel: output, gate and up, down, inner.

    hidden += mixed W0^T; mlp = silu_up(norm(hidden) W1^T); hidden += mlp W2^T;
    inner = norm(hidden) W3^T

The numbers of `decode` and `decode_few`, from the same items. Between phases the thread blocks, one
per multiprocessor, meet; only the producer does not: it fills the ring with weights of the next
phase while the last results, the meeting and the next tokens are under way.

All blocks are resident whatever else runs: no kernel in front of this one waits for it, and the one
behind it starts when every block here has begun.

Legend: T tokens, C columns of hidden; phase p has matrix Wp.
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
from ginfer.cuda.linear.decode_chain_parts import (
    CONSUMERS,
    GATE_UP,
    INNER,
    MEET,
    NUM_SUMS,
    WARPS,
    add_rows,
    chain_ahead,
    chain_products,
    chain_stream,
    copy_tokens,
    fetch_share,
    load_rows,
    meet_blocks,
    of_phase,
    phase_items,
    resident_norm,
)
from ginfer.cuda.linear.decode_results import (
    item_locator,
    result_writer,
    room_nbytes,
    slice_exchange,
)
from ginfer.cuda.linear.decode_tokens import (
    NUM_FACTORS,
    lane_tokens,
    row_factors,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

OTHER_NBYTES = UNPACK["BF16"].tile_nbytes
AT_ONCE = 2  # rows that a thread norms side by side
SHARED_NBYTES = 222 << 10  # of tokens and the ring


@kernel(*(int64,) * 17, *(uint32,) * 19, float32)
def linear_decode_chain_kernel(fmt: str, span: int, stages: int):  # type: ignore[no-untyped-def]
    """Arguments mixed, hidden, mlp, inner, workspace, counters, arrivals, w0 to w3, factors of the
    norms of phases 1 and 3, other_w, other_y, ahead0, ahead1; p, last, T; k tiles of mixed, hidden,
    mlp; C, rows of W1 and W3, splits 0 to 3 (whole + slices * 65536), other_N, other_slices,
    others, depth, tokens_nbytes, ahead_nbytes; eps.

    Phases p to last - 1. mixed, mlp: in fragment order; hidden, inner: rows. arrivals: a u32 that
    begins at zero and is nobody else's. Of phase 3 the last `others` blocks take the rows of
    other_w [other_N, C] BF16 instead, to other_y [T, other_N] FP32. The ring has `depth` stages of
    `span` k tiles, at most `stages`, behind tokens_nbytes. ahead0, ahead1: W0 and W1 of the next
    chain, of which each block brings the first ahead_nbytes of its own to L2.
    """
    words, empty, room_words = 2 * stages, 8 * stages, room_nbytes(1, 1, CONSUMERS) // 4
    threads = CONSUMERS + 32
    fetch = chain_ahead(fmt)
    stream, consume = chain_stream(fmt, span, stages), chain_products(fmt, span, stages)
    locate, exchange_slices = item_locator(1), slice_exchange(4, CONSUMERS)
    write = result_writer(1, 1, CONSUMERS)
    norm_rows, beside = resident_norm(AT_ONCE), row_tiles(WARPS, MEET)
    silu_up, store = int(Epilogue.SILU_UP), int(Epilogue.STORE_BF16)
    meet = MEET

    @cuda.jit(device=True, inline="always")
    def work(c, p, s, phase, buffers, scratch, sizes, places, T, depth, me):
        """The items of a phase; returns the stage of the ring behind them and its phase."""
        ring, barrier, flag, room, base = places
        workspace, counters = scratch
        thread, warp, lane = me
        old = cuda.local.array(4, float32)
        k_tiles, N, blocks, whole, slices, sliced, items, item, step = phase_items(p, sizes)
        mixed, hidden, mlp, inner = buffers
        y, epilogue = inner, uint32(store)
        if p == uint32(GATE_UP):
            y, epilogue = mlp, uint32(silu_up)
        x, shift = of_phase(p, (mixed, hidden, mlp, hidden)), uint32(0)
        while uint32(uint32(1) << shift) < T:
            shift = uint32(shift + uint32(1))
        while item < items:
            block, end, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
            first_row = uint32(block * uint32(128) + warp * uint32(16))
            if p & uint32(1):
                tokens = lane_tokens(base, T, uint32(k_tiles * uint32(64)), lane)
                tokens = uint32(tokens + first * uint32(128))
            else:
                named_barrier(uint32(meet), uint32(CONSUMERS))
                copy_tokens(base, x, (int64(16), int64(128), shift), first, left, T, thread)
                load_rows(old, hidden, first_row, lane, T, N)  # nobody writes them before all sums
                named_barrier(uint32(meet), uint32(CONSUMERS))
                tokens = lane_tokens(base, T, uint32(left * uint32(64)), lane)
            s, phase = consume(c, ring, barrier, s, phase, left, depth, warp, lane, tokens)
            complete = item >= sliced
            if not complete:
                complete = exchange_slices(
                    c, workspace, counters, item, slices, thread, flag, uint32(meet)
                )
            if complete and p & uint32(1):
                end_row = uint32(end * uint32(128))
                write(c, y, first_row, end_row, warp, lane, room, T, N, epilogue, uint32(meet))
            elif complete:
                add_rows(old, c, hidden, first_row, lane, T, N)
            item = uint32(item + step)
        return s, phase

    @cuda.jit(fastmath=True, launch_bounds=(threads, 1))
    def linear_decode_chain(
        mixed,
        hidden,
        mlp,
        inner,
        workspace,
        counters,
        arrivals,
        w0,
        w1,
        w2,
        w3,
        factors1,
        factors3,
        other_w,
        other_y,
        ahead0,
        ahead1,
        p,
        last,
        T,
        mixed_tiles,
        hidden_tiles,
        mlp_tiles,
        C,
        N1,
        N3,
        split0,
        split1,
        split2,
        split3,
        other_N,
        other_slices,
        others,
        depth,
        tokens_nbytes,
        ahead_nbytes,
        eps,
    ):
        barrier = shared_address(cuda.shared.array(words, int64))
        flag = shared_address(cuda.shared.array(4, uint32))
        squares = shared_address(cuda.shared.array(NUM_SUMS, float32))
        room = shared_address(cuda.shared.array(room_words, uint32))
        base = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        ring = uint32(base + tokens_nbytes)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barrier + uint32(s * 8)), uint32(1))
                mbarrier_init(uint32(barrier + uint32(empty + s * 8)), uint32(WARPS))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        tiles = (mixed_tiles, hidden_tiles, mlp_tiles, hidden_tiles)
        sizes = (tiles, (C, N1, C, N3), (split0, split1, split2, split3), others)
        if warp == uint32(WARPS):
            if lane == 0:
                if last > uint32(INNER):
                    blocks = uint32((other_N + uint32(127)) >> uint32(7))
                    fetch_share(other_w, uint32(blocks * hidden_tiles * uint32(OTHER_NBYTES)))
                stream(p, last, (w0, w1, w2, w3), sizes, ring, barrier, depth)
                fetch(ahead0, ahead1, ahead_nbytes, sizes)
        else:
            f, c = cuda.local.array(NUM_FACTORS, float32), cuda.local.array(4, float32)
            stage, phase, begun = uint32(0), uint32(0), p
            rooms, me = (ring, barrier, flag, room, base), (thread, warp, lane)
            buffers, scratch = (mixed, hidden, mlp, inner), (workspace, counters)
            while p < last:
                factors = of_phase(p, (int64(0), factors1, int64(0), factors3))
                for i in range(NUM_FACTORS):
                    f[i] = float32(0.0)  # or what no phase needs stays in registers
                if p == begun:
                    if factors != 0:
                        row_factors(f, factors, C, thread)
                    wait_for_previous_kernel()
                else:
                    meet_blocks(arrivals, f, factors, C, thread)
                if factors != 0:
                    places = (int64(C) * 2, int64(16), uint32(0))
                    copy_tokens(base, hidden, places, uint32(0), hidden_tiles, T, thread)
                    norm_rows(base, squares, f, T, C, eps, thread)
                    named_barrier(uint32(meet), uint32(CONSUMERS))
                stage, phase = work(
                    c, p, stage, phase, buffers, scratch, sizes, rooms, T, depth, me
                )
                p = uint32(p + uint32(1))
            if last > uint32(INNER) and uint32(cuda.blockIdx.x + others) >= uint32(cuda.gridDim.x):
                share = uint32(cuda.blockIdx.x + others - uint32(cuda.gridDim.x))
                tokens = lane_tokens(base, T, C, lane)
                beside(
                    other_w,
                    other_y,
                    tokens,
                    ring,
                    (share, others),
                    hidden_tiles,
                    other_slices,
                    T,
                    other_N,
                    thread,
                )

    return Build(linear_decode_chain, threads, SHARED_NBYTES + 128)
