"""Candidate selector of a drafter: a path through the best ids of each position of a block.

score(c) = logit(c) + sum_r predecessor[prev, r] hidden[r] successor[c, r] for the best ids c of a
position, prev the id before it. Greedy rows take the highest score, ties to the lower id; others
draw from softmax(score / T), rounded to multiples of 2^-24: what is drawn from is what acceptance
is told.

Legend: B rows, N drafts of a row, K candidates, R selector rank, V legal ids. Oracle:
tests.oracles.drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.batch import Purpose
from ginfer.cpu.acceptance import ONE_Q
from ginfer.cpu.kv_codec import bf16_float
from ginfer.cpu.product import device, fma, keep_apart
from ginfer.cpu.sampling import best_few, uniform_bits
from ginfer.cpu.scalar import ZERO, exp

_U64 = np.uint64
_UNIT = np.float32(2.0**32)  # of a weight: sums over K shifted by 24 bits fit 64
_DRAFT = Purpose.DRAFT


class Codebooks(NamedTuple):
    """BF16 bits of the selector's rows by token id: [vocabulary rows, R] uint16 each."""

    predecessor: np.ndarray
    successor: np.ndarray


class Paths(NamedTuple):
    """The drafts. token_ids: [B, N] int32. ids: [B, N, K] int32, by logit descending. units:
    [B, N, K] uint32, q of the ids times 2^24; a draft that was not drawn has all of it."""

    token_ids: np.ndarray
    ids: np.ndarray
    units: np.ndarray


class Anchors(NamedTuple):
    """How rows draw. token_ids, positions: [B] int32, of the token before the first draft.
    temperature: [B] float32. seeds: [B] uint64."""

    token_ids: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    seeds: np.ndarray


@device
def draw_units(units, scores, temperature, bits):
    """units = softmax(scores / T) in multiples of 2^-24 that sum to 1; the index that `bits`, a
    number below 2^24, falls on."""
    keep_apart()
    top = scores[0]
    for c in range(1, scores.size):
        top = scores[c] if scores[c] > top else top
    total = _U64(0)
    for c in range(scores.size):
        total += _U64(exp((scores[c] - top) / temperature) * _UNIT)
    running, edge, chosen = _U64(0), _U64(0), -1
    for c in range(scores.size):
        running += _U64(exp((scores[c] - top) / temperature) * _UNIT)
        after = (running << _U64(24)) // total
        units[c] = np.uint32(after - edge)
        if chosen < 0 and bits < after:
            chosen = c
        edge = after
    return chosen


@device
def _best_score(units, scores, ids):
    """Index of the highest score, ties to the lower id; it has all the units."""
    at = 0
    for c in range(scores.size):
        units[c] = 0
        if scores[c] > scores[at] or (scores[c] == scores[at] and ids[c] < ids[at]):
            at = c
    units[at] = ONE_Q
    return at


@device
def _select_path(b, paths, logits, hidden, anchors, codebooks, V, scores):
    keep_apart()
    N, previous = paths.token_ids.shape[1], anchors.token_ids[b]
    for j in range(N):
        row, ids, units = b * N + j, paths.ids[b, j], paths.units[b, j]
        values = logits[row, :V]
        best_few(values, ids.size, ids)
        for c in range(ids.size):
            pair = ZERO
            for r in range(hidden.shape[1]):
                before = bf16_float(codebooks.predecessor[previous, r]) * hidden[row, r]
                pair = fma(before, bf16_float(codebooks.successor[ids[c], r]), pair)
            scores[c] = values[ids[c]] + pair
        if anchors.temperature[b] == ZERO:
            at = _best_score(units, scores, ids)
        else:
            bits = uniform_bits(anchors.seeds[b], anchors.positions[b] + 1 + j, _DRAFT, 0)
            at = draw_units(units, scores, anchors.temperature[b], bits)
        previous = ids[at]
        paths.token_ids[b, j] = previous


@njit(cache=True, nogil=True, parallel=True)
def select_paths(paths, logits, hidden, anchors, codebooks, V, scores):
    """Choose N drafts for each of B rows. logits: [B * N, >= V] float32; hidden: [B * N, R]
    float32; scores: [threads, K] float32, scratch; V >= K."""
    for b in prange(anchors.token_ids.size):
        worker = get_thread_id()
        _select_path(np.int64(b), paths, logits, hidden, anchors, codebooks, V, scores[worker])
