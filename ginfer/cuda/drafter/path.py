"""The path of a drafter through the candidates of its positions, and how it drew.

score(c) = logit(c) + sum_r predecessor[prev, r] hidden[r] successor[c, r], prev the id before.
Greedy rows take the highest score, ties to the lower id; others draw from softmax(score / T) in
multiples of 2^-24, which acceptance is told: the arithmetic of `ginfer.cpu.selector`, bit for bit
from the scores on. One block per row, a warp per candidate.

Legend: B rows, N drafts, S = N + 1 columns of a row, K candidates, R selector rank (at most 256, a
multiple of 8). Oracle: tests.oracles.drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32, uint64

from ginfer.cuda.drafter.candidates import K
from ginfer.cuda.lib.numeric import follow, load_bf16x8, load_f32x8, row_of_32, warp_max, warp_sum
from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    div_rn_f32,
    fma_f32,
    ld_global_f32,
    ld_global_u32,
    ld_global_u64,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_u64,
    mul_rn_f32,
    shared_address,
    st_global_f32,
    st_global_u32,
    st_shared_f32,
    st_shared_u32,
    st_shared_u64,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.cuda.sampling.exact import exp_exact, uniform_bits, value_of
from ginfer.cuda.sampling.keys import NO_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS = 32 * K
DRAFT = 5  # purpose of the draws
ONE_Q = 1 << 24  # units of an id that was not drawn
MOST_RANK = 256
LOWEST = -1.0e30  # the score of no candidate, and of what is no number


@kernel(*(int64,) * 12, *(uint32,) * 5)
def draft_path_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments tokens, ids, units, best, hidden, predecessor, successor, lanes, positions,
    temperature, seeds, scores, N, R, bytes of a row of a codebook, all lanes, all drafts.

    Of lane l: tokens [1 + all drafts][all lanes] u32 has its last token in row 0 and gets its
    drafts in rows 1 .. N; ids, units: [all lanes][all drafts][K] u32. best: [B][N][K] u64; hidden:
    [B][N][R] FP32; lanes, positions (of the token before the first draft): [B] u32; scores: gets
    [B][N][K] FP32, or 0.
    """
    start = follow(early)

    @cuda.jit(device=True, inline="always")
    def score_of(word, previous, hidden, predecessor, successor, R, stride, lane):
        u, v = cuda.local.array(8, float32), cuda.local.array(8, float32)
        w = cuda.local.array(8, float32)
        pair, r = float32(0.0), uint32(lane * uint32(8))
        token = uint32(uint32(word) ^ uint32(NO_ID))
        if r < R and word != int64(0):
            load_bf16x8(v, successor + int64(token) * int64(stride) + int64(r) * 2)
            load_f32x8(w, hidden + int64(r) * 4)
            load_bf16x8(u, predecessor + int64(previous) * int64(stride) + int64(r) * 2)
            for i in range(8):
                pair = fma_f32(mul_rn_f32(u[i], w[i]), v[i], pair)
        s = add_rn_f32(value_of(uint32(word >> int64(32))), warp_sum(pair))
        if not (word != int64(0) and s > float32(LOWEST)):
            s = float32(LOWEST)
        return min(s, float32(-LOWEST))

    @cuda.jit(device=True, inline="always")
    def best_of(scores, names):
        """(index of the highest score, ties to the lower id)."""
        at, top, name = uint32(0), ld_shared_f32(scores), ld_shared_u32(names)
        for c in range(1, K):
            s = ld_shared_f32(uint32(scores + uint32(4 * c)))
            other = ld_shared_u32(uint32(names + uint32(4 * c)))
            if s > top or (s == top and other < name):
                at, top, name = uint32(c), s, other
        return at

    @cuda.jit(device=True, inline="always")
    def draw(scores, weights, temperature, bits, lane):
        """(units of candidate `lane`, whether the draw falls on it)."""
        s = ld_shared_f32(uint32(scores + (lane & uint32(K - 1)) * uint32(4)))
        x = div_rn_f32(add_rn_f32(s, -warp_max(s)), temperature)
        weight = int64(mul_rn_f32(exp_exact(x), float32(4294967296.0)))
        if lane < uint32(K):
            st_shared_u64(uint32(weights + lane * uint32(8)), weight)
        cuda.syncwarp()
        total, running = int64(0), int64(0)
        for c in range(K):
            w = ld_shared_u64(uint32(weights + uint32(8 * c)))
            running += w if uint32(c) <= lane else int64(0)
            total += w
        after = int64(uint64(uint64(running) << uint64(24)) // uint64(total))
        before = int64(uint64(uint64(running - weight) << uint64(24)) // uint64(total))
        return uint32(after - before), bits >= before and bits < after

    @cuda.jit(launch_bounds=THREADS)
    def draft_path(
        tokens,
        ids,
        units,
        best,
        hidden,
        predecessor,
        successor,
        lanes,
        positions,
        temperature,
        seeds,
        scores,
        N,
        R,
        stride,
        num_lanes,
        most,
    ):
        table = uint32(shared_address(cuda.shared.array(40, int64)))
        names, weights = uint32(table + uint32(64)), uint32(table + uint32(128))
        chosen = uint32(table + uint32(256))
        start()
        b, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        owner = ld_global_u32(row_of_32(lanes, b))
        tokens += int64(owner) * 4
        previous = ld_global_u32(tokens)
        heat, seed = ld_global_f32(row_of_32(temperature, b)), ld_global_u64(seeds + int64(b) * 8)
        position = uint32(ld_global_u32(row_of_32(positions, b)) + uint32(1))
        j = uint32(0)
        while j < N:
            row = uint32(b * N + j)
            word = ld_global_u64(best + (int64(row) * K + int64(warp)) * 8)
            x = hidden + int64(row) * int64(R) * 4
            s = score_of(word, previous, x, predecessor, successor, R, stride, lane)
            if lane == 0:
                name = uint32(uint32(word) ^ uint32(NO_ID)) if word != int64(0) else uint32(0)
                st_shared_f32(uint32(table + warp * uint32(4)), s)
                st_shared_u32(uint32(names + warp * uint32(4)), name)
                if scores != 0:
                    st_global_f32(scores + (int64(row) * K + int64(warp)) * 4, s)
                if warp == 0:
                    st_shared_u32(chosen, name)  # where scores are no numbers
            cuda.syncthreads()
            if warp == 0:
                mine, hit = uint32(0), False
                name = ld_shared_u32(uint32(names + (lane & uint32(K - 1)) * uint32(4)))
                if heat == float32(0.0):
                    hit = best_of(table, names) == lane
                    mine = uint32(ONE_Q) if hit else uint32(0)
                else:
                    bits = uniform_bits(seed, uint32(position + j), uint32(DRAFT))
                    mine, hit = draw(table, weights, heat, bits, lane)
                if hit:
                    st_shared_u32(chosen, name)
                if lane < uint32(K):
                    at = (int64(owner) * int64(most) + int64(j)) * K + int64(lane)
                    st_global_u32(ids + at * 4, name)
                    st_global_u32(units + at * 4, mine)
            cuda.syncthreads()
            previous = ld_shared_u32(chosen)
            j = uint32(j + uint32(1))
            if thread == 0:
                st_global_u32(tokens + int64(j) * int64(num_lanes) * 4, previous)
            cuda.syncthreads()

    return Build(draft_path, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """The one step."""
    yield draft_path_kernel(starts_early(capability))


@dataclass(frozen=True)
class Codebooks:
    """Device addresses of rows by token id, BF16, `stride` bytes apart, of R columns that count."""

    predecessor: int
    successor: int
    R: int
    stride: int


@dataclass(frozen=True)
class Drawing:
    """Device addresses, of rows: lanes and positions [B] u32, temperature [B] FP32, seeds [B]
    u64."""

    lanes: int
    positions: int
    temperature: int
    seeds: int


@dataclass(frozen=True)
class Drafted:
    """Where drafts stay, of all lanes: addresses of tokens [1 + most][lanes] u32, ids and units
    [lanes][most][K] u32."""

    tokens: int
    ids: int
    units: int
    lanes: int
    most: int


def draft_path(
    queue: Queue,
    out: Drafted,
    source: tuple[int, int],
    *,
    books: Codebooks,
    drawing: Drawing,
    shape: tuple[int, int],
) -> None:
    """Choose N drafts for each of B rows, shape (B, N). source: candidates [B][N][K] u64 and
    hidden [B][N][R] FP32."""
    (B, N), d = shape, drawing
    assert books.R <= MOST_RANK
    assert books.R % 8 == 0
    queue.launch(
        draft_path_kernel(queue.early),
        (B,),
        *(out.tokens, out.ids, out.units, *source, books.predecessor, books.successor),
        *(d.lanes, d.positions, d.temperature, d.seeds, 0),
        *(N, books.R, books.stride, out.lanes, out.most),
    )
