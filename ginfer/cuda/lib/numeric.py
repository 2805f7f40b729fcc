"""Scalar functions in FP32, BF16 pairs, and sums over a warp or a block in one fixed order."""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64, uint32

from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    bf16x2_from_f32,
    div_rn_f32,
    exp2_approx,
    f32_from_bits,
    ld_global_f32x4,
    ld_global_u32x4,
    ld_shared_f32,
    let_next_kernel_start,
    log2_approx,
    shfl_xor_f32,
    st_shared_f32,
    wait_for_previous_kernel,
)

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def follow(early: int) -> Any:
    """Device function for the start of a kernel. early: it may be launched before the kernel in
    front of it has ended (sm_90 and later), so it waits here, and lets the next one start."""

    @cuda.jit(device=True, inline="always")
    def start_early():
        let_next_kernel_start()
        wait_for_previous_kernel()

    @cuda.jit(device=True, inline="always")
    def start():
        pass

    return start_early if early else start


def follow_late(early: int) -> tuple[Any, Any]:
    """`follow` in two halves, start and wait. Between them only what no kernel of the same forward
    writes may be read: a copy of tables stands between forwards, and it waits for all kernels."""

    @cuda.jit(device=True, inline="always")
    def nothing():
        pass

    return (let_next_kernel_start, wait_for_previous_kernel) if early else (nothing, nothing)


@cuda.jit(device=True, inline="always")
def exp_f32(x):
    """e^x."""
    return exp2_approx(x * float32(LOG2E))


@cuda.jit(device=True, inline="always")
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return float32(1.0) / (float32(1.0) + exp2_approx(x * float32(-LOG2E)))


@cuda.jit(device=True, inline="always")
def silu(x):
    """x * sigmoid(x)."""
    return x / (float32(1.0) + exp2_approx(x * float32(-LOG2E)))


@cuda.jit(device=True, inline="always")
def softplus(x):
    """log(1 + e^x); x itself above 20. With u = 1 + e rounded, log(u) e / (u - 1) mends what the
    rounding took."""
    if x > float32(20.0):
        return x
    e = exp2_approx(x * float32(LOG2E))
    u = add_rn_f32(float32(1.0), e)
    kept = add_rn_f32(u, float32(-1.0))
    if kept == float32(0.0):
        return e
    return log2_approx(u) * float32(LN2) * div_rn_f32(e, kept)


@cuda.jit(device=True, inline="always")
def low_f32(pair):
    """The lower BF16 of a pair."""
    return f32_from_bits(uint32(pair << uint32(16)))


@cuda.jit(device=True, inline="always")
def high_f32(pair):
    """The upper BF16 of a pair."""
    return f32_from_bits(uint32(pair & uint32(0xFFFF0000)))


@cuda.jit(device=True, inline="always")
def pack_bf16(low, high):
    """Two FP32 as a BF16 pair, nearest even."""
    return bf16x2_from_f32(high, low)


@cuda.jit(device=True, inline="always")
def load_bf16x8(v, at):
    """v[0:8] = eight BF16 at a global address, a multiple of 16."""
    q = ld_global_u32x4(at)
    for i in range(4):
        v[2 * i] = low_f32(q[i])
        v[2 * i + 1] = high_f32(q[i])


@cuda.jit(device=True, inline="always")
def load_f32x8(v, at):
    """v[0:8] = eight FP32 at a global address, a multiple of 16."""
    for i in range(2):
        q = ld_global_f32x4(at + 16 * i)
        for j in range(4):
            v[4 * i + j] = q[j]


@cuda.jit(device=True, inline="always")
def warp_sum(x):
    """Sum over the lanes, in every lane."""
    x = x + shfl_xor_f32(x, uint32(16))
    x = x + shfl_xor_f32(x, uint32(8))
    x = x + shfl_xor_f32(x, uint32(4))
    x = x + shfl_xor_f32(x, uint32(2))
    return x + shfl_xor_f32(x, uint32(1))


@cuda.jit(device=True, inline="always")
def warp_max(x):
    """Maximum over the lanes, in every lane."""
    x = max(x, shfl_xor_f32(x, uint32(16)))
    x = max(x, shfl_xor_f32(x, uint32(8)))
    x = max(x, shfl_xor_f32(x, uint32(4)))
    x = max(x, shfl_xor_f32(x, uint32(2)))
    return max(x, shfl_xor_f32(x, uint32(1)))


@cuda.jit(device=True, inline="always")
def block_sum(x, words, warps):
    """Sum over the threads of a block of `warps` warps, in every thread; words: shared address of
    as many floats, not in use."""
    thread = uint32(cuda.threadIdx.x)
    x = warp_sum(x)
    if thread & uint32(31) == 0:
        st_shared_f32(uint32(words + (thread >> uint32(5)) * uint32(4)), x)
    cuda.syncthreads()
    total = float32(0.0)
    for i in range(warps):
        total = total + ld_shared_f32(uint32(words + uint32(i * 4)))
    return total


@cuda.jit(device=True, inline="always")
def row_of_32(table, idx):
    """Global address of element idx of a table of 32-bit words."""
    return table + int64(idx) * 4
