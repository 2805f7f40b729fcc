"""Inline PTX as numba.cuda intrinsics: one factory, one line per instruction.

    mma = ptx_op("mma.sync... {$0,$1,$2,$3}, {$4,...};", out="ffff", args="rrrrrrffff")

Constraint letters follow PTX inline assembly: r = 32-bit, l = 64-bit, h = 16-bit integer,
f = float32. One output is returned as a scalar, several as a tuple. `effects=False` lets LLVM move
or merge the instruction (pure arithmetic); memory operations and barriers keep the default and
clobber memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

_LLVM = {"r": ir.IntType(32), "l": ir.IntType(64), "h": ir.IntType(16), "f": ir.FloatType()}
_NUMBA = {"r": types.uint32, "l": types.int64, "h": types.uint16, "f": types.float32}


def ptx_op(text: str, out: str = "", args: str = "", *, effects: bool = True) -> Any:
    """Return an intrinsic that emits `text` ($0.. are the outputs first, then the arguments)."""
    if len(set(out)) > 1:
        raise ValueError("mixed output kinds are not supported")
    constraints = ",".join([*(f"={c}" for c in out), *args, *(["~{memory}"] if effects else [])])
    llvm_args = [_LLVM[c] for c in args]
    if not out:
        llvm_ret, numba_ret = ir.VoidType(), types.void
    elif len(out) == 1:
        llvm_ret, numba_ret = _LLVM[out], _NUMBA[out]
    else:
        llvm_ret = ir.LiteralStructType([_LLVM[c] for c in out])
        numba_ret = types.UniTuple(_NUMBA[out[0]], len(out))
    signature = numba_ret(*[_NUMBA[c] for c in args])

    def codegen(context, builder, sig, values):
        function = ir.FunctionType(llvm_ret, llvm_args)
        asm = ir.InlineAsm(function, text, constraints, side_effect=effects)
        result = builder.call(asm, values)
        if not out:
            return context.get_dummy_value()
        if len(out) == 1:
            return result
        parts = [builder.extract_value(result, i) for i in range(len(out))]
        return cgutils.pack_array(builder, parts)

    # the Python signature of an intrinsic must spell its arguments out
    names = ", ".join(["typingctx", *(f"a{i}" for i in range(len(args)))])
    namespace = {"typed": lambda: (signature, codegen)}
    exec(f"def op({names}):\n    return typed()\n", namespace)
    return intrinsic(namespace["op"])


@intrinsic
def shared_address(typingctx, array):
    """32-bit shared-window address of a cuda.shared.array, as ldmatrix and bulk copies take it."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        asm = ir.InlineAsm(
            ir.FunctionType(ir.IntType(32), [ir.IntType(64)]),
            "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }",
            "=r,l",
        )
        return builder.call(asm, [builder.ptrtoint(data, ir.IntType(64))])

    return types.uint32(array), codegen


