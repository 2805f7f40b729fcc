"""Decode linear of few tokens with emulated threads: the bits of a norm kernel and the linear."""

import numpy as np
import pytest

from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.linear.decode import NEVER, linear_decode_kernel
from ginfer.cuda.linear.decode_few import linear_decode_few_kernel
from ginfer.cuda.linear.decode_small import linear_decode_small_kernel
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.norm import rms_norm_kernel
from ginfer.formats import BF16, Layout
from ginfer.sizes import div_ceil
from scripts.pack.codecs import bf16_bits, encode
from tests.cuda.test_linear_decode import buffer_size, column_tiles, offsets, tokens, weights
from tests.device_cases import EPS, normal
from tests.host.cuda.emulator import run

NAN = 0x7FC0


class Rows:
    """T rows of a residual stream, of a table or the first, and what the norm makes of them."""

    def __init__(self, T, K, *, chosen=False):
        rng = np.random.default_rng(T + K)
        self.x, _ = normal(rng, T + 2, K)
        self.factors = (1 + 0.2 * rng.standard_normal(K)).astype(np.float32)
        self.columns = rng.permutation(T + 2)[:T].astype(np.uint32) if chosen else 0
        self.normed = np.full(buffer_size(T, K), NAN, np.uint16)
        rows = (self.normed, self.x, self.factors, self.columns)
        run(rms_norm_kernel(1, 1), T, *rows, K, *tiles_of(T), EPS)

    def few(self, *, takers, beside=(0, 0, 0, 0)):
        """What a kernel that norms takes: addresses, and numbers at the end. beside: weights and
        results of a small matrix, its rows and slices."""
        w, y, *sizes = beside
        return (self.factors, self.columns, w, y), (takers, *sizes, EPS)


def output(T, N, epilogue):
    """A poisoned result, in bits; ones where it is added to."""
    if epilogue == Epilogue.SILU_UP:
        return np.full(buffer_size(T, div_ceil(N, 128) * 64), NAN, np.uint16)
    if epilogue == Epilogue.ADD_BF16:
        return np.full((T, N), 0x3F80, np.uint16)
    return np.full((T, N), np.nan, np.float32).view(np.uint32)


