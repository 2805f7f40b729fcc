"""Exact selection: mask, bias, penalties, temperature, top-k, top-p, min-p, one draw; logprobs.

Weights are exp((adj - best) / T) as integers in units of 2^-40 and every threshold is an integer
product, so sums do not depend on their order. Candidates are walked by adjusted logit descending,
ties by ascending id; top_p is measured against the mass of the top_k. The draw is the first
candidate whose running mass exceeds u times the kept mass. Temperature 0 takes the first candidate.

Legend: R selected columns, V legal ids (the rest of a logit row is padding). Oracle:
tests.oracles.sampling.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.cpu.product import device, float_bits, keep_apart, mul_shift
from ginfer.cpu.scalar import ZERO, exp

_U64 = np.uint64
_UNIT = np.float64(2.0**40)
_SHORT = 128  # candidates found by insertion; more are sorted
_DIGITS = 2048
_LOWEST = np.float32(-np.inf)


class Draws(NamedTuple):
    """The arrays of batch.SelectionBatch; mask is [0, 0] when no row is constrained."""

    rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    purposes: np.ndarray
    forced: np.ndarray
    bias_indptr: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    mask: np.ndarray


class Chosen(NamedTuple):
    """The arrays of batch.Selection; top_ids and top_logprobs are [R, num_top]."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finite: np.ndarray


class Scratch(NamedTuple):
    """Per thread: raw, adj [V] float32; ids [2, V] int32; keys [2, V] uint32; digits [3, 2048]."""

    raw: np.ndarray
    adj: np.ndarray
    ids: np.ndarray
    keys: np.ndarray
    digits: np.ndarray


def make_scratch(threads: int, V: int) -> Scratch:
    """Scratch for `threads` threads and V ids."""
    return Scratch(
        np.zeros((threads, V), np.float32),
        np.zeros((threads, V), np.float32),
        np.zeros((threads, 2, V), np.int32),
        np.zeros((threads, 2, V), np.uint32),
        np.zeros((threads, 3, _DIGITS), np.int32),
    )


@device
def _mix(z):
    """The finaliser of SplitMix64."""
    z = _U64(z + _U64(0x9E3779B97F4A7C15))
    z = _U64((z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9))
    z = _U64((z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB))
    return z ^ (z >> _U64(31))


@device
def uniform_bits(seed, position, purpose, sub):
    """24 random bits, a pure function of the draw's key: u = bits / 2^24."""
    key = _mix(_U64(seed) ^ (_U64(np.uint32(position)) * _U64(0xD1B54A32D192ED03)))
    key ^= _U64(np.uint32(purpose)) << _U64(21)
    return _mix(key ^ (_U64(sub) * _U64(0x2545F4914F6CDD1D))) >> _U64(40)