# Loads and stores. Plain global loads are not .nc: an overlapping previous kernel may still write.
ld_global_u16 = ptx_op("ld.global.u16 $0, [$1];", "h", "l")
ld_global_u32 = ptx_op("ld.global.u32 $0, [$1];", "r", "l")
ld_global_f32 = ptx_op("ld.global.f32 $0, [$1];", "f", "l")
ld_global_u32x4 = ptx_op("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
ld_global_stream_u32x4 = ptx_op(
    "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "l"
)
ld_shared_u32 = ptx_op("ld.shared.u32 $0, [$1];", "r", "r")
ld_shared_u32x2 = ptx_op("ld.shared.v2.u32 {$0,$1}, [$2];", "rr", "r")
ld_shared_u32x4 = ptx_op("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
ld_shared_f32 = ptx_op("ld.shared.f32 $0, [$1];", "f", "r")
st_shared_u32 = ptx_op("st.shared.u32 [$0], $1;", "", "rr")
st_shared_u32x4 = ptx_op("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", "", "rrrrr")
st_shared_u16 = ptx_op("st.shared.u16 [$0], $1;", "", "rh")
st_shared_f32 = ptx_op("st.shared.f32 [$0], $1;", "", "rf")
st_global_u16 = ptx_op("st.global.u16 [$0], $1;", "", "lh")
st_global_u32 = ptx_op("st.global.u32 [$0], $1;", "", "lr")
st_global_f32 = ptx_op("st.global.f32 [$0], $1;", "", "lf")
st_global_u32x4 = ptx_op("st.global.v4.u32 [$0], {$1,$2,$3,$4};", "", "lrrrr")
ld_global_f32x4 = ptx_op("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "l")
st_global_f32x4 = ptx_op("st.global.v4.f32 [$0], {$1,$2,$3,$4};", "", "lffff")
red_global_bf16 = ptx_op("red.global.add.noftz.bf16 [$0], $1;", "", "lh")
red_global_bf16x8 = ptx_op(  # sm_90
    "red.global.add.noftz.v4.bf16x2 [$0], {$1,$2,$3,$4};", "", "lrrrr"
)
ldmatrix_x4 = ptx_op("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r")
ldmatrix_x2 = ptx_op("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0,$1}, [$2];", "rr", "r")

# Arithmetic.
f32_from_bits = ptx_op("mov.b32 $0, $1;", "f", "r", effects=False)
bits_from_f32 = ptx_op("mov.b32 $0, $1;", "r", "f", effects=False)
f32_from_f16 = ptx_op("cvt.f32.f16 $0, $1;", "f", "h", effects=False)
f16_from_f32 = ptx_op("cvt.rn.f16.f32 $0, $1;", "h", "f", effects=False)
bf16_from_f32 = ptx_op("cvt.rn.bf16.f32 $0, $1;", "h", "f", effects=False)
bf16x2_from_f32 = ptx_op(
    "cvt.rn.bf16x2.f32 $0, $1, $2;", "r", "ff", effects=False
)  # (upper, lower)
bf16x2_fma = ptx_op("fma.rn.bf16x2 $0, $1, $2, $3;", "r", "rrr", effects=False)
u16_low = ptx_op("{ .reg .b16 t; mov.b32 {$0, t}, $1; }", "h", "r", effects=False)
u16_high = ptx_op("{ .reg .b16 t; mov.b32 {t, $0}, $1; }", "h", "r", effects=False)
exp2_approx = ptx_op("ex2.approx.ftz.f32 $0, $1;", "f", "f", effects=False)
fma_f32 = ptx_op("fma.rn.f32 $0, $1, $2, $3;", "f", "fff", effects=False)
and_or = ptx_op("lop3.b32 $0, $1, $2, $3, 0xEA;", "r", "rrr", effects=False)  # (a & b) | c
permute_bytes = ptx_op("prmt.b32 $0, $1, $2, $3;", "r", "rrr", effects=False)
div_u32 = ptx_op("div.u32 $0, $1, $2;", "r", "rr", effects=False)  # `//` computes in 64 bits
any_lane_u32 = ptx_op(  # lanes of which $1 is not zero
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "r", "r"
)
first_lane_u32 = ptx_op("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "r", "r")  # warp-uniform
mma_m16n8k16_bf16 = ptx_op(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    "ffff",
    "rrrrrrffff",
    effects=False,
)

# Asynchronous copies and barriers of sm_90 and later.
mbarrier_init = ptx_op("mbarrier.init.shared.b64 [$0], $1;", "", "rr")
mbarrier_expect_bytes = ptx_op("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "", "rr")
mbarrier_arrive = ptx_op("mbarrier.arrive.shared.b64 _, [$0];", "", "r")
mbarrier_try_wait = ptx_op(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0,1,0,p; }",
    "r",
    "rr",
)
mbarrier_arrive_if = ptx_op(  # predicated, so that a pipeline of wgmma stays one path
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }", "", "rr"
)
mbarrier_wait = ptx_op(
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @!p bra WAIT; }",
    "",
    "rr",
)
fence_async_proxy = ptx_op("fence.proxy.async.shared::cta;")
bulk_copy_to_shared = ptx_op(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "",
    "rlrr",
)
bulk_stream_to_shared = ptx_op(  # read once: first out of L2
    "{ .reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1], $2, [$3], p; }",
    "",
    "rlrr",
)
tensor_copy_2d_to_shared = ptx_op(  # (shared, tensor map, column, row, barrier)
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$2, $3}], [$4];",
    "",
    "rlrrr",
)

