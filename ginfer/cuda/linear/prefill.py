"""Linear for many tokens on sm_90a: y[t, n] = sum_k x[t, k] * W[n, k], on wgmma.

Legend: N rows of W, K columns of W, T tokens; a tile is 64 rows per warpgroup by tile_n tokens.

Persistent blocks take tiles in turns, tokens fastest, so that a wave shares weights and activations
in L2. A producer warp fills a ring with k tiles: activations row-major [T, K] BF16 through a tensor
map (tails of T and K read as zero), weights as bulk copies. Each warpgroup dequantises a k16 step
of its rows into the register operand A while the products of the steps before run. A weight is
code * scale rounded once to BF16. Sums are FP32 from zero in ascending k, in one order for every T,
tile and grid: a token has the same bits in any company. BF16 results leave through shared memory as
16-byte stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    bf16x2_fma,
    bf16x2_from_f32,
    bulk_copy_to_shared,
    div_u32,
    f32_from_bits,
    fence_async_proxy,
    first_lane_u32,
    ld_shared_u32,
    ld_shared_u32x4,
    let_next_kernel_start,
    mbarrier_arrive_if,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    permute_bytes,
    red_global_bf16,
    red_global_bf16x8,
    shared_address,
    st_global_u16,
    st_global_u32x4,
    tensor_copy_2d_to_shared,
    u16_high,
    u16_low,
    wait_for_previous_kernel,
)
from ginfer.cuda.lib.wgmma import (
    accumulators,
    tile_descriptor,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.jit import Build, kernel

WAVE_TOKENS = 2048  # tokens that share a pass over the weights


@cuda.jit(device=True, inline="always")
def _split_scale(scale):
    """A scale as two BF16 pairs whose sum it is: `code * high + code * low` rounds once."""
    high = bf16x2_from_f32(scale, scale)
    rest = scale - f32_from_bits(uint32(high & uint32(0xFFFF0000)))
    return high, bf16x2_from_f32(rest, rest)


@cuda.jit(device=True, inline="always")
def _codes_q4(word, odd):
    """The codes of nibbles 0 and 4 of a word (odd: 1 and 5) in BF16, divided by 64.

    BF16 numbers of 0 to 255 in the lowest bits are those multiples of 2^-133, exactly.
    """
    masked = uint32(word & (uint32(0x00F000F0) if odd else uint32(0x000F000F)))
    return bf16x2_fma(masked, uint32(0x7D007D00) if odd else uint32(0x7F007F00), uint32(0xBE00BE00))


@cuda.jit(device=True, inline="always")
def _fragment_q4(v, i, odd):
    high = uint32(v[i] >> uint32(8))
    return _codes_q4(v[i], 0), _codes_q4(v[i], 1), _codes_q4(high, 0), _codes_q4(high, 1)


@cuda.jit(device=True, inline="always")
def _pair_q4(v, i, odd):
    gate, up = uint32(v[i] >> uint32(8)), uint32(v[4 + i] >> uint32(8))
    return _codes_q4(v[i], odd), _codes_q4(v[4 + i], odd), _codes_q4(gate, odd), _codes_q4(up, odd)


_w8_codes = UNPACK["W8G32_F16S"].fragment


@cuda.jit(device=True, inline="always")
def _fragment_w8(v, i, odd):
    return _w8_codes(v, 0, i)


@cuda.jit(device=True, inline="always")
def _pair_w8(v, i, odd):
    order = uint32(0x7632) if odd else uint32(0x5410)
    for j in range(2 * i, 2 * i + 2):
        v[j] = permute_bytes(v[j], v[8 + j], order)
    return _w8_codes(v, 0, i)


@cuda.jit(device=True, inline="always")
def _address_bf16(v, i, tile, row_tile, lane):
    """In place of words, for which there are no registers: where they lie."""
    v[i] = uint32(tile + row_tile * uint32(2048) + lane * uint32(16))


@cuda.jit(device=True, inline="always")
def _fragment_bf16(v, i, odd):
    return ld_shared_u32x4(uint32(v[0] + uint32(i * 512)))


@cuda.jit(device=True, inline="always")
def _pair_bf16(v, i, odd):
    first = uint32(uint32(i * 512) + odd * uint32(4))
    gate, up = uint32(v[0] + first), uint32(v[1] + first)
    a0, a1 = ld_shared_u32(gate), ld_shared_u32(up)
    return a0, a1, ld_shared_u32(uint32(gate + uint32(8))), ld_shared_u32(uint32(up + uint32(8)))


@dataclass(frozen=True)
class Operand:
    """How one format becomes operand A. words: of a row tile that a lane holds; divisor: of codes.

    Device functions: load(v, i, tile, row_tile, lane) fills v[i : i + words]; fragment(v, i, odd)
    returns a0..a3 of k16 step i from them; pair(v, i, odd) from those of a gate and an up tile:
    eight rows of each, the upper eight when odd.
    """

    words: int
    divisor: float
    load: Any
    fragment: Any
    pair: Any


_Q4 = Operand(4, 64.0, UNPACK["Q4G64_F16S"].load, _fragment_q4, _pair_q4)
OPERANDS = {
    "Q4G64_BF16S": _Q4,
    "Q4G64_F16S": _Q4,
    "W8G32_F16S": Operand(8, 1.0, UNPACK["W8G32_F16S"].load, _fragment_w8, _pair_w8),
    "BF16": Operand(1, 1.0, _address_bf16, _fragment_bf16, _pair_bf16),
}


def operand_loader(fmt, paired):
    """(load, operand, words of v, words of s): device functions load(v, s, tile, rows, lane), where
    `rows` is the warp's row tile, and operand(v, s, i, rows), a0..a3 of k16 step i in BF16.

    paired: a warp takes eight rows of a gate tile and those of the up tile that belong to them.
    """
    f, scaled, exact = OPERANDS[fmt], fmt != "BF16", fmt.endswith("_BF16S")
    load_words, words, factor, fragment = (
        f.load,
        f.words,
        f.divisor,
        f.pair if paired else f.fragment,
    )
    load_scales, groups = UNPACK[fmt].scales, UNPACK[fmt].groups
    num_words, num_scales = words * (2 if paired else 1), 4 * groups

    @cuda.jit(device=True, inline="always")
    def load(v, s, tile, rows, lane):
        first = uint32(rows & uint32(14)) if paired else rows
        load_words(v, 0, tile, first, lane)
        if paired:
            load_words(v, words, tile, uint32(rows | uint32(1)), lane)
        if scaled:
            for g in range(groups):
                low, high = load_scales(tile, first, lane, uint32(g))
                if paired:
                    up = load_scales(tile, uint32(rows | uint32(1)), lane, uint32(g))
                    odd = (rows & uint32(1)) != 0
                    low, high = high if odd else low, up[1] if odd else up[0]
                s[4 * g], s[4 * g + 1] = _split_scale(low * float32(factor))
                s[4 * g + 2], s[4 * g + 3] = _split_scale(high * float32(factor))

    @cuda.jit(device=True, inline="always")
    def times(code, high, low):
        zero = uint32(0x80008000)
        return bf16x2_fma(code, high, zero if exact else bf16x2_fma(code, low, zero))

    @cuda.jit(device=True, inline="always")
    def operand(v, s, i, rows):
        a0, a1, a2, a3 = fragment(v, i, rows & uint32(1))
        if not scaled:
            return a0, a1, a2, a3
        g = (i >> 1) * (groups - 1) * 4
        return (
            times(a0, s[g], s[g + 1]),
            times(a1, s[g + 2], s[g + 3]),
            times(a2, s[g], s[g + 1]),
            times(a3, s[g + 2], s[g + 3]),
        )

    return load, operand, num_words, num_scales


def row_writer(tile_n, row_bytes, put, put_one):
    """Device function write(y, staged, thread, row, token, T, N, add): staged BF16 results of 64
    rows of W to y by 128 threads.

    row_bytes: of a staged token. put(to, w0, w1, w2, w3, add) takes eight results to y,
    put_one(to, bits, add) one; add: whether to what is there.
    """
    chunks = row_bytes // 16
    shift, mask = (3, 7) if chunks == 8 else (2, 3)
    skew, per_pass = 3 - shift, 128 // chunks
    passes, pass_bytes = -(-tile_n // per_pass), per_pass * row_bytes

    @cuda.jit(device=True, inline="always")
    def put_some(to, words, n, add):
        """The first n of eight results, for rows of y that 16-byte stores cannot reach."""
        for i in range(4):
            if uint32(2 * i) < n:
                put_one(to + 4 * i, u16_low(words[i]), add)
            if uint32(2 * i + 1) < n:
                put_one(to + 4 * i + 2, u16_high(words[i]), add)

    @cuda.jit(device=True, inline="always")
    def write(y, staged, thread, row, token, T, N, add):
        chunk, local = uint32(thread & uint32(mask)), uint32(thread >> uint32(shift))
        first = uint32(row + chunk * uint32(8))
        swizzled = uint32(chunk ^ ((local >> uint32(skew)) & uint32(mask)))
        source = uint32(staged + local * uint32(row_bytes) + swizzled * uint32(16))
        to = y + (int64(token + local) * int64(N) + int64(first)) * 2
        end = min(uint32(T - token), uint32(tile_n)) if first < N else uint32(0)
        for i in range(passes):
            if uint32(local + uint32(i * per_pass)) < end:
                words = ld_shared_u32x4(uint32(source + uint32(i * pass_bytes)))
                if N & uint32(7):
                    put_some(to, words, uint32(N - first), add)
                else:
                    put(to, words[0], words[1], words[2], words[3], add)
            to += int64(N) * (2 * per_pass)

    return write


@cuda.jit(device=True, inline="always")
def _put(to, w0, w1, w2, w3, add):
    if add:
        red_global_bf16x8(to, w0, w1, w2, w3)
    else:
        st_global_u32x4(to, w0, w1, w2, w3)


@cuda.jit(device=True, inline="always")
def _put_one(to, bits, add):
    if add:
        red_global_bf16(to, bits)
    else:
        st_global_u16(to, bits)


def shared_nbytes(tile_nbytes: int, tile_n: int, groups: int, stages: int, epilogue: int) -> int:
    """Dynamic shared memory of a block, in bytes; tile_nbytes: of a weight tile."""
    staging = {Epilogue.STORE_F32: 0, Epilogue.SILU_UP: 64}.get(Epilogue(epilogue), 128)
    stage = tile_n * 128 + (groups + 1) // 2 * tile_nbytes
    return stages * stage + groups * tile_n * staging + 1024


@kernel(*(int64,) * 3, *(uint32,) * 5)
def linear_prefill_kernel(
    fmt: str, tile_n: int, groups: int, stages: int, resident: int, epilogue: int
) -> Build:
    """Arguments w, x_map, y, k_tiles, blocks, T, N, add.

    groups: warpgroups, of 64 rows each. blocks: 128-row blocks of W, padded N / 128. x_map: tensor
    map of x with boxes [tile_n, 64]. resident: thread blocks that must fit on a multiprocessor.
    epilogue: STORE_BF16, which adds to y where `add` is not 0, STORE_F32 or SILU_UP.
    """
    threads, warps, w_tiles = groups * 128 + 32, groups * 4, (groups + 1) // 2
    tile_bytes, x_bytes, turn = UNPACK[fmt].tile_nbytes, tile_n * 128, max(WAVE_TOKENS // tile_n, 1)
    w_bytes = w_tiles * tile_bytes
    stage_bytes, ring_x, ring_all = (
        x_bytes + w_bytes,
        stages * x_bytes,
        stages * (x_bytes + w_bytes),
    )
    store_f32, paired = epilogue == Epilogue.STORE_F32, epilogue == Epilogue.SILU_UP
    out_rows = 32 if paired else 64
    out_bytes, staging = out_rows * 2, tile_n * out_rows * 2
    barriers, empty = 2 * stages, 8 * stages
    in_flight = 1 if tile_n > 192 else 2  # more would take registers that are not there
    wait_all, wait_older, acc = wgmma_wait(0), wgmma_wait(in_flight), accumulators(tile_n)
    declare, multiply, acc_store_f32 = acc.declare, acc.multiply, acc.store_f32
    stage_results = acc.stage_silu if paired else acc.stage_bf16
    load, operand, num_words, num_scales = operand_loader(fmt, paired)
    write_rows = row_writer(tile_n, out_bytes, _put, _put_one)

    @cuda.jit(device=True, inline="always")
    def locate(item, row_tiles, T):
        """(row tile, token tile) of an item: turns of token tiles, row tiles, token tiles."""
        tiles = div_u32(uint32(T + uint32(tile_n - 1)), uint32(tile_n))
        first = uint32(div_u32(item, uint32(row_tiles * uint32(turn))) * uint32(turn))
        width = min(uint32(turn), uint32(tiles - first))
        rest = uint32(item - first * row_tiles)
        row = div_u32(rest, width)
        return row, uint32(first + rest - row * width)

    @cuda.jit(device=True, inline="always")
    def advance(s, phase):
        s = uint32(s + uint32(1))
        if s == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return s, phase

    @cuda.jit(device=True, inline="always")
    def produce(w, x_map, ring, barrier, items, row_tiles, k_tiles, blocks, T):
        s, phase, item = uint32(0), uint32(1), uint32(cuda.blockIdx.x)
        while item < items:
            row, tile = locate(item, row_tiles, T)
            block = uint32(uint32(row * uint32(groups)) >> uint32(1))
            source = w + int64(block) * int64(k_tiles) * tile_bytes
            # a block of rows beyond the last is never stored: any weights will do
            next_block = int64(k_tiles) * tile_bytes if block + 1 < blocks else int64(0)
            k = uint32(0)
            while k < k_tiles:
                full = uint32(barrier + s * uint32(8))
                mbarrier_wait(uint32(full + uint32(empty)), phase)
                mbarrier_expect_bytes(full, uint32(stage_bytes))
                to = uint32(ring + s * uint32(x_bytes))
                first_column, first_token = uint32(k * uint32(64)), uint32(tile * uint32(tile_n))
                tensor_copy_2d_to_shared(to, x_map, first_column, first_token, full)
                to = uint32(ring + uint32(ring_x) + s * uint32(w_bytes))
                bulk_copy_to_shared(to, source, uint32(tile_bytes), full)
                if w_tiles == 2:
                    to = uint32(to + uint32(tile_bytes))
                    bulk_copy_to_shared(to, source + next_block, uint32(tile_bytes), full)
                k = uint32(k + uint32(1))
                source += tile_bytes
                s, phase = advance(s, phase)
            item = uint32(item + uint32(cuda.gridDim.x))

    @cuda.jit(device=True, inline="always")
    def finish(y, staged, half, warp, lane, tile, T, N, add):
        """The sums of a warpgroup, those of 64-row block `half` of W, to y."""
        group, quarter = uint32(warp >> uint32(2)), uint32(warp & uint32(3))
        token = uint32(tile * uint32(tile_n))
        if store_f32:
            row = uint32(half * uint32(64) + quarter * uint32(16) + (lane >> uint32(2)))
            column = uint32(token + (lane & uint32(3)) * uint32(2))
            at = y + (int64(column) * int64(N) + int64(row)) * 4
            low = uint32(1) if row < N else uint32(0)
            high = uint32(1) if uint32(row + uint32(8)) < N else uint32(0)
            acc_store_f32(at, int64(N) * 4, low, high, uint32(T - column))
        else:
            mine = uint32(staged + group * uint32(staging))
            line, m = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
            if paired:
                at = uint32(mine + ((m & uint32(1)) * uint32(8) + line) * uint32(64))
                at = uint32(at + (quarter ^ (line >> uint32(1))) * uint32(16))
            else:
                at = uint32(mine + ((m >> uint32(1)) * uint32(8) + line) * uint32(128))
                chunk = uint32(quarter * uint32(2) + (m & uint32(1)))
                at = uint32(at + (chunk ^ line) * uint32(16))
            named_barrier(uint32(group + uint32(1)), uint32(128))
            stage_results(at)
            named_barrier(uint32(group + uint32(1)), uint32(128))
            thread = uint32(quarter * uint32(32) + lane)
            out_n = uint32(N >> uint32(1)) if paired else N
            first = uint32(half * uint32(out_rows))
            write_rows(y, mine, thread, first, token, T, out_n, uint32(0) if paired else add)

    @cuda.jit(fastmath=True, launch_bounds=(threads, resident))
    def linear_prefill(w, x_map, y, k_tiles, blocks, T, N, add):
        barrier_words = cuda.shared.array(barriers, int64)
        ring = uint32((shared_address(cuda.shared.array(0, uint32)) + 1023) & uint32(0xFFFFFC00))
        barrier, thread = shared_address(barrier_words), uint32(cuda.threadIdx.x)
        warp, lane = first_lane_u32(uint32(thread >> uint32(5))), uint32(thread & uint32(31))
        if thread == 0:
            for s in range(stages):
                mbarrier_init(uint32(barrier + s * 8), uint32(1))
                mbarrier_init(uint32(barrier + empty + s * 8), uint32(warps))
            fence_async_proxy()
        cuda.syncthreads()
        let_next_kernel_start()
        wait_for_previous_kernel()
        row_tiles = div_u32(uint32(blocks * uint32(2) + uint32(groups - 1)), uint32(groups))
        items = uint32(div_u32(uint32(T + uint32(tile_n - 1)), uint32(tile_n)) * row_tiles)
        if warp == uint32(warps):
            if lane == 0:
                produce(w, x_map, ring, barrier, items, row_tiles, k_tiles, blocks, T)
        else:
            declare()
            v = cuda.local.array(num_words, uint32)
            scales = cuda.local.array(num_scales, uint32)
            chosen = uint32(1) if lane == 0 else uint32(0)
            s, phase, item, before = uint32(0), uint32(0), uint32(cuda.blockIdx.x), barrier
            while item < items:
                row, tile = locate(item, row_tiles, T)
                first = uint32(row * uint32(groups))
                half = uint32(first + (warp >> uint32(2)))
                w_tile = uint32((half >> uint32(1)) - (first >> uint32(1)))
                codes = uint32(ring + uint32(ring_x) + w_tile * uint32(tile_bytes))
                rows = uint32((half & uint32(1)) * uint32(4) + (warp & uint32(3)))
                k = uint32(0)
                while k < k_tiles:
                    full = uint32(barrier + s * uint32(8))
                    mbarrier_wait(full, phase)
                    load(v, scales, uint32(codes + s * uint32(w_bytes)), rows, lane)
                    tokens = tile_descriptor(uint32(ring + s * uint32(x_bytes)))
                    for i in range(4):
                        a0, a1, a2, a3 = operand(v, scales, i, rows)
                        wait_older()
                        if i == in_flight:  # all products of the k tile before have ended
                            mbarrier_arrive_if(before, chosen if k > uint32(0) else uint32(0))
                        wgmma_fence()
                        multiply(a0, a1, a2, a3, tokens + 2 * i, uint32(k | uint32(i)))
                        wgmma_commit()
                    before = uint32(full + uint32(empty))
                    s, phase = advance(s, phase)
                    k = uint32(k + uint32(1))
                wait_all()
                mbarrier_arrive_if(before, chosen)
                finish(y, uint32(ring + uint32(ring_all)), half, warp, lane, tile, T, N, add)
                item = uint32(item + uint32(cuda.gridDim.x))

    nbytes = shared_nbytes(tile_bytes, tile_n, groups, stages, epilogue)
    return Build(linear_prefill, threads, nbytes)
