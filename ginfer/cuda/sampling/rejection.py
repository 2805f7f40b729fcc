"""The rejection rule of verified columns: accept the draft, or draw what it left over.

A draft d is accepted when u q(d) < p(d), else the token is drawn from max(p - q, 0), from p where
that is nothing and behind the last draft. p: the integer weights of selection over their sum; q:
units of 2^-24 of at most K ids, all of them at the draft of a host. Candidates before q are those
of `sampling.sift`; with nothing to cut they are the bin that the draw falls into once q is taken
off. Rows with many candidates are walked key by key, as in `sampling.choose`.

Legend as in `sampling.keys`; an entry is key << 32 | ~id: entries descend in the order of
candidates. Oracle: tests.oracles.acceptance; the same choices as `ginfer.cpu.acceptance`.
"""

from __future__ import annotations

from numba import cuda, int64, uint32, uint64

from ginfer.cuda.lib.numeric import follow
from ginfer.cuda.lib.ptx import (
    first_lane_u32,
    ld_global_f32,
    ld_global_u32,
    ld_global_u64,
    ld_shared_u64,
    red_shared_add_u64,
    shared_address,
    st_shared_u64,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.sampling.choose import (
    FEW,
    RESULT_NBYTES,
    gather,
    give,
    is_sound,
    masses,
    reach,
    sort,
)
from ginfer.cuda.sampling.descend import GROUPS, SHARED_NBYTES, THREADS, descend, nth_id
from ginfer.cuda.sampling.exact import mul_shift, uniform_bits, value_of, weight_of
from ginfer.cuda.sampling.keys import (
    BEST_ADJUSTED,
    CUTS,
    DRAFTED,
    DRAW_NBYTES,
    GATHERED,
    HOW,
    LEAST,
    NO_ID,
    POSITION,
    REJECTS,
    SEED,
    STATE_NBYTES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    token_of,
)
from ginfer.cuda.sampling.sift import (
    FRACTION,
    MOST,
    SHIFT,
    aim_of,
    load_bins,
    share_of_row,
    sift,
    span_at,
    total_weight,
)

K = 16  # ids of a draft's distribution
ONE_Q = 1 << 24
ACCEPT, CORRECTION, BONUS = 2, 3, 4  # purposes of draws
# shared memory behind that of selection: entries, units, parts taken off and weights before the ids
# of q, [K] u64 each, then notes
ENTRIES = SHARED_NBYTES
UNITS, TAKEN, BEFORE = ENTRIES + 8 * K, ENTRIES + 16 * K, ENTRIES + 24 * K
DRAFT, KEPT, LAST, NUMBER, ANSWER = (ENTRIES + 32 * K + 8 * i for i in range(5))
REJECTION_NBYTES = ENTRIES + 32 * K + 48
LEAST_ENTRY = 1 << 32  # of a legal id


@cuda.jit(device=True, inline="always")
def entry_of(key, token):
    """key << 32 | ~id."""
    return int64((int64(key) << int64(32)) | int64(uint32(token ^ uint32(NO_ID))))


@cuda.jit(device=True, inline="always")
def _entry(adjusted, token, V):
    """The entry of an id, 0 where it is not legal."""
    if token >= V:
        return int64(0)
    key = ld_global_u32(adjusted + int64(token) * 4)
    if key == uint32(0):
        return int64(0)
    return entry_of(key, token)


@cuda.jit(device=True, inline="always")
def load_drafted(shared, how, adjusted, drafts, place, thread):
    """Entries and units of q, and the entry of the draft; none behind the last draft.

    adjusted: address of the row's keys. drafts: (ids, tokens, names, units) as `rejection_sift`
    takes them. place: (column, V, all lanes, all drafts).
    """
    if thread <= uint32(K):
        column, V, lanes, most = place
        entry, units, token = int64(0), int64(0), uint32(NO_ID)
        if how & uint32(DRAFTED):
            next_column = uint32(column + uint32(1))
            word = uint32(ld_global_u32(drafts[0] + int64(next_column) * 4))
            if thread == uint32(K):
                token = token_of(drafts[0], drafts[1], next_column)
            elif word >> uint32(31):
                known = uint32(word ^ uint32(NO_ID))
                lane = known
                j = uint32(0)
                while lane >= lanes:
                    lane = uint32(lane - lanes)
                    j = uint32(j + uint32(1))
                at = int64(lane) * int64(most) + int64(j) - int64(1)
                at = (at * K + int64(thread)) * 4
                token = ld_global_u32(drafts[2] + at)
                units = int64(ld_global_u32(drafts[3] + at))
            elif thread == uint32(0):
                token, units = word, int64(ONE_Q)
            if units > int64(0) or thread == uint32(K):
                entry = _entry(adjusted, token, V)
        if thread == uint32(K):
            st_shared_u64(uint32(shared + uint32(DRAFT)), entry)
        else:
            at_own = uint32(shared + uint32(ENTRIES) + thread * uint32(8))
            st_shared_u64(at_own, entry)
            st_shared_u64(uint32(at_own + uint32(8 * K)), units)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def take_off(shared, kept, last, scale, thread):
    """What q takes off the weight of each of its ids that is kept: none behind the entry `last`;
    `kept` weighs all that are."""
    if thread < uint32(K):
        at = uint32(shared + uint32(ENTRIES) + thread * uint32(8))
        entry, taken = ld_shared_u64(at), int64(0)
        if uint64(entry) >= uint64(last):
            weight = weight_of(uint32(uint64(entry) >> uint64(32)), scale[0], scale[1])
            q = mul_shift(ld_shared_u64(uint32(at + uint32(8 * K))), kept, int64(0), 24)
            taken = min(weight, q)
        st_shared_u64(uint32(at + uint32(16 * K)), taken)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def _left_over(shared, kept):
    """The weight of all candidates less what q takes off, 0 where nothing is left."""
    for j in range(K):
        kept -= ld_shared_u64(uint32(shared + uint32(TAKEN + 8 * j)))
    return kept


@cuda.jit(device=True, inline="always")
def _aim(draw, how, mass):
    """The running weight, of `mass`, that the drawn candidate reaches."""
    purpose = uint32(CORRECTION) if how & uint32(DRAFTED) else uint32(BONUS)
    seed, position = ld_global_u64(draw + SEED), ld_global_u32(draw + POSITION)
    bits = uniform_bits(seed, position, purpose)
    return mul_shift(bits, mass, int64(0), 24) + int64(1)


@cuda.jit(device=True, inline="always")
def _cuts_nothing(draw):
    cuts = ld_global_u32(draw + TOP_K) | ld_global_u32(draw + CUTS)
    return cuts == uint32(0) and ld_global_u64(draw + LEAST) == int64(0)


@cuda.jit(device=True, inline="always")
def _span(shared, draw, state, scale, thread):
    """`sift.span_at` of the candidates that can matter; q is loaded."""
    load_bins(shared, state, thread)
    total = total_weight(shared)
    aim = aim_of(draw, total)
    if _cuts_nothing(draw):
        take_off(shared, total, int64(LEAST_ENTRY), scale, thread)
        left = _left_over(shared, total)
        if thread < uint32(K) and left > int64(0):
            at = uint32(shared + uint32(ENTRIES) + thread * uint32(8))
            digit = uint32(uint64(ld_shared_u64(at)) >> uint64(32 + SHIFT))
            taken = ld_shared_u64(uint32(at + uint32(16 * K)))
            red_shared_add_u64(uint32(shared + digit * uint32(8)), int64(-taken))
            group = uint32(shared + uint32(GROUPS) + (digit >> uint32(6)) * uint32(16))
            red_shared_add_u64(group, int64(-taken))
        cuda.syncthreads()
        aim = (_aim(draw, ld_global_u32(draw + HOW), left if left > int64(0) else total), aim[1])
    return span_at(shared, draw, aim, total, thread)


@cuda.jit(device=True, inline="always")
def _accepts(shared, draw, kept, last, scale):
    """Whether u q(draft) < p(draft). One thread."""
    entry = ld_shared_u64(uint32(shared + uint32(DRAFT)))
    if entry == int64(0) or uint64(entry) < uint64(last):
        return False
    units = int64(0)
    for j in range(K):
        at = uint32(shared + uint32(ENTRIES + 8 * j))
        if ld_shared_u64(at) == entry:
            units = ld_shared_u64(uint32(at + uint32(8 * K)))
    bits = uniform_bits(ld_global_u64(draw + SEED), ld_global_u32(draw + POSITION), uint32(ACCEPT))
    weight = weight_of(uint32(uint64(entry) >> uint64(32)), scale[0], scale[1])
    return mul_shift(bits * units, kept, int64(0), 48) < weight


@cuda.jit(device=True, inline="always")
def _id_of(entry):
    return uint32(uint32(entry) ^ uint32(NO_ID))


@cuda.jit(device=True, inline="always")
def _keep_few(shared, draw, n, total):
    """Notes of what top-k, top-p and min-p leave of n sorted candidates: how many, their weight,
    the last entry. One thread; total: weight of all ids."""
    weights = uint32(shared + uint32(MOST * 16))
    top_k, least = ld_global_u32(draw + TOP_K), ld_global_u64(draw + LEAST)
    m, kept, last = n, total, int64(LEAST_ENTRY)
    if not _cuts_nothing(draw):
        if top_k > uint32(0):
            m, kept = min(n, top_k), int64(0)
            for i in range(m):
                kept += ld_shared_u64(uint32(weights + uint32(i) * uint32(8)))
        if ld_global_u32(draw + CUTS) != uint32(0):
            top_p = ld_global_u64(draw + TOP_P)
            wanted = max(mul_shift(top_p, kept, int64(FRACTION), 40), int64(1))
            place, _ = reach(weights, int64(0), wanted, m)
            m = uint32(place + uint32(1))
        i, kept, weight = uint32(0), int64(0), ld_shared_u64(weights)
        while i < m and (i == uint32(0) or weight >= least):
            kept += weight
            i = uint32(i + uint32(1))
            weight = ld_shared_u64(uint32(weights + i * uint32(8)))
        m = i
        last = ld_shared_u64(uint32(shared + uint32(MOST * 8 - 8) + m * uint32(8)))
    st_shared_u64(uint32(shared + uint32(KEPT)), kept)
    st_shared_u64(uint32(shared + uint32(LAST)), last)
    st_shared_u64(uint32(shared + uint32(NUMBER)), int64(m))


@cuda.jit(device=True, inline="always")
def _note(shared, which):
    return ld_shared_u64(uint32(shared + uint32(which)))


@cuda.jit(device=True, inline="always")
def _reject_few(shared, draw, few, n, span, scale, thread):
    """The token of a column with n candidates at most MOST; q is loaded."""
    how = ld_global_u32(draw + HOW)
    sort(shared, few, n, scale, thread)
    if thread == 0:
        _keep_few(shared, draw, n, span[3])
    cuda.syncthreads()
    kept, last, m = _note(shared, KEPT), _note(shared, LAST), uint32(_note(shared, NUMBER))
    take_off(shared, kept, last, scale, thread)
    left = _left_over(shared, kept)
    i = thread
    while i < m:
        entry = ld_shared_u64(uint32(shared + uint32(MOST * 8) + i * uint32(8)))
        weight = ld_shared_u64(uint32(shared + uint32(MOST * 16) + i * uint32(8)))
        for j in range(K):
            at = uint32(shared + uint32(ENTRIES + 8 * j))
            if left > int64(0) and ld_shared_u64(at) == entry:
                weight -= ld_shared_u64(uint32(at + uint32(16 * K)))
        st_shared_u64(uint32(shared + i * uint32(8)), weight)
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    if thread == 0:
        entry = _note(shared, DRAFT)
        if not _accepts(shared, draw, kept, last, scale):
            wanted = _aim(draw, how, left if left > int64(0) else kept)
            place, _ = reach(shared, span[4], wanted, m)
            entry = ld_shared_u64(uint32(shared + uint32(MOST * 8) + place * uint32(8)))
        st_shared_u64(uint32(shared + uint32(ANSWER)), entry)
    cuda.syncthreads()
    return _id_of(_note(shared, ANSWER))


@cuda.jit(device=True, inline="always")
def _weigh_before(shared, source, scale, thread):
    """The weight of all candidates before each id of q that loses some."""
    keys, S = source
    lowest = int64(-1)
    for j in range(K):
        at = uint32(shared + uint32(ENTRIES + 8 * j))
        if ld_shared_u64(uint32(at + uint32(16 * K))) > int64(0):
            entry = ld_shared_u64(at)
            if uint64(entry) < uint64(lowest):
                lowest = entry
    if thread < uint32(K):
        st_shared_u64(uint32(shared + uint32(BEFORE) + thread * uint32(8)), int64(0))
    cuda.syncthreads()
    i = thread
    while i < S:
        key = ld_global_u32(keys + int64(i) * 4)
        entry = entry_of(key, i)
        if uint64(entry) > uint64(lowest):
            weight = weight_of(key, scale[0], scale[1])
            j = uint32(0)
            while j < uint32(K):
                at = uint32(shared + uint32(ENTRIES) + j * uint32(8))
                special = ld_shared_u64(at)
                if special != int64(0) and uint64(entry) > uint64(special):
                    red_shared_add_u64(uint32(at + uint32(24 * K)), weight)
                j = uint32(j + uint32(1))
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def _pass_over(shared, wanted, scale):
    """(answer or 0, running weight to reach with nothing taken off): ids of q in the order of
    candidates move the aim, or are hit. One thread."""
    before, answer, more = int64(-1), int64(0), uint32(1)
    while more:
        best, place = int64(0), uint32(0)
        for j in range(K):
            at = uint32(shared + uint32(ENTRIES + 8 * j))
            entry = ld_shared_u64(at)
            taken = ld_shared_u64(uint32(at + uint32(16 * K)))
            if taken > int64(0) and uint64(entry) < uint64(before) and uint64(entry) > uint64(best):
                best, place = entry, at
        more = uint32(0)
        if best != int64(0):
            running = ld_shared_u64(uint32(place + uint32(24 * K)))
            taken = ld_shared_u64(uint32(place + uint32(16 * K)))
            if running < wanted:
                weight = weight_of(uint32(uint64(best) >> uint64(32)), scale[0], scale[1])
                if running + weight - taken >= wanted:
                    answer = best
                else:
                    wanted, before, more = wanted + taken, best, uint32(1)
    return answer, wanted


@cuda.jit(device=True, inline="always")
def _reject_many(shared, source, few, draw, scale, thread):
    """The token of a column with more candidates; q is loaded. Four descents at most: to the end of
    the top-k, of the top-p, to the last candidate that is kept, to the one that is drawn."""
    top_k, least = int64(ld_global_u32(draw + TOP_K)), ld_global_u64(draw + LEAST)
    cuts, how = ld_global_u32(draw + CUTS), ld_global_u32(draw + HOW)
    keys, S = source
    floor, ties, token = uint32(0), uint32(0), uint32(NO_ID)
    wanted, kept, heavy = top_k, int64(0), int64(0)
    step, steps = uint32(0), first_lane_u32(uint32(4))  # no constant: nothing is unrolled
    while step < steps:
        if step == uint32(1):
            kept, heavy = masses(shared, (keys, S), floor, ties, least, scale, thread)
            top_p = ld_global_u64(draw + TOP_P)
            wanted = max(mul_shift(top_p, kept, int64(FRACTION), 40), int64(1))
        if step == uint32(2):
            kept = min(kept, heavy)
            wanted = kept
        needed = top_k > int64(0) if step == uint32(0) else cuts != uint32(0)
        if needed or step >= uint32(2):
            weighted = step != uint32(0)
            key, mass, above, same = descend(
                shared, (keys, S), floor, ties, wanted, scale, weighted, thread
            )
            if not weighted and key != uint32(0):
                floor, ties = key, uint32(top_k - above)
                if top_k <= int64(FEW):
                    S = gather(shared, few, (keys, S), floor, ties, thread)
                    keys, floor, ties = few, uint32(0), uint32(0)
            elif weighted:
                weight = weight_of(key, scale[0], scale[1])
                rank = (wanted - mass + weight - int64(1)) // weight
                if step == uint32(1):
                    kept = mass + min(rank, same) * weight
                else:
                    token = nth_id(shared, source, key, uint32(rank), thread)
            if step == uint32(2):
                last = entry_of(key, token)
                take_off(shared, kept, last, scale, thread)
                _weigh_before(shared, source, scale, thread)
                left = _left_over(shared, kept)
                if thread == 0:
                    answer, aim = _note(shared, DRAFT), int64(0)
                    if not _accepts(shared, draw, kept, last, scale):
                        answer, aim = int64(0), _aim(draw, how, left if left > int64(0) else kept)
                        if left > int64(0):
                            answer, aim = _pass_over(shared, aim, scale)
                    st_shared_u64(uint32(shared + uint32(ANSWER)), answer)
                    st_shared_u64(uint32(shared + uint32(NUMBER)), aim)
                cuda.syncthreads()
                wanted, entry = _note(shared, NUMBER), _note(shared, ANSWER)
                if entry != int64(0):
                    step, token = steps, _id_of(entry)
        step = uint32(step + uint32(1))
    return token


@kernel(*(int64,) * 8, *(uint32,) * 5)
def rejection_sift_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments states, few, adjusted, draws, ids, tokens, names, units, V, S, all lanes, all
    drafts, blocks of a row. `selection_sift` of the rows that reject.

    ids: [R] of the columns; ~n: word n of tokens. names, units: [all lanes][all drafts][K] u32, q
    of the drafts in tokens [1 + all drafts][all lanes].
    """
    start, shared_words = follow(early), REJECTION_NBYTES // 8

    @cuda.jit(launch_bounds=(THREADS, 2))
    def rejection_sift(
        states, few, adjusted, draws, ids, tokens, names, units, V, S, lanes, most, blocks
    ):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        start()
        row, i, step = share_of_row(blocks)
        thread = uint32(cuda.threadIdx.x)
        draw, state = draws + int64(row) * DRAW_NBYTES, states + int64(row) * STATE_NBYTES
        how = ld_global_u32(draw + HOW)
        if how & uint32(REJECTS) and is_sound(state):
            adjusted += int64(row) * int64(S) * 4
            temperature = ld_global_f32(draw + TEMPERATURE)
            scale = (value_of(ld_global_u32(state + BEST_ADJUSTED)), temperature)
            drafts, place = (ids, tokens, names, units), (row, V, lanes, most)
            load_drafted(shared, how, adjusted, drafts, place, thread)
            span = _span(shared, draw, state, scale, thread)
            sift(few + int64(row) * (MOST * 8), adjusted, state, span, (i, step, S), scale)

    return Build(rejection_sift, THREADS)


@kernel(*(int64,) * 10, *(uint32,) * 5)
def rejection_choose_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments results, states, adjusted, few, logits, draws, ids, tokens, names, units, V, S, all
    lanes, all drafts, bytes of a row of logits. `selection_choose` of the rows that reject."""
    start, shared_words = follow(early), REJECTION_NBYTES // 8

    @cuda.jit(launch_bounds=THREADS)
    def rejection_choose(
        results,
        states,
        adjusted,
        few,
        logits,
        draws,
        ids,
        tokens,
        names,
        units,
        V,
        S,
        lanes,
        most,
        logits_nbytes,
    ):
        shared = shared_address(cuda.shared.array(shared_words, int64))
        start()
        row, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        draw, state = draws + int64(row) * DRAW_NBYTES, states + int64(row) * STATE_NBYTES
        how, token, sound = ld_global_u32(draw + HOW), uint32(NO_ID), is_sound(state)
        if how & uint32(REJECTS):
            if sound:
                adjusted += int64(row) * int64(S) * 4
                temperature = ld_global_f32(draw + TEMPERATURE)
                scale = (value_of(ld_global_u32(state + BEST_ADJUSTED)), temperature)
                drafts, place = (ids, tokens, names, units), (row, V, lanes, most)
                load_drafted(shared, how, adjusted, drafts, place, thread)
                n = ld_global_u32(state + GATHERED)
                few += int64(row) * (MOST * 8)
                if n > uint32(MOST):
                    token = _reject_many(shared, (adjusted, S), few, draw, scale, thread)
                else:
                    span = _span(shared, draw, state, scale, thread)
                    cuda.syncthreads()
                    token = _reject_few(shared, draw, few, n, span, scale, thread)
            if thread == 0:
                row_logits = logits + int64(row) * int64(logits_nbytes)
                give(results + int64(row) * RESULT_NBYTES, token, sound, state, row_logits)

    return Build(rejection_choose, THREADS)
