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
    div_u32,
    fence_async_proxy,
    first_lane_u32,
    ld_shared_u32,
    let_next_kernel_start,
    mbarrier_init,
    named_barrier,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.linear.decode_beside import row_tiles
from ginfer.cuda.linear.decode_chain_parts import (
    CONSUMERS,
    FACTORS_NBYTES,
    GATE_UP,
    INNER,
    MEET,
    NUM_SUMS,
    SET,
    SETS,
    SLICE_NBYTES,
    WARPS,
    add_rows,
    add_slices,
    chain_products,
    chain_stream,
    copy_factors,
    copy_tokens,
    count_launch,
    fetch_share,
    load_rows,
    meet_blocks,
    of_phase,
    phase_items,
    publish_slice,
    resident_norm,
)
from ginfer.cuda.linear.decode_results import (
    item_locator,
    result_writer,
    room_nbytes,
)
from ginfer.cuda.linear.decode_tokens import (
    lane_tokens,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

OTHER_NBYTES = UNPACK["BF16"].tile_nbytes
SHARED_NBYTES = 217 << 10  # of factors, tokens and the ring


@kernel(*(int64,) * 14, *(uint32,) * 18, float32)
def linear_decode_chain_kernel(fmt: str, span: int, stages: int):  # type: ignore[no-untyped-def]
    """Arguments mixed, hidden, mlp, inner, exchange, counters, w0 to w3, factors of the norms of
    phases 1 and 3, other_w, other_y; p, last, T; k tiles of mixed, hidden, mlp; C, rows of W1 and
    W3, splits 0 to 3 (whole + slices * 65536), other_N, other_slices, others, depth, tokens_nbytes;
    eps.

    Phases p to last - 1. mixed, mlp: in fragment order; hidden, inner: rows. exchange: sums of
    slices with tags; counters: two u32, of meetings and launches; both are this kernel's alone and
    zero at first. Of phase 3 the last `others` blocks take the rows of other_w [other_N, C] BF16
    instead, to other_y [T, other_N] FP32. The ring has `depth` stages of `span` k tiles, at most
    `stages`, behind tokens_nbytes.
    """
    words, empty, room_words = 2 * stages, 8 * stages, SETS * room_nbytes(1, 1, SET) // 4
    threads = CONSUMERS + 32
    stream, consume = chain_stream(fmt, span, stages), chain_products(fmt, span, stages)
    locate = item_locator(1)
    write = result_writer(1, 1, SET)
    beside = row_tiles(SETS * WARPS, MEET, 2)
    slot_words, num_turns = 4 * SET, SETS * WARPS
    silu_up, store = int(Epilogue.SILU_UP), int(Epilogue.STORE_BF16)
    meet, room_nbytes_ = MEET, room_nbytes(1, 1, SET)

    @cuda.jit(device=True, inline="always")
    def work(c, p, at, buffers, scratch, sizes, places, rooms, T, depth, me):
        """The items of a phase; returns where the ring and the turns are."""
        room, base = rooms
        exchange, launches = scratch
        thread, row_tile, lane, own = me
        old = cuda.local.array(2, uint32)
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
            first_row = uint32(block * uint32(128) + row_tile * uint32(16))
            if p & uint32(1):
                tokens = lane_tokens(base, T, uint32(k_tiles * uint32(64)), lane)
                tokens = uint32(tokens + first * uint32(128))
            else:
                named_barrier(uint32(meet), uint32(CONSUMERS))
                load_rows(old, hidden, first_row, lane, T, N)  # nobody writes them before all sums
                copy_tokens(base, x, (int64(16), int64(128), shift), first, left, T, thread)
                named_barrier(uint32(meet), uint32(CONSUMERS))
                tokens = lane_tokens(base, T, uint32(left * uint32(64)), lane)
            s, phase, turn, mine, kept = consume(
                c, places, at, left, depth, (row_tile, lane), tokens
            )
            at, complete = (s, phase, turn, mine), kept != uint32(0)
            if complete and item < sliced:
                tag = uint32(uint32(ld_shared_u32(launches) << uint32(2)) + p)
                before = uint32(item - div_u32(item, slices) * slices)
                place = exchange + int64(item) * SLICE_NBYTES
                place += int64(thread & uint32(SET - 1)) * 32
                complete = before == uint32(slices - uint32(1))
                if complete:  # waits for lower items only, and those for none behind them
                    add_slices(c, place, before, tag)
                else:
                    publish_slice(c, place, tag)
            if complete and p & uint32(1):
                end_row = uint32(end * uint32(128))
                write(c, y, first_row, end_row, row_tile, lane, room, T, N, epilogue, own)
            elif complete:
                add_rows(old, c, hidden, first_row, lane, T, N)
            item = uint32(item + step)
        return at

    @cuda.jit(fastmath=True, launch_bounds=(threads, 1))
    def linear_decode_chain(
        mixed,
        hidden,
        mlp,
        inner,
        exchange,
        counters,
        w0,
        w1,
        w2,
        w3,
        factors1,
        factors3,
        other_w,
        other_y,
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
        eps,
    ):
        barrier = shared_address(cuda.shared.array(words, int64))
        turns = shared_address(cuda.shared.array(num_turns, int64))
        slots = shared_address(cuda.shared.array(slot_words, uint32))
        launches = shared_address(cuda.shared.array(4, uint32))
        squares = shared_address(cuda.shared.array(NUM_SUMS, float32))
        room = shared_address(cuda.shared.array(room_words, uint32))
        begin = shared_address(cuda.shared.array(0, uint32))
        shared_factors = uint32((begin + uint32(127)) & uint32(0xFFFFFF80))
        base = uint32(shared_factors + uint32(FACTORS_NBYTES))
        ring = uint32(base + tokens_nbytes)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barrier + uint32(s * 8)), uint32(1))
                mbarrier_init(uint32(barrier + uint32(empty + s * 8)), uint32(WARPS))
            for i in range(num_turns):
                mbarrier_init(uint32(turns + uint32(8 * i)), uint32(1))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        tiles = (mixed_tiles, hidden_tiles, mlp_tiles, hidden_tiles)
        sizes = (tiles, (C, N1, C, N3), (split0, split1, split2, split3), others)
        if warp == uint32(SETS * WARPS):
            if lane == 0:
                if last > uint32(INNER):
                    blocks = uint32((other_N + uint32(127)) >> uint32(7))
                    fetch_share(other_w, uint32(blocks * hidden_tiles * uint32(OTHER_NBYTES)))
                stream(p, last, (w0, w1, w2, w3), sizes, ring, barrier, depth)
        else:
            c = cuda.local.array(4, float32)
            begun, mine, row_tile = p, uint32(warp >> uint32(3)), uint32(warp & uint32(7))
            turn = uint32(turns + uint32(8) * warp)
            other_turn = uint32(turns + uint32(8) * (warp ^ uint32(WARPS)))
            slot = uint32(slots + row_tile * uint32(512) + lane * uint32(16))
            places = (ring, barrier, turn, other_turn, slot)
            at = (uint32(0), uint32(0), uint32(mine ^ uint32(1)), uint32(mine ^ uint32(1)))
            rooms = (uint32(room + mine * uint32(room_nbytes_)), base)
            me = (thread, row_tile, lane, uint32(uint32(meet + 1) + mine))
            buffers, scratch = (mixed, hidden, mlp, inner), (exchange, launches)
            while p < last:
                factors = of_phase(p, (int64(0), factors1, int64(0), factors3))
                if p == begun:
                    if factors != 0:
                        copy_factors(shared_factors, factors, C, thread)
                    wait_for_previous_kernel()
                    if thread == uint32(CONSUMERS - 1):
                        count_launch(launches, counters + 4)
                else:
                    meet_blocks(counters, shared_factors, factors, C, thread)
                if factors != 0:
                    rows = (int64(C) * 2, int64(16), uint32(0))
                    copy_tokens(base, hidden, rows, uint32(0), hidden_tiles, T, thread)
                    resident_norm(base, squares, shared_factors, T, C, eps, thread)
                    named_barrier(uint32(meet), uint32(CONSUMERS))
                at = work(c, p, at, buffers, scratch, sizes, places, rooms, T, depth, me)
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
