"""Warpgroup matrix products of sm_90a whose accumulators are named PTX registers, by tile width.

A warpgroup multiplies a 64 x 16 fragment of A in registers by a 16 x n tile of B in shared memory.
Its n / 2 FP32 sums per thread are registers `acc0`... that `declare` makes known to the statements
after it: nothing passes through the compiler's values. acc[4 q + 2 h + i] of lane 4 g + t of warp w
is row 16 w + 8 h + g, column 8 q + 2 t + i. Widths are multiples of 16 from 16 to 256.

B lies as [n][64 columns of k] BF16 with the 128-byte swizzle, a function of the address: tiles
begin at multiples of 1,024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int64

from ginfer.cuda.lib.ptx import ptx_op

WIDTHS = range(16, 257, 16)
_ROWS_16 = 2048  # bytes of 16 columns of a tile of 64 BF16 sums per column

wgmma_fence = ptx_op("wgmma.fence.sync.aligned;")
wgmma_commit = ptx_op("wgmma.commit_group.sync.aligned;")


@cache
def wgmma_wait(pending: int) -> Any:
    """Wait until at most `pending` of this warp's committed groups are under way."""
    return ptx_op(f"wgmma.wait_group.sync.aligned {pending};")


@dataclass(frozen=True)
class Accumulators:
    """The statements of one width; `declare` must be reached exactly once in a kernel.

    multiply(a0, a1, a2, a3, descriptor, keep): sums = A B, plus the sums when keep is not 0.
    stage_bf16(at): the sums rounded to BF16 into shared memory, [n][64 rows], 16-byte chunk c of
    column t at chunk c ^ (t % 8). stage_silu(at): of rows that alternate eight gates and eight ups,
    silu(gate) * up, [n][32], chunk c at c ^ (t / 2 % 4). For both, `at` is where stmatrix takes the
    lane's address in the first 16 columns. store_f32(at, pitch, low, high, left): sums to global
    memory from row g and column 2 t at `at`, pitch bytes a column; low, high: whether rows g and
    g + 8 exist; left: columns that exist from 2 t on.
    """

    declare: Any
    multiply: Any
    stage_bf16: Any
    stage_silu: Any
    store_f32: Any


@cache
def accumulators(n: int) -> Accumulators:
    """The statements for tiles of n columns."""
    assert n in WIDTHS, n
    names = ",".join(f"acc{i}" for i in range(n // 2))
    multiply = (
        "{ .reg .pred keep; setp.ne.u32 keep, $5, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{names}}}, "
        "{$0,$1,$2,$3}, $4, keep, 1, 1, 0; }"
    )
    return Accumulators(
        declare=ptx_op(f".reg .f32 acc<{n // 2}>;"),
        multiply=ptx_op(multiply, "", "rrrrlr"),
        stage_bf16=ptx_op(_stage_bf16(n), "", "r"),
        stage_silu=ptx_op(_stage_silu(n), "", "r"),
        store_f32=ptx_op(_store_f32(n), "", "llrrr"),
    )


def _stage_bf16(n: int) -> str:
    lines = []
    for q in range(n // 16):
        lines += [
            f"cvt.rn.bf16x2.f32 p{j}, acc{8 * q + 2 * j + 1}, acc{8 * q + 2 * j};" for j in range(4)
        ]
        lines.append(_stmatrix(4, q * _ROWS_16))
    return f"{{ .reg .b32 p<4>; {' '.join(lines)} }}"


def _stage_silu(n: int) -> str:
    lines = []
    for q in range(n // 8):
        for i in range(2):
            gate, up = f"acc{4 * q + i}", f"acc{4 * q + i + 2}"
            lines += [
                f"mul.f32 e, {gate}, 0fBFB8AA3B;",  # -log2(e)
                "ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;",
                f"mul.f32 e, e, {gate}; mul.f32 s{i}, e, {up};",
            ]
        lines.append(f"cvt.rn.bf16x2.f32 p{q % 2}, s1, s0;")
        if q % 2:
            lines.append(_stmatrix(2, (q - 1) * 512))
    return f"{{ .reg .b32 p<2>; .reg .f32 e, s<2>; {' '.join(lines)} }}"


def _stmatrix(count: int, offset: int) -> str:
    parts = ",".join(f"p{j}" for j in range(count))
    return f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0+{offset}], {{{parts}}};"


def _store_f32(n: int) -> str:
    lines = ["setp.ne.u32 low, $2, 0; setp.ne.u32 high, $3, 0; mov.b64 at, $0;"]
    for q in range(n // 8):
        for i in range(2):
            first = 4 * q + i
            lines += [
                f"setp.gt.and.s32 p, $4, {8 * q + i}, low;",
                f"setp.gt.and.s32 r, $4, {8 * q + i}, high;",
                f"@p st.global.f32 [at], acc{first}; @r st.global.f32 [at+32], acc{first + 2};",
                "add.s64 at, at, $1;" if i == 0 else "mad.lo.s64 at, $1, 7, at;",
            ]
    return f"{{ .reg .pred low, high, p, r; .reg .b64 at; {' '.join(lines)} }}"


@cuda.jit(device=True, inline="always")
def tile_descriptor(at):
    """Descriptor of a B tile at a shared address: 8-row stride 1,024, 128-byte swizzle."""
    address = int64(at >> 4) & int64(0x3FFF)
    return address | (int64(1) << 16) | (int64(64) << 32) | (int64(1) << 62)
