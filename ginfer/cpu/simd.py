"""Vectors of 16 float32 lanes as LLVM IR: unpack of tile fragments, FMA blocks, SiLU.

Every function takes int64 arguments (addresses are in bytes) and is inlined into its Numba caller.
The IR is generic: LLVM lowers it to what the host has. Sums are explicit chains of explicit fma,
so no choice made here (registers per block, vector width) changes a bit of a result.

Columns of K are visited in fragment order: the k16 steps of a tile in turn, in each of them t =
0..3, of each t the columns 2t, 2t + 1, 2t + 8, 2t + 9. A sum of a slice is p = fma(w, x, p) in that
order from zero; then acc = fma(scale, p, acc). An unpacked slice is [column][ROWS] float32 in that
order: per column one vector for each row tile of 16 rows.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from ginfer.formats import TILE_NBYTES

ROW_TILES = 4  # row tiles of a unit
ROWS = 16 * ROW_TILES

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI, _VF = ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)
_I8P = ir.IntType(8).as_pointer()
_VH = ir.VectorType(ir.IntType(16), 16)
_FRAGMENT_COLUMNS = [2 * t + i for t in range(4) for i in (0, 1, 8, 9)]
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


def _prefetch(b, address, nbytes):
    kind = ir.FunctionType(ir.VoidType(), (_I8P, _I32, _I32, _I32))
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for offset in range(0, nbytes, 64):
        at = b.inttoptr(b.add(address, _I64(offset)), _I8P)
        b.call(function, (at, _I32(0), _I32(3), _I32(1)))


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


def _q4_columns(b, source):
    """Codes - 8 of a row tile, 512 B at source. Rows 8..15 are 16 times too large, which their
    scale takes back: their nibbles stay where they are."""
    low, high = _words_by_column(b, [_load(b, source, 64 * g, _VI) for g in range(8)])
    mask, magic = _ints(*[0xF] * 8, *[0xF0] * 8), _ints(_MAGIC)
    zero = _floats(*[2.0**23 + 8] * 8, *[2.0**23 + 128] * 8)
    for j in range(4):
        for t in range(4):
            lanes = [*range(4 * t, 4 * t + 4), *range(16 + 4 * t, 20 + 4 * t)] * 2
            words = _shuffle(b, low[j], high[j], lanes)
            for shift in (0, 16, 8, 24):
                nibble = b.and_(b.lshr(words, _ints(shift)), mask)
                yield b.fsub(b.bitcast(b.or_(nibble, magic), _VF), zero)


def _bf16_columns(b, source):
    """A k16 step of a row tile, 512 B at source."""
    low, high = _words_by_column(b, [_load(b, source, 64 * g, _VI) for g in range(8)])
    for t in range(4):
        lanes = [*range(4 * t, 4 * t + 4), *range(16 + 4 * t, 20 + 4 * t)]
        for q in (0, 2):
            first, second = (_shuffle(b, low[i], high[i], lanes) for i in (q, q + 1))
            words = _shuffle(b, first, second, list(range(16)))
            yield b.bitcast(b.shl(words, _ints(16)), _VF)
            yield b.bitcast(b.and_(words, _ints(0xFFFF0000)), _VF)


def _w8_columns(b, source):
    """A k16 step of a row tile, 256 B at source."""
    v = [_load(b, source, 64 * m, _VI) for m in range(4)]  # v[m]: words 8 (g % 2) + 2 t + h
    for quarter in range(2):
        lanes = [4 * quarter + i + g for i in range(4) for g in (0, 8, 16, 24)]
        low, high = _shuffle(b, v[0], v[1], lanes), _shuffle(b, v[2], v[3], lanes)
        for i in range(4):
            lanes8 = [*range(4 * i, 4 * i + 4), *range(16 + 4 * i, 20 + 4 * i)] * 2
            words = _shuffle(b, low, high, lanes8)
            for shifts in ((24, 8), (16, 0)):
                left = _ints(*[shifts[0]] * 8, *[shifts[1]] * 8)
                yield b.sitofp(b.ashr(b.shl(words, left), _ints(24)), _VF)


def _unpack(columns, nbytes, ahead):
    """Vectors of a row tile (or a k16 step of it) to an unpacked slice.

    target: its lanes of the first column. `nbytes` at source are read, those `ahead` prefetched.
    """

    @_emitted
    def unpack(b, source, target):
        _prefetch(b, b.add(source, _I64(ahead)), nbytes)
        for i, value in enumerate(columns(b, source)):
            _store(b, value, target, i * 4 * ROWS)

    return unpack


unpack_q4 = _unpack(_q4_columns, 512, TILE_NBYTES["Q4G64_F16S"])
unpack_bf16 = _unpack(_bf16_columns, 512, TILE_NBYTES["BF16"])
unpack_w8 = _unpack(_w8_columns, 256, TILE_NBYTES["W8G32_F16S"])


def _dot_pair(columns, steps, step_nbytes, tile_nbytes, ahead):
    """acc += scale * sum of a slice, for two row tiles and one column, nothing unpacked to memory.

    acc, scale: [2][16]; source: codes of the first row tile; x: the column's part of the slice.
    `columns` yields the vectors of one of `steps` parts of the slice; the same codes of the tile
    `ahead` bytes on are prefetched.
    """

    @_emitted
    def dot_pair(b, acc, source, scale, x):
        def step(i, p):
            code = b.add(source, b.mul(i, _I64(step_nbytes)))
            x_step, p = b.add(x, b.mul(i, _I64(64))), list(p)
            for row_tile in (0, tile_nbytes):
                _prefetch(b, b.add(code, _I64(row_tile + ahead)), step_nbytes)
            pair = zip(columns(b, code), columns(b, b.add(code, _I64(tile_nbytes))))
            for n, values in enumerate(pair):
                k = _FRAGMENT_COLUMNS[n % 16] + n // 16 * 16
                value = _splat(b, _load(b, x_step, 4 * k, _F32))
                p = [_fma(b, v, value, q) for v, q in zip(values, p)]
            return p

        p = [_floats(0.0)] * 2
        p = step(_I64(0), p) if steps == 1 else _loop(b, _I64(steps), p, step)
        for r in range(2):
            total = _fma(b, _load(b, scale, 64 * r), p[r], _load(b, acc, 64 * r))
            _store(b, total, acc, 64 * r)

    return dot_pair


dot_pair_q4 = _dot_pair(_q4_columns, 1, 512, 512, TILE_NBYTES["Q4G64_F16S"])
dot_pair_bf16 = _dot_pair(_bf16_columns, 4, 512, 2048, TILE_NBYTES["BF16"])
dot_pair_w8 = _dot_pair(_w8_columns, 2, 256, 1024, TILE_NBYTES["W8G32_F16S"])


def _f16_to_f32(b, half):
    """16 halves as zero-extended integers to float32, exact; without float32 subnormals on the way,
    which are slow. Infinities and NaN are not expected."""
    magnitude = b.and_(half, _ints(0x7FFF))
    normal = b.bitcast(b.add(b.shl(magnitude, _ints(13)), _ints(112 << 23)), _VF)
    subnormal = b.fmul(b.sitofp(magnitude, _VF), _floats(2.0**-24))
    value = b.select(b.icmp_unsigned("<", magnitude, _ints(0x400)), subnormal, normal)
    sign = b.shl(b.and_(half, _ints(0x8000)), _ints(16))
    return b.bitcast(b.or_(b.bitcast(value, _VI), sign), _VF)


def _scales(f16, second):
    """Scales of a row tile, 32 B at source, pairs (row g, row g + 8), to a vector of 16 rows;
    `second` multiplies those of rows 8..15."""

    @_emitted
    def scales(b, source, target):
        pairs = _load(b, source, 0, _VH)
        bits = b.zext(_shuffle(b, pairs, pairs, [*range(0, 16, 2), *range(1, 16, 2)]), _VI)
        values = _f16_to_f32(b, bits) if f16 else b.bitcast(b.shl(bits, _ints(16)), _VF)
        _store(b, b.fmul(values, _floats(*[1.0] * 8, *[second] * 8)), target)

    return scales


q4_scales_f16 = _scales(True, 1 / 16)
q4_scales_bf16 = _scales(False, 1 / 16)
w8_scales_f16 = _scales(True, 1.0)


def _fma_block(columns):
    """acc[c] += scale * sum of a slice, for one unit of rows and a fixed number of columns.

    acc: [columns][ROWS]; w: unpacked slice of 4 * count; scale: [ROWS]; x: [columns] rows of the
    slice, x_stride bytes apart.
    """

    @_emitted
    def fma_block(b, acc, w, scale, x, x_stride, count):
        at = [b.add(x, b.mul(x_stride, _I64(c))) for c in range(columns)]
        height = next(h for h in (4, 2, 1) if h * columns <= _ACCUMULATORS)
        for first in range(0, ROW_TILES, height):
            offsets = [64 * r for r in range(first, first + height)]

            def step(i, p, offsets=offsets):
                row = b.add(w, b.mul(i, _I64(16 * ROWS)))
                k = b.add(b.shl(b.lshr(i, _I64(2)), _I64(6)), b.shl(b.and_(i, _I64(3)), _I64(3)))
                for n, column in enumerate(_FRAGMENT_COLUMNS[:4]):
                    rows = [_load(b, row, 4 * ROWS * n + offset) for offset in offsets]
                    new = []
                    for c in range(columns):
                        value = _splat(b, _load(b, b.add(at[c], k), 4 * column, _F32))
                        new += [_fma(b, u, value, p[c * height + r]) for r, u in enumerate(rows)]
                    p = new
                return p

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
