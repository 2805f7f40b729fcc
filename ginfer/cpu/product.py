"""Dot and matrix products of float32 with a written order of operations, and exact scalar pieces.

A result is a function of its operands alone: products are chains of fused multiply-adds whose
order is stated here, whatever the compiler vectorises or unrolls. Nothing uses fast-math.

Legend: M rows, N columns, K depth of a product; offsets and strides count elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

LANES = 16
intrinsic: Any = _intrinsic

# Functions that kernels call: without an entry for Python, and without the check for division by
# zero that would keep loops from being vectorised.
_options: Any = {
    "cache": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
device: Any = njit(**_options)


@intrinsic
def keep_apart(typingctx):
    """Forbid LLVM to inline the calling function: bodies that grow every caller's compilation."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen


_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_bits(typingctx, x):
    """The bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, x):
    """The float32 of 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def mul_shift(typingctx, a, b, c, shift):
    """(a * b + c) >> shift in 128 bits, the low 64 bits of it; all uint64."""

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        a, b, c, shift = (builder.zext(v, wide) for v in args)
        total = builder.add(builder.mul(a, b), c)
        return builder.trunc(builder.lshr(total, shift), _I64)

    u64 = types.uint64
    return u64(u64, u64, u64, u64), codegen


def _address(context, builder, array_type, value, offset):
    data = context.make_array(array_type)(context, builder, value).data
    return builder.gep(data, [offset])


def _load(builder, pointer, offset):
    where = builder.gep(pointer, [offset])
    return builder.load(builder.bitcast(where, _VEC.as_pointer()), align=4)


def _store(builder, value, pointer, offset):
    where = builder.gep(pointer, [offset])
    builder.store(value, builder.bitcast(where, _VEC.as_pointer()), align=4)


def _splat(builder, scalar):
    empty = ir.Constant(_VEC, ir.Undefined)
    mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(empty, scalar, _I32(0)), empty, mask)


