"""Second and third pass of selection: which candidates can matter to a row's draw.

Many blocks per row put the adjusted keys into bins by their first 11 bits, with numbers and weights
(and sum the weights of the raw keys at temperature 1). Then they gather the candidates of the bins
that hold the answer: those down to the end of the top-k, or of the top-p; those that min-p leaves;
or, with nothing to cut, the bin that the draw falls into. Usually they are few, and
`sampling.choose` is done with them; where they are not, it walks all keys.

Legend as in `sampling.keys`. Oracle: tests.oracles.sampling.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import follow
from ginfer.cuda.lib.ptx import (
    atom_global_add_u32,
    div_u32,
    ld_global_f32,
    ld_global_u32,
    ld_global_u64,
    ld_shared_u32,
    ld_shared_u64,
    red_global_add_u32,
    red_global_add_u64,
    red_shared_add_u64,
    shared_address,
    st_global_u64,
    st_shared_u32,
    st_shared_u64,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.sampling.descend import (
    COUNTS,
    DIGITS,
    GROUPS,
    NOTES,
    SHARED_NBYTES,
    THREADS,
    clear,
    cross,
    enter,
    group,
)
from ginfer.cuda.sampling.exact import mul_shift, uniform_bits, value_of, weight_of
from ginfer.cuda.sampling.keys import (
    BEST_ADJUSTED,
    BEST_RAW,
    BINS,
    CUTS,
    DRAW_NBYTES,
    GATHERED,
    HOW,
    LEAST,
    MASS,
    NO_ID,
    POSITION,
    PURPOSE,
    REJECTS,
    SEED,
    STATE_NBYTES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

SHIFT, BITS = 21, 11  # of a key: its bin
MOST = 1024  # candidates that are gathered
AT_ONCE = 4  # keys that a thread reads at a time
FRACTION = (1 << 40) - 1


@cuda.jit(device=True, inline="always")
def share_of_row(blocks):
    """(row, first place, step) of this thread, `blocks` blocks to a row."""
    row = div_u32(uint32(cuda.blockIdx.x), blocks)
    block = uint32(uint32(cuda.blockIdx.x) - row * blocks)
    first = uint32(block * uint32(THREADS) + uint32(cuda.threadIdx.x))
    return row, first, uint32(blocks * uint32(THREADS))


@kernel(*(int64,) * 4, *(uint32,) * 2)
def selection_bins_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments states, raw, adjusted, draws, S, blocks of a row. Adds to the masses, and to the
    bins of rows that draw."""
    start, shared_words = follow(early), SHARED_NBYTES // 8

    @cuda.jit(launch_bounds=THREADS)
    def selection_bins(states, raw, adjusted, draws, S, blocks):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        keys, others = cuda.local.array(AT_ONCE, uint32), cuda.local.array(AT_ONCE, uint32)
        start()
        row, i, step = share_of_row(blocks)
        thread, total = uint32(cuda.threadIdx.x), uint32(shared + uint32(NOTES))
        clear(shared, thread)
        if thread == 0:
            st_shared_u64(total, int64(0))
        cuda.syncthreads()
        state = states + int64(row) * STATE_NBYTES
        best_raw = value_of(ld_global_u32(state + BEST_RAW))
        best = value_of(ld_global_u32(state + BEST_ADJUSTED))
        temperature = ld_global_f32(draws + int64(row) * DRAW_NBYTES + TEMPERATURE)
        draws_any, mass = temperature != float32(0.0), int64(0)
        raw += int64(row) * int64(S) * 4
        adjusted += int64(row) * int64(S) * 4
        while i < S:
            for n in range(AT_ONCE):
                j = uint32(i + uint32(n) * step)
                keys[n] = ld_global_u32(raw + int64(j) * 4) if j < S else uint32(0)
                if draws_any and j < S:
                    others[n] = ld_global_u32(adjusted + int64(j) * 4)
            for n in range(AT_ONCE):
                if keys[n] != uint32(0):
                    mass += weight_of(keys[n], best_raw, float32(1.0))
                    if draws_any:
                        key = others[n]
                        weight = weight_of(key, best, temperature)
                        digits = (uint32(SHIFT), uint32(BITS))
                        enter(shared, key, uint32(1), weight, digits, uint32(0))
            i = uint32(i + uint32(AT_ONCE) * step)
        red_shared_add_u64(total, mass)
        cuda.syncthreads()
        if thread == 0:
            red_global_add_u64(state + MASS, ld_shared_u64(total))
        if draws_any:
            for j in range(DIGITS // THREADS):
                digit = uint32(thread + uint32(j * THREADS))
                n = ld_shared_u32(uint32(shared + uint32(COUNTS) + digit * uint32(4)))
                if n > uint32(0):
                    weight = ld_shared_u64(uint32(shared + digit * uint32(8)))
                    red_global_add_u64(state + BINS + int64(digit) * 8, weight)
                    red_global_add_u32(state + (BINS + COUNTS) + int64(digit) * 4, n)

    return Build(selection_bins, THREADS)


@cuda.jit(device=True, inline="always")
def load_bins(shared, state, thread):
    """The bins of a row to shared memory, summed in groups."""
    for j in range(DIGITS // THREADS):
        digit = uint32(thread + uint32(j * THREADS))
        sums, counts = state + BINS + int64(digit) * 8, state + (BINS + COUNTS) + int64(digit) * 4
        st_shared_u64(uint32(shared + digit * uint32(8)), ld_global_u64(sums))
        at = uint32(shared + uint32(COUNTS) + digit * uint32(4))
        st_shared_u32(at, ld_global_u32(counts))
    cuda.syncthreads()
    group(shared, thread)


@cuda.jit(device=True, inline="always")
def total_weight(shared):
    """Weight of all bins."""
    total = int64(0)
    for j in range(32):
        total += ld_shared_u64(uint32(shared + uint32(GROUPS + 16 * j)))
    return total


@cuda.jit(device=True, inline="always")
def aim_of(draw, total):
    """(number or weight that the candidates must reach, whether it is a weight); nothing where
    min-p alone says who matters."""
    top_k, weighted, wanted = int64(ld_global_u32(draw + TOP_K)), uint32(1), int64(0)
    if top_k > int64(0):
        wanted, weighted = top_k, uint32(0)
    elif ld_global_u32(draw + CUTS) != uint32(0):
        wanted = max(mul_shift(ld_global_u64(draw + TOP_P), total, int64(FRACTION), 40), int64(1))
    elif ld_global_u64(draw + LEAST) == int64(0):
        bits = uniform_bits(
            ld_global_u64(draw + SEED),
            ld_global_u32(draw + POSITION),
            ld_global_u32(draw + PURPOSE),
        )
        wanted = mul_shift(bits, total, int64(0), 24) + int64(1)
    return wanted, weighted


@cuda.jit(device=True, inline="always")
def span_at(shared, draw, aim, total, thread):
    """(first bin, last bin + 1, least weight, weight of all, weight above the bins) of the
    candidates that reach an aim."""
    wanted, weighted = aim
    if wanted == int64(0):
        return uint32(0), uint32(DIGITS), ld_global_u64(draw + LEAST), total, int64(0)
    cross(shared, wanted, weighted, (int64(0), int64(0)), thread)
    note = uint32(shared + uint32(NOTES))
    found = ld_shared_u64(note)
    first = uint32(found) if found >= int64(0) else uint32(0)
    if ld_global_u32(draw + TOP_K) > uint32(0) or ld_global_u32(draw + CUTS) != uint32(0):
        return first, uint32(DIGITS), int64(0), total, int64(0)
    return (
        first,
        uint32(first + uint32(1)),
        int64(0),
        total,
        ld_shared_u64(uint32(note + uint32(8))),
    )


@cuda.jit(device=True, inline="always")
def span_of(shared, draw, state, thread):
    """`span_at` of the candidates that can matter to a draw."""
    load_bins(shared, state, thread)
    total = total_weight(shared)
    return span_at(shared, draw, aim_of(draw, total), total, thread)


@cuda.jit(device=True, inline="always")
def sift(few, adjusted, state, span, place, scale):
    """Gather the candidates of a span; place: (first, step, S)."""
    first, stop, least = span[0], span[1], span[2]
    i, step, S = place
    keys = cuda.local.array(AT_ONCE, uint32)
    while i < S:
        for n in range(AT_ONCE):
            j = uint32(i + uint32(n) * step)
            keys[n] = ld_global_u32(adjusted + int64(j) * 4) if j < S else uint32(0)
        for n in range(AT_ONCE):
            key, digit = keys[n], uint32(keys[n] >> uint32(SHIFT))
            wanted = key != uint32(0) and digit >= first and digit < stop
            if wanted and least > int64(0):
                wanted = weight_of(key, scale[0], scale[1]) >= least
            if wanted:
                at = atom_global_add_u32(state + GATHERED, uint32(1))
                if at < uint32(MOST):
                    word = int64(uint32((i + uint32(n) * step) ^ uint32(NO_ID)))
                    st_global_u64(few + int64(at) * 8, (int64(key) << int64(32)) | word)
        i = uint32(i + uint32(AT_ONCE) * step)


@kernel(*(int64,) * 4, *(uint32,) * 2)
def selection_sift_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments states, few, adjusted, draws, S, blocks of a row. few: [R][MOST] u64, key << 32 |
    ~id in any order; the state counts them, beyond MOST too."""
    start, shared_words = follow(early), SHARED_NBYTES // 8

    @cuda.jit(launch_bounds=THREADS)
    def selection_sift(states, few, adjusted, draws, S, blocks):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        start()
        row, i, step = share_of_row(blocks)
        draw, state = draws + int64(row) * DRAW_NBYTES, states + int64(row) * STATE_NBYTES
        temperature = ld_global_f32(draw + TEMPERATURE)
        rejects = ld_global_u32(draw + HOW) & uint32(REJECTS)
        if temperature != float32(0.0) and rejects == uint32(0):
            span = span_of(shared, draw, state, uint32(cuda.threadIdx.x))
            scale = (value_of(ld_global_u32(state + BEST_ADJUSTED)), temperature)
            adjusted += int64(row) * int64(S) * 4
            sift(few + int64(row) * (MOST * 8), adjusted, state, span, (i, step, S), scale)

    return Build(selection_sift, THREADS)
