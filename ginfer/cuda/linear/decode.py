"""Linear for decode on sm_90: y[t, n] = sum_k x[t, k] * W[n, k], weights read once from HBM.

Legend: N rows of W, K columns of W, T tokens (columns of the batch), NT = tiles of 8 tokens.

Work is a list of items, taken in turns by persistent blocks: an item is all of K, or one of the
slices of K, for RB blocks of 128 rows. Rows that do not fill the machine evenly are sliced and
come first: their exchange hides behind the whole rows that follow. A producer warp streams the
weights of an item into a ring with bulk copies, before the wait for the previous kernel; another
one streams the tokens after it (in one warp the wait would stop the weights too). Consumer warps
own 16 M rows each; their products are in `decode_multiply`. A slice's sum starts at zero; the last
block to arrive adds the slices in ascending order. Slices are a function of (N, K), see `k_slices`,
and no plan changes an order: a column has the same bits at every width.

Tokens arrive in the order of `fragment_offset`; padding of K and of tokens is zero there.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.fragment import fragment_offset
from ginfer.cuda.lib.numeric import silu
from ginfer.cuda.lib.ptx import (
    atomic_inc_u32,
    bf16_from_f32,
    bulk_copy_to_shared,
    div_u32,
    f32_from_bits,
    fence_async_proxy,
    first_lane_u32,
    ld_global_f32x4,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32,
    let_next_kernel_start,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    shared_address,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_shared_f32,
    st_shared_u32,
    wait_for_previous_kernel,
)
from ginfer.cuda.lib.wgmma_scaled import declare_sums
from ginfer.cuda.linear.decode_multiply import X_TILE, Ring, consume_by_mma, consume_by_wgmma
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

SLICE_TILES = 4  # slices of K begin at multiples of 256 columns
ALIGNMENT = 128


_offset = cuda.jit(device=True, inline="always")(fragment_offset)


def _write_rows(epilogue, M, NT):
    """Device function: the sums of a warp's rows to a row-major y."""
    add, store_f32 = epilogue == Epilogue.ADD_BF16, epilogue == Epilogue.STORE_F32

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, lane, T, N):
        for m in range(M):
            for n in range(NT):
                for i in range(4):
                    row = uint32(first_row + (lane >> uint32(2)) + uint32(m * 16 + (i >> 1) * 8))
                    t = uint32((lane & uint32(3)) * uint32(2) + uint32(n * 8 + (i & 1)))
                    if t < T and row < end_row:
                        value = c[(m * NT + n) * 4 + i]
                        at = int64(t) * int64(N) + int64(row)
                        if store_f32:
                            st_global_f32(y + at * 4, value)
                        elif add:
                            old = uint32(ld_global_u16(y + at * 2)) << uint32(16)
                            st_global_u16(y + at * 2, bf16_from_f32(f32_from_bits(old) + value))
                        else:
                            st_global_u16(y + at * 2, bf16_from_f32(value))

    return write


def _write_silu(M, NT, consumers):
    """Device function: silu(gate) * up in fragment order; 16-row tiles alternate gate and up.

    Padding of rows and tokens has sums of zero and stays zero.
    """
    sums = M * NT * 4

    @cuda.jit(device=True, inline="always")
    def write(c, y, first_row, end_row, warp, lane, exchange):
        row = uint32((first_row >> uint32(5)) * uint32(16) + (lane >> uint32(2)))
        at = y + int64(_offset(uint32((lane & uint32(3)) * uint32(2)), row, uint32(NT)))
        if M == 1:  # odd warps hold the up rows of the even warp before them
            place = uint32(exchange + ((warp >> uint32(1)) * uint32(32) + lane) * uint32(NT * 16))
            if warp & uint32(1):
                for i in range(sums):
                    st_shared_f32(uint32(place + uint32(i * 4)), c[i])
            named_barrier(uint32(1), uint32(consumers))
            if warp & uint32(1) == 0 and first_row < end_row:
                for i in range(sums):
                    up = ld_shared_f32(uint32(place + uint32(i * 4)))
                    to = at + (i >> 2) * X_TILE + (i & 1) * 16 + ((i >> 1) & 1) * 128
                    st_global_u16(to, bf16_from_f32(silu(c[i]) * up))
            named_barrier(uint32(1), uint32(consumers))
        elif first_row < end_row:
            for i in range(NT * 4):
                to = at + (i >> 2) * X_TILE + (i & 1) * 16 + ((i >> 1) & 1) * 128
                st_global_u16(to, bf16_from_f32(silu(c[i]) * c[NT * 4 + i]))

    return write


