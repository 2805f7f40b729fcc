"""Stand-ins for `numba` and for the instructions of `ginfer.cuda.lib.ptx`, for emulated threads."""

import ctypes
import struct
import types

import numpy as np

from tests.host.cuda.emulated_block import (
    M32,
    M64,
    bf16_bits,
    bits_of,
    f32,
    float_of,
    machine,
)
from tests.host.cuda.emulated_ptx import Warp

# numba


class Type:
    def __init__(self, name, convert, nbytes):
        self.name, self.convert, self.nbytes = name, convert, nbytes

    def __call__(self, x):
        return self.convert(x)

    def __str__(self):
        return self.name


def _signed(bits):
    def convert(x):
        x = int(x) & ((1 << bits) - 1)
        return x - (1 << bits) if x >> (bits - 1) else x

    return convert


TYPES = {
    "uint32": Type("uint32", lambda x: int(x) & M32, 4),
    "uint64": Type("uint64", lambda x: int(x) & M64, 8),
    "uint16": Type("uint16", lambda x: int(x) & 0xFFFF, 2),
    "int64": Type("int64", _signed(64), 8),
    "int32": Type("int32", _signed(32), 4),
    "float32": Type("float32", f32, 4),
}


class _Index:
    def __init__(self, name):
        self.name = name

    @property
    def x(self):
        return getattr(machine, self.name)


def _gather(value=None):
    """The values of all lanes of the warp."""
    return (yield "warp", value)


def _block_barrier():
    yield "block", None


def fake_numba():
    numba = types.ModuleType("numba")
    cuda = types.SimpleNamespace(
        jit=lambda function=None, **_: function if function is not None else (lambda f: f),
        threadIdx=_Index("thread"),
        blockIdx=_Index("index"),
        gridDim=_Index("grid"),
        syncthreads=_block_barrier,
        syncwarp=_gather,
        shared=types.SimpleNamespace(array=lambda n, t: machine.claim(n, t.nbytes)),
        local=types.SimpleNamespace(
            array=lambda n, t: [float("nan") if t.name == "float32" else 0xFFFFFFFF] * n
        ),
    )
    numba.cuda = cuda
    for name, kind in TYPES.items():
        setattr(numba, name, kind)
    return numba


# instructions


def _shared_load(fmt):
    size = struct.calcsize(fmt)

    def load(at):
        values = struct.unpack_from(fmt, machine.shared(at, size), at)
        return values[0] if len(values) == 1 else values

    return load


def _shared_store(fmt):
    size = struct.calcsize(fmt)

    def store(at, *values):
        struct.pack_into(fmt, machine.shared(at, size), at, *values)

    return store


def _atomic_shared(fmt, combine):
    load, store = _shared_load(fmt), _shared_store(fmt)

    def change(at, value):
        old = load(at)
        store(at, combine(old, value & (M64 if fmt == "<Q" else M32)))
        return old

    return change


def _atomic_global(kind, combine):
    def change(at, value):
        old = machine.load(at, kind)
        machine.store(at, kind, combine(old, value))
        return old

    return change


def _atomic_inc(at, last):
    old = machine.load(at, _U32)
    machine.store(at, _U32, 0 if old >= last else old + 1)
    return old


def _once(make):
    """What a warp's collective gives to all lanes: made by the first, kept for the others."""
    last = [None, None]

    def result(lanes):
        if last[0] is not lanes:
            last[:] = lanes, make(lanes)
        return last[1]

    return result


def _ldmatrix(transposed):
    @_once
    def words(addresses):
        raw = [bytes(machine.shared(a, 16)[a : a + 16]) for a in addresses]
        rows = np.frombuffer(b"".join(raw), np.uint16).reshape(4, 8, 8).astype(np.uint32)
        rows = rows.transpose(0, 2, 1) if transposed else rows
        return (rows[:, :, 0::2] | rows[:, :, 1::2] << 16).reshape(4, 32).T.tolist()

    def load(at):
        addresses = yield from _gather(at)
        return tuple(words(addresses)[machine.thread & 31])

    return load


