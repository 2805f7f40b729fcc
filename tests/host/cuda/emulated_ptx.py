"""PTX statements on the lanes of a warp: an interpreter for the texts of `wgmma_attention`.

Registers of a warp are arrays of 32 words, kept by name for as long as the block runs; the named
registers of the text and its arguments are such words, 64-bit ones and predicates of their own.
"""

import ctypes
import re
from functools import cache

import numpy as np

from tests.host.cuda.emulated_block import machine

LANES = 32
ALL = np.full(LANES, True)
IGNORED = (".reg", "wgmma.fence", "wgmma.commit", "wgmma.wait")  # products are made at once
OPERAND = r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+"


def _f(words):
    return words.view(np.float32)


def _w(floats):
    return np.asarray(floats, np.float32).view(np.uint32)


def _ftz(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x).astype(np.float32)


def _fma(a, b, c):
    return _w((_f(a).astype(np.float64) * _f(b) + _f(c)).astype(np.float32))


def _bf16(words):
    return (words + 0x7FFF + ((words >> 16) & 1)) >> 16


BINARY = {
    "add.s64": lambda a, b: a + b,
    "max.f32": lambda a, b: _w(np.maximum(_f(a), _f(b))),
    "add.rn.f32": lambda a, b: _w(_f(a) + _f(b)),
    "add.f32": lambda a, b: _w(_f(a) + _f(b)),
    "mul.rn.f32": lambda a, b: _w(_f(a) * _f(b)),
    "mul.f32": lambda a, b: _w(_f(a) * _f(b)),
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "cvt.rn.bf16x2.f32": lambda a, b: (_bf16(a) << 16 | _bf16(b)).astype(np.uint32),
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.s32": lambda a, b: a.view(np.int32) < b.view(np.int32),
    "setp.ne.f32": lambda a, b: _f(a) != _f(b),
}
UNARY = {
    "ex2.approx.ftz.f32": lambda a: _w(_ftz(np.exp2(_f(a).astype(np.float64)))),
    "rcp.approx.ftz.f32": lambda a: _w(1 / _f(a)),
    "cvt.u64.u32": lambda a: a.astype(np.int64),
    "mov.f32": lambda a: a,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.b64": lambda a: a,
}


def swizzled(at):
    return at ^ ((at >> 7 & 7) << 4)


@cache
def parsed(text):
    """(statements, labels): (guard, opcode, operands) each; label to index."""
    statements, labels = [], {}
    for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
        line = line.strip()
        while (label := re.match(r"(\w+):", line)) is not None:
            labels[label.group(1)] = len(statements)
            line = line[label.end() :].strip()
        if line and not line.startswith(IGNORED):
            guard, opcode, rest = re.match(r"(?:@(\S+) )?(\S+) (.*)", line).groups()
            statements.append((guard, opcode, re.findall(OPERAND, rest)))
    return statements, labels