def _fold(builder, vector, combine):
    """Combine the lanes: halves with each other until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        masks = [
            ir.Constant(ir.VectorType(_I32, width), list(range(lo, lo + width)))
            for lo in (0, width)
        ]
        low, high = (builder.shuffle_vector(vector, vector, mask) for mask in masks)
        vector = combine(builder, low, high)
    return builder.extract_element(vector, _I32(0))


def _vector_fma(builder, a, b, c):
    kind = ir.FunctionType(_VEC, [_VEC] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


@intrinsic
def dot(typingctx, a, ao, b, bo, n):
    """sum_i a[ao + i] * b[bo + i]: 16 lane chains in ascending order, their tree, then the tail."""

    def codegen(context, builder, signature, args):
        pa = _address(context, builder, signature.args[0], args[0], args[1])
        pb = _address(context, builder, signature.args[2], args[2], args[3])
        whole = builder.and_(args[4], _I64(-LANES))
        lanes = cgutils.alloca_once_value(builder, ir.Constant(_VEC, [_F32(0.0)] * LANES))
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(LANES), intp=_I64) as (i, _):
            x, y = _load(builder, pa, i), _load(builder, pb, i)
            builder.store(_vector_fma(builder, x, y, builder.load(lanes)), lanes)
        acc = cgutils.alloca_once_value(
            builder, _fold(builder, builder.load(lanes), ir.IRBuilder.fadd)
        )
        with cgutils.for_range_slice(builder, whole, args[4], _I64(1), intp=_I64) as (i, _):
            x, y = (builder.load(builder.gep(p, [i])) for p in (pa, pb))
            builder.store(builder.fma(x, y, builder.load(acc)), acc)
        return builder.load(acc)

    return types.float32(a, types.int64, b, types.int64, types.int64), codegen


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def highest(typingctx, a, ao, n):
    """The largest of n elements, n a positive multiple of 16. NaN may be passed over."""

    def codegen(context, builder, signature, args):
        pa = _address(context, builder, signature.args[0], args[0], args[1])
        lanes = cgutils.alloca_once_value(builder, _load(builder, pa, _I64(0)))
        with cgutils.for_range_slice(builder, _I64(0), args[2], _I64(LANES), intp=_I64) as (i, _):
            builder.store(_larger(builder, _load(builder, pa, i), builder.load(lanes)), lanes)
        return _fold(builder, builder.load(lanes), _larger)

    return types.float32(a, types.int64, types.int64), codegen


def _load_bf16(builder, pointer, offset):
    """16 BF16 as float32."""
    half = ir.VectorType(ir.IntType(16), LANES)
    word = ir.VectorType(_I32, LANES)
    where = builder.bitcast(builder.gep(pointer, [offset]), half.as_pointer())
    bits = builder.zext(builder.load(where, align=2), word)
    return builder.bitcast(builder.shl(bits, ir.Constant(word, [16] * LANES)), _VEC)


def _product(rows, vectors, load=_load):
    """Intrinsic for `rows` rows and 16 * `vectors` columns of `multiply_add`, in registers."""

    @intrinsic
    def block(typingctx, c, co, ldc, a, ao, row_step, depth_step, b, bo, ldb, K):
        def codegen(context, builder, signature, args):
            c, co, ldc, a, ao, row_step, depth_step, b, bo, ldb, K = args
            pc = _address(context, builder, signature.args[0], c, co)
            pa = _address(context, builder, signature.args[3], a, ao)
            pb = _address(context, builder, signature.args[7], b, bo)
            columns = [_I64(j * LANES) for j in range(vectors)]
            at = [[builder.add(builder.mul(ldc, _I64(i)), j) for j in columns] for i in range(rows)]
            acc = [
                [cgutils.alloca_once_value(builder, _load(builder, pc, o)) for o in row]
                for row in at
            ]
            with cgutils.for_range(builder, K, intp=_I64) as loop:
                base = builder.mul(loop.index, ldb)
                right = [load(builder, pb, builder.add(base, j)) for j in columns]
                depth = builder.mul(loop.index, depth_step)
                for i in range(rows):
                    where = builder.add(builder.mul(row_step, _I64(i)), depth)
                    left = _splat(builder, builder.load(builder.gep(pa, [where])))
                    for vector, slot in zip(right, acc[i]):
                        total = _vector_fma(builder, left, vector, builder.load(slot))
                        builder.store(total, slot)
            for row, slots in zip(at, acc):
                for offset, slot in zip(row, slots):
                    _store(builder, builder.load(slot), pc, offset)
            return context.get_dummy_value()

        i64 = types.int64
        return types.none(c, i64, i64, a, i64, i64, i64, b, i64, i64, i64), codegen

    return block


_block_4x2, _block_2x4, _block_1x8 = _product(4, 2), _product(2, 4), _product(1, 8)
_block_1x2 = _product(1, 2)
_bf16_1x4, _bf16_2x4, _bf16_3x4, _bf16_4x4, _bf16_6x4 = (
    _product(m, 4, _load_bf16) for m in (1, 2, 3, 4, 6)
)


@intrinsic
def add_outer(typingctx, s, so, lds, x, xo, y, yo, decay, K):
    """S[k, j] = fma(x[k], y[j], decay * S[k, j]) for k < K and 64 columns j."""

    def codegen(context, builder, signature, args):
        s, so, lds, x, xo, y, yo, decay, K = args
        ps = _address(context, builder, signature.args[0], s, so)
        px = _address(context, builder, signature.args[3], x, xo)
        py = _address(context, builder, signature.args[5], y, yo)
        columns = [_I64(j) for j in range(0, 64, LANES)]
        right = [_load(builder, py, j) for j in columns]
        factor = _splat(builder, decay)
        with cgutils.for_range(builder, K, intp=_I64) as loop:
            left = _splat(builder, builder.load(builder.gep(px, [loop.index])))
            base = builder.mul(loop.index, lds)
            for j, vector in zip(columns, right):
                at = builder.add(base, j)
                kept = builder.fmul(factor, _load(builder, ps, at))
                _store(builder, _vector_fma(builder, left, vector, kept), ps, at)
        return context.get_dummy_value()

    i64 = types.int64
    return types.none(s, i64, i64, x, i64, y, i64, types.float32, i64), codegen


@device
def multiply_add(c, co, ldc, a, ao, row_step, depth_step, b, bo, ldb, M, N, K):
    """C[i, j] = fma(A[i, k], B[k, j], C[i, j]) for k ascending; M x N x K, float32.

    C at c[co + i * ldc + j], A at a[ao + i * row_step + k * depth_step], B at
    b[bo + k * ldb + j], in flat arrays. An element's value depends neither on M nor on N.
    """
    keep_apart()
    rs, ds = row_step, depth_step
    done = 0
    if M == 1:
        for j in range(0, N - 127, 128):
            _block_1x8(c, co + j, ldc, a, ao, rs, ds, b, bo + j, ldb, K)
            done = j + 128
    elif M == 2:
        for j in range(0, N - 63, 64):
            _block_2x4(c, co + j, ldc, a, ao, rs, ds, b, bo + j, ldb, K)
            done = j + 64
    for j in range(done, N - 31, 32):
        i = 0
        while i + 4 <= M:
            _block_4x2(c, co + i * ldc + j, ldc, a, ao + i * rs, rs, ds, b, bo + j, ldb, K)
            i += 4
        while i < M:
            _block_1x2(c, co + i * ldc + j, ldc, a, ao + i * rs, rs, ds, b, bo + j, ldb, K)
            i += 1
        done = j + 32
    for i in range(M):
        for k in range(K):
            x = a[ao + i * rs + k * ds]
            for j in range(done, N):
                c[co + i * ldc + j] = fma(x, b[bo + k * ldb + j], c[co + i * ldc + j])


@device
def multiply_add_bf16(c, co, ldc, a, ao, row_step, b, ldb, M, N, K):
    """`multiply_add` with B in BF16 (uint16, from its first element) and closed rows of A: B is
    converted in registers, for up to six rows at once, which costs less than an unpacked copy."""
    keep_apart()
    whole = N // 64 * 64
    for j in range(0, whole, 64):
        for i in range(0, M, 6):
            at, ai, m = co + i * ldc + j, ao + i * row_step, M - i
            if m >= 6:
                _bf16_6x4(c, at, ldc, a, ai, row_step, 1, b, j, ldb, K)
                continue
            if m >= 4:
                _bf16_4x4(c, at, ldc, a, ai, row_step, 1, b, j, ldb, K)
                at, ai, m = at + 4 * ldc, ai + 4 * row_step, m - 4
            if m == 3:
                _bf16_3x4(c, at, ldc, a, ai, row_step, 1, b, j, ldb, K)
            elif m == 2:
                _bf16_2x4(c, at, ldc, a, ai, row_step, 1, b, j, ldb, K)
            elif m == 1:
                _bf16_1x4(c, at, ldc, a, ai, row_step, 1, b, j, ldb, K)
    for i in range(M):
        for k in range(K):
            for j in range(whole, N):
                y = bits_float(np.uint32(np.uint32(b[k * ldb + j]) << np.uint32(16)))
                at = co + i * ldc + j
                c[at] = fma(a[ao + i * row_step + k], y, c[at])


@device
def multiply_add_lower(c, co, ldc, a, ao, row_step, b, bo, ldb, M, N, first, slope, limit):
    """`multiply_add` where row i has depth min(first + slope * i, limit) >= 0; A rows lie closed.

    Rows are finished in ascending order, so C may be B: a triangular solve with first 0, slope 1.
    """
    keep_apart()
    for i0 in range(0, M, 8):
        m = min(8, M - i0)
        shared = min(first + slope * i0, limit)
        multiply_add(
            c, co + i0 * ldc, ldc, a, ao + i0 * row_step, row_step, 1, b, bo, ldb, m, N, shared
        )
        for i in range(i0, i0 + m):
            rest = min(first + slope * i, limit) - shared
            if rest > 0:
                at = ao + i * row_step + shared
                multiply_add(
                    c, co + i * ldc, ldc, a, at, 0, 1, b, bo + shared * ldb, ldb, 1, N, rest
                )