@_once
def _transposed(lanes):
    words = np.array(lanes, np.uint32)
    matrix = np.stack([words & 0xFFFF, words >> 16], -1).reshape(8, 8).T
    return (matrix[:, 0::2] | matrix[:, 1::2] << 16).reshape(32).tolist()


def _transpose(value):
    return _transposed((yield from _gather(value)))[machine.thread & 31]


def _floats(words):
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@_once
def _products(lanes):
    words = np.array([v[:6] for v in lanes], np.uint32)  # lane = 4 g + t
    pairs = np.stack([words & 0xFFFF, words >> 16], -1).reshape(8, 4, 6, 2)
    a = np.zeros((16, 16), np.uint32)
    b = np.zeros((16, 8), np.uint32)
    for t in range(4):
        for i in range(4):
            rows, first = slice(8 * (i & 1), 8 * (i & 1) + 8), 8 * (i >> 1) + 2 * t
            a[rows, first : first + 2] = pairs[:, t, i]
        for i in range(2):
            b[8 * i + 2 * t : 8 * i + 2 * t + 2, :] = pairs[:, t, 4 + i].T
    return _floats(a) @ _floats(b)


def _mma(*values):
    product = _products((yield from _gather(values)))
    lane = machine.thread & 31
    g, t = lane >> 2, (lane & 3) * 2
    c = values[6:]
    return tuple(f32(c[2 * h + i] + product[g + 8 * h, t + i]) for h in range(2) for i in range(2))


def _mma_pair_add(c, p, a, *b):
    for n in range(2):
        at = p + 4 * n
        c[at : at + 4] = yield from _mma(*a, *b[2 * n : 2 * n + 2], *c[at : at + 4])


def _split_bf16(high, low, v, p):
    for i in range(4):
        pair = [f32(x) for x in v[p + 2 * i : p + 2 * i + 2]]
        bits = [bf16_bits(x) for x in pair]
        rest = [bf16_bits(f32(x) - float_of(b << 16)) for x, b in zip(pair, bits)]
        high[i], low[i] = bits[1] << 16 | bits[0], rest[1] << 16 | rest[0]


def _cp_async(to, source, nbytes=16):
    words = machine.words(source, 4) if nbytes else (0, 0, 0, 0)
    _shared_store("<4I")(to, *words)


def _exp2(x):
    if x != x:
        return x
    return f32(2.0**x) if x < 200 else float("inf")


def _shuffle(value, distance):
    values = yield from _gather(value)
    return values[(machine.thread & 31) ^ distance]


def _lane(value, lane=0):
    return (yield from _gather(value))[lane]


def _none(*_):
    pass


# named barriers: [arrivals, generation]; mbarriers: [arrivals to come, of a phase, bytes, phase]


def _arrive(name, count):
    barrier = machine.barriers.setdefault(name, [0, 0])
    barrier[0] += 1
    if barrier[0] == count:
        barrier[:] = 0, barrier[1] + 1


def _named_barrier(name, count):
    generation = machine.barriers.get(name, (0, 0))[1]
    _arrive(name, count)
    yield "until", lambda: machine.barriers[name][1] != generation


def _mbarrier_init(at, count):
    machine.barriers["m", at] = [count, count, 0, 0]


def _mbarrier_change(at, arrivals, nbytes):
    barrier = machine.barriers["m", at]
    barrier[0] -= arrivals
    barrier[2] += nbytes
    if barrier[0] == barrier[2] == 0:
        barrier[:] = barrier[1], barrier[1], 0, barrier[3] ^ 1


def _mbarrier_wait(at, phase):
    yield "until", lambda: machine.barriers["m", at][3] != phase


def _any_lane(value):
    """Lanes that miss a word; before they look again, somebody has to store one."""
    missing = sum((v != 0) << i for i, v in enumerate((yield from _gather(value))))
    if missing:
        seen = machine.num_stores
        yield "until", lambda: machine.num_stores != seen
    return missing


def _bulk_copy(to, source, nbytes, barrier):
    machine.where(source, 1), machine.where(source + nbytes - 1, 1)
    machine.shared(to, 16), machine.shared(to + nbytes - 16, 16)
    machine.block[to : to + nbytes] = ctypes.string_at(source, nbytes)
    _mbarrier_change(barrier, 0, -nbytes)


