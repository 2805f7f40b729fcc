"""Acceptance: verified columns against their drafts, without a change of the target's distribution.

Column i of a row chooses a token; the row goes on to column i + 1 while that token is the draft.
Coupled rows (explicit seed, or temperature 0) choose as plain decode does, with the same key.
Others accept draft d when u q(d) < p(d), else draw from max(p - q, 0), or from p where that is
nothing; the column after the last draft draws from p. p are the integer weights of `sampling` over
their sum, q multiples of 2^-24: a drafter draws from exactly this q, and a draft that was not drawn
(argmax, context copy) has q = 1. So the rule is integer arithmetic, and exact.

Legend: B rows, R columns of all rows, V legal ids, K ids with q > 0. Oracle:
tests.oracles.acceptance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.batch import Purpose
from ginfer.cpu.product import device, keep_apart, mul_shift
from ginfer.cpu.sampling import candidates, choose, keep, observe, uniform_bits, weight
from ginfer.cpu.scalar import ZERO

ONE_Q = 1 << 24  # q of a draft that was not drawn

_U64 = np.uint64
_ZERO, _HALF, _WHOLE = _U64(0), _U64(24), _U64(48)
_ACCEPT, _CORRECTION, _BONUS = Purpose.ACCEPT, Purpose.CORRECTION, Purpose.BONUS


class Drafts(NamedTuple):
    """What columns are verified against.

    indptr: [B + 1] int32, columns of a row. coupled: [B] bool. token_ids: [R] int32, the draft that
    follows the column, -1 at the last of a row. ids: [R, K] int32 with their units [R, K] uint32,
    q = units / 2^24; entries of 0 units do not count.
    """

    indptr: np.ndarray
    coupled: np.ndarray
    token_ids: np.ndarray
    ids: np.ndarray
    units: np.ndarray


@device
def _units_of(token, r, drafts):
    """q(token) of column r in units of 2^-24."""
    for j in range(drafts.ids.shape[1]):
        if drafts.ids[r, j] == token and drafts.units[r, j]:
            return _U64(drafts.units[r, j])
    return _ZERO


@device
def _residual(w, mass, token, r, drafts):
    """max(p - q, 0) of a token in units of p's weights."""
    q = mul_shift(_units_of(token, r, drafts), mass, _ZERO, _HALF)
    return w - q if w > q else _ZERO


@device
def _draw_residual(adj, ids, m, mass, r, draws, drafts):
    """The token after a rejected draft, or after the last one: from max(p - q, 0), else from p."""
    keep_apart()
    best, temperature = adj[ids[0]], draws.temperature[r]
    drafted = drafts.token_ids[r] >= 0
    total = _ZERO
    for i in range(m * drafted):
        total += _residual(weight(adj[ids[i]], best, temperature), mass, ids[i], r, drafts)
    subtract = total > _ZERO
    total = total if subtract else mass
    purpose = _CORRECTION if drafted else _BONUS
    u = uniform_bits(draws.seeds[r], draws.positions[r], purpose, 0)
    target, running = mul_shift(u, total, _ZERO, _HALF), _ZERO
    for i in range(m):
        w = weight(adj[ids[i]], best, temperature)
        running += _residual(w, mass, ids[i], r, drafts) if subtract else w
        if running > target:
            return ids[i]
    return ids[m - 1]


@device
def _reject_or_accept(r, draws, drafts, counts, scratch, worker):
    """The token of a column under the rejection rule."""
    n = candidates(r, draws, counts, scratch, worker)
    adj, ids = scratch.adj[worker], scratch.ids[worker, 0]
    m, mass = keep(adj, ids, n, r, draws)
    draft = drafts.token_ids[r]
    for i in range(m):
        if ids[i] == draft:
            w = weight(adj[draft], adj[ids[0]], draws.temperature[r])
            u = uniform_bits(draws.seeds[r], draws.positions[r], _ACCEPT, 0)
            if mul_shift(u * _units_of(draft, r, drafts), mass, _ZERO, _WHOLE) < w:
                return draft
            break
    return _draw_residual(adj, ids, m, mass, r, draws, drafts)


@device
def _accept_row(b, chosen, accepted, logits, draws, drafts, counts, scratch):
    worker = get_thread_id()
    raw, ids = scratch.raw[worker], scratch.ids[worker, 0]
    accepted[b] = 0
    for r in range(drafts.indptr[b], drafts.indptr[b + 1]):
        best, log_mass = observe(r, logits, draws, chosen, raw, ids)
        if not chosen.finite[r]:
            return
        if drafts.coupled[b] or draws.temperature[r] == ZERO or draws.forced[r] >= 0:
            token = choose(r, draws, counts, scratch, worker)
        else:
            token = _reject_or_accept(r, draws, drafts, counts, scratch, worker)
        chosen.token_ids[r] = token
        chosen.logprobs[r] = (logits[r, token] - best) - log_mass
        counts[draws.rows[r], token] += 1
        if token != drafts.token_ids[r]:
            return
        accepted[b] += 1


@njit(cache=True, nogil=True, parallel=True)
def accept_rows(chosen, accepted, logits, draws, drafts, counts, scratch):
    """Accept a prefix of each row's drafts and choose the token after it.

    accepted: [B] int32; row b gives the tokens of its first accepted[b] + 1 columns, the other
    columns of `chosen` are left alone. logits: [R, >= V] float32, of a row in order. draws.purposes
    counts for coupled rows only. counts: [lanes, V] int32, takes the tokens given; rows have lanes
    of their own. A row ends at a column that chosen.finite reports.
    """
    for b in prange(accepted.size):
        _accept_row(np.int64(b), chosen, accepted, logits, draws, drafts, counts, scratch)
