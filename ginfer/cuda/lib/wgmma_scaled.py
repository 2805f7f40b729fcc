"""Warpgroup products for a few tokens: sets of sums, each scaled into FP32 values of a thread.

A warpgroup multiplies a 64 x 16 fragment of A in registers by 8 NT tokens in shared memory. The
4 NT sums per thread of a set are named registers, so that one set is scaled and added while the
products of the other run. Sum 4 q + 2 h + i of lane 4 g + t of warp w is row 16 w + 8 h + g, token
8 q + 2 t + i: the order of mma.m16n8k16.

Tokens lie as core matrices of 8 tokens x 8 columns, 128 bytes: eight of them are the 64 columns of
a tile of 8 tokens, and tiles follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int64

from ginfer.cuda.lib.ptx import ptx_op

SETS = ("first", "second", "third")
STEP = 16  # of a descriptor from one k16 step to the next
TILE = 64  # and from one tile of 8 tokens to the next


@dataclass(frozen=True)
class ScaledSums:
    """The statements of one set; `declare_sums` must be reached exactly once in a kernel.

    multiply(a0, a1, a2, a3, descriptor, keep): sums = A B, plus the sums when keep is not 0.
    add(c, p, low, high): c[p : p + 4 NT] += sums * scales of rows g and g + 8. clear(): sums = 0.
    """

    multiply: Any
    add: Any
    clear: Any


@cache
def declare_sums(NT: int) -> Any:
    """The statement that makes all sets known to those after it."""
    return ptx_op(f".reg .f32 {', '.join(f'{name}<{4 * NT}>' for name in SETS)};")


@cache
def scaled_sums(name: str, NT: int) -> ScaledSums:
    """The statements of one of SETS for NT tiles of 8 tokens, a power of two up to 8."""
    names = ",".join(f"{name}{i}" for i in range(4 * NT))
    multiply = ptx_op(
        "{ .reg .pred keep; setp.ne.u32 keep, $5, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{8 * NT}k16.f32.bf16.bf16 {{{names}}}, "
        "{$0,$1,$2,$3}, $4, keep, 1, 1, 0; }",
        "",
        "rrrrlr",
    )
    clear = ptx_op(" ".join(f"mov.f32 {name}{i}, 0f00000000;" for i in range(4 * NT)))
    return ScaledSums(multiply, _add(name, 0, NT), clear)


def _add(name: str, first: int, count: int) -> Any:
    """Device function add(c, p, low, high) of tiles `first` on."""
    if count > 1:
        half = count // 2
        lower, upper = _add(name, first, half), _add(name, first + half, half)
        skip = 4 * half

        @cuda.jit(device=True, inline="always")
        def add(c, p, low, high):
            lower(c, p, low, high)
            upper(c, p + skip, low, high)

        return add
    text = " ".join(
        f"fma.rn.f32 ${i}, {name}{4 * first + i}, ${8 + i // 2}, ${4 + i};" for i in range(4)
    )
    fma = ptx_op(text, "ffff", "ffffff")

    @cuda.jit(device=True, inline="always")
    def add_tile(c, p, low, high):
        r = fma(c[p], c[p + 1], c[p + 2], c[p + 3], low, high)
        for i in range(4):
            c[p + i] = r[i]

    return add_tile


@cuda.jit(device=True, inline="always")
def tokens_descriptor(at):
    """Descriptor of tokens at a shared address: no swizzle, 128 bytes in k, 1,024 in tokens."""
    return int64(at >> 4) & int64(0x3FFF) | (int64(8) << 16) | (int64(64) << 32)