def _statement(text, out="", args="", *, effects=True):
    """An instruction that a module of `lib` makes: of one thread, or of the lanes of a warp."""
    opcode = text.split(" ", 1)[0]
    if opcode in _OF_A_THREAD:
        return _OF_A_THREAD[opcode]
    words = {"f": bits_of, "r": lambda x: x & M32, "l": lambda x: x}

    @_once
    def execute(lanes):
        warp = machine.warps.setdefault(machine.thread >> 5, Warp(machine.thread >> 5))
        kinds = {"f": np.uint32, "r": np.uint32, "l": np.int64}
        columns = zip(args, zip(*lanes))
        found = [None] * len(out)
        found += [np.array([words[k](x) for x in v], kinds[k]) for k, v in columns]
        warp.run(text, found)
        value = float_of if out.startswith("f") else int
        return [[value(int(x)) for x in row] for row in zip(*found[: len(out)])]

    def run(*values):
        found = execute((yield from _gather(values)))
        mine = found[machine.thread & 31] if out else None
        return mine[0] if len(out) == 1 else mine

    return run


def _loader(kind):
    return lambda at: machine.load(at, kind)


def _storer(kind):
    return lambda at, value: machine.store(at, kind, value)


_U16, _U32, _I64, _U64 = ctypes.c_uint16, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64
_MEMORY = {
    "ld_global_u16": _loader(_U16),
    "ld_global_u32": _loader(_U32),
    "ld_global_f32": _loader(ctypes.c_float),
    "ld_global_u64": _loader(_I64),
    "ld_acquire_u32": _loader(_U32),
    "ld_global_u32x4": lambda at: machine.words(at, 4),
    "ld_global_f32x4": lambda at: tuple(float_of(w) for w in machine.words(at, 4)),
    "st_global_u16": _storer(_U16),
    "st_global_u32": _storer(_U32),
    "st_global_f32": _storer(ctypes.c_float),
    "st_global_u64": _storer(_I64),
    "st_global_u32x4": lambda at, *v: machine.store_words(at, v),
    "st_global_f32x4": lambda at, *v: machine.store_words(at, [bits_of(x) for x in v]),
    "ld_relaxed_u32x4": lambda at: machine.words(at, 4),
    "st_relaxed_u32x4": lambda at, *v: machine.store_words(at, v),
    "ld_shared_u32": _shared_load("<I"),
    "ld_shared_f32": _shared_load("<f"),
    "ld_shared_u64": _shared_load("<q"),
    "ld_shared_u32x2": _shared_load("<2I"),
    "ld_shared_u32x4": _shared_load("<4I"),
    "st_shared_u16": _shared_store("<H"),
    "st_shared_u32": _shared_store("<I"),
    "st_shared_f32": _shared_store("<f"),
    "st_shared_u64": _shared_store("<q"),
    "st_shared_u32x4": _shared_store("<4I"),
    "red_shared_add_u32": _atomic_shared("<I", lambda a, b: (a + b) & M32),
    "atom_shared_add_u32": _atomic_shared("<I", lambda a, b: (a + b) & M32),
    "red_shared_max_u32": _atomic_shared("<I", max),
    "red_shared_min_u32": _atomic_shared("<I", min),
    "red_shared_add_u64": _atomic_shared("<Q", lambda a, b: (a + b) & M64),
    "atomic_inc_u32": _atomic_inc,
    "red_global_add_u32": _atomic_global(_U32, lambda a, b: a + b),
    "red_global_max_u32": _atomic_global(_U32, max),
    "red_global_add_u64": _atomic_global(_U64, lambda a, b: a + b),
    "red_global_max_u64": _atomic_global(_U64, lambda a, b: max(a, b & M64)),
    "atom_global_add_u32": _atomic_global(_U32, lambda a, b: a + b),
    "cp_async_16": _cp_async,
    "cp_async_16_or_zero": _cp_async,
}
_OTHERS = {
    "shared_address": lambda at: at,
    "ldmatrix_x4": _ldmatrix(False),
    "ldmatrix_x4_trans": _ldmatrix(True),
    "transpose_u16": _transpose,
    "mma_m16n8k16_bf16": _mma,
    "mma_pair_add": _mma_pair_add,
    "split_bf16": _split_bf16,
    "lane_f32": _lane,
    "shfl_xor_f32": _shuffle,
    "shfl_xor_u32": _shuffle,
    "f32_from_bits": float_of,
    "bits_from_f32": bits_of,
    "f32_from_f16": lambda h: float(np.uint16(h).view(np.float16)),
    "f16_from_f32": lambda x: int(np.float16(x).view(np.uint16)),
    "bf16_from_f32": bf16_bits,
    "bf16x2_from_f32": lambda high, low: bf16_bits(high) << 16 | bf16_bits(low),
    "exp2_approx": _exp2,
    "log2_approx": lambda x: f32(np.log2(x)) if x > 0 else float("-inf"),
    "rsqrt_approx": lambda x: f32(1.0 / np.sqrt(x)),
    "fma_f32": lambda a, b, c: f32(a * b + c),
    "add_rn_f32": lambda a, b: f32(f32(a) + f32(b)),
    "mul_rn_f32": lambda a, b: f32(f32(a) * f32(b)),
    "div_rn_f32": lambda a, b: f32(np.float64(f32(a)) / f32(b)),
    "div_u32": lambda a, b: a // b,
    "mul_high_u64": lambda a, b: TYPES["int64"]((a & M64) * (b & M64) >> 64),
    "any_lane_u32": _any_lane,
    "first_lane_u32": _lane,
    "named_barrier": _named_barrier,
    "mbarrier_init": _mbarrier_init,
    "mbarrier_expect_bytes": lambda at, nbytes: _mbarrier_change(at, 1, nbytes),
    "mbarrier_arrive_if": lambda at, arrives: _mbarrier_change(at, int(arrives), 0),
    "mbarrier_wait": _mbarrier_wait,
    "bulk_copy_to_shared": _bulk_copy,
    "bulk_stream_to_shared": _bulk_copy,
}
_NOTHING_TO_DO = (
    *("cp_async_commit", "cp_async_wait_0", "cp_async_wait_1", "cp_async_wait_2"),
    *("wait_for_previous_kernel", "let_next_kernel_start", "fence_async_proxy"),
)


