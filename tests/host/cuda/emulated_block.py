"""A block of emulated threads: what they may touch, and where they wait for each other."""

import ctypes
import struct
import types

import numpy as np

DYNAMIC = 32 * 1024  # where the dynamic part of shared memory begins
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits & M32))[0]


def bits_of(x):
    return int(np.float32(x).view(np.uint32))


def bf16_bits(x):
    bits = bits_of(x)
    if x != x:
        return 0x7FFF
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def f32(x):
    return float(np.float32(x))


class _Block:
    """What belongs to a block while it runs, and what its threads wait for."""

    def __init__(self, index, shared, threads):
        self.index, self.block = index, shared
        self.claimed, self.calls = {}, [0] * threads
        self.warps, self.barriers = {}, {}
        self.bodies, self.values = [], [None] * threads
        self.waiting = dict.fromkeys(range(threads), "start")


class Machine:
    """One block at a time: its threads, its shared memory, and the arrays that may be touched."""

    def __init__(self):
        self.arrays, self.num_stores = [], 0

    # memory
    def own(self, array):
        assert array.flags.c_contiguous
        self.arrays.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        return array.ctypes.data

    def where(self, at, nbytes):
        if at % nbytes:
            raise AssertionError(f"misaligned access of {nbytes} bytes at {at:#x}")
        if not any(low <= at and at + nbytes <= high for low, high in self.arrays):
            raise AssertionError(f"access of {nbytes} bytes at {at:#x} is outside every array")
        return at

    def load(self, at, kind):
        return kind.from_address(self.where(at, ctypes.sizeof(kind))).value

    def store(self, at, kind, value):
        kind.from_address(self.where(at, ctypes.sizeof(kind))).value = value
        self.num_stores += 1

    def words(self, at, count):
        self.where(at, 4 * count)
        return tuple((ctypes.c_uint32 * count).from_address(at))

    def store_words(self, at, values):
        self.where(at, 4 * len(values))
        (ctypes.c_uint32 * len(values)).from_address(at)[:] = values
        self.num_stores += 1

    def shared(self, at, nbytes):
        block = self.block
        assert at % nbytes == 0, f"misaligned shared access of {nbytes} bytes at {at}"
        assert 0 <= at <= at + nbytes <= len(block), f"shared address {at} of {len(block)}"
        return block

    # threads
    def run(self, function, grid, threads, shared_nbytes, arguments):
        """Run the blocks of a grid one after the other; one that waits for what another has to do
        is resumed when all have had their turn."""
        self.grid, waiting = grid, []
        for index in range(grid):
            block = _Block(index, bytearray(b"\xff" * (DYNAMIC + shared_nbytes)), threads)
            vars(self).update(vars(block))
            block.bodies = [function(*arguments) for _ in range(threads)]
            if not isinstance(block.bodies[0], types.GeneratorType):
                raise AssertionError("a kernel that meets no other thread is no generator")
            self._resume(block)
            waiting.append(block)
        while waiting := [block for block in waiting if block.waiting]:
            moved = [self._resume(block) for block in waiting]
            assert any(moved), "threads wait for each other"

    def _resume(self, block):
        """Resume threads until all have ended or wait: a warp at its own collectives or when what
        it waits for is true, all at barriers. Returns whether any have moved."""
        vars(self).update(vars(block))
        bodies, values, ever = block.bodies, block.values, False
        while block.waiting:
            moved = False
            for first in range(0, len(bodies), 32):
                while self._resume_warp(bodies[first : first + 32], first, block.waiting, values):
                    moved = True
            if block.waiting and all(kind == "block" for kind in block.waiting.values()):
                assert len(block.waiting) == len(bodies), "some threads ended before a barrier"
                block.waiting = dict.fromkeys(block.waiting, "start")
                moved = True
            if not moved:
                break
            ever = True
        return ever

    def _resume_warp(self, bodies, first, waiting, values):
        """Let the lanes of a warp run to where they meet next; False when they wait at a barrier,
        for a lane that does, or have ended."""
        lanes = [t for t in range(first, first + len(bodies)) if t in waiting]
        if not lanes or any(waiting[t] == "block" for t in lanes):
            return False
        if not all(values[t]() for t in lanes if waiting[t] == "until"):
            return False
        meeting = waiting[lanes[0]] == "warp"
        found = values[first : first + len(bodies)] if meeting else None
        for t in lanes:
            self.thread = t
            try:
                waiting[t], values[t] = bodies[t - first].send(found)
            except StopIteration:
                del waiting[t]
        return True

    def claim(self, count, nbytes):
        """A shared array: the same address for the same call of every thread."""
        self.calls[self.thread] += 1
        if count == 0:
            return DYNAMIC
        key = self.calls[self.thread]
        if key not in self.claimed:
            used = sum(size for _, size in self.claimed.values())
            self.claimed[key] = (used, -(-count * nbytes // 16) * 16)
        return self.claimed[key][0]


machine = Machine()
