"""Gated DeltaNet inside its chunks of 64 tokens (prefill family): what needs no state.

Per chunk and value head, rows i and j of a chunk, G the running sum of g in it:
  A = strict_lower(beta_i (k_i . k_j) e^(G_i - G_j)), T = (I + A)^-1 diag(beta),
  P = lower((q_i . k_j) e^(G_i - G_j)),
with k = unit(k), q = unit(q) / sqrt(K) and the gates of `step`. Products are of BF16 inputs as they
are, their lengths are divided out in FP32; T is found by substitution in FP32. T and P are kept as
the nearest BF16 and what that leaves, BF16 too. Rows beyond the end of a chunk are zero.

Legend: HK key heads, HV value heads, K = 128, X channels. Blocks are 16 x 16; only those on and
below the diagonal are kept, row after row, each in the order of the B operands of two m16n8k16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.attention.pages import PANEL_NBYTES, TILE, chunk_at
from ginfer.cuda.attention.products import row_fragment
from ginfer.cuda.gdn.recurrence import FORGOTTEN, L2_EPS, WIDTH, decay_of
from ginfer.cuda.lib.numeric import exp_f32, follow, row_of_32, sigmoid, softplus
from ginfer.cuda.lib.ptx import (
    cp_async_16_or_zero,
    cp_async_commit,
    cp_async_wait_0,
    div_u32,
    f32_from_bits,
    fma_f32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_f32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    ldmatrix_x4,
    mma_pair_add,
    rsqrt_approx,
    shared_address,
    shfl_xor_f32,
    split_bf16,
    st_global_f32,
    st_global_u32x4,
    st_shared_f32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel

CHUNK = TILE
THREADS, RESIDENT = 128, 5  # RESIDENT: blocks on a multiprocessor
AT_ONCE = 4  # columns that the substitution takes in a step
BLOCK_NBYTES, BLOCKS = 512, 10
LOW_AT, P_AT = BLOCKS * BLOCK_NBYTES, 2 * BLOCKS * BLOCK_NBYTES  # the high parts come first
# behind the blocks: factors of S^T k, S^T q, k per row, and of the state, FP32
FACTORS_AT = 4 * BLOCKS * BLOCK_NBYTES
END_AT = FACTORS_AT + 3 * CHUNK * 4
WITHIN_NBYTES = END_AT + 16
PITCH = CHUNK + 4  # floats
TILE_NBYTES = 2 * PANEL_NBYTES
MATRIX_NBYTES = CHUNK * PITCH * 4
VECTORS_AT = 2 * MATRIX_NBYTES  # the matrices take the place of k and q
SHARED_NBYTES = VECTORS_AT + 4 * CHUNK * 4


@cuda.jit(device=True, inline="always")
def rows_at(lane):
    """Place of a lane's row of a 16 x 16 block of a panel, for the operands of two mma side by
    side: rows 0-7, then rows 8-15."""
    row = uint32((lane & uint32(7)) + (lane >> uint32(4)) * uint32(8))
    turn = uint32(((lane >> uint32(3)) & uint32(1)) ^ (lane & uint32(7)))
    return uint32(row * uint32(128) + turn * uint32(16))


def rows_fetch(threads: int, columns: int) -> Any:
    """Device function fetch(to, source, pitch, count, thread): start copying 64 rows of so many
    BF16 columns, `pitch` bytes apart, to panels; rows from `count` on become zero."""
    chunks = columns // 8
    shift, step = chunks.bit_length() - 1, threads // chunks
    assert step % 8 == 0, "rows of a thread lie at one place of the swizzle"

    @cuda.jit(device=True, inline="always")
    def fetch(to, source, pitch, count, thread):
        row, chunk = uint32(thread >> uint32(shift)), uint32(thread & uint32(chunks - 1))
        at = source + int64(row) * pitch + int64(chunk) * 16
        place = uint32(to + (chunk >> uint32(3)) * uint32(PANEL_NBYTES))
        place = uint32(place + chunk_at(row, uint32(chunk & uint32(7))))
        for i in range(CHUNK // step):
            there = uint32(row + uint32(i * step)) < count
            nbytes = uint32(16) if there else uint32(0)
            cp_async_16_or_zero(uint32(place + uint32(i * step * 128)), at, nbytes)
            at += pitch * step if there else int64(0)

    return fetch


@kernel(*(int64,) * 5, *(uint32,) * 2)
def gdn_prepare_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments within, convolved, ab, gates, chunks, HK, HV. A block takes a chunk and a value
    head. within: [chunks][HV][WITHIN_NBYTES]; chunks: u32 (first column, columns) each."""
    start, shorten, fetch = follow(early), WIDTH**-0.5, rows_fetch(THREADS, WIDTH)
    sums, invk, invq, betas = (VECTORS_AT + i * CHUNK * 4 for i in range(4))

    @cuda.jit(device=True, inline="always")
    def gate(base, ab, gates, t, h, HV, row, n):
        """g of a row, and its beta to its place; nothing moves beyond the end of a chunk."""
        g, beta = float32(0.0), float32(0.0)
        if row < n:
            at = ab + (int64(t + row) * int64(HV) * 2 + int64(h)) * 4
            bias = ld_global_f32(gates + int64(HV + h) * 4)
            g = ld_global_f32(gates + int64(h) * 4) * softplus(ld_global_f32(at) + bias)
            beta = sigmoid(ld_global_f32(at + int64(HV) * 4))
        st_shared_f32(uint32(base + uint32(betas) + row * uint32(4)), beta)
        return g

    @cuda.jit(device=True, inline="always")
    def add_up(base, first, second, lane):
        """One warp: running sums of g, of which a lane has two rows."""
        before, total = float32(0.0), first + second
        for i in range(5):
            other = shfl_xor_f32(total, uint32(1 << i))
            before = before + (other if lane & uint32(1 << i) else float32(0.0))
            total = total + other
        at = uint32(base + uint32(sums) + lane * uint32(8))
        st_shared_f32(at, before + first)
        st_shared_f32(uint32(at + uint32(4)), before + first + second)

    @cuda.jit(device=True, inline="always")
    def keep_lengths(c, p, to, scale, row, lane):
        """scale / |x| of the warp's rows, from the diagonal of X X^T."""
        i = uint32(lane >> uint32(2))
        if i >> uint32(1) == lane & uint32(3):
            at = uint32(to + (row + i) * uint32(4))
            low = c[p + 1] if i & uint32(1) else c[p]
            high = c[p + 7] if i & uint32(1) else c[p + 6]
            st_shared_f32(at, rsqrt_approx(low + float32(L2_EPS)) * scale)
            st_shared_f32(uint32(at + uint32(32)), rsqrt_approx(high + float32(L2_EPS)) * scale)

    @cuda.jit(device=True, inline="always")
    def scores(kk, qk, base, warp, lane):
        """K K^T and Q K^T of the warp's 16 rows, of raw inputs, and the lengths of the rows."""
        qq = cuda.local.array(8, float32)
        k, q = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        for i in range(32):
            kk[i] = float32(0.0)
            qk[i] = float32(0.0)
        for i in range(8):
            qq[i] = float32(0.0)
        queries, row = uint32(base + uint32(TILE_NBYTES)), uint32(warp * uint32(16))
        straight = rows_at(lane)
        for step in range(WIDTH // 16):
            a = row_fragment(base, row, uint32(step), PANEL_NBYTES, lane)
            b = row_fragment(queries, row, uint32(step), PANEL_NBYTES, lane)
            for i in range(4):
                k[i], q[i] = a[i], b[i]
            mma_pair_add(qq, 0, q, b[0], b[2], b[1], b[3])
            at = uint32(base + (straight ^ uint32((step & 3) * 32)))
            at = uint32(at + uint32(step >> 2) * uint32(PANEL_NBYTES))
            for n in range(4):
                if uint32(n) <= warp:
                    c = ldmatrix_x4(uint32(at + uint32(n * 16 * 128)))
                    mma_pair_add(kk, 8 * n, k, c[0], c[1], c[2], c[3])
                    mma_pair_add(qk, 8 * n, q, c[0], c[1], c[2], c[3])
        keep_lengths(qq, 0, uint32(base + uint32(invq)), float32(shorten), row, lane)
        for n in range(4):
            if uint32(n) == warp:
                keep_lengths(kk, 8 * n, uint32(base + uint32(invk)), float32(1.0), row, lane)

    @cuda.jit(device=True, inline="always")
    def pair_at(base, at, j):
        """Elements j and j + 1 of a vector."""
        f = ld_shared_u32x2(uint32(base + uint32(at) + j * uint32(4)))
        return f32_from_bits(f[0]), f32_from_bits(f[1])

    @cuda.jit(device=True, inline="always")
    def weigh(kk, qk, p, i, j, g, scales):
        """Element p of both products, row i and column j: A and P. g: sum of the row and of the
        column; scales: of K K^T and of Q K^T."""
        change = g[0] - g[1]
        decay = exp_f32(change)
        decay = decay if j <= i and change > float32(FORGOTTEN) else float32(0.0)
        kk[p] = kk[p] * scales[0] * (decay if j < i else float32(0.0))
        qk[p] = qk[p] * scales[1] * decay

    @cuda.jit(device=True, inline="always")
    def keep(block, a, lane):
        """A block of 16 rows, of the order of an A operand, in that of two B operands."""
        st_global_u32x4(block + int64(lane) * 16, a[0], a[2], a[1], a[3])

    @cuda.jit(device=True, inline="always")
    def weigh_blocks(kk, qk, base, out, warp, lane):
        """The warp's blocks of A, transposed, to their place, those of P to memory."""
        high_words, low_words = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        i = uint32(warp * uint32(16) + (lane >> uint32(2)))
        low, high = uint32(base + i * uint32(4)), uint32(base + i * uint32(4) + uint32(32))
        g = ld_shared_f32(uint32(low + uint32(sums))), ld_shared_f32(uint32(high + uint32(sums)))
        q = ld_shared_f32(uint32(low + uint32(invq))), ld_shared_f32(uint32(high + uint32(invq)))
        k = (
            ld_shared_f32(uint32(low + uint32(invk))) * ld_shared_f32(uint32(low + uint32(betas))),
            ld_shared_f32(uint32(high + uint32(invk)))
            * ld_shared_f32(uint32(high + uint32(betas))),
        )
        for n in range(4):
            if uint32(n) <= warp:
                for half in range(2):
                    j = uint32(uint32(16 * n + 8 * half) + (lane & uint32(3)) * uint32(2))
                    gs, inv = pair_at(base, sums, j), pair_at(base, invk, j)
                    for e in range(4):
                        r, c = e >> 1, e & 1
                        row, column = uint32(i + uint32(8 * r)), uint32(j + uint32(c))
                        scales = (k[r] * inv[c], q[r] * inv[c])
                        p = 8 * n + 4 * half + e
                        weigh(kk, qk, p, row, column, (g[r], gs[c]), scales)
                        at = uint32(base + (column * uint32(PITCH) + row) * uint32(4))
                        st_shared_f32(at, kk[p])
                block = int64(((warp * (warp + uint32(1))) >> uint32(1)) + uint32(n))
                split_bf16(high_words, low_words, qk, 8 * n)
                keep(out + P_AT + block * BLOCK_NBYTES, high_words, lane)
                keep(out + P_AT + LOW_AT + block * BLOCK_NBYTES, low_words, lane)

    @cuda.jit(device=True, inline="always")
    def take(r, at, x, first):
        """r -= x a for the rows of a column of 16 from `at`, four by four, from row `first`."""
        for q in range(4):
            if 4 * q + 3 > first:
                a = ld_shared_u32x4(uint32(at + uint32(16 * q)))
                for e in range(4):
                    r[4 * q + e] = fma_f32(-f32_from_bits(a[e]), x, r[4 * q + e])

    @cuda.jit(device=True, inline="always")
    def sweep(r, at, first):
        """Four steps of the substitution of a block of 16. A itself is strictly lower."""
        for m in range(4):
            take(r, uint32(at + uint32((first + m) * PITCH * 4)), r[first + m], first + m)

    @cuda.jit(device=True, inline="always")
    def invert(base, thread):
        """Column `thread` of (I + A)^-1, block after block of 16 rows."""
        r = cuda.local.array(16, float32)
        first = uint32(thread & uint32(32))  # above it a warp's columns are zero
        column = uint32(base + uint32(MATRIX_NBYTES) + thread * uint32(4))
        row = first
        while row < uint32(CHUNK):
            for i in range(16):
                r[i] = float32(1.0) if uint32(row + uint32(i)) == thread else float32(0.0)
            m = first
            while m < row:
                for i in range(AT_ONCE):
                    step = uint32((m + uint32(i)) * uint32(PITCH * 4))
                    x = ld_shared_f32(uint32(column + step))
                    take(r, uint32(base + step + row * uint32(4)), x, -1)
                m = uint32(m + uint32(AT_ONCE))
            at = uint32(base + row * uint32(PITCH * 4 + 4))
            sweep(r, at, 0)
            sweep(r, at, 4)
            sweep(r, at, 8)
            sweep(r, at, 12)
            for i in range(16):
                st_shared_f32(uint32(column + (row + uint32(i)) * uint32(PITCH * 4)), r[i])
            row = uint32(row + uint32(16))

    @cuda.jit(device=True, inline="always")
    def keep_inverse(base, out, warp, lane):
        """The warp's blocks of T."""
        v = cuda.local.array(8, float32)
        high, low = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        for n in range(4):
            if uint32(n) <= warp:
                for half in range(2):
                    j = uint32(uint32(16 * n + 8 * half) + (lane & uint32(3)) * uint32(2))
                    beta = pair_at(base, betas, j)
                    for r in range(2):
                        i = uint32(warp * uint32(16) + (lane >> uint32(2)) + uint32(8 * r))
                        x = pair_at(base, MATRIX_NBYTES, uint32(i * uint32(PITCH) + j))
                        v[4 * half + 2 * r], v[4 * half + 2 * r + 1] = (
                            x[0] * beta[0],
                            x[1] * beta[1],
                        )
                split_bf16(high, low, v, 0)
                block = int64(((warp * (warp + uint32(1))) >> uint32(1)) + uint32(n))
                keep(out + block * BLOCK_NBYTES, high, lane)
                keep(out + LOW_AT + block * BLOCK_NBYTES, low, lane)

    @cuda.jit(device=True, inline="always")
    def keep_factors(base, out, row):
        """What multiplies a row of S^T k, of S^T q, of k; and the state."""
        word = uint32(base + row * uint32(4))
        g = ld_shared_f32(uint32(word + uint32(sums)))
        end = ld_shared_f32(uint32(base + uint32(sums + 4 * CHUNK - 4)))
        k, decay = ld_shared_f32(uint32(word + uint32(invk))), decay_of(g)
        to = out + FACTORS_AT + int64(row) * 4
        st_global_f32(to, k * decay)
        st_global_f32(to + 4 * CHUNK, ld_shared_f32(uint32(word + uint32(invq))) * decay)
        st_global_f32(to + 8 * CHUNK, k * decay_of(end - g))
        if row < uint32(4):
            st_global_f32(out + END_AT + int64(row) * 4, decay_of(end))

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, RESIDENT))
    def gdn_prepare(within, convolved, ab, gates, chunks, HK, HV):
        base = uint32(shared_address(cuda.shared.array(0, uint32)))
        kk, qk = cuda.local.array(32, float32), cuda.local.array(32, float32)
        start()
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        item = div_u32(uint32(cuda.blockIdx.x), HV)
        h = uint32(uint32(cuda.blockIdx.x) - item * HV)
        key = div_u32(h, div_u32(HV, HK))
        t = ld_global_u32(row_of_32(chunks, uint32(item * uint32(2))))
        n = ld_global_u32(row_of_32(chunks, uint32(item * uint32(2) + uint32(1))))
        width = int64(HK * uint32(2) + HV) * (2 * WIDTH)
        q = convolved + int64(t) * width + int64(key) * (2 * WIDTH)
        fetch(base, q + int64(HK) * (2 * WIDTH), width, n, thread)
        fetch(uint32(base + uint32(TILE_NBYTES)), q, width, n, thread)
        cp_async_commit()
        if warp == 0:
            row = uint32(lane * uint32(2))
            g = gate(base, ab, gates, t, h, HV, row, n)
            after = gate(base, ab, gates, t, h, HV, uint32(row + uint32(1)), n)
            add_up(base, g, after, lane)
        cp_async_wait_0()
        cuda.syncthreads()
        scores(kk, qk, base, warp, lane)
        cuda.syncthreads()
        out = within + (int64(item) * int64(HV) + int64(h)) * WITHIN_NBYTES
        weigh_blocks(kk, qk, base, out, warp, lane)
        cuda.syncthreads()
        if thread < uint32(CHUNK):
            invert(base, thread)
        else:
            keep_factors(base, out, uint32(thread - uint32(CHUNK)))
        cuda.syncthreads()
        keep_inverse(base, out, warp, lane)

    return Build(gdn_prepare, THREADS, SHARED_NBYTES)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel."""
    yield gdn_prepare_kernel(starts_early(capability))