def _count_arrival(at, most):
    (old,) = struct.unpack_from("<I", machine.shared(at, 4), at)
    struct.pack_into("<I", machine.block, at, 0 if old >= most else old + 1)
    return old


_OF_A_THREAD = {
    "bar.arrive": _arrive,
    "atom.acq_rel.cta.shared.inc.u32": _count_arrival,
    "st.release.gpu.global.u32": _MEMORY["st_global_u32"],
    "max.f32": max,
}


def _fma_pair(a, b, c):
    low = [float_of((v & 0xFFFF) << 16) for v in (a, b, c)]
    high = [float_of(v & 0xFFFF0000) for v in (a, b, c)]
    return bf16_bits(high[0] * high[1] + high[2]) << 16 | bf16_bits(low[0] * low[1] + low[2])


def _permute_bytes(a, b, selector):
    either = b << 32 | a
    places = [selector >> (4 * i) & 7 for i in range(4)]  # bit 3 would repeat a sign
    return sum((either >> (8 * place) & 0xFF) << (8 * i) for i, place in enumerate(places))


_PACKED = {
    "permute_bytes": _permute_bytes,
    "bf16x2_fma": _fma_pair,
    "u16_low": lambda word: word & 0xFFFF,
    "u16_high": lambda word: word >> 16,
    "and_or": lambda a, b, c: (a & b) | c,
}


def _unknown(*_, **__):
    def refuse(*_):
        raise NotImplementedError("an instruction without a stand-in")

    return refuse


def fake_ptx(names):
    """The module; names: of all instructions, those without a stand-in refuse to run."""
    ptx = types.ModuleType("ginfer.cuda.lib.ptx")
    ptx.__dict__.update(dict.fromkeys(names, _unknown()), ptx_op=_statement)
    ptx.__dict__.update(_MEMORY, **_OTHERS, **_PACKED, **dict.fromkeys(_NOTHING_TO_DO, _none))
    return ptx
