"""The delta rule on a state in registers: what a block does for one value head, column by column.

A warp has 16 columns of S [K, V], a lane four of them, 4 (lane & 3) and on, and 16 rows: 32 i + 4 g
+ n for i, n < 4, g = lane >> 2. Keys and queries of up to AHEAD columns wait in shared memory, so
no warp waits for another between columns. Sums over K: 16 rows of a lane in ascending order, then
g by g ^ 1, ^ 2, ^ 4, where a lane keeps half of its sums and sends the others: one order for
decode, verification and fold, whatever the number of columns.

Legend: K = V = 128; a place is a shared-memory address of this column's part.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.numeric import exp_f32, high_f32, low_f32, sigmoid, softplus, warp_sum
from ginfer.cuda.lib.ptx import (
    bits_from_f32,
    f32_from_bits,
    fma_f32,
    lane_f32,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u32,
    ld_shared_u32,
    ld_shared_u32x4,
    rsqrt_approx,
    shfl_xor_f32,
    st_global_f32x4,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x4,
)

WIDTH = 128  # of a key head and of a value head
THREADS, WARPS = 256, 8
AHEAD = WARPS  # columns that are loaded at a time, by a warp each
HELD = WIDTH * WIDTH // THREADS  # elements of S in a thread
QUERY, VALUE, GATES = 4 * WIDTH, 8 * WIDTH, 10 * WIDTH  # after the key of a place, in bytes
PLACE_NBYTES = GATES + 16  # decay, beta, key . query
FORGOTTEN = -60.0  # e^g below is zero: it would only make subnormal numbers
L2_EPS = 1e-6
SHORTEN = WIDTH**-0.5


@cuda.jit(device=True, inline="always")
def decay_of(g):
    """e^g for g <= 0."""
    return exp_f32(g) if g > float32(FORGOTTEN) else float32(0.0)


@cuda.jit(device=True, inline="always")
def offset_in_head(thread):
    """Bytes from the start of a head's state to a thread's first element."""
    warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
    row, column = uint32(lane >> uint32(2)), uint32(warp * uint32(4) + (lane & uint32(3)))
    return int64(row) * (16 * WIDTH) + int64(column) * 16


@cuda.jit(device=True, inline="always")
def load_state(s, at):
    """s = a thread's share of the state, at its first element."""
    for i in range(4):
        for n in range(4):
            q = ld_global_f32x4(at + (32 * i + n) * (4 * WIDTH))
            for j in range(4):
                s[16 * i + 4 * n + j] = q[j]


@cuda.jit(device=True, inline="always")
def store_state(at, s):
    """The reverse of `load_state`."""
    for i in range(4):
        for n in range(4):
            p = 16 * i + 4 * n
            st_global_f32x4(at + (32 * i + n) * (4 * WIDTH), s[p], s[p + 1], s[p + 2], s[p + 3])


@cuda.jit(device=True, inline="always")
def _store4(to, a, b, c, d):
    words = (bits_from_f32(a), bits_from_f32(b), bits_from_f32(c), bits_from_f32(d))
    st_shared_u32x4(to, words[0], words[1], words[2], words[3])


@cuda.jit(device=True, inline="always")
def place_key_query(place, k, q, lane):
    """One warp: unit key and unit query over sqrt(K) of words k, q, two a lane; their product."""
    q0, q1, q2, q3 = low_f32(q[0]), high_f32(q[0]), low_f32(q[1]), high_f32(q[1])
    k0, k1, k2, k3 = low_f32(k[0]), high_f32(k[0]), low_f32(k[1]), high_f32(k[1])
    qq = warp_sum(fma_f32(q3, q3, fma_f32(q2, q2, fma_f32(q1, q1, q0 * q0))))
    kk = warp_sum(fma_f32(k3, k3, fma_f32(k2, k2, fma_f32(k1, k1, k0 * k0))))
    kq = warp_sum(fma_f32(k3, q3, fma_f32(k2, q2, fma_f32(k1, q1, k0 * q0))))
    q_inv = rsqrt_approx(qq + float32(L2_EPS)) * float32(SHORTEN)
    k_inv = rsqrt_approx(kk + float32(L2_EPS))
    to = uint32(place + lane * uint32(16))
    _store4(to, k0 * k_inv, k1 * k_inv, k2 * k_inv, k3 * k_inv)
    _store4(uint32(to + uint32(QUERY)), q0 * q_inv, q1 * q_inv, q2 * q_inv, q3 * q_inv)
    return kq * k_inv * q_inv


