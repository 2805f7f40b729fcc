"""Checks of attention kernels against the float64 oracles, for whatever runs them.

`run` as in `tests.device_cases`. Rows of K/V lie in pages in random order; what no token has is
NaN.
"""

from dataclasses import dataclass, replace

import numpy as np

from ginfer.batch import ForwardBatch, Phase, WorkUnits
from ginfer.cpu.rope import frequency_axes, inverse_frequencies
from ginfer.cuda.attention.append import append_kernel, blocks_of
from ginfer.cuda.attention.expand import attention_expand_kernel
from ginfer.cuda.attention.merge import attention_merge_kernel
from ginfer.cuda.attention.pages import TILE, PageShape
from ginfer.cuda.attention.prefill import attention_prefill_kernel
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.engine.work_items import work_items
from ginfer.sizes import div_ceil
from ginfer.spec import BLOCK_TOKENS
from scripts.pack.codecs import bf16_bits
from tests.device_cases import EPS, NAN, SECTIONS, THETA, D, fragment_size, from_fragments, normal
from tests.oracles.attention import attention
from tests.oracles.formats import bf16_to_f32
from tests.oracles.norm import rms_norm, sigmoid
from tests.oracles.rope import rotate
from tests.tolerances import ATTENTION_BF16, POINTWISE_BF16


