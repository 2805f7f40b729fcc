"""Checks of device kernels against the float64 oracles, for whatever runs them.

`run(kernel, grid, *arguments)` runs one launch and leaves the results in the arrays; `run.early` is
the variant that it can launch. Used at small sizes with emulated threads, at full size on a GPU.
"""

from dataclasses import dataclass, replace

import numpy as np
from numba import get_num_threads

from ginfer.batch import SelectionBatch
from ginfer.cpu import sampling
from ginfer.cpu.stage import stage_draws
from ginfer.cuda.embedding import embedding_kernel
from ginfer.cuda.frame import chunks_of
from ginfer.cuda.gdn.chunk import gdn_chunk_kernel
from ginfer.cuda.gdn.column import gdn_column_kernel
from ginfer.cuda.gdn.conv import PIECE, conv_kernel, conv_prefill_kernel
from ginfer.cuda.gdn.fold import HALVES, gdn_fold_kernel
from ginfer.cuda.gdn.gate import gated_norm_kernel
from ginfer.cuda.gdn.prepare import WITHIN_NBYTES, gdn_prepare_kernel
from ginfer.cuda.gdn.step import gdn_step_kernel
from ginfer.cuda.lib.fragment import fragment_offset, tiles_of
from ginfer.cuda.norm import rms_norm_kernel, rms_norm_rows_kernel
from ginfer.cuda.sampling.choose import FEW, selection_choose_kernel, selection_top_kernel
from ginfer.cuda.sampling.keys import STATE_NBYTES, selection_keys_kernel
from ginfer.cuda.sampling.launch import RESULT, best_ids, draw_records, key_values, logprob
from ginfer.cuda.sampling.sift import selection_bins_kernel, selection_sift_kernel
from ginfer.formats import FORMATS, Layout, row_nbytes
from ginfer.sizes import align_up, div_ceil
from scripts.pack.codecs import bf16_bits, encode
from tests.oracles import gdn as gdn_oracle
from tests.oracles.formats import bf16_to_f32, decode
from tests.oracles.norm import gated_rms_norm, rms_norm
from tests.tolerances import GDN_OUTPUT, GDN_STATE, POINTWISE_BF16

D, SECTIONS, THETA, EPS = 256, (11, 11, 10), 1e7, 1e-6
NAN = 0x7FC0


def normal(rng, *shape):
    """BF16 bits and their values."""
    bits = bf16_bits(rng.standard_normal(shape).astype(np.float32))
    return bits, bf16_to_f32(bits)