@kernel(*(int64,) * 5, *(uint32,) * 6)
def linear_decode_kernel(  # type: ignore[no-untyped-def]
    fmt: str,
    warps: int,
    M: int,
    NT: int,
    span: int,
    stages: int,
    resident: int,
    wgmma: int,
    epilogue: int,
):
    """Arguments w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N.

    blocks: 128-row blocks of W (padded N / 128), of which the first `whole` take all of K and the
    others `slices` slices. warps: consumer warps, each with M 16-row tiles. span: k tiles in a
    stage. resident: thread blocks that must fit on a multiprocessor. wgmma: its products, else mma.
    """
    threads, consumers, RB = warps * 32 + 64, warps * 32, warps * M // 8
    tile_bytes, x_bytes = UNPACK[fmt].tile_nbytes, NT * X_TILE  # of a k tile
    form = Ring(span, stages, tile_bytes, x_bytes, RB)
    slab, weight_bytes, stage_bytes = form.slab, form.weight_bytes, form.stage_bytes
    sums, words, empty, ring_bytes = M * NT * 4, 2 * stages, stages * 8, stages * stage_bytes
    slot_bytes = sums * consumers * 4
    silu_up, factor = epilogue == Epilogue.SILU_UP, UNPACK[fmt].divisor
    exchange_bytes = consumers // 2 * NT * 16 if silu_up and M == 1 else 0
    declare = declare_sums(NT)
    consume = (consume_by_wgmma if wgmma else consume_by_mma)(fmt, M, NT, form)
    write_rows, write_silu = _write_rows(epilogue, M, NT), _write_silu(M, NT, consumers)
    quarters = M * NT
    batch = 4 if sums <= 8 else 1
    batch_sums = batch * sums

    @cuda.jit(device=True, inline="always")
    def locate(item, sliced, k_tiles, blocks, whole, slices):
        """(first row block, end of its row blocks, first k tile, k tiles) of an item."""
        if item >= sliced:
            return uint32((item - sliced) * uint32(RB)), whole, uint32(0), k_tiles
        group = div_u32(item, slices)
        s = uint32(item - group * slices)
        steps = uint32((k_tiles + uint32(SLICE_TILES - 1)) >> uint32(2))
        base = div_u32(steps, slices)
        extra = uint32(steps - base * slices)
        first = uint32(uint32(s * base + min(s, extra)) << uint32(2))
        count = uint32(uint32(base + (uint32(1) if s < extra else uint32(0))) << uint32(2))
        return (
            uint32(whole + group * uint32(RB)),
            blocks,
            first,
            min(count, uint32(k_tiles - first)),
        )

    @cuda.jit(device=True, inline="always")
    def stream_weights(w, ring, barrier, items, sliced, k_tiles, blocks, whole, slices):
        s, phase, item = uint32(0), uint32(1), uint32(cuda.blockIdx.x)
        while item < items:
            block, end, first, left = locate(item, sliced, k_tiles, blocks, whole, slices)
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
                count = min(left, uint32(span))
                num_bytes = uint32(count * uint32(tile_bytes))
                full = uint32(barrier + s * uint32(8))
                at = uint32(ring + s * uint32(stage_bytes))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, uint32(num_bytes * uint32(RB)))
                bulk_copy_to_shared(at, source, num_bytes, full)
                if RB == 2:
                    bulk_copy_to_shared(uint32(at + uint32(slab)), second, num_bytes, full)
                source += slab
                second += slab
                left = uint32(left - count)
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
            source = x + int64(first) * x_bytes
            while left > uint32(0):
                count = min(left, uint32(span))
                num_bytes = uint32(count * uint32(x_bytes))
                full = uint32(barrier + s * uint32(8))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, num_bytes)
                at = uint32(ring + s * uint32(stage_bytes) + uint32(weight_bytes))
                bulk_copy_to_shared(at, source, num_bytes, full)
                source += span * x_bytes
                left = uint32(left - count)
                s = uint32(s + uint32(1))
                if s == uint32(stages):
                    s = uint32(0)
                    phase ^= uint32(1)
            item = uint32(item + uint32(cuda.gridDim.x))

    @cuda.jit(device=True, inline="always")
    def exchange_slices(c, workspace, counters, item, slices, thread, flag):
        """Publish a slice; the last block to arrive gets c = all slices, ascending, and True."""
        at = workspace + int64(item) * slot_bytes + int64(thread) * 16
        for i in range(quarters):
            to = at + i * (consumers * 16)
            st_global_f32x4(to, c[i * 4], c[i * 4 + 1], c[i * 4 + 2], c[i * 4 + 3])
        group = div_u32(item, slices)
        last = uint32(slices - uint32(1))
        named_barrier(uint32(1), uint32(consumers))
        if thread == 0:  # its release covers what the barrier has ordered before it
            st_shared_u32(flag, atomic_inc_u32(counters + int64(group) * 4, last))
        named_barrier(uint32(1), uint32(consumers))
        if ld_shared_u32(flag) != last:
            return False
        at += (int64(group) * int64(slices) - int64(item)) * slot_bytes
        for i in range(sums):
            c[i] = float32(0.0)
        values = cuda.local.array(batch_sums, float32)
        done = uint32(0)
        while done < slices:
            for b in range(batch):
                source = at + int64(min(uint32(done + uint32(b)), last)) * slot_bytes
                for i in range(quarters):
                    q = ld_global_f32x4(source + i * (consumers * 16))
                    for j in range(4):
                        values[b * sums + i * 4 + j] = q[j]
            for b in range(batch):
                if uint32(done + uint32(b)) <= last:
                    for i in range(sums):
                        c[i] = c[i] + values[b * sums + i]
            done = uint32(done + uint32(batch))
        return True

    @cuda.jit(fastmath=True, launch_bounds=(threads, resident))
    def linear_decode(w, x, y, workspace, counters, k_tiles, blocks, whole, slices, T, N):
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
                    complete = exchange_slices(c, workspace, counters, item, slices, thread, flag)
                if complete:
                    first_row = uint32(block * uint32(128) + warp * uint32(16 * M))
                    end_row = uint32(end * uint32(128))
                    if silu_up:
                        exchange = uint32(ring + uint32(ring_bytes))
                        write_silu(c, y, first_row, end_row, warp, lane, exchange)
                    else:
                        write_rows(c, y, first_row, min(end_row, N), lane, T, N)
                item = uint32(item + uint32(cuda.gridDim.x))

    return Build(linear_decode, threads, ring_bytes + exchange_bytes + ALIGNMENT)
