"""Decode linear on the GPU: float64 oracle at every format, epilogue and border of widths.

Columns, grids and replay are equal bit for bit.
"""

from functools import cache

import numpy as np
import pytest

from ginfer.cuda.lib.fragment import fragment_offset
from ginfer.cuda.linear.decode_launch import (
    COUNTERS_NBYTES,
    SMS,
    DecodeLinear,
    DecodeScratch,
    column_tiles,
    k_runs,
    linear_decode,
    scratch_nbytes,
)
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.variants import decode_kernel
from ginfer.cuda.runtime.graph import Graph
from ginfer.formats import FORMATS, TILE_NBYTES, Layout, payload_nbytes
from ginfer.sizes import align_up, div_ceil
from scripts.pack.codecs import bf16_bits, encode
from tests.oracles.formats import bf16_to_f32, decode
from tests.tolerances import LINEAR_BF16

SPLIT_SHAPES = ((96, 5120), (1000, 520), (2048, 1024), (5120, 6144))
SHAPES = ((128, 64), (200, 72), (201, 72), *SPLIT_SHAPES, (17152, 1536))
WIDTHS = (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 73, 127, 128)


@pytest.fixture(autouse=True)
def _needs_sm_90a(capability):
    if capability != "90a":
        pytest.skip("the kernels of sm_90a")