class Warp:
    """The registers of a warp."""

    def __init__(self, index):
        self.index, self.registers = index, {}

    def value(self, name, arguments):
        name = name.strip()
        if name.startswith("$"):
            return arguments[int(name[1:])]
        if name.startswith("0f"):
            return np.full(LANES, int(name[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", name):
            return np.full(LANES, int(name, 0) & 0xFFFFFFFF, np.uint32)
        return self.registers[name]

    def run(self, text, arguments):
        """Outputs are the entries of `arguments` that the text writes."""
        statements, labels = parsed(text)
        at = 0
        while at < len(statements):
            guard, opcode, operands = statements[at]
            at += 1
            live = ALL
            if guard:
                live = self.registers[guard.lstrip("!")]
                live = ~live if guard[0] == "!" else live
            if opcode == "bra":
                assert live.all() or not live.any()
                at = labels[operands[0]] if live.any() else at
            else:
                self.step(opcode, operands, arguments, live)

    def step(self, opcode, operands, arguments, live):
        """One instruction; lanes that are not live, and what they hold, may be anything."""
        with np.errstate(all="ignore"):
            self._step(opcode, operands, arguments, live)

    def _step(self, opcode, operands, arguments, live):
        if opcode.startswith("wgmma"):
            assert live.all()
            return self.multiply(opcode, operands, arguments)
        if opcode.startswith(("ld.global", "st.global", "st.shared")):
            return self.access(opcode, operands, arguments, live)
        if opcode == "vote.sync.any.pred":
            found = np.full(LANES, self.registers[operands[1]].any())
        elif opcode == "setp.ne.or.f32":
            a, b, p = (self.value(o, arguments) for o in operands[1:])
            found = (_f(a) != _f(b)) | p
        elif opcode.startswith("fma."):
            found = _fma(*(self.value(o, arguments) for o in operands[1:]))
        elif opcode in UNARY:
            found = UNARY[opcode](self.value(operands[1], arguments))
        elif opcode == "add.s64":
            a, b = (self.value(o, arguments) for o in operands[1:])
            found = a + b.astype(np.int64)
        else:
            found = BINARY[opcode](*(self.value(o, arguments) for o in operands[1:]))
        return self.assign(operands[0], found, arguments, live)

    def assign(self, name, found, arguments, live):
        if name.startswith("$"):
            arguments[int(name[1:])] = found
            return
        old = self.registers.get(name, np.full(LANES, 0x7FC00000, np.uint32))
        self.registers[name] = found if live.all() else np.where(live, found, old)

    def access(self, opcode, operands, arguments, live):
        place = next(o for o in operands if o.startswith("["))
        base, _, offset = place[1:-1].partition("+")
        where = self.value(base, arguments) + int(offset or 0)
        other = next(o for o in operands if o is not place).strip("{}").split(",")
        for i, name in enumerate(n.strip() for n in other):
            if opcode.startswith("st.shared"):
                words = self.value(name, arguments)
                for lane in np.flatnonzero(live):
                    to = int(where[lane]) + 4 * i
                    machine.shared(to, 4)[to : to + 4] = words[lane].tobytes()
            elif opcode.startswith("st"):
                for lane in np.flatnonzero(live):
                    word = int(self.value(name, arguments)[lane])
                    machine.store(int(where[lane]) + 4 * i, ctypes.c_uint32, word)
            else:
                found = np.zeros(LANES, np.uint32)
                for lane in np.flatnonzero(live):
                    found[lane] = machine.load(int(where[lane]) + 4 * i, ctypes.c_uint32)
                self.assign(name, found, arguments, live)

    def multiply(self, opcode, operands, arguments):
        n = int(re.search(r"m64n(\d+)k16", opcode).group(1))
        sums = [s.strip() for s in operands[0].strip("{}").split(",")]
        a = self.fragment(operands[1], arguments)
        k_of_b = self.transposed if operands[-1] == "1" and len(operands) >= 7 else self.plain
        b = k_of_b(int(self.value(operands[2], arguments)[0]), n)
        product = a @ b  # 16 x n
        keep = self.registers[operands[3]].all()
        lane = np.arange(LANES)
        for i, name in enumerate(sums):
            row, column = (lane >> 2) + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
            old = _f(self.registers[name]) if keep else np.float32(0)
            self.registers[name] = _w((old + product[row, column]).astype(np.float32))

    def fragment(self, operand, arguments):
        """A of the warp's sixteen rows, from shared memory or from registers."""
        if operand.startswith("{"):
            a, lane = np.zeros((16, 16)), np.arange(LANES)
            for i, name in enumerate(operand.strip("{}").split(",")):
                words = self.value(name, arguments)
                row, column = (lane >> 2) + 8 * (i & 1), 2 * (lane & 3) + 8 * (i >> 1)
                a[row, column] = _f(words << 16)
                a[row, column + 1] = _f(words & np.uint32(0xFFFF0000))
            return a
        descriptor = int(self.value(operand, arguments)[0])
        rows = 16 * (self.index & 3) + np.arange(16)[:, None]
        return self.matrix(descriptor, rows, np.arange(16)[None])

    def plain(self, descriptor, n):
        return self.matrix(descriptor, np.arange(n)[:, None], np.arange(16)[None]).T

    def transposed(self, descriptor, n):
        """k x n, n innermost: groups of 64 n lie a leading offset apart."""
        start, leading, stride = _fields(descriptor)
        k, column = np.arange(16)[:, None], np.arange(n)[None]
        at = start + column // 64 * leading + k // 8 * stride + k % 8 * 128 + column % 64 * 2
        return self.read(at)

    def matrix(self, descriptor, rows, columns):
        if descriptor >> 62 & 3 == 0:  # core matrices of 8 x 8, wherever they lie
            start, leading, stride = _offsets(descriptor)
            at = start + rows // 8 * stride + rows % 8 * 16
            return self.read(at + columns // 8 * leading + columns % 8 * 2, swizzle=False)
        start, _, stride = _fields(descriptor)
        return self.read(start + rows // 8 * stride + rows % 8 * 128 + columns * 2)

    def read(self, at, *, swizzle=True):
        raw = np.frombuffer(machine.block, np.uint16)
        return _f(raw[(swizzled(at) if swizzle else at) // 2].astype(np.uint32) << 16).astype(
            np.float64
        )


def _fields(descriptor):
    assert descriptor >> 62 & 3 == 1, "swizzle"
    return _offsets(descriptor)


def _offsets(descriptor):
    return tuple((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
