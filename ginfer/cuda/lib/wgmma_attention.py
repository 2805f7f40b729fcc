"""Attention of 64 rows by a warpgroup of sm_90a, in named PTX registers: products and softmax.

Scores of a tile of 64 keys are registers `score`, their weights `weight` (BF16 pairs, the operand A
of the second product), sums of weighted values `sum`. Of thread 4 g + t of a warp, score[4 q + 2 h
+ i] and sum[...] belong to row 8 h + g of the warp's sixteen, key or dim 8 q + 2 t + i. Nothing
passes through the compiler's values but statistics of the two rows.

Tiles of Q and K are panels of 64 dims, tiles of V too, all with the 128-byte swizzle; see `wgmma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, int64

from ginfer.cuda.lib.ptx import ptx_op

KEYS = 64  # of a tile
_SCORES = KEYS // 2
_WEIGHTS = KEYS // 4
_PANEL = KEYS * 128  # bytes of a panel of K or V
arrive_at_barrier = ptx_op("bar.arrive $0, $1;", "", "rr")
count_arrival = ptx_op(  # the number of arrivals before; starts again after $2
    "atom.acq_rel.cta.shared.inc.u32 $0, [$1], $2;", "r", "rr"
)
st_release_u32 = ptx_op("st.release.gpu.global.u32 [$0], $1;", "", "lr")
max_f32 = ptx_op("max.f32 $0, $1, $2;", "f", "ff", effects=False)
_STEP = 2048  # bytes between the quadruples of a thread's sums in memory: 128 threads x 16


@dataclass(frozen=True)
class AttentionTile:
    """The statements for heads of D dims; `declare` must be reached exactly once in a kernel.

    score(q, k): scores = Q K^T, by descriptors. mask(low, high): scores of keys of this thread
    beyond `low` (row g) and `high` (row g + 8), signed, become -inf. highest(): maxima of its two
    rows. weigh(scale, low, high): scores become 2^(score * scale + low or high); their two sums.
    pack(): weights = scores in BF16. add(v, keep): sums = weights V, plus the sums when keep is not
    0. rescale(low, high): sums times a factor per row.
    store(at): sums to memory, a quadruple every 2,048 bytes. merge(at, old0, new0, old1, new1,
    zero): sums = those there * old + sums * new.
    finish(out0, out1, gate0, gate1, inv0, inv1, live0, live1): out = sums * inv * sigmoid(gate)
    in BF16 for rows that are live, at global addresses of dim 2 t.
    """

    declare: Any
    score: Any
    mask: Any
    highest: Any
    weigh: Any
    pack: Any
    add: Any
    rescale: Any
    store: Any
    merge: Any
    finish: Any


@cache
def attention_tile(D: int, rows: int) -> AttentionTile:
    """The statements for heads of D dims, 128 or 256, and panels of `rows` rows of Q."""
    assert D in (128, 256), D
    return AttentionTile(
        declare=ptx_op(
            f".reg .f32 sum<{D // 2}>; .reg .f32 score<{_SCORES}>; .reg .b32 weight<{_WEIGHTS}>;"
        ),
        score=ptx_op(_score(D, rows * 128), "", "ll"),
        mask=ptx_op(_mask(), "", "rr"),
        highest=ptx_op(_highest(), "ff"),
        weigh=ptx_op(_weigh(), "ff", "fff"),
        pack=ptx_op(
            " ".join(
                f"cvt.rn.bf16x2.f32 weight{i}, score{2 * i + 1}, score{2 * i};"
                for i in range(_WEIGHTS)
            )
        ),
        add=ptx_op(_add(D), "", "lr"),
        rescale=ptx_op(_rescale(D), "", "ff"),
        store=ptx_op(
            " ".join(
                f"st.global.v4.f32 [$0+{_STEP * i}], {{{_names('sum', 4 * i, 4)}}};"
                for i in range(D // 8)
            ),
            "",
            "l",
        ),
        merge=ptx_op(_merge(D), "", "lffffr"),
        finish=ptx_op(_finish(D), "", "llllffrr"),
    )


def _names(name: str, first: int, count: int) -> str:
    return ",".join(f"{name}{i}" for i in range(first, first + count))


def _score(D: int, q_panel: int) -> str:
    lines = ["setp.ne.u32 more, 0, 0;"]
    for i in range(D // 16):
        q, k = (((i // 4) * panel + (i % 4) * 32) >> 4 for panel in (q_panel, _PANEL))
        lines += [
            f"add.s64 a, $0, {q}; add.s64 b, $1, {k};",
            f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.bf16.bf16 "
            f"{{{_names('score', 0, _SCORES)}}}, a, b, more, 1, 1, 0, 0;",
        ]
        if i == 0:
            lines.append("setp.eq.u32 more, 0, 0;")
    return f"{{ .reg .b64 a, b; .reg .pred more; {' '.join(lines)} }}"


def _add(D: int) -> str:
    lines = ["setp.ne.u32 more, $1, 0;"]
    for i in range(KEYS // 16):
        lines += [
            f"add.s64 b, $0, {i * 2048 >> 4};",
            f"wgmma.mma_async.sync.aligned.m64n{D}k16.f32.bf16.bf16 "
            f"{{{_names('sum', 0, D // 2)}}}, {{{_names('weight', 4 * i, 4)}}}, "
            "b, more, 1, 1, 1;",
        ]
        if i == 0:
            lines.append("setp.eq.u32 more, 0, 0;")
    return f"{{ .reg .b64 b; .reg .pred more; {' '.join(lines)} }}"


def _mask() -> str:
    lines = []
    for i in range(_SCORES):
        key = (i >> 2) * 8 + (i & 1)
        lines.append(f"setp.lt.s32 p, ${i >> 1 & 1}, {key}; @p mov.f32 score{i}, 0fFF800000;")
    return f"{{ .reg .pred p; {' '.join(lines)} }}"


def _highest() -> str:
    lines = [f"max.f32 m{j}, score{j}, score{4 + j};" for j in range(4)]
    for q in range(2, KEYS // 8):
        lines += [f"max.f32 m{j}, m{j}, score{4 * q + j};" for j in range(4)]
    return f"{{ .reg .f32 m<4>; {' '.join(lines)} max.f32 $0, m0, m1; max.f32 $1, m2, m3; }}"


def _weigh() -> str:
    lines = []
    for i in range(_SCORES):
        lines += [
            f"fma.rn.ftz.f32 score{i}, score{i}, $2, ${3 + (i >> 1 & 1)};",
            f"ex2.approx.ftz.f32 score{i}, score{i};",
        ]
    lines += [f"add.rn.f32 t{j}, score{j}, score{4 + j};" for j in range(4)]
    for q in range(2, KEYS // 8):
        lines += [f"add.rn.f32 t{j}, t{j}, score{4 * q + j};" for j in range(4)]
    lines.append("add.rn.f32 $0, t0, t1; add.rn.f32 $1, t2, t3;")
    return f"{{ .reg .f32 t<4>; {' '.join(lines)} }}"


def _rescale(D: int) -> str:
    """Most tiles raise no maximum: a factor of one is no work."""
    lines = [f"mul.rn.f32 sum{i}, sum{i}, ${i >> 1 & 1};" for i in range(D // 2)]
    return (
        "{ .reg .pred p; setp.ne.f32 p, $0, 0f3F800000; setp.ne.or.f32 p, $1, 0f3F800000, p; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra KEPT; {' '.join(lines)} KEPT: }}"
    )


def _merge(D: int, batch: int = 8) -> str:
    """A batch of loads depends on the results of the batch before, through a mask that is zero:
    else all loads move to the front, where no registers are left for them."""
    lines = ["mov.b64 at, $0;"]
    for first in range(0, D // 8, batch):
        lines += [
            f"ld.global.cg.v4.f32 {{{_names('v', 4 * i, 4)}}}, [at+{_STEP * (first + i)}];"
            for i in range(batch)
        ]
        for i in range(4 * batch):
            total, old = f"sum{4 * first + i}", 1 + 2 * (i >> 1 & 1)
            lines += [
                f"mul.rn.f32 {total}, {total}, ${old + 1};",
                f"fma.rn.f32 {total}, v{i}, ${old}, {total};",
            ]
        lines.append("mov.b32 t, 0;")
        for i in range(4 * batch):
            lines.append(f"mov.b32 e, sum{4 * first + i}; or.b32 t, t, e;")
        lines.append("and.b32 t, t, $5; cvt.u64.u32 wide, t; add.s64 at, at, wide;")
    return f"{{ .reg .f32 v<{4 * batch}>; .reg .b32 t, e; .reg .b64 at, wide; {' '.join(lines)} }}"


def _finish(D: int, batch: int = 4) -> str:
    lines = ["setp.ne.u32 live0, $6, 0; setp.ne.u32 live1, $7, 0;"]
    for first in range(0, D // 8, batch):
        for q in range(first, first + batch):
            for h in range(2):
                gate = f"g{2 * (q - first) + h}"
                lines.append(
                    f"mov.u32 {gate}, 0; @live{h} ld.global.u32 {gate}, [${2 + h}+{16 * q}];"
                )
        for q in range(first, first + batch):
            for h in range(2):
                gate = f"g{2 * (q - first) + h}"
                lines += [f"shl.b32 e0, {gate}, 16; and.b32 e1, {gate}, 0xFFFF0000;"]
                for i in range(2):
                    lines += [
                        f"mov.b32 x{i}, e{i}; mul.f32 x{i}, x{i}, 0fBFB8AA3B;",  # -log2(e)
                        f"ex2.approx.ftz.f32 x{i}, x{i}; add.f32 x{i}, x{i}, 0f3F800000;",
                        f"rcp.approx.ftz.f32 x{i}, x{i}; mul.f32 x{i}, x{i}, ${4 + h};",
                        f"mul.f32 x{i}, x{i}, sum{4 * q + 2 * h + i};",
                    ]
                lines.append(
                    f"cvt.rn.bf16x2.f32 e0, x1, x0; @live{h} st.global.u32 [${h}+{16 * q}], e0;"
                )
    return (
        f"{{ .reg .pred live0, live1; .reg .b32 g<{2 * batch}>, e<2>; .reg .f32 x<2>; "
        f"{' '.join(lines)} }}"
    )


@cuda.jit(device=True, inline="always")
def value_descriptor(at):
    """Descriptor of a tile of V at a shared address, dims innermost: panels of 64 dims 8,192 bytes
    apart, eight tokens 1,024."""
    address = int64(at >> 4) & int64(0x3FFF)
    return address | (int64(_PANEL >> 4) << 16) | (int64(64) << 32) | (int64(1) << 62)