# Asynchronous copies of sm_80 and later: 16 bytes a thread, groups counted per thread.
cp_async_16 = ptx_op("cp.async.cg.shared.global [$0], [$1], 16;", "", "rl")
cp_async_16_or_zero = ptx_op(  # $2: bytes that exist, 16 or 0
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "rlr"
)
cp_async_commit = ptx_op("cp.async.commit_group;")
cp_async_wait_0 = ptx_op("cp.async.wait_group 0;")
cp_async_wait_1 = ptx_op("cp.async.wait_group 1;")
cp_async_wait_2 = ptx_op("cp.async.wait_group 2;")
named_barrier = ptx_op("bar.sync $0, $1;", "", "rr")

# Programmatic dependent launch (sm_90 and later).
wait_for_previous_kernel = ptx_op("griddepcontrol.wait;")
let_next_kernel_start = ptx_op("griddepcontrol.launch_dependents;")

# Device- and system-scope flags.
atomic_inc_u32 = ptx_op("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "r", "lr")  # wraps to 0
ld_acquire_u32 = ptx_op("ld.acquire.gpu.global.u32 $0, [$1];", "r", "l")
ld_relaxed_u32x4 = ptx_op("ld.relaxed.gpu.global.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
st_relaxed_u32x4 = ptx_op("st.relaxed.gpu.global.v4.u32 [$0], {$1,$2,$3,$4};", "", "lrrrr")
st_release_system_u32 = ptx_op("st.release.sys.global.u32 [$0], $1;", "", "lr")
ld_acquire_system_u32 = ptx_op("ld.acquire.sys.global.u32 $0, [$1];", "r", "l")

# Exchange between the lanes of a warp; all 32 take part.
lane_f32 = ptx_op("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fr")
shfl_xor_f32 = ptx_op("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "f", "fr")
shfl_xor_u32 = ptx_op("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", "r", "rr")
transpose_u16 = ptx_op("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r")  # 8 x 8
ldmatrix_x4_trans = ptx_op(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r"
)

# 64-bit words, and sums and maxima whose order does not matter.
ld_global_u64 = ptx_op("ld.global.u64 $0, [$1];", "l", "l")
st_global_u64 = ptx_op("st.global.u64 [$0], $1;", "", "ll")
ld_shared_u64 = ptx_op("ld.shared.u64 $0, [$1];", "l", "r")
st_shared_u64 = ptx_op("st.shared.u64 [$0], $1;", "", "rl")
mul_high_u64 = ptx_op("mul.hi.u64 $0, $1, $2;", "l", "ll", effects=False)
red_global_add_u32 = ptx_op("red.global.add.u32 [$0], $1;", "", "lr")
red_global_max_u32 = ptx_op("red.global.max.u32 [$0], $1;", "", "lr")
red_global_add_u64 = ptx_op("red.global.add.u64 [$0], $1;", "", "ll")
red_global_max_u64 = ptx_op("red.global.max.u64 [$0], $1;", "", "ll")
atom_global_add_u32 = ptx_op("atom.global.add.u32 $0, [$1], $2;", "r", "lr")
red_shared_add_u32 = ptx_op("red.shared.add.u32 [$0], $1;", "", "rr")
red_shared_max_u32 = ptx_op("red.shared.max.u32 [$0], $1;", "", "rr")
red_shared_min_u32 = ptx_op("red.shared.min.u32 [$0], $1;", "", "rr")
red_shared_add_u64 = ptx_op("red.shared.add.u64 [$0], $1;", "", "rl")
atom_shared_add_u32 = ptx_op("atom.shared.add.u32 $0, [$1], $2;", "r", "rr")

# Arithmetic that no option of the compiler contracts or approximates.
add_rn_f32 = ptx_op("add.rn.f32 $0, $1, $2;", "f", "ff", effects=False)
mul_rn_f32 = ptx_op("mul.rn.f32 $0, $1, $2;", "f", "ff", effects=False)
div_rn_f32 = ptx_op("div.rn.f32 $0, $1, $2;", "f", "ff", effects=False)
rsqrt_approx = ptx_op("rsqrt.approx.ftz.f32 $0, $1;", "f", "f", effects=False)
log2_approx = ptx_op("lg2.approx.ftz.f32 $0, $1;", "f", "f", effects=False)


# Several instructions on local arrays at once, for kernels that repeat them too often for Numba.
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};"
)


def _elements(context, builder, typed, array, first, count):
    """Pointers to elements first .. first + count - 1 of a local array."""
    data = context.make_array(typed)(context, builder, array).data
    index = [builder.add(first, ir.Constant(ir.IntType(64), i)) for i in range(count)]
    return [builder.gep(data, [i], inbounds=True) for i in index]


@intrinsic
def mma_pair_add(typingctx, c, p, a, b0, b1, b2, b3):
    """c[p : p + 4] += A B and c[p + 4 : p + 8] += A B' of a 16-deep step; B is b0 and b1, B' is b2
    and b3."""

    def codegen(context, builder, sig, args):
        zero = ir.Constant(ir.IntType(64), 0)
        sums = _elements(context, builder, sig.args[0], args[0], args[1], 8)
        places = _elements(context, builder, sig.args[2], args[2], zero, 4)
        rows = [builder.load(place) for place in places]
        f32, i32 = ir.FloatType(), ir.IntType(32)
        function = ir.FunctionType(ir.LiteralStructType([f32] * 4), [i32] * 6 + [f32] * 4)
        mma = ir.InlineAsm(function, _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3")
        for n in range(2):
            four, b = sums[4 * n : 4 * n + 4], args[3 + 2 * n : 5 + 2 * n]
            found = builder.call(mma, [*rows, *b, *map(builder.load, four)])
            for i, place in enumerate(four):
                builder.store(builder.extract_value(found, i), place)
        return context.get_dummy_value()

    u = types.uint32
    return types.void(c, types.int64, a, u, u, u, u), codegen


@intrinsic
def split_bf16(typingctx, high, low, v, p):
    """A operands of a 16-deep step from sums v[p : p + 8]: high, the nearest BF16, and low, what
    that leaves, BF16 too; [4] pairs each."""

    def codegen(context, builder, sig, args):
        zero, i32, f32 = ir.Constant(ir.IntType(64), 0), ir.IntType(32), ir.FloatType()
        pack = ir.InlineAsm(
            ir.FunctionType(i32, [f32, f32]), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"
        )
        places = _elements(context, builder, sig.args[2], args[2], args[3], 8)
        v = [builder.load(place) for place in places]
        highs, lows = (_elements(context, builder, sig.args[i], args[i], zero, 4) for i in range(2))
        for i in range(4):
            pair = builder.call(pack, [v[2 * i + 1], v[2 * i]])
            builder.store(pair, highs[i])
            below = builder.shl(pair, ir.Constant(i32, 16))
            above = builder.and_(pair, ir.Constant(i32, 0xFFFF0000))
            rest = [
                builder.fsub(x, builder.bitcast(y, f32))
                for x, y in ((v[2 * i + 1], above), (v[2 * i], below))
            ]
            builder.store(builder.call(pack, rest), lows[i])
        return context.get_dummy_value()

    return types.void(high, low, v, types.int64), codegen
