"""Attention of a drafter's block: S queries of a row over its ring and over the block itself.

A query at position P + i sees the ring's tokens less than W before it, and all of its block. A
thread block takes one K/V head of a row and one piece: 128 tokens of context from an absolute
multiple of 128 on, or last the block's own S keys. q and own keys are normed and rotated on the way
in; scores and weights times values run on mma. A piece leaves its maximum, its sum and its values;
the merge adds them in order.

Shared memory: queries, later weights, [rows][PITCH]; keys, later scores, [KEYS][PITCH]; values
[KEYS][PITCH]. Legend: B rows, S columns, H query heads, G K/V heads, M = H / G, D = 128 dims, R
slots of a ring, tiles of 16 rows (row i M + m: head m of column i). Oracle: tests.oracles.drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.products import mma_add
from ginfer.cuda.drafter.order import HEAD_DIM, prepare_head
from ginfer.cuda.lib.fragment import pair_store, tiles_of
from ginfer.cuda.lib.numeric import (
    LOG2E,
    follow,
    pack_bf16,
    row_of_32,
    warp_max,
    warp_sum,
)
from ginfer.cuda.lib.ptx import (
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    exp2_approx,
    f32_from_bits,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32x4,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shared_address,
    st_global_f32,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.drafter.context import Rings
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

KEYS = 128  # of a piece
PITCH = 2 * HEAD_DIM + 16  # bytes of a row: its chunks fall on different banks
SCORES = 4 * KEYS + 16
THREADS, WARPS = 256, 8
TILES = (2, 4)  # of 16 query rows
LOWEST = -1.0e30
MERGE_ROWS = 4  # of a merging block, a warp each
STEP = 6  # partials in flight


@cuda.jit(device=True, inline="always")
def _store_head(v, at):
    """Eight dims to shared memory."""
    st_shared_u32x4(
        at,
        pack_bf16(v[0], v[1]),
        pack_bf16(v[2], v[3]),
        pack_bf16(v[4], v[5]),
        pack_bf16(v[6], v[7]),
    )


@cuda.jit(device=True, inline="always")
def _fetch_ring(keys, plane, R, first, length, width, thread):
    """Start copying 128 tokens of a head from `first` on: keys, then values; zeros behind `length`.
    plane: of keys, at the head's first dim; width: bytes of a slot."""
    base = uint32(first - div_u32(first, R) * R)
    for i in range(2 * KEYS * 16 // THREADS):
        item = uint32(thread + uint32(i * THREADS))
        row, chunk = uint32(item >> uint32(4)), uint32(item & uint32(15))
        key = uint32(row & uint32(KEYS - 1))
        slot = uint32(base + key)
        slot = uint32(slot - R) if slot >= R else slot
        source = plane + int64(slot) * int64(width) + int64(chunk) * 16
        if row >= uint32(KEYS):
            source += int64(R) * int64(width)
        at = uint32(keys + row * uint32(PITCH) + chunk * uint32(16))
        cp_async_16_or_zero(at, source, uint32(16) if first + key < length else uint32(0))


def _block_parts(tiles: int) -> tuple[Any, Any, Any]:
    """Device functions for `tiles` tiles of query rows. score(queries, keys, scale, warp, lane): a
    warp's 16 keys, scores to the place of the keys. weigh(queries, keys, stats, seen, warp, lane):
    weights to the place of the queries. add(partials, queries, values, count, warp, lane): a warp's
    16 dims of `count` rows."""
    sums, per_warp = tiles * 8, tiles * 2

    @cuda.jit(device=True, inline="always")
    def score(queries, keys, scale, warp, lane):
        c = cuda.local.array(sums, float32)
        for i in range(sums):
            c[i] = float32(0.0)
        chunk = uint32((lane >> uint32(3)) & uint32(1)) * uint32(16)
        b_at = uint32(warp * uint32(16) + ((lane >> uint32(4)) << uint32(3)) + (lane & uint32(7)))
        b_at = uint32(keys + b_at * uint32(PITCH) + chunk)
        a_at = uint32(queries + (lane & uint32(15)) * uint32(PITCH))
        a_at = uint32(a_at + (lane >> uint32(4)) * uint32(16))
        for step in range(HEAD_DIM // 16):
            b = ldmatrix_x4(uint32(b_at + uint32(step * 32)))
            for m in range(tiles):
                a = ldmatrix_x4(uint32(a_at + uint32(m * 16 * PITCH + step * 32)))
                mma_add(c, m * 8, a, b[0], b[1])
                mma_add(c, m * 8 + 4, a, b[2], b[3])
        cuda.syncthreads()  # all have read the keys
        column = uint32(warp * uint32(16) + (lane & uint32(3)) * uint32(2))
        at = uint32(keys + (lane >> uint32(2)) * uint32(SCORES) + column * uint32(4))
        for m in range(tiles):
            for i in range(8):
                row, to = m * 16 + ((i >> 1) & 1) * 8, (i >> 2) * 32 + (i & 1) * 4
                st_shared_f32(uint32(at + uint32(row * SCORES + to)), c[m * 8 + i] * scale)

    @cuda.jit(device=True, inline="always")
    def weigh(queries, keys, stats, view, warp, lane):
        """view: (first token, length, W, own keys or 0, M)."""
        first, length, W, own, M = view
        s = cuda.local.array(4, float32)
        for n in range(per_warp):
            r = uint32(warp * uint32(per_warp) + uint32(n))
            i = div_u32(r, M)
            q = ld_shared_u32x4(uint32(keys + r * uint32(SCORES) + lane * uint32(16)))
            m = float32(LOWEST)
            for j in range(4):
                key = uint32(lane * uint32(4) + uint32(j))
                token = uint32(first + key)
                seen = token < length and uint32(length + i - token) < W
                if own > uint32(0):
                    seen = key < own
                s[j] = f32_from_bits(q[j]) if seen else float32(LOWEST)
                m = max(m, s[j])
            m = warp_max(m)
            total = float32(0.0)
            for j in range(4):
                s[j] = exp2_approx(s[j] - m) if s[j] > float32(LOWEST) else float32(0.0)
                total = total + s[j]
            total = warp_sum(total)
            to = uint32(queries + r * uint32(PITCH) + lane * uint32(8))
            st_shared_u32(to, pack_bf16(s[0], s[1]))
            st_shared_u32(uint32(to + uint32(4)), pack_bf16(s[2], s[3]))
            if lane == 0:
                st_global_f32(stats + int64(r) * 8, m)
                st_global_f32(stats + int64(r) * 8 + 4, total)

    @cuda.jit(device=True, inline="always")
    def add(partials, queries, values, count, warp, lane):
        c = cuda.local.array(sums, float32)
        for i in range(sums):
            c[i] = float32(0.0)
        low, chunk = uint32(lane & uint32(15)), uint32((lane >> uint32(4)) * uint32(16))
        a_at = uint32(queries + low * uint32(PITCH) + chunk)
        b_at = uint32(values + low * uint32(PITCH) + chunk + warp * uint32(32))
        for step in range(KEYS // 16):
            b = ldmatrix_x4_trans(uint32(b_at + uint32(step * 16 * PITCH)))
            for m in range(tiles):
                a = ldmatrix_x4(uint32(a_at + uint32(m * 16 * PITCH + step * 32)))
                mma_add(c, m * 8, a, b[0], b[1])
                mma_add(c, m * 8 + 4, a, b[2], b[3])
        column = uint32(warp * uint32(16) + (lane & uint32(3)) * uint32(2))
        at = partials + int64(lane >> uint32(2)) * (4 * HEAD_DIM) + int64(column) * 4
        for m in range(tiles):
            for i in range(8):
                row, to = m * 16 + ((i >> 1) & 1) * 8, (i >> 2) * 32 + (i & 1) * 4
                if uint32(uint32(row) + (lane >> uint32(2))) < count:
                    st_global_f32(at + (row * 4 * HEAD_DIM + to), c[m * 8 + i])

    return score, weigh, add


@kernel(*(int64,) * 10, *(uint32,) * 7, *(float32,) * 2)
def block_attention_kernel(tiles: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments partials, stats, qkv, layer, ring, positions, w_q, w_k, far, near, S, H, G, W, R,
    bytes of a ring / 16, pieces (of the context, and one), scale (in powers of two), eps.

    qkv: [B S][q [H, D], k [G, D], v [G, D]] BF16. layer: that of ring 0. ring: [B]. positions: [B]
    of the blocks' first columns. partials: [B][G][pieces][16 tiles][D] FP32; stats: the same of
    (m, l).
    """
    rows, D = tiles * 16, HEAD_DIM
    start, (score, weigh, add) = follow(early), _block_parts(tiles)
    keys_at, values_at = rows * PITCH, (rows + KEYS) * PITCH
    shared_nbytes = (rows + 2 * KEYS) * PITCH
    assert rows * SCORES <= KEYS * PITCH

    @cuda.jit(device=True, inline="always")
    def load_queries(queries, source, count, M, stride, w, angles, position, eps, thread):
        """Rows of queries, zeros behind `count`; source: of column 0."""
        v = cuda.local.array(8, float32)
        for n in range(rows // 16):
            r = uint32(uint32(n * 16) + (thread >> uint32(4)))
            place = min(r, uint32(count - uint32(1)))
            i = div_u32(place, M)
            at = source + int64(i) * int64(stride) + int64(place - i * M) * (2 * D)
            prepare_head(v, at, w, angles, uint32(position + i), uint32(thread & uint32(15)), eps)
            for j in range(8):
                v[j] = v[j] if r < count else float32(0.0)
            _store_head(v, uint32(queries + r * uint32(PITCH) + (thread & uint32(15)) * uint32(16)))

    @cuda.jit(device=True, inline="always")
    def load_own(keys, source, offset, S, stride, w, angles, position, eps, thread):
        """The block's own keys, and `offset` bytes behind them in a row its values; zeros behind
        S keys. source: of column 0."""
        v = cuda.local.array(8, float32)
        r, chunk = uint32(thread >> uint32(4)), uint32(thread & uint32(15))
        i = min(r, uint32(S - uint32(1)))
        at = source + int64(i) * int64(stride)
        prepare_head(v, at, w, angles, uint32(position + i), chunk, eps)
        to = uint32(keys + r * uint32(PITCH) + chunk * uint32(16))
        _store_head(v, to)
        values = uint32(to + uint32(KEYS * PITCH))
        cp_async_16_or_zero(
            values, at + offset + int64(chunk) * 16, uint32(16) if r < S else uint32(0)
        )
        for n in range(1, KEYS // 16):
            at = uint32(values + uint32(n * 16 * PITCH))
            st_shared_u32x4(at, uint32(0), uint32(0), uint32(0), uint32(0))

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def block_attention(
        partials,
        stats,
        qkv,
        layer,
        ring,
        positions,
        w_q,
        w_k,
        far,
        near,
        S,
        H,
        G,
        W,
        R,
        ring_sixteenths,
        pieces,
        scale,
        eps,
    ):
        queries = uint32(shared_address(cuda.shared.array(0, uint32)))
        keys, values = uint32(queries + uint32(keys_at)), uint32(queries + uint32(values_at))
        start()
        item, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        head = div_u32(item, pieces)
        piece, b = uint32(item - head * pieces), div_u32(head, G)
        g, M = uint32(head - b * G), div_u32(H, G)
        length = ld_global_u32(row_of_32(positions, b))
        stats += int64(item) * (rows * 8)
        oldest = uint32(length - W + uint32(1)) if length >= W else uint32(0)
        own = piece + uint32(1) == pieces
        first = uint32(((oldest >> uint32(7)) + piece) * uint32(KEYS))
        if own or first < length:
            stride = uint32((H + G + G) * uint32(2 * D))
            source = qkv + int64(b * S) * int64(stride)
            count = uint32(S * M)
            if own:
                at = source + int64(H + g) * (2 * D)
                offset = int64(G) * (2 * D)
                load_own(keys, at, offset, S, stride, w_k, (far, near), length, eps, thread)
            else:
                width = uint32(G * uint32(2 * D))
                plane = int64(ld_global_u32(row_of_32(ring, b))) * int64(ring_sixteenths) * 16
                plane += layer + int64(g) * (2 * D)
                _fetch_ring(keys, plane, R, first, length, width, thread)
            cp_async_commit()
            at = source + int64(g * M) * (2 * D)
            load_queries(queries, at, count, M, stride, w_q, (far, near), length, eps, thread)
            cp_async_wait_0()
            cuda.syncthreads()
            score(queries, keys, scale, warp, lane)
            cuda.syncthreads()
            view = (first, length, W, S if own else uint32(0), M)
            weigh(queries, keys, stats, view, warp, lane)
            cuda.syncthreads()
            partials += int64(item) * (rows * 4 * D)
            add(partials, queries, values, count, warp, lane)
        elif thread < uint32(rows):
            st_global_f32(stats + int64(thread) * 8, float32(LOWEST))
            st_global_f32(stats + int64(thread) * 8 + 4, float32(0.0))

    return Build(block_attention, THREADS, shared_nbytes)


@kernel(*(int64,) * 3, *(uint32,) * 6)
def block_merge_kernel(tiles: int, early: int):  # type: ignore[no-untyped-def]
    """Arguments out, partials, stats, S, H, G, pieces, first, rest: [T, H D] in fragment order. A
    warp owns a row, a lane four dims and a piece."""
    start, store, rows = follow(early), pair_store(1), tiles * 16
    held, words, steps = 4 * STEP, MERGE_ROWS * 32, -(-32 // STEP)
    threads = 32 * MERGE_ROWS

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def block_merge(out, partials, stats, S, H, G, pieces, first, rest):
        table = shared_address(cuda.shared.array(words, float32))
        v, c = cuda.local.array(held, float32), cuda.local.array(4, float32)
        start()
        lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        M = div_u32(H, G)
        count = uint32(S * M)
        task = uint32(uint32(cuda.blockIdx.x) * uint32(MERGE_ROWS) + warp)
        head = div_u32(task, count)
        r, b = uint32(task - head * count), div_u32(head, G)
        g, i = uint32(head - b * G), div_u32(r, M)
        table = uint32(table + warp * uint32(128))
        place = int64(head) * int64(pieces)
        last = uint32(pieces - uint32(1))
        m, total = float32(LOWEST), float32(0.0)
        if lane < pieces:
            at = stats + ((place + int64(lane)) * rows + int64(r)) * 8
            m, total = ld_global_f32(at), ld_global_f32(at + 4)
        top = warp_max(m)
        weight = exp2_approx(m - top) if total > float32(0.0) else float32(0.0)
        st_shared_f32(uint32(table + lane * uint32(4)), weight)
        cuda.syncwarp()
        total = warp_sum(weight * total)
        for j in range(4):
            c[j] = float32(0.0)
        source = partials + place * (rows * 4 * HEAD_DIM)
        source += int64(r) * (4 * HEAD_DIM) + int64(lane) * 16
        for step in range(steps):
            if uint32(step * STEP) < pieces:
                for n in range(STEP):
                    piece = uint32(step * STEP + n)
                    full = piece < last
                    if full:
                        full = ld_shared_f32(uint32(table + piece * uint32(4))) > float32(0.0)
                    piece = piece if full else last
                    q = ld_global_f32x4(source + int64(piece) * (rows * 4 * HEAD_DIM))
                    for j in range(4):
                        v[4 * n + j] = q[j]
                for n in range(STEP):
                    piece = min(uint32(step * STEP + n), uint32(31))
                    w = ld_shared_f32(uint32(table + piece * uint32(4)))
                    if uint32(step * STEP + n) >= pieces:
                        w = float32(0.0)
                    for j in range(4):
                        c[j] = c[j] + w * v[4 * n + j]
        t, column = uint32(b * S + i), uint32((g * M + r - i * M) * uint32(HEAD_DIM))
        column = uint32(column + lane * uint32(4))
        width = uint32(H * uint32(HEAD_DIM))
        low, high = pack_bf16(c[0] / total, c[1] / total), pack_bf16(c[2] / total, c[3] / total)
        store(out, t, column, width, first, rest, low)
        store(out, t, uint32(column + uint32(2)), width, first, rest, high)

    return Build(block_merge, threads)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Blocks of up to 32 and 64 query rows per K/V head."""
    early = starts_early(capability)
    for tiles in TILES:
        yield block_attention_kernel(tiles, early)
        yield block_merge_kernel(tiles, early)


@dataclass(frozen=True)
class Heads:
    """H query and G K/V heads of 128 dims; addresses of the factors of q and k, [D] FP32 each, and
    of the tables of angles; eps."""

    H: int
    G: int
    w_q: int
    w_k: int
    angles: tuple[int, int]
    eps: float


@dataclass(frozen=True)
class BlockRows:
    """B rows of S columns; device addresses, u32: ring [B], positions [B] of the first columns."""

    B: int
    S: int
    ring: int
    positions: int


@dataclass(frozen=True)
class Partials:
    """Addresses of what pieces leave."""

    values: int
    stats: int


def row_tiles(S: int, M: int) -> int:
    """Tiles of the kernel for blocks of S columns and M query heads per K/V head."""
    return next(tiles for tiles in TILES if tiles * 16 >= S * M)


def num_pieces(W: int) -> int:
    """Pieces of a head: W - 1 tokens from anywhere on, and the block."""
    return (W + KEYS - 3) // KEYS + 2


def partials_nbytes(B: int, S: int, heads: tuple[int, int], W: int) -> tuple[int, int]:
    """Bytes of values and of stats for B rows of S columns with heads (H, G)."""
    H, G = heads
    rows = B * G * num_pieces(W) * 16 * row_tiles(S, H // G)
    return rows * HEAD_DIM * 4, rows * 8


def block_attention(
    queue: Queue,
    out: int,
    qkv: int,
    rings: tuple[Rings, int],
    *,
    rows: BlockRows,
    heads: tuple[Heads, Partials],
) -> None:
    """out [B S, H D] BF16 in fragment order = attention of blocks; rings: with the layer; heads:
    with scratch memory."""
    (ring, layer), (norms, scratch) = rings, heads
    assert rows.S <= 16
    assert KEYS <= ring.W <= ring.R
    B, S, H, G = rows.B, rows.S, norms.H, norms.G
    tiles, pieces = row_tiles(S, H // G), num_pieces(ring.W)
    assert pieces <= 32
    address = ring.address + layer * ring.layer_nbytes
    scale = HEAD_DIM**-0.5 * LOG2E
    queue.launch(
        block_attention_kernel(tiles, queue.early),
        (B * G * pieces,),
        *(scratch.values, scratch.stats, qkv, address, rows.ring, rows.positions),
        *(norms.w_q, norms.w_k, *norms.angles),
        *(S, H, G, ring.W, ring.R, ring.nbytes // 16, pieces, scale, norms.eps),
    )
    assert B * S * H % MERGE_ROWS == 0
    queue.launch(
        block_merge_kernel(tiles, queue.early),
        (B * S * H // MERGE_ROWS,),
        *(out, scratch.values, scratch.stats, S, H, G, pieces, *tiles_of(B * S)),
    )
