"""Statements of decode attention on sm_90a: 64 rows by a warpgroup, sums in named PTX registers.

A warpgroup has the scores of two tiles of 64 keys, registers `even` and `odd`, and of 128 dims the
values of a block, `value`, and of all blocks up to it, `whole`. Of thread 4 g + t of a warp,
register [4 q + 2 h + i] belongs to row 8 h + g of the warp's sixteen, key or dim 8 q + 2 t + i.
Operands lie in shared memory in panels of 64 dims (weights: of 64 keys) with the 128-byte swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ginfer.cuda.lib.ptx import ptx_op

ROWS, KEYS, DIMS = 64, 64, 128
_SCORES, _VALUES = KEYS // 2, DIMS // 2
_REGISTERS = (("even", "odd", _SCORES), ("value", "whole", _VALUES))
_PANEL = 64 * 128  # bytes of a panel
_MASKED = "0fF149F2CA"  # -1e30


@dataclass(frozen=True)
class Scores:
    """Statements on the scores of one tile.

    multiply(q, k): scores = Q K^T, by descriptors. mask(low, high): scores of this thread's keys
    beyond `low` (row g) and `high` (row g + 8), signed, become -1e30. highest(): maxima of the two
    rows. weigh(scale, low, high): scores become 2^(score * scale + low or high); their two sums.
    store(at, swizzle): them in BF16 to shared memory; at: row g of a panel, and 4 t; swizzle: 16 g.
    """

    multiply: Any
    mask: Any
    highest: Any
    weigh: Any
    store: Any


@dataclass(frozen=True)
class DecodeTile:
    """`declare` must be reached exactly once in a kernel. clear(): whole = 0. clear_scores(),
    clear_values(): all of a block = 0; what a branch may leave as it was would occupy registers in
    between. add(weights, v): value += weights V. fold(keep0, take0, keep1, take1): whole = whole *
    keep + value * take per row. write(at0, at1, live0, live1): whole to global memory, dim 2 t of a
    row at `at`, of rows that are live."""

    declare: Any
    even: Scores
    odd: Scores
    clear: Any
    clear_scores: Any
    clear_values: Any
    add: Any
    fold: Any
    write: Any


def _clear(name: str, count: int) -> str:
    return " ".join(f"mov.f32 {name}{i}, 0f00000000;" for i in range(count))


def _names(name: str, count: int) -> str:
    return ",".join(f"{name}{i}" for i in range(count))


@cache
def decode_tile(D: int) -> DecodeTile:
    """The statements for heads of D dims, DIMS to a warpgroup."""
    scores, values = (f".reg .f32 {a}<{n}>, {b}<{n}>;" for a, b, n in _REGISTERS)
    fold = [
        f"mul.rn.f32 whole{i}, whole{i}, ${i & 2}; "
        f"fma.rn.f32 whole{i}, value{i}, ${(i & 2) + 1}, whole{i};"
        for i in range(_VALUES)
    ]
    return DecodeTile(
        declare=ptx_op(scores + values),
        even=_scores("even", D),
        odd=_scores("odd", D),
        clear=ptx_op(_clear("whole", _VALUES)),
        clear_scores=ptx_op(_clear("even", _SCORES) + " " + _clear("odd", _SCORES)),
        clear_values=ptx_op(_clear("value", _VALUES)),
        add=ptx_op(_add(), "", "ll"),
        fold=ptx_op(" ".join(fold), "", "ffff"),
        write=ptx_op(_write(), "", "llrr"),
    )


def _scores(s: str, D: int) -> Scores:
    return Scores(
        multiply=ptx_op(_multiply(s, D), "", "ll"),
        mask=ptx_op(_mask(s), "", "rr"),
        highest=ptx_op(_highest(s), "ff"),
        weigh=ptx_op(_weigh(s), "ff", "fff"),
        store=ptx_op(_store(s), "", "rr"),
    )


def _multiply(s: str, D: int) -> str:
    lines = ["setp.ne.u32 more, 0, 0;"]
    for i in range(D // 16):
        at = (i // 4 * _PANEL + i % 4 * 32) >> 4
        lines += [
            f"add.s64 a, $0, {at}; add.s64 b, $1, {at};",
            f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.bf16.bf16 "
            f"{{{_names(s, _SCORES)}}}, a, b, more, 1, 1, 0, 0;",
        ]
        if i == 0:
            lines.append("setp.eq.u32 more, 0, 0;")
    return f"{{ .reg .b64 a, b; .reg .pred more; {' '.join(lines)} }}"


def _add() -> str:
    lines = ["setp.eq.u32 more, 0, 0;"]
    for i in range(KEYS // 16):
        lines += [
            f"add.s64 a, $0, {i * 32 >> 4}; add.s64 b, $1, {i * 2048 >> 4};",
            f"wgmma.mma_async.sync.aligned.m64n{DIMS}k16.f32.bf16.bf16 "
            f"{{{_names('value', _VALUES)}}}, a, b, more, 1, 1, 0, 1;",
        ]
    return f"{{ .reg .b64 a, b; .reg .pred more; {' '.join(lines)} }}"


def _mask(s: str) -> str:
    lines = []
    for i in range(_SCORES):
        key = (i >> 2) * 8 + (i & 1)
        lines.append(f"setp.lt.s32 p, ${i >> 1 & 1}, {key}; @p mov.f32 {s}{i}, {_MASKED};")
    return f"{{ .reg .pred p; {' '.join(lines)} }}"


def _highest(s: str) -> str:
    lines = [f"max.f32 m{j}, {s}{j}, {s}{4 + j};" for j in range(4)]
    for q in range(2, KEYS // 8):
        lines += [f"max.f32 m{j}, m{j}, {s}{4 * q + j};" for j in range(4)]
    return f"{{ .reg .f32 m<4>; {' '.join(lines)} max.f32 $0, m0, m1; max.f32 $1, m2, m3; }}"


def _weigh(s: str) -> str:
    lines = []
    for i in range(_SCORES):
        lines += [
            f"fma.rn.ftz.f32 {s}{i}, {s}{i}, $2, ${3 + (i >> 1 & 1)};",
            f"ex2.approx.ftz.f32 {s}{i}, {s}{i};",
        ]
    lines += [f"add.rn.f32 t{j}, {s}{j}, {s}{4 + j};" for j in range(4)]
    for q in range(2, KEYS // 8):
        lines += [f"add.rn.f32 t{j}, t{j}, {s}{4 * q + j};" for j in range(4)]
    lines.append("add.rn.f32 $0, t0, t1; add.rn.f32 $1, t2, t3;")
    return f"{{ .reg .f32 t<4>; {' '.join(lines)} }}"


def _store(s: str) -> str:
    lines = []
    for q in range(KEYS // 8):
        lines += [
            f"xor.b32 at, $1, {16 * q}; add.u32 at, at, $0;",
            f"cvt.rn.bf16x2.f32 low, {s}{4 * q + 1}, {s}{4 * q}; st.shared.b32 [at], low;",
            f"cvt.rn.bf16x2.f32 high, {s}{4 * q + 3}, {s}{4 * q + 2};",
            "st.shared.b32 [at+1024], high;",
        ]
    return f"{{ .reg .b32 at, low, high; {' '.join(lines)} }}"


def _write() -> str:
    lines = ["setp.ne.u32 live0, $2, 0; setp.ne.u32 live1, $3, 0;"]
    for q in range(DIMS // 8):
        for h in range(2):
            first = 4 * q + 2 * h
            pair = f"{{whole{first},whole{first + 1}}}"
            lines.append(f"@live{h} st.global.v2.f32 [${h}+{32 * q}], {pair};")
    return f"{{ .reg .pred live0, live1; {' '.join(lines)} }}"
