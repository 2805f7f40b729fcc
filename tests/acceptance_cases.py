"""Checks of acceptance on a device against the CPU image; `run` as in `tests.device_cases`."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import get_num_threads

from ginfer.batch import Purpose, SelectionBatch
from ginfer.cpu import acceptance, sampling
from ginfer.cpu.stage import stage_draws
from ginfer.cuda.sampling.acceptance import acceptance_settle_kernel, verified_records
from ginfer.cuda.sampling.choose import FEW, selection_choose_kernel
from ginfer.cuda.sampling.keys import STATE_NBYTES, selection_keys_kernel
from ginfer.cuda.sampling.launch import RESULT, draw_records, key_values, logprob
from ginfer.cuda.sampling.rejection import ONE_Q, K, rejection_choose_kernel, rejection_sift_kernel
from ginfer.cuda.sampling.sift import selection_bins_kernel, selection_sift_kernel
from ginfer.sizes import align_up, div_ceil

MOST = 7  # drafts of a drafter


@dataclass
class Verification:
    """Columns of B rows to be verified. ids: [T], ~n for word n of tokens [1 + MOST][lanes]; names,
    units: [lanes][MOST][K]; resolved: [T], the ids that those stand for."""

    logits: np.ndarray
    batch: SelectionBatch
    indptr: np.ndarray
    limits: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    names: np.ndarray
    units: np.ndarray
    resolved: np.ndarray
    counts: np.ndarray


def random_q(rng, logits, V):
    """16 ids with units that sum to 2^24, mostly of ids that are likely."""
    likely = np.argsort(-logits[:V], kind="stable")[: 2 * K]
    names = rng.permutation(likely)[:K] if rng.random() < 0.8 else rng.permutation(V)[:K]
    shares = rng.random(K) ** 4
    shares[rng.random(K) < 0.2] = 0
    shares[rng.integers(K)] += 0.5
    edges = np.floor(np.cumsum(shares) / shares.sum() * ONE_Q).astype(np.int64)
    edges[-1] = ONE_Q
    return names, np.diff(edges, prepend=0)


def random_verification(seed, V, lengths, *, temperatures=(0.0, 0.7, 1.0), masked=False):
    """Rows with every mixture of options and drafts of hosts and drafters."""
    rng, B, T = np.random.default_rng(seed), len(lengths), sum(lengths)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    row = np.repeat(np.arange(B), lengths)
    logits = (rng.standard_normal((T, V + 5)) * rng.choice([0.3, 3.0], (T, 1))).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])
    lanes = rng.permutation(B)
    tokens = rng.integers(0, V, (1 + MOST, B)).astype(np.uint32)
    names, units = np.zeros((B, MOST, K), np.int64), np.zeros((B, MOST, K), np.int64)
    ids, drafter = rng.integers(0, V, T), rng.random(B) < 0.6
    for b, (first, end) in enumerate(pairwise(indptr)):
        ids[first] = ~lanes[b]
        for j, t in enumerate(range(first + 1, end)):
            if drafter[b] and j < MOST:
                n, u = random_q(rng, logits[t - 1], V)
                names[lanes[b], j], units[lanes[b], j] = n, u
                tokens[j + 1, lanes[b]] = rng.choice(n, p=u / ONE_Q)
                ids[t] = ~((j + 1) * B + lanes[b])
            elif rng.random() < 0.8:
                ids[t] = np.argmax(logits[t - 1, :V])
    resolved = np.where(ids < 0, tokens.reshape(-1)[np.where(ids < 0, ~ids, 0)], ids)
    pick = lambda *values: rng.choice(values, B)[row]  # noqa: E731
    coupled = rng.random(B) < 0.4
    bias = rng.integers(0, 3, T)
    bias_ids = np.concatenate([rng.permutation(V)[:n] for n in bias]).astype(np.int32)
    mask = rng.integers(0, 1 << 32, (T, div_ceil(V, 32)), np.uint32) if masked else None
    batch = SelectionBatch(
        columns=np.arange(T, dtype=np.int32),
        rows=lanes[row].astype(np.int32),
        temperature=pick(*temperatures).astype(np.float32),
        top_k=pick(0, 0, 3, 20, V).astype(np.int32),
        top_p=pick(1.0, 1.0, 0.9).astype(np.float32),
        min_p=pick(0.0, 0.0, 0.05).astype(np.float32),
        presence=pick(0.0, 1.5).astype(np.float32),
        frequency=pick(0.0, -0.7).astype(np.float32),
        seeds=rng.integers(0, 1 << 64, B, np.uint64, endpoint=False)[row],
        positions=rng.integers(0, 300_000, T).astype(np.int32),
        purposes=np.where(coupled, Purpose.DECODE, Purpose.ACCEPT)[row].astype(np.int32),
        forced=np.where(rng.random(T) < 0.05, 3, -1).astype(np.int32),
        bias_indptr=np.cumsum([0, *bias]).astype(np.int32),
        bias_ids=bias_ids,
        bias_values=(rng.standard_normal(len(bias_ids)) * 2).astype(np.float32),
        mask=mask,
    )
    limits = np.where(rng.random(B) < 0.7, lengths, rng.integers(1, np.array(lengths) + 1))
    counts = rng.integers(0, 3, (B, V))
    rest = (ids.astype(np.int32), tokens, names.astype(np.uint32), units.astype(np.uint32))
    return Verification(logits, batch, indptr, limits, *rest, resolved.astype(np.int64), counts)


def on_cpu(v, V):
    """What the CPU image makes of it: chosen, accepted, counts."""
    T, B, lanes = len(v.ids), len(v.limits), len(v.counts)
    following = np.full(T, -1, np.int32)
    names, units = np.full((T, K), -1, np.int32), np.zeros((T, K), np.uint32)
    for b, first in enumerate(v.indptr[:-1]):
        for t in range(first, first + v.limits[b] - 1):
            following[t] = v.resolved[t + 1]
            if v.ids[t + 1] < 0:
                j, lane = divmod(~v.ids[t + 1], lanes)
                names[t], units[t] = v.names[lane, j - 1], v.units[lane, j - 1]
            else:
                names[t, 0], units[t, 0] = following[t], ONE_Q
    coupled = v.batch.purposes[v.indptr[:-1]] == Purpose.DECODE
    drafts = acceptance.Drafts(v.indptr, coupled, following, names, units)
    chosen = sampling.Chosen(
        np.zeros(T, np.int32),
        np.zeros(T, np.float32),
        np.zeros((T, 0), np.int32),
        np.zeros((T, 0), np.float32),
        np.zeros(T, np.bool_),
    )
    accepted, counts = np.zeros(B, np.int32), v.counts.astype(np.int32)
    scratch = sampling.make_scratch(get_num_threads(), V)
    draws = stage_draws(v.batch)
    acceptance.accept_rows(chosen, accepted, v.logits, draws, drafts, counts, scratch)
    return chosen, accepted, counts


def on_device(run, v, V, blocks):
    """(results, columns, counts, tokens) of the kernels."""
    T, S, early, B = len(v.ids), align_up(V, 4), run.early, len(v.limits)
    draws = verified_records(draw_records(v.batch), v.batch, v.indptr, v.limits).view(np.uint8)
    counts, tokens, lanes = v.counts.astype(np.uint32), v.tokens.copy(), v.tokens.shape[1]
    states = np.zeros(T * STATE_NBYTES // 4, np.uint32)
    raw, adjusted = (np.full((T, S), 0xFFFFFFFF, np.uint32) for _ in range(2))
    results, few = np.zeros(T, RESULT).view(np.uint8), np.full((T, FEW), 0xFFFFFFFF, np.uint32)
    bias = [np.append(a, 0).astype(a.dtype) for a in (v.batch.bias_ids, v.batch.bias_values)]
    mask = 0 if v.batch.mask is None else v.batch.mask
    pitch, grid = v.logits.shape[1] * 4, T * blocks
    tables = (v.logits, draws, mask, *bias, counts, v.ids, tokens, V, pitch, blocks)
    run(selection_keys_kernel(early), grid, raw, adjusted, states, *tables, 1)
    run(selection_bins_kernel(early), grid, states, raw, adjusted, draws, S, blocks)
    run(selection_sift_kernel(early), grid, states, few, adjusted, draws, S, blocks)
    tables = (adjusted, few, v.logits, draws, counts, V, S, pitch)
    run(selection_choose_kernel(early), T, results, tokens, states, *tables)
    known = (v.ids, tokens, v.names, v.units, V, S, lanes, MOST)
    run(rejection_sift_kernel(early), grid, states, few, adjusted, draws, *known, blocks)
    tables = (states, adjusted, few, v.logits, draws)
    run(rejection_choose_kernel(early), T, results, *tables, *known, pitch)
    columns = np.full(B, 99, np.uint32)
    tables = (columns, tokens, counts, draws, v.ids, v.indptr, V)
    run(acceptance_settle_kernel(early), B, results, *tables)
    return results.view(RESULT), columns, counts, tokens


def check_acceptance(run, v, V, *, blocks=1):
    """The same accepted drafts, tokens, log-probabilities, counts and last tokens as the CPU image,
    bit for bit. Returns the accepted drafts."""
    chosen, accepted, counts = on_cpu(v, V)
    results, columns, got, tokens = on_device(run, v, V, blocks)
    assert (results["accepted"][v.indptr[:-1]] == accepted).all()
    assert (columns == accepted + 1).all()
    for b, first in enumerate(v.indptr[:-1]):
        last = first + accepted[b]
        for t in range(first, last + 1):
            result = results[t]
            assert (result["sound"] != 0) == chosen.finite[t]
            if chosen.finite[t]:
                assert result["token"] == chosen.token_ids[t], (b, t - first)
                best = key_values(result["best"])[()]
                mass = int(result["mass"])
                assert logprob(result["logit"], best, mass) == chosen.logprobs[t]
        if chosen.finite[last]:
            assert tokens[0, v.batch.rows[first]] == chosen.token_ids[last]
    assert (got == counts).all()
    return accepted
