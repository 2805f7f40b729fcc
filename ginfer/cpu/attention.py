"""Gated causal attention over paged K/V: q/k norm, rotation, append, softmax, output gate.

A tile is a page of 64 tokens. A partial (maximum, sum, weighted values) covers an absolute block of
keys, 2,048 in prefill and 256 in decode, tile by tile from the left; partials are merged from the
left, in decode inside absolute spans of 1,024 first, then the spans. So a column's value depends on
its position and history, never on the rest of the batch.
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

from ginfer.cpu.kv_codec import KEYS, VALUES, Pages, load_plane, plane_bits, store
from ginfer.cpu.norm import norm_row
from ginfer.cpu.product import (
    device,
    dot,
    highest,
    keep_apart,
    multiply_add,
    multiply_add_bf16,
    multiply_add_lower,
)
from ginfer.cpu.rope import rotate
from ginfer.cpu.scalar import ONE, ZERO, exp, sigmoid
from ginfer.spec import BLOCK_TOKENS, PAGE_TOKENS, SPAN_BLOCKS

TILE = PAGE_TOKENS
PREFILL_TILES, DECODE_TILES = 2048 // TILE, BLOCK_TOKENS // TILE  # tiles of an absolute block
QUERIES = 64  # columns of a prefill work item
GROUP = 16  # columns that read a block of keys together in decode
_LOWEST = np.float32(-np.inf)
_ONES = np.ones(TILE, np.float32)


class Heads(NamedTuple):
    """Numbers of heads, their width, and the factor of the scores."""

    H: int
    G: int
    D: int
    scale: np.float32


class Columns(NamedTuple):
    """Where the batch's columns belong. row: [T] int32; token: [T] int64, index in the sequence.
    pages: [B, P] int32. cos, sin: [T, F] float32."""

    row: np.ndarray
    token: np.ndarray
    pages: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Work(NamedTuple):
    """What decode reads, as in `ginfer.batch.WorkUnits`. units: [U, 3], members, first: [T + 1];
    int32; blocks of a unit."""

    grain: int
    units: np.ndarray
    members: np.ndarray
    first: np.ndarray


@device
def _prepare_column(t, qkgv, kv, layer, w_q, w_k, heads, columns, eps):
    """Norm and rotate q (times scale) and k of column t in place; append k and v to its page."""
    keep_apart()
    H, G, D, scale = heads
    row, cos, sin = qkgv[t], columns.cos[t], columns.sin[t]
    for h in range(H + G):
        x = row[h * D : (h + 1) * D]
        norm_row(x, x, w_q if h < H else w_k, eps)
        rotate(x, cos, sin)
    q = row[: H * D]
    for i in range(q.size):
        q[i] *= scale
    page = columns.pages[columns.row[t], columns.token[t] // TILE]
    slot = columns.token[t] % TILE
    for g in range(G):
        k, v = (H + g) * D, (2 * H + G + g) * D
        store(kv, page, layer, KEYS, g, slot, row[k : k + D])
        store(kv, page, layer, VALUES, g, slot, row[v : v + D])


@device
def _soften(acc, ao, m, l, mo, scores, M, D, seen, slope):
    """Turn scores [M, 64] into weights and rescale the partials; query i sees its first
    seen + slope * i keys, the others weigh 0."""
    keep_apart()
    for i in range(M):
        row = scores[i * TILE : (i + 1) * TILE]
        for j in range(min(seen + slope * i, TILE), TILE):
            row[j] = _LOWEST
        top = highest(scores, i * TILE, TILE)
        top = top if top > m[mo + i] else m[mo + i]
        decay = exp(m[mo + i] - top)
        for j in range(TILE):
            row[j] = exp(row[j] - top)
        l[mo + i] = l[mo + i] * decay + dot(scores, i * TILE, _ONES, 0, TILE)
        m[mo + i] = top
        if decay != ONE:
            kept = acc[ao + i * D : ao + (i + 1) * D]
            for d in range(D):
                kept[d] *= decay


@device
def _clear(acc, ao, m, l, mo, M, D):
    for i in range(mo, mo + M):
        m[i], l[i] = _LOWEST, ZERO
    acc[ao : ao + M * D].fill(ZERO)


@device
def _merge(acc, m, l, i, part, part_m, part_l, j, D):
    """Add the partial of query j to the total of query i."""
    keep_apart()
    top = part_m[j] if part_m[j] > m[i] else m[i]
    left, right = exp(m[i] - top), exp(part_m[j] - top)
    l[i] = l[i] * left + part_l[j] * right
    m[i] = top
    total, more = acc[i * D : (i + 1) * D], part[j * D : (j + 1) * D]
    for d in range(D):
        total[d] = total[d] * left + more[d] * right


@device
def _finish(out, acc, total, gate):
    """out = acc / total * sigmoid(gate)."""
    keep_apart()
    for d in range(out.size):
        out[d] = acc[d] / total * sigmoid(gate[d])


@device
def _prefill_item(out, qkgv, kv, layer, heads, columns, t0, t1, g, scratch, room):
    """Queries t0 .. t1 of one row against K/V head g."""
    H, G, D, _ = heads
    M, W, n = H // G, qkgv.shape[1], t1 - t0
    x = qkgv.reshape(-1)
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
        load_plane(k_tile, plane_bits(kv, page, layer, KEYS, g, room), D * TILE)
        values = plane_bits(kv, page, layer, VALUES, g, room)
        load_plane(v_tile, values, min(TILE, last + 1 - tile * TILE) * D)
        skip = max(0, tile * TILE - start)  # queries that end before this tile
        for h in range(M):
            i, rows = h * QUERIES + skip, n - skip
            seen = start + skip - tile * TILE + 1
            scores[: rows * TILE].fill(ZERO)
            qo = (t0 + skip) * W + (g * M + h) * D
            multiply_add(scores, 0, TILE, x, qo, W, 1, k_tile, 0, TILE, rows, TILE, D)
            _soften(part, i * D, pm, pl, i, scores, rows, D, seen, 1)
            multiply_add_lower(
                part, i * D, D, scores, 0, TILE, v_tile, 0, D, rows, D, seen, 1, TILE
            )
        if tile % PREFILL_TILES == PREFILL_TILES - 1 or tile == last // TILE:
            for h in range(M):
                for i in range(h * QUERIES, h * QUERIES + n):
                    if pl[i] != ZERO:
                        _merge(total, m, l, i, part, pm, pl, i, D)
    for h in range(M):
        for i in range(n):
            j, q = h * QUERIES + i, (g * M + h) * D
            gate = q + (H + G) * D
            to, acc = out[t0 + i, q : q + D], total[j * D : (j + 1) * D]
            _finish(to, acc, l[j], qkgv[t0 + i, gate : gate + D])


@njit(cache=True, nogil=True, parallel=True)
def attention_prefill(out, qkgv, kv, layer, w_q, w_k, heads, columns, items, scratch, rooms, eps):
    """out[t] = gated attention of column t; appends the columns' K and V first.

    out: [T, H D]. qkgv: [T, 2 (H + G) D], overwritten. kv: Pages. w_q, w_k: [D].
    items: [I, 2] int64, first and last + 1 column of each work item, heavy and light mixed.
    scratch: [threads, prefill_scratch]. rooms: [threads, two planes] uint16, for decoded planes.
    """
    for i in prange(qkgv.shape[0]):
        _prepare_column(np.int64(i), qkgv, kv, layer, w_q, w_k, heads, columns, eps)
    G = heads.G
    for i in prange(items.shape[0] * G):
        mine, room, at = scratch[get_thread_id()], rooms[get_thread_id()], np.int64(i)
        t0, t1 = items[at // G, 0], items[at // G, 1]
        _prefill_item(out, qkgv, kv, layer, heads, columns, t0, t1, at % G, mine, room)


def room_elements(heads: Heads, kv: Pages) -> int:
    """uint16 of room per thread: two planes, if they have to be decoded."""
    return 2 * TILE * heads.D if kv.codes.size else 0


def prefill_scratch(heads: Heads) -> int:
    """float32 of scratch per thread of `attention_prefill`."""
    rows = heads.H // heads.G * QUERIES
    return 2 * rows * heads.D + 2 * heads.D * TILE + QUERIES * TILE + 4 * rows


@device
def _decode_block(block, group, g, sums, kv, layer, heads, columns, scratch, room):
    """sums (acc, m, l) = the partials of K/V head g and a group of columns over `block`; scratch:
    their queries, then scores."""
    keep_apart()
    H, G, D, _ = heads
    M = H // G
    rows, size, (acc, m, l) = group.size * M, GROUP * M * D, sums
    q, scores = scratch[:size], scratch[size:]
    _clear(acc, 0, m, l, 0, rows, D)
    pages = columns.pages[columns.row[group[0]]]
    fewest, most = columns.token[group[0]] + 1, columns.token[group[group.size - 1]] + 1
    for tile in range(block * DECODE_TILES, min((block + 1) * DECODE_TILES, -(-most // TILE))):
        page, half = pages[tile], room.size // 2
        k = plane_bits(kv, page, layer, KEYS, g, room[:half])
        v = plane_bits(kv, page, layer, VALUES, g, room[half:])
        scores[: rows * TILE].fill(ZERO)
        multiply_add_bf16(scores, 0, TILE, q, 0, D, k, TILE, rows, TILE, D)
        if fewest >= (tile + 1) * TILE:
            _soften(acc, 0, m, l, 0, scores, rows, D, TILE, 0)
            multiply_add_bf16(acc, 0, D, scores, 0, TILE, v, D, rows, D, TILE)
            continue
        for i in range(group.size):
            n = min(TILE, columns.token[group[i]] + 1 - tile * TILE)
            if n > 0:
                weights = scores[i * M * TILE : (i + 1) * M * TILE]
                _soften(acc, i * M * D, m, l, i * M, weights, M, D, n, 0)
                multiply_add_bf16(acc, i * M * D, D, weights, 0, TILE, v, D, M, D, n)


@device
def _decode_unit(
    block, group, g, base, grain, part, stats, qkgv, kv, layer, heads, columns, first, spaces
):
    """The partials of K/V head g and a group of columns that see keys of `block`, over `grain`
    blocks from there with the same pages; all of it if they are columns of several rows."""
    keep_apart()
    H, G, D, _ = heads
    M, W, x, (scratch, room) = H // G, qkgv.shape[1], qkgv.reshape(-1), spaces
    size, n = GROUP * M * D, GROUP * M
    acc, more, inner = scratch[:size], scratch[size : 2 * size], scratch[2 * size :]
    tail = inner[size + n * TILE :]
    sums, others = (acc, tail, tail[n:]), (more, tail[2 * n :], tail[3 * n :])
    for i in range(group.size):
        at, qo = i * M * D, group[i] * W + g * M * D
        inner[at : at + M * D] = x[qo : qo + M * D]
    _decode_block(block, group, g, sums, kv, layer, heads, columns, inner, room)
    last = min(block + grain - 1, columns.token[group[group.size - 1]] // BLOCK_TOKENS)
    for coming in range(block + 1, last + 1):
        _decode_block(coming, group, g, others, kv, layer, heads, columns, inner, room)
        for i in range(group.size):
            if columns.token[group[i]] >= coming * BLOCK_TOKENS:
                for j in range(i * M, (i + 1) * M):
                    _merge(acc, sums[1], sums[2], j, more, others[1], others[2], j, D)
    for i in range(group.size):
        to = (first[group[i]] - base + block // grain) * H + g * M
        part[to * D : (to + M) * D] = acc[i * M * D : (i + 1) * M * D]
        stats[0, to : to + M] = sums[1][i * M : (i + 1) * M]
        stats[1, to : to + M] = sums[2][i * M : (i + 1) * M]


@device
def _decode_merge(t, h, slot, runs, per_span, out, part, stats, qkgv, heads):
    """Merge the partials of column t and query head h, `per_span` to a span, into the first of
    them, at `slot`; finish."""
    H, G, D, _ = heads
    m, l, home = stats[0], stats[1], slot * H + h
    for span in range(0, runs, per_span):
        begin = home + span * H
        for run in range(span + 1, min(span + per_span, runs)):
            _merge(part, m, l, begin, part, m, l, home + run * H, D)
        if span > 0:
            _merge(part, m, l, home, part, m, l, begin, D)
    gate = (H + G + h) * D
    to, acc = out[t, h * D : (h + 1) * D], part[home * D : (home + 1) * D]
    _finish(to, acc, l[home], qkgv[t, gate : gate + D])


@njit(cache=True, nogil=True)
def append_columns(qkgv, kv, layer, w_q, w_k, heads, columns, eps):
    """The first step of `attention_prefill` alone, for a few columns."""
    for t in range(qkgv.shape[0]):
        _prepare_column(t, qkgv, kv, layer, w_q, w_k, heads, columns, eps)


@njit(cache=True, nogil=True, parallel=True)
def attention_decode(out, qkgv, kv, layer, heads, columns, work, wave, part, stats, scratch, rooms):
    """Attention of the columns c0 .. c1 - 1 = `wave`, after `append_columns`: partials, merge.

    part: [S H D], stats: [2, S H] for S >= first[c1] - first[c0] partials. scratch: [threads,
    decode_scratch]. rooms as in `attention_prefill`.
    """
    H, G, first, members = heads.H, heads.G, work.first, work.members
    grain = work.grain
    c0, c1 = wave
    n = work.units.shape[0]
    for i in prange(n * G):
        at, g = np.int64(i) // G, np.int64(i) % G
        # threads take stretches: large and small units in turns
        place, count, block = work.units[at // 2 if at % 2 == 0 else n - 1 - at // 2]
        t0, t1 = np.int64(place), np.int64(place + count)
        while t0 < t1 and members[t0] < c0:
            t0 += 1
        while t0 < t1 and members[t1 - 1] >= c1:
            t1 -= 1
        if t0 < t1:
            group, base = members[t0:t1], first[c0]
            mine = (scratch[get_thread_id()], rooms[get_thread_id()])
            unit = (block, group, g, base, grain)
            _decode_unit(*unit, part, stats, qkgv, kv, layer, heads, columns, first, mine)
    for i in prange((c1 - c0) * H):
        t, h = c0 + np.int64(i) // H, np.int64(i) % H
        runs, per_span = first[t + 1] - first[t], SPAN_BLOCKS // grain
        slot = first[t] - first[c0]
        _decode_merge(t, h, slot, runs, per_span, out, part, stats, qkgv, heads)


def decode_scratch(heads: Heads) -> int:
    """float32 of scratch per thread of `attention_decode`."""
    rows = heads.H // heads.G * GROUP
    return rows * (3 * heads.D + TILE + 4)
