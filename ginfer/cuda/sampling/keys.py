"""First pass of selection: legal ids as keys, raw and adjusted, and the best of them.

adjusted = logit + bias - presence (if generated) - frequency * times generated; to a column that is
verified the tokens of its row before it are generated. Many blocks per row; what they find of a row
meets in its state: the best raw key, the best adjusted key with the lowest id that has it, whether
a logit is not finite.

Legend: R rows, V legal ids, S places of a row of keys (V rounded up to 4; the last ones hold 0).
Oracle: tests.oracles.sampling; the same numbers as `ginfer.cpu.sampling`.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import follow
from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    bits_from_f32,
    div_u32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_u32,
    mul_rn_f32,
    red_global_max_u32,
    red_global_max_u64,
    red_shared_max_u32,
    shared_address,
    st_global_u32,
    st_shared_u32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.sampling.exact import key_of, value_of

THREADS = 512
AT_ONCE = 8  # logits that a thread reads at a time
NO_ID = 0xFFFFFFFF
# bytes of a row's record, see `ginfer.cuda.sampling.launch.DRAW`
DRAW_NBYTES, ROW, TOP_K, TEMPERATURE, PRESENCE, FREQUENCY, FORCED = 80, 0, 4, 8, 12, 16, 20
POSITION, PURPOSE, SEED, TOP_P, LEAST, CUTS, BIAS = 24, 28, 32, 40, 48, 56, 60
PATH, HOW = 68, 72
DRAFTED, VERIFIED, REJECTS = 1, 2, 4  # bits of HOW: a draft follows, one of many, its rule
MOST_PATH = 16  # columns of a row that is verified
# and of its state: best raw key, gathered candidates, a flag, mass of the raw keys, best adjusted
# key << 32 | ~id, the bins of `sampling.sift`
BEST_RAW, GATHERED, BAD, MASS, BEST, BEST_ADJUSTED, BINS = 0, 4, 8, 16, 24, 28, 32
STATE_NBYTES = BINS + 2048 * 12


@cuda.jit(device=True, inline="always")
def token_of(ids, tokens, column):
    """The token of a column: an id, or ~n for word n of `tokens`."""
    word = ld_global_u32(ids + int64(column) * 4)
    if word >> uint32(31):
        word = ld_global_u32(tokens + int64(uint32(word ^ uint32(NO_ID))) * 4)
    return word


@kernel(*(int64,) * 11, *(uint32,) * 4)
def selection_keys_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments raw, adjusted, states, logits, draws, mask, bias_ids, bias_values, counts, ids,
    tokens, V, bytes of a row of logits, blocks of a row, whether keys are wanted.

    raw, adjusted: [R][S] u32; where keys are not wanted, of rows with a bias alone. states: zeroed.
    mask: [R][ceil(V / 32)] u32 or 0. counts: [lanes][V] u32. draws: records whose bias is a range
    of bias_ids and bias_values, and whose path is that many columns before this one; ids, tokens:
    as the embedding reads them, for columns with a path.
    """
    start, words = follow(early), 4 + MOST_PATH

    @cuda.jit(device=True, inline="always")
    def raw_of(x, mask, i):
        """(key or 0, whether the logit is not finite) of an id with logit x."""
        bits = bits_from_f32(x)
        if bits & uint32(0x7F800000) == uint32(0x7F800000):
            return uint32(0), uint32(1)
        if mask != 0:
            word = ld_global_u32(mask + int64(i >> uint32(5)) * 4)
            if (word >> (i & uint32(31))) & uint32(1) == uint32(0):
                return uint32(0), uint32(0)
        return key_of(x), uint32(0)

    @cuda.jit(device=True, inline="always")
    def adjust(value, penalties, counts, before, length, i):
        """The key of a value less the penalties of its id; before: the ids of the path."""
        presence, frequency = penalties
        if presence != float32(0.0) or frequency != float32(0.0):
            n = ld_global_u32(counts + int64(i) * 4)
            c = uint32(0)
            while c < length:
                if ld_shared_u32(uint32(before + c * uint32(4))) == i:
                    n = uint32(n + uint32(1))
                c = uint32(c + uint32(1))
            if n > uint32(0):
                value = add_rn_f32(value, -presence)
                value = add_rn_f32(value, -mul_rn_f32(frequency, float32(n)))
        return key_of(value)

    @cuda.jit(launch_bounds=THREADS)
    def selection_keys(
        raw,
        adjusted,
        states,
        logits,
        draws,
        mask,
        bias_ids,
        bias_values,
        counts,
        ids,
        tokens,
        V,
        logits_nbytes,
        blocks,
        wanted,
    ):
        found = shared_address(cuda.shared.array(words, uint32))
        x = cuda.local.array(AT_ONCE, float32)
        start()
        row = div_u32(uint32(cuda.blockIdx.x), blocks)
        block, thread = uint32(uint32(cuda.blockIdx.x) - row * blocks), uint32(cuda.threadIdx.x)
        if thread < uint32(4):
            st_shared_u32(uint32(found + thread * uint32(4)), uint32(0))
        draw, before = draws + int64(row) * DRAW_NBYTES, uint32(found + uint32(16))
        length = ld_global_u32(draw + PATH)
        if thread < length:
            word = token_of(ids, tokens, uint32(row - thread))
            st_shared_u32(uint32(before + thread * uint32(4)), word)
        cuda.syncthreads()
        S = uint32((V + uint32(3)) & uint32(0xFFFFFFFC))
        share = div_u32(uint32(S + blocks - uint32(1)), blocks)
        first, stop = uint32(block * share), min(uint32((block + uint32(1)) * share), S)
        state = states + int64(row) * STATE_NBYTES
        logits += int64(row) * int64(logits_nbytes)
        counts += int64(ld_global_u32(draw + ROW)) * int64(V) * 4
        raw += int64(row) * int64(S) * 4
        adjusted += int64(row) * int64(S) * 4
        if mask != 0:
            mask += int64(row) * int64((V + uint32(31)) >> uint32(5)) * 4
        penalties = (ld_global_f32(draw + PRESENCE), ld_global_f32(draw + FREQUENCY))
        best, bad, top, lowest = uint32(0), uint32(0), uint32(0), uint32(NO_ID)
        b = ld_global_u32(draw + BIAS)
        biases = ld_global_u32(draw + (BIAS + 4))
        stored, end = wanted != uint32(0) or b < biases, min(stop, V)
        base = uint32(first + thread)
        while base < stop:
            for n in range(AT_ONCE):
                i = uint32(base + uint32(n * THREADS))
                if i < end:
                    x[n] = ld_global_f32(logits + int64(i) * 4)
            for n in range(AT_ONCE):
                i = uint32(base + uint32(n * THREADS))
                key, other = uint32(0), uint32(0)
                if i < end:
                    key, wrong = raw_of(x[n], mask, i)
                    bad |= wrong
                    best = max(best, key)
                    if key != uint32(0):
                        other = adjust(value_of(key), penalties, counts, before, length, i)
                if stored and i < stop:
                    st_global_u32(raw + int64(i) * 4, key)
                    st_global_u32(adjusted + int64(i) * 4, other)
                if other > top:
                    top, lowest = other, i
            base = uint32(base + uint32(AT_ONCE * THREADS))
        if b < biases:
            cuda.syncthreads()
            b = uint32(b + thread)
            while b < biases:
                i = uint32(ld_global_u32(bias_ids + int64(b) * 4))
                if i >= first and i < min(stop, V):
                    key = ld_global_u32(raw + int64(i) * 4)
                    if key != uint32(0):
                        value = add_rn_f32(value_of(key), ld_global_f32(bias_values + int64(b) * 4))
                        key = adjust(value, penalties, counts, before, length, i)
                        st_global_u32(adjusted + int64(i) * 4, key)
                b = uint32(b + uint32(THREADS))
            cuda.syncthreads()
            top, lowest = uint32(0), uint32(NO_ID)
            i = uint32(first + thread)
            while i < stop:
                other = ld_global_u32(adjusted + int64(i) * 4)
                if other > top:
                    top, lowest = other, i
                i = uint32(i + uint32(THREADS))
        red_shared_max_u32(found, best)
        red_shared_max_u32(uint32(found + uint32(4)), top)
        red_shared_max_u32(uint32(found + uint32(8)), bad)
        cuda.syncthreads()
        if top == ld_shared_u32(uint32(found + uint32(4))):
            red_shared_max_u32(uint32(found + uint32(12)), uint32(lowest ^ uint32(NO_ID)))
        cuda.syncthreads()
        if thread == 0:
            red_global_max_u32(state + BEST_RAW, ld_shared_u32(found))
            red_global_max_u32(state + BAD, ld_shared_u32(uint32(found + uint32(8))))
            key = ld_shared_u32(uint32(found + uint32(4)))
            word = int64(ld_shared_u32(uint32(found + uint32(12))))
            red_global_max_u64(state + BEST, (int64(key) << int64(32)) | word)

    return Build(selection_keys, THREADS)