@dataclass
class Cache:
    """Rows of K/V in pages, and the columns at their ends, q, k, v and gate drawn at random. kv:
    BF16 bits, or INT8 codes with scales."""

    H: int
    G: int
    kv: np.ndarray
    scales: np.ndarray
    shape: PageShape
    layer: int
    pages: np.ndarray
    row: np.ndarray
    token: np.ndarray
    qkgv: np.ndarray

    def plane(self, page, value, g):
        """Indices of a plane of keys or values, [64, D], in elements of `kv`."""
        token, dim = np.arange(TILE)[:, None], np.arange(D)[None]
        chunk = dim % 64 // 8 if self.shape.packed else (dim % 64 // 8) ^ (token % 8)
        inside = dim // 64 * 4096 + token * 64 + chunk * 8 + dim % 8
        plane = ((self.layer * 2 + value) * self.G + g) * TILE * D
        return page * self.kv.shape[1] + plane + inside

    def put(self, page, value, g, bits):
        """Write the first tokens of a plane, BF16 bits [n, D]."""
        at = self.plane(page, value, g)[: len(bits)]
        if self.shape.packed:
            codes, scales = quantised(bf16_to_f32(bits))
            self.scales.reshape(-1)[at[:, ::64] // 64] = scales.view(np.uint16)
            bits = codes
        self.kv.reshape(-1)[at] = bits

    def get(self, page, value, g):
        """What a plane represents, [64, D]: of packed values, code * scale in BF16."""
        at = self.plane(page, value, g)
        if not self.shape.packed:
            return bf16_to_f32(self.kv.reshape(-1)[at])
        scales = self.scales.reshape(-1)[at[:, ::64] // 64].view(np.float16).astype(np.float64)
        exact = self.kv.reshape(-1)[at] * np.repeat(scales, 64, 1)
        return bf16_to_f32(bf16_bits(exact.astype(np.float32))) if value else exact

    def history(self, row, tokens):
        """(K, V) [tokens, G, D] of a row."""
        out = np.zeros((2, div_ceil(tokens, TILE) * TILE, self.G, D))
        for page in range(out.shape[1] // TILE):
            for value in range(2):
                for g in range(self.G):
                    plane = self.get(self.pages[row, page], value, g)
                    out[value, page * TILE : (page + 1) * TILE, g] = plane
        return out[:, :tokens]

    @property
    def heads(self):
        """Values of qkgv, [T, 2 (H + G), D]."""
        return bf16_to_f32(self.qkgv).reshape(len(self.qkgv), -1, D)

    @property
    def numbers(self):
        """Scalars of the attention kernels behind G (and M)."""
        return self.pages.shape[1], self.shape.page_nbytes, self.shape.layer_offset(self.layer)


def quantised(x):
    """(codes, F16 scales per 64 dims) of BF16 values [n, D]."""
    groups = x.astype(np.float32).reshape(len(x), -1, 64)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales.astype(np.float32), np.float32(0))
    codes = np.rint(groups * inverse[..., None]).clip(-127, 127)
    return codes.reshape(x.shape).astype(np.int8), scales


def quarter(bits):
    """A quarter of BF16 values, exactly."""
    return bf16_bits(bf16_to_f32(bits) / 4)


def make_cache(seed, heads, columns, *, shared=0, packed=False):
    """columns: (tokens of the row with its last ones, how many of them are columns) per row; the
    rows share their first `shared` pages. What no token has is NaN. Values have deviation 1/4, so
    that results stay below 1: the bound has no room for half a BF16 step of larger ones."""
    rng, (H, G) = np.random.default_rng(seed), heads
    P = max(div_ceil(tokens, TILE) for tokens, _ in columns)
    L, layer = 2, 1
    shape = PageShape(L, G, D, packed)
    order = rng.permutation(len(columns) * P + 3).astype(np.int32)
    pages = order[: len(columns) * P].reshape(-1, P).copy()
    pages[:, :shared] = pages[0, :shared]
    kv = np.full((len(order), shape.page_nbytes // 2), NAN, np.uint16)
    scales = np.full((len(order), shape.page_nbytes // 64), 0x7E00, np.uint16)
    if packed:
        kv = rng.integers(-128, 127, (len(order), shape.page_nbytes), np.int8)
    row = np.repeat(np.arange(len(columns)), [n for _, n in columns]).astype(np.int32)
    token = np.concatenate([np.arange(end - n, end) for end, n in columns]).astype(np.int32)
    qkgv, _ = normal(rng, len(row), 2 * (H + G) * D)
    qkgv[:, -G * D :] = quarter(qkgv[:, -G * D :])
    cache = Cache(H, G, kv, scales, shape, layer, pages, row, token, qkgv)
    for b, (end, n) in enumerate(columns):
        for page in range(div_ceil(end - n, TILE)):
            if b and page < shared:
                continue
            count = min(TILE, end - n - page * TILE)
            for value in range(2):
                for g in range(G):
                    bits, _ = normal(rng, count, D)
                    cache.put(pages[b, page], value, g, quarter(bits) if value else bits)
    return cache


def check_append(run, cache, seed=0):
    """Append the columns of a cache: their K and V lie in its pages afterwards."""
    rng, H, G = np.random.default_rng(seed), cache.H, cache.G
    T = len(cache.row)
    w_q, w_k = (1 + 0.2 * rng.standard_normal((2, D))).astype(np.float32)
    positions = np.stack([cache.token, cache.token + 3, cache.token * 2]).astype(np.int32)
    angles = np.outer(inverse_frequencies(THETA, 32).astype(np.float64), np.ones(T))
    angles = (angles * positions[frequency_axes(SECTIONS)]).T
    rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32, order="C")
    before, blocks = cache.heads, blocks_of(H, G)
    run(
        append_kernel(32, cache.shape.packed, run.early),
        T * blocks,
        *(cache.qkgv, cache.kv, cache.scales, w_q, w_k, cache.row, cache.token, cache.pages, rope),
        *(H, G, *cache.numbers, blocks, EPS),
    )
    for first, last, w in ((0, H, w_q), (H, H + G, w_k)):
        x = before[:, first:last]
        normed = rms_norm(x.reshape(-1, D), w, EPS).reshape(x.shape)
        want = rotate(normed, positions, THETA, SECTIONS)
        if first == 0:
            POINTWISE_BF16.check(cache.heads[:, :H], want, "q")
            continue
        for t in range(T):
            k, v = cache.history(cache.row[t], cache.token[t] + 1)[:, -1]
            if cache.shape.packed:
                step = np.abs(want[t]).reshape(G, -1, 64).max(-1).repeat(64, 1) / 127
                assert (np.abs(k - want[t]) <= 0.52 * step + np.abs(want[t]) / 128).all()
                codes, scales = quantised(before[t, 2 * H + G :].reshape(-1, D))
                exact = codes * np.repeat(scales.astype(np.float32), 64, 1)
                assert (v == bf16_to_f32(bf16_bits(exact))).all()
                continue
            POINTWISE_BF16.check(k, want[t], "k")
            assert (v == before[t, 2 * H + G :]).all()
    assert (cache.heads[:, H:] == before[:, H:]).all()


def check_expand(run, cache):
    """Open all complete pages of packed rows: one layer of BF16 pages, bit for bit."""
    G, count = cache.G, [div_ceil(int(t) + 1, TILE) - 1 for t in cache.token]
    ids = np.concatenate([pages[:n] for pages, n in zip(cache.pages, count)])
    opened = PageShape(1, G, D)
    out = np.full((len(ids), opened.page_nbytes // 2), NAN, np.uint16)
    scalars = (2 * G, cache.shape.page_nbytes, cache.shape.layer_offset(cache.layer))
    item = attention_expand_kernel(run.early)
    run(item, len(ids) * 2 * G, out, cache.kv, cache.scales, ids, *scalars)
    plain = replace(cache, kv=out, shape=opened, layer=0)
    for i, page in enumerate(ids):
        for value in range(2):
            for g in range(G):
                want = bf16_bits(cache.get(page, value, g).astype(np.float32))
                assert (bf16_bits(plain.get(i, value, g).astype(np.float32)) == want).all()


def gated_attention(cache, t):
    """The oracle of column t, [H D]."""
    H, G, seen = cache.H, cache.G, cache.token[t] + 1
    k, v = cache.history(cache.row[t], seen)
    out = attention(cache.heads[t : t + 1, :H], k, v, seen - 1, D**-0.5)[0]
    return (out * sigmoid(cache.heads[t, H + G : 2 * H + G])).reshape(-1)


def decode_batch(cache):
    """The tables of a cache as a batch, of rows that share what they have in common."""
    starts = cache.token[np.flatnonzero(np.diff(cache.row, prepend=-1))]
    indptr = np.searchsorted(cache.row, np.arange(len(starts) + 1)).astype(np.int32)
    rows = np.arange(len(starts), dtype=np.int32)
    return ForwardBatch(
        phase=Phase.DECODE,
        token_ids=np.zeros(len(cache.row), np.int32),
        positions=np.zeros((3, len(cache.row)), np.int32),
        row_indptr=indptr,
        starts=starts,
        page_table=cache.pages,
        state_in=rows,
        state_out=rows,
        items=work_items(cache.pages, starts, indptr),
    )


def attention_decode(run, cache, item, *, group, grid, grain):
    """Result bits [T, H D] of a decode kernel with units of `grain` blocks."""
    T, H, G = len(cache.row), cache.H, cache.G
    batch = decode_batch(cache)
    blocks = div_ceil(int(cache.token.max()) + 1, BLOCK_TOKENS)
    room = {"workers": 1 << 20} if grain == 1 else {"num_partials": 0}
    units = WorkUnits(batch.num_rows, T, blocks, group=group, **room)
    units.fill(batch)
    assert units.header[1] == grain
    head, first = np.concatenate([units.header, units.units.reshape(-1)]), units.first.copy()
    partials = np.full((first[T], H, D), np.nan, np.float32)
    stats = np.full((first[T], H, 2), np.nan, np.float32)
    run(
        item,
        grid,
        *(partials, stats, cache.qkgv, cache.kv, cache.scales, head, units.members.copy(), first),
        *(cache.row, cache.token, cache.pages, H, G, H // G, *cache.numbers, D**-0.5),
    )
    out = np.full((T, H * D), NAN, np.uint16)
    tail = (partials, stats, cache.qkgv, head, first, cache.token, H, G)
    run(attention_merge_kernel(0, run.early), T * H, out, *tail, *tiles_of(T))
    if run.early:
        buffer = np.full(fragment_size(T, H * D), NAN, np.uint16)
        run(attention_merge_kernel(1, 1), T * H, buffer, *tail, *tiles_of(T))
        assert (from_fragments(buffer, T, H * D) == out).all()
    return out


def check_attention(cache, out):
    """Results [T, H D] against the oracle."""
    want = np.stack([gated_attention(cache, t) for t in range(len(cache.row))])
    ATTENTION_BF16.check(bf16_to_f32(out), want)


def attention_prefill(run, cache, *, form):
    """Result bits [T, H D] of the prefill kernel."""
    most = 16 * form[0]
    items = [
        (t, min(most, stop - t))
        for start, stop in _spans(cache.row)
        for t in range(start, stop, most)
    ]
    out = np.full((len(cache.row), cache.H * D), NAN, np.uint16)
    run(
        attention_prefill_kernel(*form, run.early),
        len(items) * cache.H,
        *(out, cache.qkgv, cache.kv, np.array(items, np.int32), cache.row, cache.token),
        *(cache.pages, cache.H, cache.G, *cache.numbers, D**-0.5),
    )
    return out


def _spans(row):
    ends = np.flatnonzero(np.diff(row, append=-1)) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist()))
