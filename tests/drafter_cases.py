"""Checks of the drafter's kernels against float64 and the CPU image, for whatever runs them; see
`tests.device_cases`."""

import numpy as np
from numba import njit

from ginfer.batch import Purpose
from ginfer.cpu.sampling import uniform_bits
from ginfer.cpu.selector import draw_units
from ginfer.cuda.drafter.attention import (
    block_attention_kernel,
    block_merge_kernel,
    num_pieces,
    row_tiles,
)
from ginfer.cuda.drafter.candidates import PIECE, K, candidates_kernel
from ginfer.cuda.drafter.context import HEADS, OCTETS, context_kernel, tap_kernel
from ginfer.cuda.drafter.conv import finish_kernel, mix_kernel, silu_kernel
from ginfer.cuda.drafter.order import HEAD_DIM, angle_tables
from ginfer.cuda.drafter.path import ONE_Q, draft_path_kernel
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.lib.numeric import LOG2E
from scripts.pack.codecs import bf16_bits
from tests.device_cases import NAN, fragment_size, from_fragments, normal
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import ATTENTION_BF16, POINTWISE_BF16, Pointwise

D, THETA, EPS = HEAD_DIM, 1e7, 1e-6
_DRAFT = Purpose.DRAFT
CONV_BF16 = Pointwise(2e-2, 1 / 120)  # of sums of two products, which may cancel, and the stream


def to_fragments(rows):
    """Rows [T, K] of BF16 bits in fragment order; NaN where there is none."""
    T, K = rows.shape
    size = fragment_size(T, K)
    places = from_fragments(np.arange(size, dtype=np.int64), T, K)
    buffer = np.full(size, NAN, np.uint16)
    buffer[places] = rows
    return buffer


