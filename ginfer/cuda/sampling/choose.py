"""The choice of one id per row: top-k, top-p, min-p and one draw, or the best id; and best ids.

The order is adjusted key descending, ids ascending among equals. top-k cuts at a number, top-p at a
weight of those that are left, min-p at a weight of one candidate; the draw takes the first
candidate whose running weight exceeds u times the weight that is kept. The few candidates of
`sampling.sift` are sorted and walked; with more of them the keys of the row are walked digit by
digit, and gathered where top-k leaves few. One block per row.

Legend as in `sampling.keys`. Oracle: tests.oracles.sampling; the same choices as
`ginfer.cpu.sampling`.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32, uint64

from ginfer.cuda.lib.numeric import follow, row_of_32
from ginfer.cuda.lib.ptx import (
    atom_shared_add_u32,
    first_lane_u32,
    ld_global_f32,
    ld_global_u32,
    ld_global_u64,
    ld_shared_u32,
    ld_shared_u64,
    red_global_add_u32,
    red_shared_add_u64,
    shared_address,
    st_global_u32,
    st_global_u64,
    st_shared_u32,
    st_shared_u64,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.sampling.descend import NOTES, SHARED_NBYTES, THREADS, descend, nth_id
from ginfer.cuda.sampling.exact import mul_shift, uniform_bits, value_of, weight_of
from ginfer.cuda.sampling.keys import (
    BAD,
    BEST,
    BEST_ADJUSTED,
    BEST_RAW,
    CUTS,
    DRAW_NBYTES,
    FORCED,
    GATHERED,
    HOW,
    LEAST,
    MASS,
    NO_ID,
    POSITION,
    PURPOSE,
    REJECTS,
    ROW,
    SEED,
    STATE_NBYTES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from ginfer.cuda.sampling.sift import FRACTION, MOST, span_of

FEW = 2 * MOST  # candidates of a top-k that are gathered, in the place of the sifted ones
# bytes of a row's result: id, whether it is sound, bits of its logit, best raw key, raw mass; of
# the first column of a row that is verified, the drafts that were accepted
RESULT_NBYTES, ID, SOUND, LOGIT, BEST_KEY, TOTAL, ACCEPTED = 32, 0, 4, 8, 12, 16, 24


@cuda.jit(device=True, inline="always")
def gather(shared, few, source, floor, ties, thread):
    """Keys above the floor, and `ties` of the floor, to `few`, zeros behind them; how many places,
    a multiple of 4."""
    keys, S = source
    counter = uint32(shared + uint32(NOTES + 64))
    if thread == 0:
        st_shared_u64(counter, int64(0))
    i = thread
    while i < uint32(FEW):
        st_global_u32(row_of_32(few, i), uint32(0))
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    i = thread
    while i < S:
        key = ld_global_u32(row_of_32(keys, i))
        if key > floor:
            st_global_u32(row_of_32(few, atom_shared_add_u32(counter, uint32(1))), key)
        i = uint32(i + uint32(THREADS))
    i = thread
    while i < ties:
        st_global_u32(row_of_32(few, atom_shared_add_u32(counter, uint32(1))), floor)
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    n = uint32(ld_shared_u64(counter))
    cuda.syncthreads()
    return uint32((n + uint32(3)) & uint32(0xFFFFFFFC))


@cuda.jit(device=True, inline="always")
def masses(shared, source, floor, ties, least, scale, thread):
    """Weight of all candidates, and of those that weigh at least `least`."""
    keys, S = source
    at = uint32(shared + uint32(NOTES + 64))
    if thread < uint32(2):
        st_shared_u64(uint32(at + thread * uint32(8)), int64(0))
    cuda.syncthreads()
    total, heavy = int64(0), int64(0)
    i = thread
    while i < S:
        key = ld_global_u32(row_of_32(keys, i))
        if key > floor:
            weight = weight_of(key, scale[0], scale[1])
            total += weight
            if weight >= least:
                heavy += weight
        i = uint32(i + uint32(THREADS))
    if thread == 0 and ties > uint32(0):
        weight = weight_of(floor, scale[0], scale[1])
        total += weight * int64(ties)
        if weight >= least:
            heavy += weight * int64(ties)
    red_shared_add_u64(at, total)
    red_shared_add_u64(uint32(at + uint32(8)), heavy)
    cuda.syncthreads()
    total, heavy = ld_shared_u64(at), ld_shared_u64(uint32(at + uint32(8)))
    cuda.syncthreads()
    return total, heavy


@cuda.jit(device=True, inline="always")
def draw_key(shared, source, few, draw, best, thread):
    """(key, rank among its equals from 1) of the drawn candidate.

    Three descents, of which only the last always happens: to the end of the top-k, to the end of
    the top-p, to the draw.
    """
    scale = (value_of(best), ld_global_f32(draw + TEMPERATURE))
    top_k, least = int64(ld_global_u32(draw + TOP_K)), ld_global_u64(draw + LEAST)
    cuts = ld_global_u32(draw + CUTS)
    keys, S = source
    floor, ties, key, rank = uint32(0), uint32(0), uint32(0), int64(0)
    wanted, kept, heavy = top_k, int64(0), int64(0)
    step, steps = uint32(0), first_lane_u32(uint32(3))  # no constant: nothing is unrolled
    while step < steps:
        if step == uint32(1):
            kept, heavy = masses(shared, (keys, S), floor, ties, least, scale, thread)
            wanted = max(
                mul_shift(ld_global_u64(draw + TOP_P), kept, int64(FRACTION), 40), int64(1)
            )
        if step == uint32(2):
            bits = uniform_bits(
                ld_global_u64(draw + SEED),
                ld_global_u32(draw + POSITION),
                ld_global_u32(draw + PURPOSE),
            )
            wanted = mul_shift(bits, min(kept, heavy), int64(0), 24) + int64(1)
        if step == uint32(2) or (top_k > int64(0) if step == uint32(0) else cuts != uint32(0)):
            weighted = step != uint32(0)
            key, mass, above, same = descend(
                shared, (keys, S), floor, ties, wanted, scale, weighted, thread
            )
            if weighted and key != uint32(0):
                weight = weight_of(key, scale[0], scale[1])
                rank = (wanted - mass + weight - int64(1)) // weight
                if step == uint32(1):
                    kept = mass + min(rank, same) * weight
            elif key != uint32(0):
                floor, ties = key, uint32(top_k - above)
                if top_k <= int64(FEW):
                    S = gather(shared, few, (keys, S), floor, ties, thread)
                    keys, floor, ties = few, uint32(0), uint32(0)
        step = uint32(step + uint32(1))
    return key, uint32(rank)


@cuda.jit(device=True, inline="always")
def sort(shared, few, n, scale, thread):
    """The n candidates of `sampling.sift` in order: entries [MOST] u64, then their weights."""
    entries, weights = uint32(shared + uint32(MOST * 8)), uint32(shared + uint32(MOST * 16))
    i = thread
    while i < n:
        st_shared_u64(uint32(shared + i * uint32(8)), ld_global_u64(few + int64(i) * 8))
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    i = thread
    while i < n:
        mine, rank, j = ld_shared_u64(uint32(shared + i * uint32(8))), uint32(0), uint32(0)
        while j < n:
            if uint64(ld_shared_u64(uint32(shared + j * uint32(8)))) > uint64(mine):
                rank = uint32(rank + uint32(1))
            j = uint32(j + uint32(1))
        weight = weight_of(uint32(uint64(mine) >> uint64(32)), scale[0], scale[1])
        st_shared_u64(uint32(entries + rank * uint32(8)), mine)
        st_shared_u64(uint32(weights + rank * uint32(8)), weight)
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def reach(weights, running, wanted, n):
    """(place, running weight) where the running weight first reaches `wanted`; the last place."""
    i = uint32(0)
    running += ld_shared_u64(weights)
    while running < wanted and uint32(i + uint32(1)) < n:
        i = uint32(i + uint32(1))
        running += ld_shared_u64(uint32(weights + i * uint32(8)))
    return i, running


@cuda.jit(device=True, inline="always")
def _draw_few(shared, draw, n, total, above):
    """The id that is drawn from the sorted candidates; total: weight of all ids, above: of those
    before the first candidate. One thread."""
    weights = uint32(shared + uint32(MOST * 16))
    top_k, least = ld_global_u32(draw + TOP_K), ld_global_u64(draw + LEAST)
    if top_k > uint32(0):
        n = min(n, top_k)
    own, heavy = int64(0), int64(0)
    for i in range(n):
        weight = ld_shared_u64(uint32(weights + uint32(i) * uint32(8)))
        own += weight
        if weight >= least:
            heavy += weight
    kept = own if top_k > uint32(0) else total
    if least == int64(0):
        heavy = kept
    if ld_global_u32(draw + CUTS) != uint32(0):
        wanted = max(mul_shift(ld_global_u64(draw + TOP_P), kept, int64(FRACTION), 40), int64(1))
        _, kept = reach(weights, int64(0), wanted, n)
    bits = uniform_bits(
        ld_global_u64(draw + SEED), ld_global_u32(draw + POSITION), ld_global_u32(draw + PURPOSE)
    )
    wanted = mul_shift(bits, min(kept, heavy), int64(0), 24) + int64(1)
    place, _ = reach(weights, above, wanted, n)
    entry = ld_shared_u64(uint32(shared + uint32(MOST * 8) + place * uint32(8)))
    return uint32(uint32(entry) ^ uint32(NO_ID))


@cuda.jit(device=True, inline="always")
def _drawn_id(shared, source, few, draw, state, thread):
    """The id that a row of temperature above 0 draws."""
    best = ld_global_u32(state + BEST_ADJUSTED)
    scale = (value_of(best), ld_global_f32(draw + TEMPERATURE))
    n, note = ld_global_u32(state + GATHERED), uint32(shared + uint32(MOST * 24))
    if n > uint32(MOST):
        key, rank = draw_key(shared, source, few, draw, best, thread)
        return nth_id(shared, source, key, rank, thread)
    span = span_of(shared, draw, state, thread)
    cuda.syncthreads()
    sort(shared, few, n, scale, thread)
    if thread == 0:
        st_shared_u32(note, _draw_few(shared, draw, n, span[3], span[4]))
    cuda.syncthreads()
    return ld_shared_u32(note)


@cuda.jit(device=True, inline="always")
def give(to, token, sound, state, logits):
    """Write a row's result; logits: the row's."""
    if token == uint32(NO_ID):
        token = uint32(0)
    st_global_u32(to + ID, token)
    st_global_u32(to + SOUND, uint32(1) if sound else uint32(0))
    st_global_u32(to + LOGIT, ld_global_u32(logits + int64(token) * 4))
    st_global_u32(to + BEST_KEY, ld_global_u32(state + BEST_RAW))
    st_global_u64(to + TOTAL, ld_global_u64(state + MASS))


@cuda.jit(device=True, inline="always")
def is_sound(state):
    """Whether a row has a legal id, and no logit that is not finite."""
    bad, best = ld_global_u32(state + BAD), ld_global_u32(state + BEST_RAW)
    return bad == uint32(0) and best != uint32(0)


@kernel(*(int64,) * 8, *(uint32,) * 3)
def selection_choose_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments results, tokens, states, adjusted, few, logits, draws, counts, V, S, bytes of a row
    of logits.

    results: [R] records. tokens: [lanes] u32, the chosen id of each lane, left alone when the row
    is not sound. few: [R][MOST] u64 of `sampling.sift`, scratch afterwards. counts: [lanes][V] u32,
    one is added for a sound row. draws: positions move on by one, as the next round wants them.
    Columns that are verified leave tokens and counts to `sampling.acceptance`, those that reject
    their results to `sampling.rejection`; their records stay.
    """
    start, shared_words = follow(early), max(SHARED_NBYTES, MOST * 24 + 8) // 8

    @cuda.jit(launch_bounds=THREADS)
    def selection_choose(
        results, tokens, states, adjusted, few, logits, draws, counts, V, S, logits_nbytes
    ):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        start()
        row, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        draw, state = draws + int64(row) * DRAW_NBYTES, states + int64(row) * STATE_NBYTES
        few += int64(row) * (MOST * 8)
        sound, how = is_sound(state), ld_global_u32(draw + HOW)
        token = ld_global_u32(draw + FORCED)
        if how & uint32(REJECTS) == uint32(0):
            if sound and token == uint32(NO_ID):
                if ld_global_f32(draw + TEMPERATURE) == float32(0.0):
                    token = uint32(ld_global_u32(state + BEST) ^ uint32(NO_ID))
                else:
                    source = (adjusted + int64(row) * int64(S) * 4, S)
                    token = _drawn_id(shared, source, few, draw, state, thread)
            if thread == 0:
                row_logits = logits + int64(row) * int64(logits_nbytes)
                give(results + int64(row) * RESULT_NBYTES, token, sound, state, row_logits)
                if how == uint32(0):
                    red_global_add_u32(draw + POSITION, uint32(1))
                    if sound:
                        lane = ld_global_u32(draw + ROW)
                        at = counts + (int64(lane) * int64(V) + int64(token)) * 4
                        red_global_add_u32(at, uint32(1))
                        st_global_u32(row_of_32(tokens, lane), token)

    return Build(selection_choose, THREADS)