@device
def _load_legal(raw, logits, r, mask):
    """raw = logits of row r with -inf at masked ids. False if a logit is not finite."""
    bad = 0
    for i in range(raw.size):
        raw[i] = logits[r, i]
        bad |= (float_bits(raw[i]) & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    if mask.shape[0]:
        for i in range(raw.size):
            if not (mask[r, i >> 5] >> np.uint32(i & 31)) & np.uint32(1):
                raw[i] = _LOWEST
    return not bad


@device
def _adjust(adj, raw, r, draws, counts):
    """adj = raw + bias - presence (if generated) - frequency * times generated."""
    keep_apart()
    for i in range(raw.size):
        adj[i] = raw[i]
    for b in range(draws.bias_indptr[r], draws.bias_indptr[r + 1]):
        if draws.bias_ids[b] < adj.size:
            adj[draws.bias_ids[b]] += draws.bias_values[b]
    presence, frequency = draws.presence[r], draws.frequency[r]
    if presence != ZERO or frequency != ZERO:
        row = counts[draws.rows[r]]
        for i in range(adj.size):
            if row[i] > 0:
                adj[i] = adj[i] - presence - frequency * np.float32(row[i])


@device
def best_few(values, limit, ids):
    """ids[:n] = the best `limit` ids by value descending, id ascending; n < limit if fewer are
    legal."""
    keep_apart()
    n, last = 0, _LOWEST
    for i in range(values.size):
        v = values[i]
        if v > last:
            at = min(n, limit - 1)
            while at > 0 and values[ids[at - 1]] < v:
                ids[at] = ids[at - 1]
                at -= 1
            ids[at] = i
            n = min(n + 1, limit)
            if n == limit:
                last = values[ids[n - 1]]
    return n


@device
def _sort_all(values, ids, keys, digits):
    """ids[0, :n] = all n legal ids in the order of `best_few`: a radix sort, three digits of 11
    bits, stable."""
    keep_apart()
    n = 0
    for d in range(3):
        for j in range(_DIGITS):
            digits[d, j] = 0
    for i in range(values.size):
        if values[i] > _LOWEST:
            bits = float_bits(values[i] + ZERO)
            key = bits if bits >> np.uint32(31) else np.uint32(~bits) ^ np.uint32(0x80000000)
            ids[0, n], keys[0, n] = i, key
            for d in range(3):
                digits[d, (key >> np.uint32(11 * d)) & np.uint32(2047)] += 1
            n += 1
    for d in range(3):
        total = 0
        for j in range(_DIGITS):
            total, digits[d, j] = total + digits[d, j], total
        source, target = d & 1, 1 - (d & 1)
        for i in range(n):
            digit = (keys[source, i] >> np.uint32(11 * d)) & np.uint32(2047)
            at = digits[d, digit]
            digits[d, digit] = at + 1
            ids[target, at], keys[target, at] = ids[source, i], keys[source, i]
    for i in range(n):
        ids[0, i] = ids[1, i]
    return n


@device
def weight(v, best, temperature):
    """exp((v - best) / T) in units of 2^-40."""
    return _U64(np.float64(exp((v - best) / temperature)) * _UNIT)


@device
def keep(adj, ids, n, r, draws):
    """(m, mass): of n candidates, best first, top-p and min-p leave the first m; the sum of their
    weights."""
    keep_apart()
    best, temperature = adj[ids[0]], draws.temperature[r]
    total = _U64(0)
    for i in range(n):
        total += weight(adj[ids[i]], best, temperature)
    top_p = _U64(min(np.float64(draws.top_p[r]), 1.0) * _UNIT + 0.5)
    enough = mul_shift(top_p, total, _U64((1 << 40) - 1), _U64(40))
    least = _U64(math.ceil(np.float64(draws.min_p[r]) * _UNIT))
    kept, m = _U64(0), 0
    while m < n:
        w = weight(adj[ids[m]], best, temperature)
        if m > 0 and (w < least or (draws.top_p[r] < 1 and kept >= enough)):
            break
        kept += w
        m += 1
    return m, kept


@device
def draw(adj, ids, n, r, draws):
    """One of the n candidates, best first: top-p, min-p, inverse distribution."""
    keep_apart()
    best, temperature = adj[ids[0]], draws.temperature[r]
    m, kept = keep(adj, ids, n, r, draws)
    u = uniform_bits(draws.seeds[r], draws.positions[r], draws.purposes[r], 0)
    target = mul_shift(u, kept, _U64(0), _U64(24))
    running = _U64(0)
    for i in range(m):
        running += weight(adj[ids[i]], best, temperature)
        if running > target:
            return ids[i]
    return ids[m - 1]


@device
def _log_mass(raw):
    """(maximum, log sum exp(raw - maximum)) over legal ids."""
    best = _LOWEST
    for i in range(raw.size):
        best = raw[i] if raw[i] > best else best
    total = _U64(0)
    for i in range(raw.size):
        total += weight(raw[i], best, np.float32(1.0))
    return best, math.log(np.float64(total) / _UNIT)


@device
def observe(r, logits, draws, chosen, raw, ids):
    """Load the legal logits of column r; report its top logprobs and whether it is sound.

    Returns (maximum, log sum exp) of the raw logits.
    """
    num_top = chosen.top_ids.shape[1]
    for i in range(num_top):
        chosen.top_ids[r, i], chosen.top_logprobs[r, i] = -1, _LOWEST
    chosen.token_ids[r], chosen.logprobs[r] = max(draws.forced[r], 0), np.float32(np.nan)
    chosen.finite[r] = _load_legal(raw, logits, r, draws.mask)
    best, log_mass = _log_mass(raw)
    if best == _LOWEST:
        chosen.finite[r] = False
    if chosen.finite[r] and num_top:
        for i in range(best_few(raw, num_top, ids)):
            chosen.top_ids[r, i] = ids[i]
            chosen.top_logprobs[r, i] = (raw[ids[i]] - best) - log_mass
    return best, log_mass


@device
def candidates(r, draws, counts, scratch, worker):
    """The n candidates of the observed column r after bias, penalties and top-k, best first, in
    scratch.ids[worker, 0]; one at temperature 0."""
    adj, ids = scratch.adj[worker], scratch.ids[worker]
    _adjust(adj, scratch.raw[worker], r, draws, counts)
    limit = 1 if draws.temperature[r] == ZERO else draws.top_k[r]
    if 0 < limit <= _SHORT:
        return best_few(adj, limit, ids[0])
    n = _sort_all(adj, ids, scratch.keys[worker], scratch.digits[worker])
    return min(n, limit) if limit > 0 else n


@device
def choose(r, draws, counts, scratch, worker):
    """The token of the observed column r: forced, the first candidate, or drawn."""
    if draws.forced[r] >= 0:
        return draws.forced[r]
    n = candidates(r, draws, counts, scratch, worker)
    ids = scratch.ids[worker, 0]
    return ids[0] if draws.temperature[r] == ZERO else draw(scratch.adj[worker], ids, n, r, draws)


@device
def _select_row(r, logits, draws, counts, chosen, scratch):
    worker = get_thread_id()
    best, log_mass = observe(r, logits, draws, chosen, scratch.raw[worker], scratch.ids[worker, 0])
    if not chosen.finite[r]:
        return
    token = choose(r, draws, counts, scratch, worker)
    chosen.token_ids[r] = token
    chosen.logprobs[r] = (logits[r, token] - best) - log_mass


@njit(cache=True, nogil=True, parallel=True)
def select_rows(chosen, logits, draws, counts, scratch):
    """Choose one token for each of R rows of logits.

    logits: [R, >= V] float32. counts: [lanes, V] int32, only read: the caller adds the chosen
    tokens. A row without a finite logit or legal id is reported by chosen.finite.
    """
    for r in prange(draws.rows.size):
        _select_row(np.int64(r), logits, draws, counts, chosen, scratch)
