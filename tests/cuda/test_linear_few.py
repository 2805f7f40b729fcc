"""Decode linear of a few rows on the GPU: norm, linear and a small matrix beside it in one launch.

Bit for bit what their own launches give, whatever the company, with and without a graph.
"""

import numpy as np
import pytest

from ginfer.cuda.linear.decode_few_launch import NormedRows, linear_decode_rows
from ginfer.cuda.linear.decode_launch import DecodeLinear, DecodeScratch, linear_decode
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.norm import RowNorm, rms_norm
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.queue import Queue
from tests.cuda.test_linear_decode import Case, buffer_size
from tests.device_cases import EPS, normal

SHAPES = ((128, 64), (96, 5120), (2048, 1024), (17152, 1536), (16384, 5120))
MOST = 8


@pytest.fixture(autouse=True)
def _needs_sm_90a(capability):
    if capability != "90a":
        pytest.skip("the kernels of sm_90a")


class Rows:
    """Rows of a residual stream on the device, and linear operators on their norm."""

    def __init__(self, memory, image, stream, fmt, shape):
        self.case, self.queue = Case(memory, image, stream, fmt, shape), Queue(image, stream)
        self.memory, self.K = memory, shape[1]
        rng = np.random.default_rng(sum(shape))
        self.x = memory.put(normal(rng, 2 * MOST, self.K)[0])
        factors = 1 + 0.2 * rng.standard_normal(self.K)
        self.factors = memory.put(factors.astype(np.float32))
        self.columns = rng.permutation(2 * MOST)[:MOST].astype(np.uint32)

    def _linear(self, case, epilogue):
        matrix = DecodeLinear(w=case.w.address, fmt=case.fmt, N=case.N, K=case.K, epilogue=epilogue)
        scratch = DecodeScratch(workspace=case.workspace.address, counters=case.counters.address)
        return matrix, scratch

    def apart(self, columns, epilogue, case=None):
        """A norm and a linear launch."""
        case, T = case or self.case, len(columns)
        table, normed = (
            self.memory.put(columns),
            self.memory.put(np.zeros(buffer_size(T, self.K), np.uint16)),
        )
        how, y = RowNorm(EPS, True, table.address), case.output(T, epilogue)
        rows = (normed.address, self.x.address, self.factors.address)
        rms_norm(self.queue, *rows, shape=(T, self.K), how=how)
        linear = self._linear(case, epilogue)
        image, stream = self.queue.image, self.queue.stream
        linear_decode(image, stream, y.address, normed.address, T=T, linear=linear)
        stream.synchronize()
        return case.bits(y, T, epilogue)

    def together(self, columns, epilogue, *, other=None, graph=False):
        """One launch; other: the case of a small matrix, whose results come second."""
        T, table = len(columns), self.memory.put(columns)
        y = self.case.output(T, epilogue)
        rows = NormedRows(
            x=self.x.address, factors=self.factors.address, eps=EPS, T=T, columns=table.address
        )
        beside, z = None, None
        if other is not None:
            z = other.output(T, Epilogue.STORE_F32)
            beside = (self._linear(other, Epilogue.STORE_F32)[0], z.address)
        linear = self._linear(self.case, epilogue)

        def work():
            linear_decode_rows(self.queue, y.address, rows, linear=linear, beside=beside)

        captured = Graph(self.queue.stream, work) if graph else None
        (captured.replay if captured else work)()
        self.queue.stream.synchronize()
        if captured:
            captured.close()
        assert (self.case.workspace.read() == 0).all()
        found = self.case.bits(y, T, epilogue)
        return found if z is None else (found, other.bits(z, T, Epilogue.STORE_F32))


@pytest.fixture
def make(memory, image, stream):
    def rows(fmt, shape):
        return Rows(memory, image, stream, fmt, shape)

    return rows


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_has_the_bits_of_norm_and_linear(make, fmt, shape):
    it = make(fmt, shape)
    for epilogue in EPILOGUES[fmt]:
        for T in (1, 2, 5, 8):
            columns = it.columns[:T]
            want = it.apart(columns, epilogue)
            assert (it.together(columns, epilogue) == want).all(), (epilogue, T)


def test_a_small_matrix_beside_has_the_bits_of_its_own_launch(make):
    it, other = make("Q4G64_F16S", (16384, 5120)), make("BF16", (96, 5120)).case
    for T in (1, 3, 8):
        columns = it.columns[:T]
        want = it.apart(columns, Epilogue.STORE_BF16)
        beside = it.apart(columns, Epilogue.STORE_F32, other)
        for graph in (False, True):
            found = it.together(columns, Epilogue.STORE_BF16, other=other, graph=graph)
            assert (found[0] == want).all()
            assert (found[1] == beside).all()


def test_a_row_alone_is_itself_in_any_company_bit_for_bit(make):
    it = make("Q4G64_F16S", (17152, 1536))
    alone = [it.together(it.columns[t : t + 1], Epilogue.STORE_BF16) for t in range(MOST)]
    for T in range(1, MOST + 1):
        together = it.together(it.columns[:T], Epilogue.STORE_BF16)
        assert (together == np.concatenate(alone[:T])).all()