@kernel(int64, int64, uint32, uint32)
def selection_top_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments top, raw, S, n. top: [R][n] u64, the n best ids in any order, each key << 32 | id;
    0 where fewer are legal. Among equals the lowest ids are taken."""
    start, shared_words = follow(early), SHARED_NBYTES // 8

    @cuda.jit(launch_bounds=THREADS)
    def selection_top(top, raw, S, n):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        start()
        row, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        source = (raw + int64(row) * int64(S) * 4, S)
        top += int64(row) * int64(n) * 8
        scale = (float32(0.0), float32(1.0))
        counter = uint32(shared + uint32(NOTES + 64))
        i = thread
        while i < n:
            st_global_u64(top + int64(i) * 8, int64(0))
            i = uint32(i + uint32(THREADS))
        floor, _, above, _ = descend(
            shared, source, uint32(0), uint32(0), int64(n), scale, 0, thread
        )
        if thread == 0:
            st_shared_u32(counter, uint32(0))
        cuda.syncthreads()
        i = thread
        while i < S:
            key = ld_global_u32(row_of_32(source[0], i))
            if key > floor:
                at = top + int64(atom_shared_add_u32(counter, uint32(1))) * 8
                st_global_u64(at, (int64(key) << int64(32)) | int64(i))
            i = uint32(i + uint32(THREADS))
        if floor != uint32(0):
            for k in range(uint32(uint32(n) - uint32(above))):
                token = nth_id(shared, source, floor, uint32(k + 1), thread)
                if thread == 0:
                    at = top + (above + int64(k)) * 8
                    st_global_u64(at, (int64(floor) << int64(32)) | int64(token))

    return Build(selection_top, THREADS)
