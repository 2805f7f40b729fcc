"""Linear for decode on sm_90: y[t, n] = sum_k x[t, k] * W[n, k], weights read once from HBM.

Legend: N rows of W, K columns of W, T tokens (columns of the batch), NT = tiles of 8 tokens.

Work is a list of items, taken in turns by persistent blocks: runs of K through the row blocks that
do not fill the machine evenly, and all of K for others (`decode_runs`). Runs come first, so that
their exchange hides behind the whole rows that follow. A producer warp streams the weights of an
item into a ring with bulk copies, before the wait for the previous kernel; another one streams the
tokens after it (in one warp the wait would stop the weights too). Consumer warps own 16 rows each;
their products are in `decode_multiply` and, from 17 tokens on, in `decode_wide`. A slice's sum
starts at zero, and slices are added in ascending order. How K is cut is a function of (N, K), see
`k_runs`, and no plan changes an order: a column has the same bits at every width. From 17 tokens on
the slices of a row block are many bytes for one collection: everyone who has sent one finishes a
share of the columns (`decode_shares`).

Tokens arrive in the order of `fragment_offset`; padding of K and of tokens is zero there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    fence_async_proxy,
    first_lane_u32,
    let_next_kernel_start,
    mbarrier_init,
    shared_address,
    wait_for_previous_kernel,
)
from ginfer.cuda.lib.wgmma_scaled import declare_sums
from ginfer.cuda.linear.decode_multiply import consume_by_mma
from ginfer.cuda.linear.decode_results import (
    X_TILE,
    add_old,
    old_results,
    result_writer,
    room_nbytes,
    stores,
)
from ginfer.cuda.linear.decode_ring import ALONE_NBYTES, Ring, stage_tiles
from ginfer.cuda.linear.decode_runs import (
    ALL,
    NOTHING,
    SEND,
    collector,
    duty,
    end_of_items,
    following,
    place,
    sender,
    slots,
)
from ginfer.cuda.linear.decode_shares import share_finisher
from ginfer.cuda.linear.decode_stream import stream
from ginfer.cuda.linear.decode_wide import consume_by_wgmma
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

if TYPE_CHECKING:
    from collections.abc import Collection

ALIGNMENT = 128
WARPS = 8  # consumers: a row block
SHARED_TILES = 4  # of columns, from which on slices are finished by all who have sent one
NEVER = 0xFFFFFFFF


def finisher(NT: int, epilogues: Collection[Epilogue]) -> Any:
    """Device function finish(c, y, workspace, block, have, cut, mine, how): the results of a row
    block, whose slices from `have` on are added to c. mine: thread, warp and lane among its
    consumers; how: room in shared memory, T, N, epilogue (one of those), named barrier."""
    sums, consumers = NT * 4, WARPS * 32
    fetch, collect = old_results(NT), collector(sums, consumers)
    early = NT <= 4 and Epilogue.ADD_BF16 in epilogues  # more would not fit in registers
    write = result_writer(NT, consumers, stores(epilogues) if early else epilogues)
    add_bf16, store_bf16 = int(Epilogue.ADD_BF16), int(Epilogue.STORE_BF16)
    num_old = 2 * NT if early else 1

    @cuda.jit(device=True, inline="always")
    def finish(c, y, workspace, block, have, cut, mine, how):
        thread, warp, lane = mine
        room, T, N, epilogue, meet = how
        first_row = uint32(block * uint32(128) + warp * uint32(16))
        old, last = cuda.local.array(num_old, uint32), epilogue
        if early and epilogue == uint32(add_bf16):  # asked for while the slices are waited for
            fetch(old, y, first_row, lane, T, N)
            last = uint32(store_bf16)
        if have != uint32(ALL):
            first, slices = slots(block, cut)
            collect(c, workspace, first, have, slices, thread)
        if early and epilogue == uint32(add_bf16):
            for n in range(NT):
                add_old(c, 4 * n, old, 2 * n, lane)
        end_row = uint32(uint32(block + uint32(1)) * uint32(128))
        write(c, y, first_row, end_row, warp, lane, room, T, N, last, meet)

    return finish


def waited_slices(NT: int, finish: Any) -> tuple[Any, Any]:
    """Two device functions. bring(c, y, workspace, place, cut, mine, how): send, or finish with the
    slices that are waited for. place: row block, slot and duty of an item. settle: nothing, for
    nothing is owed."""
    send = sender(NT * 4, WARPS * 32)

    @cuda.jit(device=True, inline="always")
    def bring(c, y, workspace, place, cut, mine, how):
        block, slot, have = place
        if have == uint32(SEND):
            send(c, workspace, slot, mine[0])
        elif have != uint32(NOTHING):
            finish(c, y, workspace, block, have, cut, mine, how)

    @cuda.jit(device=True, inline="always")
    def settle(y, workspace, item, cut, mine, how):
        pass

    return bring, settle


def shared_slices(NT: int, finish: Any, epilogues: Collection[Epilogue]) -> tuple[Any, Any]:
    """As waited_slices, but all are sent. settle(y, workspace, item, cut, mine, how): the shares of
    one who takes items, of whose runs `item` is the first, in the row blocks of these runs."""
    consumers = WARPS * 32
    send, finish_share = sender(NT * 4, consumers), share_finisher(NT, consumers, epilogues)

    @cuda.jit(device=True, inline="always")
    def bring(c, y, workspace, place, cut, mine, how):
        block, slot, have = place
        if have == uint32(SEND) and slots(block, cut)[1] > uint32(1):
            send(c, workspace, slot, mine[0])
        elif have == uint32(SEND) or have == uint32(ALL):
            finish(c, y, workspace, block, uint32(ALL), cut, mine, how)

    @cuda.jit(device=True, inline="always")
    def settle(y, workspace, item, cut, mine, how):
        while uint32(item >> uint32(1)) < cut[3]:
            block, _, left, _, _, slot = place(item, cut)
            if left > uint32(0):
                first, slices = slots(block, cut)
                own = uint32(slot - first)
                if slices > uint32(1) and own < uint32(NT):
                    finish_share(y, workspace, block, (first, own, slices), mine, how)
            item = following(item, cut[4])

    return bring, settle


@kernel(*(int64,) * 4, *(uint32,) * 8)
def linear_decode_kernel(fmt: str, NT: int, span: int, stages: int, wgmma: int):  # type: ignore[no-untyped-def]
    """Arguments w, x, y, workspace, k_tiles, blocks, whole, runs, T, N, epilogue, ahead.

    blocks: 128-row blocks of W (padded N / 128), of which the first `whole` take all of K; runs:
    of the others. span: k tiles in a stage. wgmma: its products, else mma. epilogue: an Epilogue.
    ahead: stages of weights that are asked for before the previous kernel has ended.
    """
    threads, consumers = WARPS * 32 + 64, WARPS * 32
    form = Ring(span, stages, UNPACK[fmt].tile_nbytes, NT * X_TILE)
    sums, empty, ring_bytes = NT * 4, stages * 8, stages * form.stage_bytes
    shared, words = NT >= SHARED_TILES, 2 * stages
    factor, room_bytes = UNPACK[fmt].divisor, room_nbytes(NT, consumers)
    declare, tiles_of = declare_sums(NT), stage_tiles(span, wgmma)
    consume = (consume_by_wgmma if wgmma else consume_by_mma)(fmt, NT, form)
    epilogues, add_bf16 = EPILOGUES[fmt], int(Epilogue.ADD_BF16)
    finish = finisher(NT, epilogues)
    bring, settle = shared_slices(NT, finish, epilogues) if shared else waited_slices(NT, finish)
    stream_weights = stream(form, tiles_of, tokens=False)
    stream_tokens = stream(form, tiles_of, tokens=True)

    @cuda.jit(device=True, inline="always")
    def work(c, y, workspace, ring, barrier, item, cut, mine, how):
        s, phase = uint32(0), uint32(0)
        _, warp, lane = mine
        stay, items = end_of_items(cut)
        stay = stay and not shared
        first, owes = item, uint32(item >> uint32(1)) < cut[3]
        while item < items:
            block, k, left, before, after, slot = place(item, cut)
            for i in range(sums):
                c[i] = float32(0.0)
            if left > uint32(0):
                rest = (left, before, after)
                s, phase = consume(c, ring, barrier, s, phase, rest, warp, lane)
                for i in range(sums):
                    c[i] = c[i] * float32(factor)
            have = duty(item, k, left, cut, stay)
            bring(c, y, workspace, (block, slot, have), cut, mine, how)
            done, item = uint32(item >> uint32(1)), following(item, cut[4])
            if shared and owes and (done >= cut[3] or item >= items):  # others have sent by now
                settle(y, workspace, first, cut, mine, how)
                owes = False

    @cuda.jit(fastmath=True, launch_bounds=(threads, 1))
    def linear_decode(w, x, y, workspace, k_tiles, blocks, whole, runs, T, N, epilogue, ahead):
        barrier = shared_address(cuda.shared.array(words, int64))
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 127) & uint32(0xFFFFFF80))
        thread = uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barrier + s * 8), uint32(2))
                mbarrier_init(uint32(barrier + empty + s * 8), uint32(WARPS))
            fence_async_proxy()
        cuda.syncthreads()
        if epilogue != uint32(add_bf16):  # what adds lets it start behind its last copy: weights of
            let_next_kernel_start()  # the next kernel take bandwidth from the last of these
        cut = (k_tiles, blocks, whole, runs, uint32(cuda.gridDim.x))
        item = uint32(uint32(2) * uint32(cuda.blockIdx.x))
        if warp == uint32(WARPS):
            if lane == 0:
                stream_weights(w, ring, barrier, item, cut, ahead)
                let_next_kernel_start()
        elif warp > uint32(WARPS):
            if lane == 0:
                wait_for_previous_kernel()
                stream_tokens(x, ring, barrier, item, cut, uint32(NEVER))
        else:
            wait_for_previous_kernel()
            if wgmma:
                declare()
            c = cuda.local.array(sums, float32)
            how = (uint32(ring + uint32(ring_bytes)), T, N, epilogue, uint32(1))
            work(c, y, workspace, ring, barrier, item, cut, (thread, warp, lane), how)

    nbytes = ring_bytes + room_bytes + ALIGNMENT
    return Build(linear_decode, threads, max(nbytes, ALONE_NBYTES))