def from_fragments(buffer, T, K):
    """[T, K] of a buffer in fragment order."""
    first, rest = tiles_of(T)
    t, k = np.arange(T)[:, None], np.arange(K)[None]
    at = np.where(t < 64, fragment_offset(t, k, first), 128 * K + fragment_offset(t - 64, k, rest))
    return buffer[at // 2]


def fragment_size(T, K):
    """Elements of such a buffer."""
    first, rest = tiles_of(T)
    return (64 + 8 * rest if T > 64 else 8 * first) * K


def check_embedding(run, fmt, C):
    rng, fmt = np.random.default_rng(C), FORMATS[fmt]
    values = rng.standard_normal((7, C)).astype(np.float32)
    payload = np.ascontiguousarray(encode(fmt, Layout.ROWS, values)).view(np.uint8).reshape(-1)
    want = decode(fmt, Layout.ROWS, (7, C), payload)
    ids, drawn = np.array([3, 0, 6, ~1, ~0], np.int32), np.array([5, 2], np.uint32)
    item, y = embedding_kernel(fmt.name, run.early), np.full((5, C), NAN, np.uint16)
    run(item, 5, y, ids, drawn, payload, C, row_nbytes(fmt, C))
    assert (y == bf16_bits(want[[3, 0, 6, 2, 5]].astype(np.float32))).all()


def check_rms_norm(run, T, C):
    rng = np.random.default_rng(T * C)
    x, values = normal(rng, T + 2, C)
    w = (1 + 0.2 * rng.standard_normal(C)).astype(np.float32)
    columns = rng.integers(0, T + 2, T).astype(np.uint32)
    want = rms_norm(values[columns], w, EPS)
    y = np.full((T, C), NAN, np.uint16)
    run(rms_norm_kernel(0, run.early), T, y, x, w, columns, C, 1, 1, EPS)
    POINTWISE_BF16.check(bf16_to_f32(y), want)
    if C <= 6144:
        rows = np.full((T, C), NAN, np.uint16)
        run(rms_norm_rows_kernel(run.early), div_ceil(T, 4), rows, x[columns], w, T, C, EPS)
        assert (rows == y).all()
    if run.early:
        buffer = np.full(fragment_size(T, C), NAN, np.uint16)
        run(rms_norm_kernel(1, 1), T, buffer, x, w, columns, C, *tiles_of(T), EPS)
        assert (from_fragments(buffer, T, C) == y).all()


@dataclass
class Gdn:
    """Inputs and slots of a GDN layer; row b reads slot `state_in[b]` and writes `state_out[b]`."""

    HK: int
    HV: int
    mix: np.ndarray
    ab: np.ndarray
    taps: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    w: np.ndarray
    history: np.ndarray
    state: np.ndarray
    indptr: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray

    @property
    def X(self):
        return (2 * self.HK + self.HV) * 128

    @property
    def gates(self):
        return np.stack([-np.exp(self.a_log), self.dt_bias]).astype(np.float32)

    def rows(self):
        """(first column, end, slot read, slot written) per row."""
        return list(zip(self.indptr[:-1], self.indptr[1:], self.state_in, self.state_out))


def make_gdn(seed, heads, lengths, slots):
    """lengths: columns per row; slots: (read, written) per row."""
    rng, (HK, HV) = np.random.default_rng(seed), heads
    X, T = (2 * HK + HV) * 128, sum(lengths)
    num_slots = 1 + max(max(pair) for pair in slots)
    f32 = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    state_in, state_out = np.array(slots, np.int32).T
    return Gdn(
        *(HK, HV, normal(rng, T, X + HV * 128)[0], f32(T, 2 * HV), 0.5 * f32(4, X)),
        *(f32(HV), f32(HV), (1 + 0.1 * f32(128)).astype(np.float32)),
        *(normal(rng, num_slots, 3, X)[0], f32(num_slots, HV, 128, 128)),
        np.cumsum([0, *lengths]).astype(np.int32),
        *(state_in.copy(), state_out.copy()),
    )


def check_conv(run, it):
    """Convolve; returns the result bits [T, X]."""
    X, W, T = it.X, it.mix.shape[1], len(it.mix)
    blocks, longest = div_ceil(X, 256), int(np.diff(it.indptr).max())
    y, before = np.full((T, X), NAN, np.uint16), bf16_to_f32(it.history)
    tables = (it.mix, it.taps, it.history, it.indptr, it.state_in, it.state_out)
    B = len(it.state_in)
    if longest > PIECE:
        wide, pieces = div_ceil(X, 1024), div_ceil(longest, PIECE)
        run(conv_prefill_kernel(run.early), B * pieces * wide, y, *tables, X, W, pieces, wide)
    else:
        run(conv_kernel(run.early), B * blocks, y, *tables, X, W, blocks)
    m = bf16_to_f32(it.mix)[:, :X]
    for first, end, read, written in it.rows():
        want = gdn_oracle.causal_conv(m[first:end], it.taps, before[read])
        POINTWISE_BF16.check(bf16_to_f32(y[first:end]), want)
        kept = np.concatenate([before[read], m[first:end]])[-3:]
        assert (bf16_to_f32(it.history[written]) == kept).all()
    return y


def gdn_step(run, it, convolved):
    """Result bits [T, HV V] of the step kernel; the slots move on."""
    HV, T = it.HV, len(it.mix)
    buffer = np.full(fragment_size(T, HV * 128), NAN, np.uint16)
    run(
        gdn_step_kernel(run.early),
        len(it.state_in) * HV,
        *(buffer, convolved, it.mix, it.ab, it.state, it.gates, it.w),
        *(it.indptr, it.state_in, it.state_out, it.mix.shape[1]),
        *(it.HK, HV, *tiles_of(T), EPS),
    )
    return from_fragments(buffer, T, HV * 128)


def check_gdn_column(run, heads, B):
    """Rows of one column in one kernel against convolution and step, bit for bit."""
    it, two = (make_gdn(16, heads, [1] * B, [(b, 2 * B - 1 - b) for b in range(B)]) for _ in "ab")
    want, HV = gdn_step(run, two, check_conv(run, two)), it.HV
    buffer = np.full(fragment_size(B, HV * 128), NAN, np.uint16)
    run(
        gdn_column_kernel(run.early),
        B * HV,
        *(buffer, it.mix, it.ab, it.state, it.gates, it.w, it.taps, it.history),
        *(it.indptr, it.state_in, it.state_out, it.mix.shape[1], it.HK, HV, *tiles_of(B), EPS),
    )
    assert (from_fragments(buffer, B, HV * 128) == want).all()
    assert (it.state == two.state).all()
    assert (it.history == two.history).all()


def gdn_fold(run, layers, convolved, columns):
    """Fold of layers with the same rows; states [L, slots, HV, K, V] and histories after it."""
    it = layers[0]
    stack = lambda name: np.stack([getattr(layer, name) for layer in layers])  # noqa: E731
    state, history, mix = stack("state"), stack("history"), stack("mix")
    convolved, ab = np.stack(convolved), stack("ab")
    run(
        gdn_fold_kernel(run.early),
        len(layers) * len(it.state_in) * it.HV * HALVES,
        *(state, history, stack("gates"), mix, convolved, ab),
        *(it.indptr, it.state_in, it.state_out, np.array(columns, np.int32)),
        *(it.mix.shape[1], mix[0].nbytes, convolved[0].nbytes, ab[0].nbytes),
        *(len(it.state_in), it.HK, it.HV, len(it.state)),
    )
    return state, history


def check_fold(run, heads, lengths, columns, *, L=2):
    """Fold against steps over just these columns, bit for bit; rows of -1 columns stay."""
    B = len(lengths)
    layers = [make_gdn(20 + i, heads, lengths, [(b, B + b) for b in range(B)]) for i in range(L)]
    convolved, wanted = [], []
    for it in layers:
        state, history = it.state.copy(), it.history.copy()
        convolved.append(check_conv(run, it))
        some = [b for b in range(B) if columns[b] > 0]
        kept = np.concatenate([it.indptr[b] + np.arange(columns[b]) for b in some])
        short = replace(
            it,
            mix=it.mix[kept],
            ab=it.ab[kept],
            indptr=np.cumsum([0, *(columns[b] for b in some)]).astype(np.int32),
            state_in=it.state_in[some],
            state_out=it.state_out[some],
            state=state.copy(),
            history=history.copy(),
        )
        gdn_step(run, short, check_conv(run, short))
        for b, n in enumerate(columns):
            if n <= 0:
                source = b if n == 0 else B + b
                short.state[B + b], short.history[B + b] = state[source], history[source]
        wanted.append((short.state, short.history))
        it.state, it.history = state, history
    states, histories = gdn_fold(run, layers, convolved, columns)
    for (state, history), got, raw in zip(wanted, states, histories):
        assert (got == state).all()
        assert (raw == history).all()


def gdn_chunks(run, it, convolved, starts, form=(4, 2)):
    """Result bits [T, HV V] of the chunk kernels; the slots move on. starts: per row."""
    HK, HV, T = it.HK, it.HV, len(it.mix)
    chunks, ends = chunks_of(it.indptr, np.array(starts, np.int32))
    within = np.full((len(chunks), HV, WITHIN_NBYTES), 0xFF, np.uint8)
    results = np.full((T, HV * 128), np.nan, np.float32)
    out = np.full((T, HV * 128), NAN, np.uint16)
    prepare = gdn_prepare_kernel(run.early)
    run(prepare, len(chunks) * HV, within, convolved, it.ab, it.gates, chunks, HK, HV)
    run(
        gdn_chunk_kernel(*form, run.early),
        len(it.state_in) * HV * 8 // form[0],
        *(results, convolved, within, chunks, ends, it.state, it.state_in, it.state_out, HK, HV),
    )
    norm = gated_norm_kernel(run.early)
    run(norm, div_ceil(T * HV, 16), out, results, it.mix, it.w, T, HV, it.mix.shape[1], EPS)
    return out


def check_gdn(it, convolved, before, out):
    """Results and slots against the oracle; before: the slots before the launch."""
    x, HK, HV = bf16_to_f32(convolved), it.HK, it.HV
    z = bf16_to_f32(it.mix)[:, it.X :]
    for first, end, read, written in it.rows():
        q, k, v = np.split(x[first:end].reshape(end - first, -1, 128), [HK, 2 * HK], 1)
        a, b = it.ab[first:end, :HV], it.ab[first:end, HV:]
        g, beta = gdn_oracle.gates(a, b, it.a_log, it.dt_bias)
        o, state = gdn_oracle.gated_deltanet(q, k, v, g, beta, before[read])
        gate = z[first:end].reshape(-1, 128)
        want = gated_rms_norm(o.reshape(-1, 128), it.w, gate, EPS).reshape(end - first, -1)
        GDN_OUTPUT.check(bf16_to_f32(out[first:end]), want, "out")
        GDN_STATE.check(it.state[written], state, "state")


@dataclass
class Selected:
    """What the kernels left: result records, keys of best ids, counts, tokens of the lanes."""

    results: np.ndarray
    top: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray


def run_selection(run, logits, batch, counts, V):
    """Choose for rows of logits [R, >= V]."""
    R, S, early = len(logits), align_up(V, 4), run.early
    draws, counts = draw_records(batch).view(np.uint8), counts.astype(np.uint32)
    tokens = np.full(len(counts), 77, np.uint32)
    states = np.zeros(R * STATE_NBYTES // 4, np.uint32)
    raw, adjusted = (np.full((R, S), 0xFFFFFFFF, np.uint32) for _ in range(2))
    results = np.zeros(R, RESULT).view(np.uint8)
    num_top = max(batch.num_top, 1)
    top, few = np.zeros((R, num_top), np.uint64), np.full((R, FEW), 0xFFFFFFFF, np.uint32)
    bias = [np.append(a, 0).astype(a.dtype) for a in (batch.bias_ids, batch.bias_values)]
    mask = 0 if batch.mask is None else batch.mask
    pitch = logits.shape[1] * 4
    tables = (logits, draws, mask, *bias, counts, 0, 0, V, pitch, 2)
    best, unkept = states.copy(), raw.copy()
    run(selection_keys_kernel(early), R * 2, unkept, adjusted, best, *tables, 0)
    run(selection_keys_kernel(early), R * 2, raw, adjusted, states, *tables, 1)
    assert (best == states).all()
    assert (unkept[np.diff(batch.bias_indptr) == 0] == 0xFFFFFFFF).all()
    run(selection_bins_kernel(early), R * 2, states, raw, adjusted, draws, S, 2)
    run(selection_sift_kernel(early), R * 2, states, few, adjusted, draws, S, 2)
    tables = (adjusted, few, logits, draws, counts, V, S, pitch)
    run(selection_choose_kernel(early), R, results, tokens, states, *tables)
    run(selection_top_kernel(early), R, top, raw, S, num_top)
    return Selected(results.view(RESULT), top, counts, tokens)


def check_selection(run, logits, batch, counts, V):
    """The same choices, log-probabilities and best ids as the CPU image, bit for bit."""
    R, num_top = len(logits), max(batch.num_top, 1)
    chosen = sampling.Chosen(
        np.zeros(R, np.int32),
        np.zeros(R, np.float32),
        np.zeros((R, num_top), np.int32),
        np.zeros((R, num_top), np.float32),
        np.zeros(R, np.bool_),
    )
    draws, own = stage_draws(batch), counts.astype(np.int32)
    scratch = sampling.make_scratch(get_num_threads(), V)
    sampling.select_rows(chosen, logits, draws, own, scratch)
    got = run_selection(run, logits, batch, counts, V)
    assert (got.results["sound"] == chosen.finite).all()
    for r in np.flatnonzero(chosen.finite):
        result = got.results[r]
        assert result["token"] == chosen.token_ids[r], r
        best = key_values(result["best"])[()]
        assert logprob(result["logit"], best, int(result["mass"])) == chosen.logprobs[r]
        ids, values = best_ids(got.top[r])
        ids, values = ids.tolist(), [logprob(v, best, int(result["mass"])) for v in values]
        rest = [-1] * (num_top - len(ids)), [-np.inf] * (num_top - len(ids))
        assert [*ids, *rest[0]] == chosen.top_ids[r].tolist()
        assert [*values, *rest[1]] == chosen.top_logprobs[r].tolist()
    np.add.at(own, (draws.rows[chosen.finite], chosen.token_ids[chosen.finite]), 1)
    assert (got.counts == own).all()
    want = np.full(len(counts), 77)
    want[draws.rows[chosen.finite]] = chosen.token_ids[chosen.finite]
    assert (got.tokens == want).all()


def random_draws(seed, V, R, *, masked=True):
    """Rows with every mixture of options, ties among the logits, and a row that is not finite."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((R, V + 9)) * 4).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])  # ties, also of zeros with both signs
    logits[0, :] = np.round(logits[0])
    pick = lambda *values: rng.choice(values, R)  # noqa: E731
    bias = rng.integers(0, 4, R)
    indptr = np.cumsum([0, *bias]).astype(np.int32)
    ids = np.concatenate([rng.permutation(V)[:n] for n in bias]).astype(np.int32)
    mask = rng.integers(0, 1 << 32, (R, div_ceil(V, 32)), np.uint32) if masked else None
    if masked:
        mask[-1] = 0
    batch = SelectionBatch(
        columns=np.arange(R, dtype=np.int32),
        rows=rng.permutation(R).astype(np.int32),
        temperature=pick(0.0, 0.3, 1.0, 2.0).astype(np.float32),
        top_k=pick(0, 1, 5, 20, V).astype(np.int32),
        top_p=pick(1.0, 0.9, 0.3, 0.0).astype(np.float32),
        min_p=pick(0.0, 0.05, 1.0).astype(np.float32),
        presence=pick(0.0, 1.5).astype(np.float32),
        frequency=pick(0.0, -0.7).astype(np.float32),
        seeds=rng.integers(0, 1 << 64, R, np.uint64, endpoint=False),
        positions=rng.integers(0, 300_000, R).astype(np.int32),
        purposes=pick(0, 1, 4).astype(np.int32),
        forced=pick(-1, -1, -1, 3).astype(np.int32),
        bias_indptr=indptr,
        bias_ids=ids,
        bias_values=(rng.standard_normal(len(ids)) * 5).astype(np.float32),
        mask=mask,
        num_top=int(rng.integers(1, 6)),
    )
    return logits, batch, rng.integers(0, 3, (R, V))
