"""Vectors of 16 float32 lanes as LLVM IR: unpack of tile fragments, FMA blocks, SiLU.

Every function takes int64 arguments (addresses are in bytes) and is inlined into its Numba caller.
The IR is generic: LLVM lowers it to what the host has. Sums are explicit chains of explicit fma,
so no choice made here (registers per block, vector width) changes a bit of a result.

An unpacked slice is [k][ROWS] float32: per k one vector for each row tile of 16 rows.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

ROW_TILES = 4  # row tiles of a unit
ROWS = 16 * ROW_TILES

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI, _VF = ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)
_VH = ir.VectorType(ir.IntType(16), 16)
_MAGIC = 0x4B000000  # bits of 2^23: an integer ored into its low bits is added to it
_FEATURES = getattr(config, "CPU_FEATURES", None) or get_host_cpu_features()
_ACCUMULATORS = 24 if "+avx512f" in _FEATURES else 6  # vectors of 16 lanes held in registers


def _emitted(emit: Any) -> Any:
    """Make a Numba intrinsic of int64 arguments from a function that emits IR."""

    def typed(context: Any, *arguments: Any) -> Any:
        def codegen(context, builder, signature, values):
            result = emit(builder, *values)
            return context.get_dummy_value() if result is None else result

        return types.void(*(types.int64,) * len(arguments)), codegen

    cast("Any", typed).__signature__ = inspect.signature(emit)  # Numba folds call arguments by it
    return intrinsic(typed)


def _ints(*values):
    return ir.Constant(_VI, [v & 0xFFFFFFFF for v in values * (16 // len(values))])


def _floats(*values):
    return ir.Constant(_VF, list(values * (16 // len(values))))


def _pointer(b, address, offset, kind):
    return b.inttoptr(b.add(address, _I64(offset)), kind.as_pointer())


def _load(b, address, offset=0, kind=_VF):
    return b.load(_pointer(b, address, offset, kind), align=2 if kind is _VH else 4)


def _store(b, value, address, offset=0):
    b.store(value, _pointer(b, address, offset, value.type), align=4)


def _shuffle(b, first, second, lanes):
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _splat(b, scalar):
    undefined = ir.Constant(_VF, ir.Undefined)
    return _shuffle(b, b.insert_element(undefined, scalar, _I32(0)), undefined, [0] * 16)


def _fma(b, x, y, z):
    kind = ir.FunctionType(_VF, (_VF, _VF, _VF))
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v16f32"), (x, y, z))


def _loop(b, count, carried, body):
    """for i in range(count): carried = body(i, carried); count > 0; returns the last `carried`."""
    before, block = b.block, b.append_basic_block("k")
    after = b.append_basic_block("done")
    b.branch(block)
    b.position_at_end(block)
    i = b.phi(_I64)
    phis = [b.phi(v.type) for v in carried]
    new, following = body(i, phis), b.add(i, _I64(1))
    for phi, start, value in zip([i, *phis], [_I64(0), *carried], [following, *new]):
        phi.add_incoming(start, before)
        phi.add_incoming(value, block)
    b.cbranch(b.icmp_signed("<", following, count), block, after)
    b.position_at_end(after)
    return new


# The fragments of 16 rows x 64 columns are transposed to vectors of 16 rows. Lane = 4 g + t holds
# rows g and g + 8; what comes first is a transpose of the 32-bit words of the 8 values of g.


def _words_by_column(b, v):
    """v: 8 vectors, v[g] = words 4 t + q. Returns (low, high): low[q] = words (t, g = 0..3),
    high[q] = (t, g = 4..7)."""
    low32 = [4 * t + i for t in range(4) for i in (0, 16, 1, 17)]
    high32 = [4 * t + i for t in range(4) for i in (2, 18, 3, 19)]
    low64 = [4 * t + i for t in range(4) for i in (0, 1, 16, 17)]
    high64 = [4 * t + i for t in range(4) for i in (2, 3, 18, 19)]
    halves = []
    for g in (0, 4):
        columns = []
        for pair in (low32, high32):
            a, c = _shuffle(b, v[g], v[g + 1], pair), _shuffle(b, v[g + 2], v[g + 3], pair)
            columns += [_shuffle(b, a, c, low64), _shuffle(b, a, c, high64)]
        halves.append(columns)
    return halves


@_emitted
def unpack_q4(b, source, target):
    """Codes - 8 of a row tile, 512 B at source; rows 8..15 are 16 times too large, which their
    scale takes back (their nibbles stay where they are)."""
    low, high = _words_by_column(b, [_load(b, source, 64 * g, _VI) for g in range(8)])
    mask, magic = _ints(*[0xF] * 8, *[0xF0] * 8), _ints(_MAGIC)
    zero = _floats(*[2.0**23 + 8] * 8, *[2.0**23 + 128] * 8)
    for j in range(4):
        for t in range(4):
            lanes = [*range(4 * t, 4 * t + 4), *range(16 + 4 * t, 20 + 4 * t)] * 2
            words = _shuffle(b, low[j], high[j], lanes)
            for column, shift in ((0, 0), (1, 16), (8, 8), (9, 24)):
                nibble = b.and_(b.lshr(words, _ints(shift)), mask)
                value = b.fsub(b.bitcast(b.or_(nibble, magic), _VF), zero)
                _store(b, value, target, (16 * j + 2 * t + column) * 4 * ROWS)


@_emitted
def unpack_bf16(b, source, target):
    """A k16 step of a row tile, 512 B at source, to 16 columns."""
    halves = _words_by_column(b, [_load(b, source, 64 * g, _VI) for g in range(8)])
    for h in range(2):
        for t in range(4):
            lanes = [*range(4 * t, 4 * t + 4), *range(16 + 4 * t, 20 + 4 * t)]
            first, second = (
                _shuffle(b, halves[0][q], halves[1][q], lanes) for q in (2 * h, 2 * h + 1)
            )
            words = _shuffle(b, first, second, list(range(16)))
            for e, value in enumerate((b.shl(words, _ints(16)), b.and_(words, _ints(0xFFFF0000)))):
                _store(b, b.bitcast(value, _VF), target, (2 * t + 8 * h + e) * 4 * ROWS)


@_emitted
def unpack_w8(b, source, target):
    """A k16 step of a row tile, 256 B at source, to 16 columns."""
    v = [_load(b, source, 64 * m, _VI) for m in range(4)]  # v[m]: words 8 (g % 2) + 2 t + h
    for quarter in range(2):
        lanes = [4 * quarter + i + g for i in range(4) for g in (0, 8, 16, 24)]
        low, high = _shuffle(b, v[0], v[1], lanes), _shuffle(b, v[2], v[3], lanes)
        for i in range(4):
            t, h = divmod(4 * quarter + i, 2)
            lanes8 = [*range(4 * i, 4 * i + 4), *range(16 + 4 * i, 20 + 4 * i)] * 2
            words = _shuffle(b, low, high, lanes8)
            for e, shifts in enumerate(((24, 8), (16, 0))):
                left = _ints(*[shifts[0]] * 8, *[shifts[1]] * 8)
                value = b.ashr(b.shl(words, left), _ints(24))
                _store(b, b.sitofp(value, _VF), target, (2 * t + 8 * h + e) * 4 * ROWS)


def _scales(f16, second):
    """Scales of a row tile, 32 B at source, pairs (row g, row g + 8), to a vector of 16 rows.

    `second` multiplies those of rows 8..15. F16 bits moved to their float32 place are too small
    by 2^112, subnormals included.
    """

    @_emitted
    def scales(b, source, target):
        pairs = _load(b, source, 0, _VH)
        bits = b.zext(_shuffle(b, pairs, pairs, [*range(0, 16, 2), *range(1, 16, 2)]), _VI)
        if f16:
            sign = b.shl(b.and_(bits, _ints(0x8000)), _ints(16))
            bits = b.or_(sign, b.shl(b.and_(bits, _ints(0x7FFF)), _ints(13)))
        else:
            bits = b.shl(bits, _ints(16))
        factor = 2.0**112 if f16 else 1.0
        factors = _floats(*[factor] * 8, *[factor * second] * 8)
        _store(b, b.fmul(b.bitcast(bits, _VF), factors), target)

    return scales


q4_scales_f16 = _scales(True, 1 / 16)
q4_scales_bf16 = _scales(False, 1 / 16)
w8_scales_f16 = _scales(True, 1.0)


def _fma_block(columns):
    """acc[c] += scale * sum of a slice, for one unit of rows and a fixed number of columns.

    acc: [columns][ROWS]; w: unpacked slice; scale: [ROWS]; x: [columns] rows of `count` float32,
    x_stride bytes apart. p = fma(w, x, p) in ascending k from zero, then acc = fma(scale, p, acc).
    """

    @_emitted
    def fma_block(b, acc, w, scale, x, x_stride, count):
        at = [b.add(x, b.mul(x_stride, _I64(c))) for c in range(columns)]
        height = max(1, min(ROW_TILES, _ACCUMULATORS // columns))
        for first in range(0, ROW_TILES, height):
            offsets = [64 * r for r in range(first, first + height)]

            def step(k, p, offsets=offsets):
                row = b.add(w, b.mul(k, _I64(4 * ROWS)))
                rows = [_load(b, row, offset) for offset in offsets]
                out = []
                for c in range(columns):
                    value = _splat(b, _load(b, b.add(at[c], b.shl(k, _I64(2))), 0, _F32))
                    out += [_fma(b, u, value, p[c * height + r]) for r, u in enumerate(rows)]
                return out

            p = _loop(b, count, [_floats(0.0)] * (columns * height), step)
            for c in range(columns):
                for r, offset in enumerate(offsets):
                    old = _load(b, acc, 4 * ROWS * c + offset)
                    new = _fma(b, _load(b, scale, offset), p[c * height + r], old)
                    _store(b, new, acc, 4 * ROWS * c + offset)

    return fma_block


fma_block_1, fma_block_2, fma_block_4, fma_block_6 = (_fma_block(c) for c in (1, 2, 4, 6))


def _exp(b, x):
    """exp(x) of finite lanes: x = n ln 2 + r, polynomial of degree 7 in r, exponent added as an
    integer. x is clamped to [-87, 88]."""
    x = b.select(b.fcmp_ordered("<", x, _floats(-87.0)), _floats(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, _floats(88.0)), _floats(88.0), x)
    round_magic = _floats(1.5 * 2.0**23)
    n = b.fsub(_fma(b, x, _floats(1.44269504), round_magic), round_magic)
    r = _fma(b, n, _floats(-0.693359375), x)
    r = _fma(b, n, _floats(2.12194440e-4), r)
    y = _floats(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        y = _fma(b, y, r, _floats(1 / divisor))
    exponent = b.shl(b.fptosi(n, _VI), _ints(23))
    return b.bitcast(b.add(b.bitcast(y, _VI), exponent), _VF)


def scratch(nbytes):
    """A function () -> address of `nbytes` of the caller's stack, aligned to a vector."""

    @intrinsic
    def allocate(context):
        def codegen(context, builder, signature, values):
            with builder.goto_entry_block():  # not filled, unlike cgutils.alloca_once
                memory = builder.alloca(ir.ArrayType(_F32, nbytes // 4))
            memory.align = 64
            return builder.ptrtoint(memory, _I64)

        return types.int64(), codegen

    return allocate


def _fill(value):
    @_emitted
    def fill(b, target):
        _store(b, _floats(value), target)

    return fill


zero_rows, one_rows = _fill(0.0), _fill(1.0)


def _store_rows(kind):
    @_emitted
    def store(b, target, source):
        _store(b, _load(b, source, 0, kind), target)

    return store


def _add_rows(kind):
    @_emitted
    def add(b, target, source):
        _store(b, b.fadd(_load(b, target, 0, kind), _load(b, source, 0, kind)), target)

    return add


store_rows, store_row = _store_rows(_VF), _store_rows(_F32)  # 16 floats, or one
add_rows, add_row = _add_rows(_VF), _add_rows(_F32)  # target += source


@_emitted
def silu_up_rows(b, target, gate):
    """target[0:16] = silu(gate[0:16]) * up, where up = gate[16:32]."""
    x = _load(b, gate)
    below = b.fadd(_floats(1.0), _exp(b, b.fneg(x)))
    _store(b, b.fmul(b.fdiv(x, below), _load(b, gate, 64)), target)