def results(y, T, N, epilogue):
    """The bits of the T tokens."""
    return y[offsets(T, N // 2, div_ceil(N, 128) * 64)] if epilogue == Epilogue.SILU_UP else y


def linear(launch, matrix, inputs, *, cut, result, few=None):
    """Result (tokens, epilogue) of a kernel on a grid; few: what a kernel for few tokens takes
    beside the rest."""
    payload, (N, K) = matrix
    (item, grid), (T, epilogue) = launch, result
    blocks, k_tiles = div_ceil(N, 128), div_ceil(K, 64)
    whole, runs = cut
    y, workspace = output(T, N, epilogue), np.zeros((blocks + runs) * 1024, np.uint32)
    scalars = (k_tiles, blocks, whole, runs, T, N, epilogue, NEVER)
    addresses, more = few or ((), ())
    run(item, grid, payload, inputs, y, workspace, *addresses, *scalars, *more)
    assert (workspace == 0).all()
    return results(y, T, N, epilogue)


CASES = [
    ("Q4G64_F16S", (1, 4, 3), 1, (1, 2), Epilogue.STORE_F32),
    ("Q4G64_F16S", (2, 2, 2), 5, (1, 2), Epilogue.ADD_BF16),
    ("Q4G64_F16S", (2, 2, 2), 8, (2, 0), Epilogue.SILU_UP),
    ("Q4G64_BF16S", (2, 2, 2), 3, (0, 3), Epilogue.SILU_UP),
    ("W8G32_F16S", (1, 2, 2), 6, (2, 0), Epilogue.STORE_F32),
    ("BF16", (1, 2, 2), 2, (0, 5), Epilogue.STORE_F32),
]


@pytest.mark.parametrize(("fmt", "how", "T", "cut", "epilogue"), CASES, ids=str)
def test_norm_and_linear_in_one_have_the_bits_of_two(fmt, how, T, cut, epilogue):
    shape = (200 if epilogue != Epilogue.SILU_UP else 160, 576)
    matrix, rows = (weights(fmt, *shape)[0], shape), Rows(T, shape[1], chosen=T % 2 == 0)
    common = {"cut": cut, "result": (T, epilogue)}
    plain = linear_decode_kernel(fmt, 1, 2, 2, 0)
    want = linear((plain, 1), matrix, rows.normed, **common)
    item, few = linear_decode_few_kernel(fmt, *how, 1), rows.few(takers=1)
    assert (linear((item, 1), matrix, rows.x, **common, few=few) == want).all()
    item = linear_decode_few_kernel(fmt, *how, 0)
    few = ((0, 0, 0, 0), (1, 0, 0, EPS))
    assert (linear((item, 1), matrix, rows.normed, **common, few=few) == want).all()


@pytest.mark.parametrize("slices", [1, 3])
def test_a_small_matrix_beside_has_the_bits_of_its_own_launch(slices):
    T, (N, K), other_N = 3, (160, 576), 40
    rows, common = Rows(T, K), {"result": (T, Epilogue.STORE_F32)}
    matrix = (weights("Q4G64_F16S", N, K)[0], (N, K))
    other = (weights("BF16", other_N, K)[0], (other_N, K))
    plain = linear_decode_kernel("BF16", 1, 2, 2, 0)
    want = linear((plain, 1), other, rows.normed, cut=(0, slices), **common)
    plain = linear_decode_kernel("Q4G64_F16S", 1, 2, 2, 0)
    first = linear((plain, 1), matrix, rows.normed, cut=(1, 2), **common)
    y = output(T, other_N, Epilogue.STORE_F32)
    item = linear_decode_few_kernel("Q4G64_F16S", 2, 2, 2, 1)
    few = rows.few(takers=1, beside=(other[0], y, other_N, slices))
    assert (linear((item, 3), matrix, rows.x, cut=(1, 2), **common, few=few) == first).all()
    assert (y == want).all()


@pytest.mark.parametrize(("T", "slices"), [(20, 3), (9, 1)])
def test_a_small_matrix_of_many_tokens_has_the_bits_of_each_alone(T, slices):
    (N, K), NT = (40, 1152), column_tiles(T)
    matrix, x = (weights("BF16", N, K)[0], (N, K)), bf16_bits(tokens(T, K))
    together = np.zeros(buffer_size(T, K), np.uint16)
    together[offsets(T, K, K)] = x
    y = output(T, N, Epilogue.STORE_F32)
    sizes = (K // 64, slices, NT, T, N)
    run(linear_decode_small_kernel(), 3 * NT, matrix[0], together, y, *sizes)
    plain = linear_decode_kernel("BF16", 1, 2, 2, 0)
    for t in (0, 8, T - 1):
        alone = np.zeros(buffer_size(1, K), np.uint16)
        alone[offsets(1, K, K)] = x[t : t + 1]
        result = (1, Epilogue.STORE_F32)
        assert (y[t] == linear((plain, 1), matrix, alone, cut=(0, slices), result=result)).all()


@pytest.mark.parametrize(("groups", "T"), [(2, 1), (2, 4), (2, 7), (1, 8)])
def test_every_thread_norms_its_columns(groups, T):
    K, columns = 5120, [0, 1, 1022, 1025, 2046, 2049, 3071, 3072, 4095, 4096, 4607, 5118, 5119]
    chosen = np.zeros((16, K), np.float32)
    chosen[np.arange(len(columns)), columns] = 1
    payload = np.asarray(encode(BF16, Layout.TILE, chosen)).reshape(-1).view(np.uint8)
    rows, y = Rows(T, K), output(T, 16, Epilogue.STORE_F32)
    item = linear_decode_few_kernel("BF16", groups, 2, 2, 1)
    nothing = (np.zeros(16, np.uint8), (128, K))
    few, result = rows.few(takers=0, beside=(payload, y, 16, 1)), (T, Epilogue.STORE_F32)
    linear((item, 1), nothing, rows.x, cut=(1, 0), result=result, few=few)
    want = rows.normed[offsets(T, K, K)[:, columns]].astype(np.uint32) << 16
    assert (y[:, : len(columns)] == want).all()