def rotated(heads, w, positions):
    """Norm and rotation of heads [T, n, D] in float64."""
    x = heads.astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w
    F = D // 2
    angles = positions[:, None] * (THETA ** (-np.arange(F) / F)).astype(np.float32)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :F], x[..., F:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def check_tap(run, T, C):
    rng = np.random.default_rng(T)
    x, _ = normal(rng, T + 3, C)
    blocks, width = -(-C // OCTETS), 3 * C
    y = to_fragments(np.zeros((T, width), np.uint16))
    item = tap_kernel(1, run.early)
    run(item, T * blocks, y, x, 0, C, width, C, *tiles_of(T), blocks)
    want = np.zeros((T, width), np.uint16)
    want[:, C : 2 * C] = x[:T]
    assert (from_fragments(y, T, width) == want).all()
    columns = rng.integers(0, T + 3, T).astype(np.uint32)
    rows = np.zeros((T, width), np.uint16)
    item = tap_kernel(0, run.early)
    run(item, T * blocks, rows, x, columns, C, width, 2 * C, 1, 1, blocks)
    want = np.zeros((T, width), np.uint16)
    want[:, 2 * C :] = x[columns]
    assert (rows == want).all()


def check_context(run, form, rows):
    """form: (layers, K/V heads, window, slots of a ring). rows: (ring, first token, columns, used)
    each."""
    (L, G, W, R), rng = form, np.random.default_rng(len(rows))
    T, lanes = sum(n for _, _, n, _ in rows), 1 + max(r for r, *_ in rows)
    kv, values = normal(rng, T, L, 2, G, D)
    w = (1 + 0.2 * rng.standard_normal((L, D))).astype(np.float32)
    row = np.repeat(np.arange(len(rows)), [n for _, _, n, _ in rows]).astype(np.uint32)
    token = np.concatenate([np.arange(f, f + n) for _, f, n, _ in rows]).astype(np.uint32)
    ring, first, used = (
        np.array([r[i] for r in rows], dtype)
        for i, dtype in ((0, np.uint32), (1, np.uint32), (3, np.int32))
    )
    far, near = angle_tables(THETA, int(token.max()) + 1)
    rings = np.full((lanes, L, 2, R, G, D), NAN, np.uint16)
    blocks = -(-L * G // HEADS)
    item = context_kernel(run.early)
    addresses = (rings, kv, w, row, token, ring, first, used, far, near)
    run(item, T * blocks, *addresses, L * G, G, W, R, blocks, EPS)
    want = np.full(rings.shape, np.nan)
    for t in range(T):
        lane, start, _, n = rows[row[t]]
        if start + n - W <= token[t] < start + n:
            slot = token[t] % R
            for layer in range(L):
                k = rotated(values[t : t + 1, layer, 0], w[layer], token[t : t + 1])[0]
                want[lane, layer, 0, slot], want[lane, layer, 1, slot] = k, values[t, layer, 1]
    there = ~np.isnan(want)
    assert ((rings == NAN) == ~there).all()
    POINTWISE_BF16.check(bf16_to_f32(rings[:, :, 1])[there[:, :, 1]], want[:, :, 1][there[:, :, 1]])
    keys = Pointwise(2e-5, 1 / 250)
    keys.check(bf16_to_f32(rings[:, :, 0])[there[:, :, 0]], want[:, :, 0][there[:, :, 0]])


def _conv(u, coef, base, side, S):
    """The convolution in float64. coef: [T, 2, 2, groups]."""
    shifted = np.roll(u, 1, 0)
    shifted[::S] = 0
    width = u.shape[1] // coef.shape[-1]
    now, before = (np.repeat(coef[:, side, tap], width, 1) + base[side, tap] for tap in (0, 1))
    return now * u + before * shifted


def check_convolutions(run, B, S, C, group=16):
    rng, T = np.random.default_rng(B * S), B * S
    x, values = normal(rng, T, C)
    a, results = normal(rng, T, C)
    coef = rng.standard_normal((T, 2, 2, C // group)).astype(np.float32)
    base = rng.standard_normal((2, 2, C)).astype(np.float32)
    blocks = -(-C // OCTETS)
    y = np.full(fragment_size(T, C), NAN, np.uint16)
    scalars = (C, group, S)
    item = mix_kernel(run.early)
    run(item, T * blocks, y, to_fragments(x), coef, base, *scalars, *tiles_of(T), blocks)
    want = _conv(values.astype(np.float64), coef, base, 0, S)
    CONV_BF16.check(bf16_to_f32(from_fragments(y, T, C)), want)

    w = (1 + 0.2 * rng.standard_normal(C)).astype(np.float32)
    for N in {S, max(S - 1, 1)}:
        hidden, stream = normal(rng, T, C)
        rows = np.arange(T).reshape(B, S)[:, S - N :].reshape(-1)
        y = np.full(fragment_size(B * N, C), NAN, np.uint16)
        before, item = hidden.copy(), finish_kernel(run.early)
        run(item, B * N, y, hidden, a, coef, base, w, *scalars, N, *tiles_of(B * N), EPS)
        want = stream + _conv(results.astype(np.float64), coef, base, 1, S)
        got = bf16_to_f32(hidden)
        CONV_BF16.check(got[rows], want[rows])
        others = np.setdiff1d(np.arange(T), rows)
        assert (hidden[others] == before[others]).all()
        x64 = got[rows].astype(np.float64)
        want = x64 / np.sqrt((x64 * x64).mean(1, keepdims=True) + EPS) * w
        POINTWISE_BF16.check(bf16_to_f32(from_fragments(y, B * N, C)), want)


def check_silu_up(run, T, width):
    rng = np.random.default_rng(T)
    x, values = normal(rng, T, 2, width)
    y = np.full(fragment_size(T, width), NAN, np.uint16)
    blocks = -(-width // OCTETS)
    run(silu_kernel(run.early), T * blocks, y, x, width, *tiles_of(T), blocks)
    gate, up = values[:, 0].astype(np.float64), values[:, 1]
    POINTWISE_BF16.check(bf16_to_f32(from_fragments(y, T, width)), gate / (1 + np.exp(-gate)) * up)


def quarter(bits, values, part):
    """Have a quarter of the values, so that attention results are below 1, as their bound
    presumes."""
    values[part] /= 4
    bits[part] = bf16_bits(values[part])


def check_block_attention(run, heads, S, rows, ring):
    """heads: (query, K/V). rows: (ring, tokens of context) each. ring: (window, slots)."""
    (H, G), (W, R), B = heads, ring, len(rows)
    rng, T, M = np.random.default_rng(S), B * S, H // G
    qkv, values = normal(rng, T, H + 2 * G, D)
    quarter(qkv, values, np.s_[:, H + G :])
    lanes = 1 + max(r for r, _ in rows)
    rings, context = normal(rng, lanes, 2, 2, R, G, D)  # of two layers, the first counts
    quarter(rings, context, np.s_[:, :, 1])
    w_q, w_k = (1 + 0.2 * rng.standard_normal((2, D))).astype(np.float32)
    lane, length = (np.array([r[i] for r in rows], np.uint32) for i in (0, 1))
    for b, n in rows:
        if n < R:
            rings[b, :, :, n:] = NAN
    far, near = angle_tables(THETA, int(length.max()) + S)
    tiles, pieces = row_tiles(S, M), num_pieces(W)
    partials = np.full((B * G * pieces, 16 * tiles, D), np.nan, np.float32)
    stats = np.full((B * G * pieces, 16 * tiles, 2), np.nan, np.float32)
    item = block_attention_kernel(tiles, run.early)
    scalars = (S, H, G, W, R, 2 * 2 * R * G * D * 2 // 16, pieces, D**-0.5 * LOG2E, EPS)
    addresses = (partials, stats, qkv, rings, lane, length, w_q, w_k, far, near)
    run(item, B * G * pieces, *addresses, *scalars)
    out = np.full(fragment_size(T, H * D), NAN, np.uint16)
    item = block_merge_kernel(tiles, run.early)
    run(item, T * H // 4, out, partials, stats, S, H, G, pieces, *tiles_of(T))
    got = bf16_to_f32(from_fragments(out, T, H * D)).reshape(B, S, H, D)
    for b, (owner, n) in enumerate(rows):
        places = n + np.arange(S)
        own = values[b * S : b * S + S]
        q, k = rotated(own[:, :H], w_q, places), rotated(own[:, H : H + G], w_k, places)
        q, k = (bf16_to_f32(bf16_bits(x.astype(np.float32))) for x in (q, k))
        tokens = np.arange(max(0, n - W + 1), n)
        past = context[owner, 0][:, tokens % R].astype(np.float64)
        for h in range(H):
            g = h // M
            keys = np.concatenate([past[0][:, g], k[:, g]])
            seen = places[:, None] - np.concatenate([tokens, places])[None] < W
            scores = np.where(seen, q[:, h].astype(np.float64) @ keys.T / np.sqrt(D), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            want = weights @ np.concatenate([past[1][:, g], own[:, H + G + g]])
            ATTENTION_BF16.check(got[b, :, h], want, f"row {b} head {h}")
    return out


def best_candidates(run, logits, V, ids=0):
    """[R, K] u64 of both passes."""
    R, pieces = len(logits), -(-V // PIECE)
    parts, best = np.zeros((R, pieces, K), np.uint64), np.zeros((R, K), np.uint64)
    item = candidates_kernel(0, run.early)
    run(item, R * pieces, parts, logits, ids, V, logits.strides[0], pieces)
    run(candidates_kernel(1, run.early), R, best, parts, 0, pieces * K, pieces * K * 8, 1)
    return best


def check_candidates(run, V, R=2):
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((R, V + 3)).astype(np.float32)
    logits[:, V:] = 100
    logits[0] = np.round(logits[0])  # many ties
    logits[-1, rng.integers(0, V, 3)] = np.nan
    best = best_candidates(run, logits, V)
    names = np.sort(rng.permutation(3 * V)[:V]).astype(np.uint32)
    other = best_candidates(run, logits, V, names)
    for r in range(R):
        legal = np.isfinite(logits[r, :V])
        row, n = np.where(legal, logits[r, :V], -np.inf), min(K, legal.sum())
        order = np.lexsort((np.arange(V), -row))[:n]
        for found, named in ((best, np.arange(V)), (other, names)):
            got = found[r].astype(np.uint32) ^ np.uint32(0xFFFFFFFF)
            assert (got[:n] == named[order]).all()
            assert (found[r, n:] == 0).all()


@njit(cache=True)
def drawn(units, scores, temperature, seed, position):
    """The draw of the CPU image."""
    return draw_units(units, scores, temperature, uniform_bits(seed, position, _DRAFT, 0))


def check_paths(run, B, N, V, R):
    rng = np.random.default_rng(B * N)
    logits = rng.standard_normal((B * N, V)).astype(np.float32) * 3
    hidden = rng.standard_normal((B * N, R)).astype(np.float32)
    books, values = normal(rng, 2, V, R)
    lanes = rng.permutation(B + 2)[:B].astype(np.uint32)
    positions = rng.integers(0, 1000, B).astype(np.uint32)
    temperature = np.where(np.arange(B) % 2, 0.0, 0.8).astype(np.float32)
    seeds = rng.integers(0, 1 << 63, B).astype(np.uint64)
    most, num_lanes = N + 1, B + 2
    tokens = np.full((1 + most, num_lanes), 0xFFFFFFFF, np.uint32)
    tokens[0] = rng.integers(0, V, num_lanes)
    ids = np.full((num_lanes, most, K), 7, np.uint32)
    units, scores = ids.copy(), np.full((B * N, K), np.nan, np.float32)
    best = best_candidates(run, logits, V)
    item = draft_path_kernel(run.early)
    addresses = (tokens, ids, units, best, hidden, *books, lanes, positions, temperature, seeds)
    run(item, B, *addresses, scores, N, R, 2 * R, num_lanes, most)
    for b in range(B):
        previous, lane = int(tokens[0, lanes[b]]), lanes[b]
        for j in range(N):
            row, names = b * N + j, ids[lane, j].astype(np.int64)
            order = np.lexsort((np.arange(V), -logits[row]))[:K]
            assert (names == order).all()
            pair = (values[0, previous] * hidden[row]).astype(np.float64) @ values[1, names].T
            want = logits[row, names] + pair
            assert np.abs(scores[row] - want).max() < 1e-4
            expected, chosen = np.zeros(K, np.uint32), -1
            if temperature[b] == 0:
                chosen = min(range(K), key=lambda c: (-scores[row, c], names[c]))
                expected[chosen] = ONE_Q
            else:
                position = np.int64(positions[b] + 1 + j)
                chosen = drawn(expected, scores[row], temperature[b], seeds[b], position)
            assert (units[lane, j] == expected).all()
            previous = int(names[chosen])
            assert tokens[1 + j, lane] == previous
        assert (tokens[1 + N :, lane] == 0xFFFFFFFF).all()
    others = np.setdiff1d(np.arange(num_lanes), lanes)
    assert (tokens[1:, others] == 0xFFFFFFFF).all()