@cuda.jit(device=True, inline="always")
def place_gates(place, inputs, gates, product, lane):
    """One lane: decay and beta of the column's inputs a, b, and key . query. gates: -e^A_log and
    dt_bias of the head."""
    if lane == 0:
        g = gates[0] * softplus(inputs[0] + gates[1])
        to = uint32(place + uint32(GATES))
        st_shared_f32(to, decay_of(g))
        st_shared_f32(uint32(to + uint32(4)), sigmoid(inputs[1]))
        st_shared_f32(uint32(to + uint32(8)), product)


@cuda.jit(device=True, inline="always")
def load_column(place, x, ab, gates, heads, lane):
    """One warp: unit key, unit query over sqrt(K), value and gates of a column to its place.

    x: address of the column's convolved channels, ab of its gate inputs. heads: (h, key head, HK,
    HV).
    """
    h, key, HK, HV = heads
    at_q = x + int64(key) * (2 * WIDTH) + int64(lane) * 8
    at_k = at_q + int64(HK) * (2 * WIDTH)
    at_v = x + (int64(HK) * 2 + int64(h)) * (2 * WIDTH) + int64(lane) * 8
    q = (ld_global_u32(at_q), ld_global_u32(at_q + 4))
    k = (ld_global_u32(at_k), ld_global_u32(at_k + 4))
    v = (ld_global_u32(at_v), ld_global_u32(at_v + 4))
    at = ab + int64(h) * 4
    inputs = (ld_global_f32(at), ld_global_f32(at + int64(HV) * 4))
    product = place_key_query(place, k, q, lane)
    at_words = uint32(place + uint32(VALUE) + lane * uint32(8))
    st_shared_u32(at_words, v[0])
    st_shared_u32(uint32(at_words + uint32(4)), v[1])
    at = gates + int64(h) * 4
    factors = (ld_global_f32(at), ld_global_f32(at + int64(HV) * 4))
    place_gates(place, inputs, factors, product, lane)


@cuda.jit(device=True, inline="always")
def own_column(lane):
    """Which of a lane's four columns is its own, whose sums it has."""
    return uint32(((lane >> uint32(1)) & uint32(2)) | ((lane >> uint32(3)) & uint32(1)))


@cuda.jit(device=True, inline="always")
def multiply(s, rows, lane):
    """The sum over K of s times a key or query, for the lane's own column. rows: the place of the
    lane's first row."""
    p = cuda.local.array(4, float32)
    for j in range(4):
        p[j] = float32(0.0)
    for i in range(4):
        q = ld_shared_u32x4(uint32(rows + uint32(128 * i)))
        for n in range(4):
            x = f32_from_bits(q[n])
            for j in range(4):
                p[j] = fma_f32(s[16 * i + 4 * n + j], x, p[j])
    later, odd = lane & uint32(4) != 0, lane & uint32(8) != 0  # what is kept of four, of two
    a, b = (p[2], p[3]) if later else (p[0], p[1])
    c, d = (p[0], p[1]) if later else (p[2], p[3])
    a, b = a + shfl_xor_f32(c, uint32(4)), b + shfl_xor_f32(d, uint32(4))
    a, b = (b, a) if odd else (a, b)
    a = a + shfl_xor_f32(b, uint32(8))
    return a + shfl_xor_f32(a, uint32(16))


@cuda.jit(device=True, inline="always")
def difference(p, total, place, gates, thread):
    """p[0:4] = d = beta (v - decay S^T k), the column's delta at the lane's four columns; returns
    that of its own, whose `total` is S^T k. gates: (decay, beta)."""
    warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
    four, own = uint32(warp * uint32(4) + (lane & uint32(3))), own_column(lane)
    at = uint32(four * uint32(8) + (own >> uint32(1)) * uint32(4))
    word = ld_shared_u32(uint32(place + uint32(VALUE) + at))
    value = high_f32(word) if own & uint32(1) else low_f32(word)
    d = fma_f32(-gates[0], total, value) * gates[1]
    for j in range(4):  # from a lane whose own column is j
        p[j] = lane_f32(d, uint32((lane & uint32(3)) | uint32((j & 2) * 2 + (j & 1) * 8)))
    return d


@cuda.jit(device=True, inline="always")
def update(s, p, decay, rows):
    """s = decay s + k d; p[0:4]: d."""
    for i in range(4):
        q = ld_shared_u32x4(uint32(rows + uint32(128 * i)))
        for n in range(4):
            k = f32_from_bits(q[n])
            for j in range(4):
                at = 16 * i + 4 * n + j
                s[at] = fma_f32(k, p[j], decay * s[at])
