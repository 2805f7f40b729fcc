"""Gated causal attention over paged BF16 K/V: q/k norm, rotation, append, softmax, output gate.

A tile is a page of 64 tokens. A partial (maximum, sum, weighted values) covers an absolute block of
keys, 2,048 in prefill and 256 in decode, tile by tile from the left; partials are merged from the
left. So a column's value depends on its position and history, never on the rest of the batch.
Keys beyond a column's own position are not multiplied by zero but left out.

Legend: T columns, B rows, H query heads, G K/V heads, M query heads per K/V head, D head width, L
attention layers, P pages. Columns of `qkgv`: q [H, D], k [G, D], gate [H, D], v [G, D].
Oracle: tests.oracles.attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numba.np.ufunc.parallel import get_thread_id

from ginfer.cpu.kv_codec import load_plane, store_key, store_value
from ginfer.cpu.norm import norm_row
from ginfer.cpu.product import dot, multiply_add, multiply_add_lower
from ginfer.cpu.rope import rotate
from ginfer.cpu.scalar import ONE, ZERO, exp, sigmoid
from ginfer.spec import PAGE_TOKENS

TILE = PAGE_TOKENS
PREFILL_TILES, DECODE_TILES = 2048 // TILE, 256 // TILE  # tiles of an absolute block
QUERIES = 64  # columns of a prefill work item
_LOWEST = np.float32(-np.inf)
_ONES = np.ones(TILE, np.float32)


class Heads(NamedTuple):
    """Numbers of heads, their width, and the factor of the scores."""

    H: int
    G: int
    D: int
    scale: np.float32


class Columns(NamedTuple):
    """Where the batch's columns belong. row, token: [T] int32, row and index in the sequence.
    pages: [B, P] int32. cos, sin: [T, F] float32."""

    row: np.ndarray
    token: np.ndarray
    pages: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


@njit(cache=True)
def _prepare_column(t, qkgv, kv, layer, w_q, w_k, heads, columns, eps):
    """Norm and rotate q (times scale) and k of column t in place; append k and v to its page."""
    H, G, D, scale = heads
    x = qkgv.reshape(-1)
    base = t * qkgv.shape[1]
    for h in range(H + G):
        at = base + h * D
        norm_row(x, at, x, at, w_q if h < H else w_k, D, eps)
        rotate(x, at, columns.cos, columns.sin, t)
    for i in range(base, base + H * D):
        x[i] *= scale
    page = columns.pages[columns.row[t], columns.token[t] // TILE]
    slot = columns.token[t] % TILE
    for g in range(G):
        store_key(kv[page, layer, 0, g], slot, x, base + (H + g) * D, D)
        store_value(kv[page, layer, 1, g], slot, x, base + (2 * H + G + g) * D, D)


@njit(cache=True)
def _attend_tile(acc, ao, m, l, mo, q, qo, q_step, k_tile, v_tile, scores, M, D, seen, slope):
    """Add one tile to the partials of M queries; query i sees its first seen + slope * i keys.

    acc: at ao, [M, D]; m, l: at mo, [M]; q: rows at qo, q_step apart; k_tile [D, 64]; v_tile
    [64, D]; scores: scratch [M, 64].
    """
    for i in range(M * TILE):
        scores[i] = ZERO
    multiply_add(scores, 0, TILE, q, qo, q_step, 1, k_tile, 0, TILE, M, TILE, D)
    for i in range(M):
        n, row = min(seen + slope * i, TILE), i * TILE
        top = m[mo + i]
        for j in range(row, row + n):
            top = scores[j] if scores[j] > top else top
        decay = exp(m[mo + i] - top)
        for j in range(row, row + n):
            scores[j] = exp(scores[j] - top)
        l[mo + i] = l[mo + i] * decay + dot(scores, row, _ONES, 0, n)
        m[mo + i] = top
        if decay != ONE:
            for d in range(ao + i * D, ao + (i + 1) * D):
                acc[d] *= decay
    multiply_add_lower(acc, ao, D, scores, 0, TILE, v_tile, 0, D, M, D, seen, slope, TILE)


@njit(cache=True)
def _clear(acc, ao, m, l, mo, M, D):
    for i in range(M):
        m[mo + i] = _LOWEST
        l[mo + i] = ZERO
    for d in range(ao, ao + M * D):
        acc[d] = ZERO


@njit(cache=True)
def _merge(acc, ao, m, l, mo, part, po, part_m, part_l, pm, D):
    """Add the partial at po / pm of one query to the total at ao / mo."""
    top = part_m[pm] if part_m[pm] > m[mo] else m[mo]
    left, right = exp(m[mo] - top), exp(part_m[pm] - top)
    l[mo] = l[mo] * left + part_l[pm] * right
    m[mo] = top
    for d in range(D):
        acc[ao + d] = acc[ao + d] * left + part[po + d] * right


@njit(cache=True)
def _finish(out, oo, acc, ao, total, gate, go, D):
    """out = acc / total * sigmoid(gate)."""
    for d in range(D):
        out[oo + d] = acc[ao + d] / total * sigmoid(gate[go + d])


@njit(cache=True)
def _prefill_item(out, qkgv, kv, layer, heads, columns, t0, t1, g, scratch):
    """Queries t0 .. t1 of one row against K/V head g."""
    H, G, D, _ = heads
    M, W, n = H // G, qkgv.shape[1], t1 - t0
    x, y = qkgv.reshape(-1), out.reshape(-1)
    size = M * QUERIES * D
    total, part = scratch[:size], scratch[size : 2 * size]
    k_tile = scratch[2 * size : 2 * size + D * TILE]
    rest = scratch[2 * size + D * TILE :]
    v_tile, scores = rest[: D * TILE], rest[D * TILE : D * TILE + QUERIES * TILE]
    stats = rest[D * TILE + QUERIES * TILE :]
    m, l = stats[: M * QUERIES], stats[M * QUERIES : 2 * M * QUERIES]
    pm, pl = stats[2 * M * QUERIES : 3 * M * QUERIES], stats[3 * M * QUERIES :]
    start, last = columns.token[t0], columns.token[t1 - 1]
    _clear(total, 0, m, l, 0, M * QUERIES, D)
    for tile in range(last // TILE + 1):
        if tile % PREFILL_TILES == 0:
            _clear(part, 0, pm, pl, 0, M * QUERIES, D)
        page = columns.pages[columns.row[t0], tile]
        load_plane(k_tile, kv[page, layer, 0, g], D * TILE)
        load_plane(v_tile, kv[page, layer, 1, g], min(TILE, last + 1 - tile * TILE) * D)
        skip = max(0, tile * TILE - start)  # queries that end before this tile
        for h in range(M):
            i = h * QUERIES + skip
            qo = (t0 + skip) * W + (g * M + h) * D
            seen = start + skip - tile * TILE + 1
            _attend_tile(
                part, i * D, pm, pl, i, x, qo, W, k_tile, v_tile, scores, n - skip, D, seen, 1
            )
        if tile % PREFILL_TILES == PREFILL_TILES - 1 or tile == last // TILE:
            for h in range(M):
                for i in range(h * QUERIES, h * QUERIES + n):
                    if pl[i] != ZERO:
                        _merge(total, i * D, m, l, i, part, i * D, pm, pl, i, D)
    for h in range(M):
        for i in range(n):
            at = (t0 + i) * W + (H + G + g * M + h) * D
            to = (t0 + i) * H * D + (g * M + h) * D
            j = h * QUERIES + i
            _finish(y, to, total, j * D, l[j], x, at, D)


@njit(cache=True, nogil=True, parallel=True)
def attention_prefill(out, qkgv, kv, layer, w_q, w_k, heads, columns, items, scratch, eps):
    """out[t] = gated attention of column t; appends the columns' K and V first.

    out: [T, H D]. qkgv: [T, 2 (H + G) D], overwritten. kv: [P, L, 2, G, 64 D] uint16. w_q, w_k:
    [D].
    items: [I, 2] int32, first and last + 1 column of each work item, heavy and light mixed.
    scratch: [threads, prefill_scratch].
    """
    for t in prange(qkgv.shape[0]):
        _prepare_column(t, qkgv, kv, layer, w_q, w_k, heads, columns, eps)
    G = heads.G
    for i in prange(items.shape[0] * G):
        t0, t1 = items[i // G, 0], items[i // G, 1]
        mine = scratch[get_thread_id()]
        _prefill_item(out, qkgv, kv, layer, heads, columns, t0, t1, i % G, mine)


def prefill_scratch(heads: Heads) -> int:
    """float32 of scratch per thread of `attention_prefill`."""
    rows = heads.H // heads.G * QUERIES
    return 2 * rows * heads.D + 2 * heads.D * TILE + QUERIES * TILE + 4 * rows


@njit(cache=True)
def _decode_item(t, g, block, part, po, stats, so, qkgv, kv, layer, heads, columns, scratch):
    """The partial of column t, K/V head g and one block of 256 keys."""
    H, G, D, _ = heads
    M = H // G
    k_tile, v_tile = scratch[: D * TILE], scratch[D * TILE : 2 * D * TILE]
    scores, x = scratch[2 * D * TILE :], qkgv.reshape(-1)
    seen = columns.token[t] + 1
    m, l = stats[0], stats[1]
    _clear(part, po, m, l, so, M, D)
    for tile in range(block * DECODE_TILES, min((block + 1) * DECODE_TILES, -(-seen // TILE))):
        n = min(TILE, seen - tile * TILE)
        page = columns.pages[columns.row[t], tile]
        load_plane(k_tile, kv[page, layer, 0, g], D * TILE)
        load_plane(v_tile, kv[page, layer, 1, g], n * D)
        qo = t * qkgv.shape[1] + g * M * D
        _attend_tile(part, po, m, l, so, x, qo, D, k_tile, v_tile, scores, M, D, n, 0)


@njit(cache=True)
def _decode_merge(t, h, slot, blocks, out, part, stats, qkgv, heads):
    """Merge the partials of column t and query head h into the first of them, at `slot`; finish."""
    H, G, D, _ = heads
    m, l, home = stats[0], stats[1], slot * H + h
    for other in range(home + H, home + blocks * H, H):
        _merge(part, home * D, m, l, home, part, other * D, m, l, other, D)
    gate = t * qkgv.shape[1] + (H + G + h) * D
    _finish(out.reshape(-1), (t * H + h) * D, part, home * D, l[home], qkgv.reshape(-1), gate, D)


@njit(cache=True, nogil=True)
def append_columns(qkgv, kv, layer, w_q, w_k, heads, columns, eps):
    """The first step of `attention_prefill` alone, for a few columns."""
    for t in range(qkgv.shape[0]):
        _prepare_column(t, qkgv, kv, layer, w_q, w_k, heads, columns, eps)


@njit(cache=True, nogil=True, parallel=True)
def attention_decode(out, qkgv, kv, layer, heads, columns, c0, c1, first, part, stats, scratch):
    """Attention of the columns c0 .. c1 - 1 after `append_columns`: partials, then their merge.

    first: [T + 1] int32, running number of 256-key blocks of the columns before. part: [S H D],
    stats: [2, S H] for S >= first[c1] - first[c0] blocks. scratch: [threads, decode_scratch].
    """
    H, G, D = heads.H, heads.G, heads.D
    M, base = H // G, first[c0]
    for i in prange((first[c1] - base) * G):
        slot, g = i // G, i % G
        t = c0
        while first[t + 1] - base <= slot:
            t += 1
        at, block = slot * H + g * M, base + slot - first[t]
        mine = scratch[get_thread_id()]
        _decode_item(t, g, block, part, at * D, stats, at, qkgv, kv, layer, heads, columns, mine)
    for i in prange((c1 - c0) * H):
        t = c0 + i // H
        blocks = first[t + 1] - first[t]
        _decode_merge(t, i % H, first[t] - base, blocks, out, part, stats, qkgv, heads)


def decode_scratch(heads: Heads) -> int:
    """float32 of scratch per thread of `attention_decode`."""
    return 2 * heads.D * TILE + heads.H // heads.G * TILE