@cache
def weights(name, N, K):
    """(payload bytes, represented values [N, K] float64)."""
    fmt, rng = FORMATS[name], np.random.default_rng(N * K)
    if name == "Q4G64_BF16S":  # only imported packages have it: random codes and scales
        N, K = align_up(N, 128), align_up(K, 64)
        tiles = rng.integers(0, 256, (N // 128 * K // 64, 4352), np.uint8)
        scales = (rng.standard_normal((len(tiles), 128)) * 0.01).astype(np.float32)
        tiles[:, 4096:] = bf16_bits(scales).view(np.uint8)
        payload = tiles.reshape(-1)
    else:
        values = (rng.standard_normal((N, K)) * 0.03).astype(np.float32)
        blocks = [encode(fmt, Layout.TILE, values[n : n + 128]) for n in range(0, N, 128)]
        payload = np.concatenate([np.asarray(b).reshape(-1).view(np.uint8) for b in blocks])
    assert payload.nbytes == payload_nbytes(fmt, Layout.TILE, (N, K))
    return payload, decode(fmt, Layout.TILE, (N, K), payload).astype(np.float64)


def tokens(T, K, seed=0):
    """[T, K] float32 with BF16 values."""
    values = np.random.default_rng(seed).standard_normal((T, K)).astype(np.float32)
    return bf16_to_f32(bf16_bits(values))


def parts_of(T):
    """(first token, tokens, column tiles) of the launches that T tokens take."""
    counts = [min(64, T - first) for first in range(0, T, 64)]
    return [(64 * i, count, column_tiles(count)) for i, count in enumerate(counts)]


def offsets(T, K, padded_K):
    """[T, K] places in the fragment-ordered buffer of T tokens, in elements."""
    columns = np.arange(K)[None]
    return np.concatenate(
        [
            first * padded_K + fragment_offset(np.arange(count)[:, None], columns, NT) // 2
            for first, count, NT in parts_of(T)
        ]
    )


def buffer_size(T, padded_K):
    """Elements of such a buffer."""
    first, _, NT = parts_of(T)[-1]
    return (first + NT * 8) * padded_K


class Case:
    """One matrix on the device; run() launches it on tokens and returns the result as float32."""

    def __init__(self, memory, image, stream, fmt, shape):
        self.memory, self.image, self.stream, self.fmt = memory, image, stream, fmt
        payload, self.W = weights(fmt, *shape)
        self.N, self.K = self.W.shape
        self.w = memory.put(payload)
        self.blocks, self.k_tiles = div_ceil(self.N, 128), div_ceil(self.K, 64)
        free = self.blocks * 17 * 4096  # room for cuts that no shape has
        room = scratch_nbytes(self.N, self.K)
        sizes = max(room[0], 8 * free), max(room[1], COUNTERS_NBYTES + 8 * free)
        self.workspace, self.counters = (memory.put(np.zeros(n // 4, np.uint32)) for n in sizes)

    def put_tokens(self, x):
        """Tokens in fragment order, padding zero."""
        padded_K = self.k_tiles * 64
        buffer = np.zeros(buffer_size(len(x), padded_K), np.uint16)
        buffer[offsets(*x.shape, padded_K)] = bf16_bits(x)
        return self.memory.put(buffer)

    def output(self, T, epilogue):
        """Poisoned, or where the sums are added to, ones."""
        if epilogue == Epilogue.SILU_UP:
            return self.memory.empty(buffer_size(T, self.blocks * 64), np.uint16)
        if epilogue == Epilogue.ADD_BF16:
            return self.memory.put(np.full((T, self.N), 0x3F80, np.uint16))
        dtype = np.float32 if epilogue == Epilogue.STORE_F32 else np.uint16
        return self.memory.empty((T, self.N), dtype)

    def run(self, x, epilogue, launch=None, graph=False):
        """The result of all tokens, float32 [T, N or N / 2]; `launch` in place of the launcher."""
        T = len(x)
        xs, y = self.put_tokens(x), self.output(T, epilogue)
        matrix = DecodeLinear(w=self.w.address, fmt=self.fmt, N=self.N, K=self.K, epilogue=epilogue)
        scratch = DecodeScratch(workspace=self.workspace.address, counters=self.counters.address)

        def work():
            if launch is not None:
                launch(self, xs.address, y.address, T, epilogue)
                return
            linear_decode(
                self.image, self.stream, y.address, xs.address, T=T, linear=(matrix, scratch)
            )

        if graph:
            captured = Graph(self.stream, work)
            captured.replay()
            self.stream.synchronize()
            captured.close()
        else:
            work()
            self.stream.synchronize()
        assert (self.workspace.read() == 0).all()
        assert (self.counters.read()[: COUNTERS_NBYTES // 4] == 0).all()
        return self.values(y.read(), T, epilogue)

    def values(self, y, T, epilogue):
        """Result bits to float32; whatever a fragment-ordered result has as padding is zero."""
        if epilogue == Epilogue.STORE_F32:
            return y
        if epilogue != Epilogue.SILU_UP:
            return bf16_to_f32(y)
        at = offsets(T, self.N // 2, self.blocks * 64)
        padding = np.delete(y, at.reshape(-1))
        assert (padding & 0x7FFF == 0).all()
        return bf16_to_f32(y[at])

    def bits(self, y, T, epilogue):
        """Results of an output array as they are, [T, N or N / 2]."""
        found = y.read()
        silu = epilogue == Epilogue.SILU_UP
        return found[offsets(T, self.N // 2, self.blocks * 64)] if silu else found

    def want(self, x, epilogue):
        """The oracle, float64."""
        z = x.astype(np.float64) @ self.W.T
        if epilogue == Epilogue.ADD_BF16:
            return z + 1
        if epilogue == Epilogue.SILU_UP:
            pairs = z.reshape(len(z), -1, 2, 16)
            gate, up = pairs[:, :, 0], pairs[:, :, 1]
            return (gate / (1 + np.exp(-gate)) * up).reshape(len(z), -1)
        return z


def cut_launch(cut, grid=None):
    """A launch of the kernel itself with another cut of K, or on another grid."""

    def launch(case, x, y, T, epilogue):
        NT = column_tiles(T)
        shape = (case.N, case.K, NT, TILE_NBYTES[case.fmt])
        item, ahead = decode_kernel(case.image.plans, case.fmt, shape)
        whole, runs = cut
        most = min(max(runs + whole, case.blocks), SMS)
        addresses = (case.w.address, x, y, case.workspace.address)
        scalars = (case.k_tiles, case.blocks, whole, runs, T, case.N, epilogue, ahead)
        case.image.launch(item, (grid or most,), case.stream, *addresses, *scalars, dependent=True)

    return launch


@pytest.fixture
def case(memory, image, stream):
    def make(fmt, shape):
        return Case(memory, image, stream, fmt, shape)

    return make


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_at_every_epilogue_and_border_of_widths(case, fmt, shape):
    it = case(fmt, shape)
    for epilogue in EPILOGUES[fmt]:
        if epilogue == Epilogue.SILU_UP and it.N % 32:
            continue  # gate and up alternate in tiles of 16 rows
        for T in WIDTHS:
            x = tokens(T, it.K, seed=T)
            LINEAR_BF16.check(it.run(x, epilogue), it.want(x, epilogue))


def cuts(shape):
    """(whole row blocks, runs through the others) that the kernel can be asked for: as many slices
    to each row block, and runs that cross their borders."""
    blocks, steps = div_ceil(shape[0], 128), div_ceil(shape[1], 256)
    found = set()
    for whole in (0, blocks // 2):
        cut = blocks - whole
        found |= {(whole, cut * s) for s in (2, 3, min(steps, 16)) if 1 < s <= steps}
        found |= {(whole, runs) for runs in (cut + 1, 132) if cut < runs <= cut * steps}
    return sorted(found)


@pytest.mark.parametrize(("shape", "cut"), [(s, p) for s in SPLIT_SHAPES for p in cuts(s)], ids=str)
def test_oracle_with_any_cut(case, shape, cut):
    it = case("Q4G64_F16S", shape)
    for T in (1, 9, 64):
        x = tokens(T, it.K, seed=T)
        got = it.run(x, Epilogue.STORE_BF16, cut_launch(cut))
        LINEAR_BF16.check(got, it.want(x, Epilogue.STORE_BF16))


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("shape", [(1024, 2048), (17152, 1536)], ids=str)
def test_a_column_alone_is_itself_in_any_company_bit_for_bit(case, fmt, shape):
    it = case(fmt, shape)
    assert k_runs(*shape)[1] > 0
    epilogue = EPILOGUES[fmt][0]
    x = tokens(128, it.K)
    alone = np.concatenate([it.run(x[t : t + 1], epilogue) for t in range(0, 128, 9)])
    for T in WIDTHS:
        together = it.run(x[:T], epilogue)[::9]
        assert (together.view(np.uint32) == alone[: len(together)].view(np.uint32)).all()


def test_a_small_matrix_has_the_same_bits_at_any_width(case):
    it = case("BF16", (96, 5120))
    x = tokens(128, it.K)
    alone = np.concatenate([it.run(x[t : t + 1], Epilogue.STORE_F32) for t in range(0, 128, 9)])
    for T in WIDTHS:
        for graph in (False, True):
            together = it.run(x[:T], Epilogue.STORE_F32, graph=graph)[::9]
            assert (together.view(np.uint32) == alone[: len(together)].view(np.uint32)).all()


def test_grid_and_replay_change_no_bit(case, device):
    it = case("Q4G64_F16S", (2048, 1024))
    x = tokens(9, it.K)
    want = it.run(x, Epilogue.STORE_BF16, cut_launch((8, 24))).view(np.uint32)
    for grid in (1, 2, 7, device.info.num_sms):
        for graph in (False, True):
            got = it.run(x, Epilogue.STORE_BF16, cut_launch((8, 24), grid), graph)
            assert (got.view(np.uint32) == want).all()


def test_replay_of_the_launcher_is_eager_bit_for_bit(case):
    it = case("Q4G64_F16S", (5120, 6144))
    for T in (1, 65):
        x = tokens(T, it.K)
        eager = it.run(x, Epilogue.ADD_BF16)
        assert (it.run(x, Epilogue.ADD_BF16, graph=True) == eager).all()
