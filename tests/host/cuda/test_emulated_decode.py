"""Decode linear of sm_90a with emulated threads, on mma and on wgmma, against float64."""

import numpy as np
import pytest

from ginfer.cuda.linear.decode import linear_decode_kernel
from ginfer.cuda.linear.decode_ring import LONG_RUN
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.sizes import div_ceil
from scripts.pack.codecs import bf16_bits
from tests.cuda.test_linear_decode import buffer_size, column_tiles, offsets, tokens, weights
from tests.host.cuda.emulator import run
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import LINEAR_BF16, SILU_UP_BF16

MMA, WGMMA = 0, 1


def linear(fmt, shape, x, *, cut, how, epilogue=Epilogue.STORE_F32):
    """Result of tokens x as float32 [T, N or N / 2]. cut: (whole row blocks, runs), and
    thread blocks if not one; how: k tiles of a stage, mma or wgmma."""
    payload, W = weights(fmt, *shape)
    (N, K), T, NT = W.shape, len(x), column_tiles(len(x))
    blocks, k_tiles = div_ceil(N, 128), div_ceil(K, 64)
    buffer = np.zeros(buffer_size(T, k_tiles * 64), np.uint16)
    buffer[offsets(T, K, k_tiles * 64)] = bf16_bits(x)
    y = np.full((T, N), np.nan, np.float32)
    if epilogue == Epilogue.SILU_UP:
        y = np.full(buffer_size(T, blocks * 64), 0x7FC0, np.uint16)
    if epilogue == Epilogue.ADD_BF16:
        y = np.full((T, N), 0x3F80, np.uint16)
    (whole, runs, *grid), (span, wgmma) = cut, how
    workspace = np.zeros((runs + blocks) * NT * 1024, np.uint32)
    item = linear_decode_kernel(fmt, NT, span, 2, wgmma)
    scalars = (k_tiles, blocks, whole, runs, T, N, epilogue, 1)
    arrays = (payload, buffer, y, workspace)
    run(item, *(grid or [1]), *arrays, *scalars)
    assert (workspace == 0).all()
    if epilogue == Epilogue.STORE_F32:
        return y
    if epilogue == Epilogue.ADD_BF16:
        return bf16_to_f32(y)
    at = offsets(T, N // 2, blocks * 64)
    assert (np.delete(y, at.reshape(-1)) & 0x7FFF == 0).all()
    return bf16_to_f32(y[at])


@pytest.mark.parametrize(
    ("fmt", "T", "cut", "how"),
    [
        ("Q4G64_F16S", 5, (1, 2), (4, MMA)),
        ("Q4G64_F16S", 3, (2, 0), (8, MMA)),
        ("Q4G64_F16S", 5, (1, 2), (4, WGMMA)),
        ("Q4G64_BF16S", 9, (2, 0), (2, MMA)),
        ("Q4G64_BF16S", 33, (0, 4), (1, WGMMA)),
        ("W8G32_F16S", 3, (0, 3), (2, MMA)),
        ("W8G32_F16S", 17, (2, 0), (2, WGMMA)),
        ("BF16", 9, (0, 4), (2, WGMMA)),
    ],
    ids=str,
)
def test_linear_is_the_oracle(fmt, T, cut, how):
    shape = (136, 328)
    W = weights(fmt, *shape)[1]
    x = tokens(T, W.shape[1])
    want = x.astype(np.float64) @ W.T
    LINEAR_BF16.check(linear(fmt, shape, x, cut=cut, how=how), want)


@pytest.mark.parametrize(("T", "how"), [(9, (4, MMA)), (9, (4, WGMMA)), (20, (4, WGMMA))], ids=str)
def test_gated_rows_become_tokens_of_the_next_linear(T, how):
    x, fmt, shape = tokens(T, 328), "Q4G64_F16S", (96, 328)
    z = (x.astype(np.float64) @ weights(fmt, *shape)[1].T).reshape(T, -1, 2, 16)
    want = (z[:, :, 0] / (1 + np.exp(-z[:, :, 0])) * z[:, :, 1]).reshape(T, -1)
    got = linear(fmt, shape, x, cut=(0, 2), how=how, epilogue=Epilogue.SILU_UP)
    SILU_UP_BF16.check(got, want)


def test_stages_of_every_length():
    K = 64 * LONG_RUN + 8  # k tiles: 2, 2, 4, nine times 8, 4, 1
    x = tokens(2, K)
    want = x.astype(np.float64) @ weights("Q4G64_F16S", 32, K)[1].T
    LINEAR_BF16.check(linear("Q4G64_F16S", (32, K), x, cut=(1, 0), how=(8, MMA)), want)


@pytest.mark.parametrize(
    ("N", "epilogue"),
    [(300, Epilogue.STORE_F32), (300, Epilogue.ADD_BF16), (301, Epilogue.ADD_BF16)],  # lone rows
)
def test_runs_that_cross_row_blocks_are_slices_of_both(N, epilogue):
    shape, x = (N, 584), tokens(3, 584)  # nine steps in five runs: 1, 2, 2, 2, 2
    want = x.astype(np.float64) @ weights("Q4G64_F16S", *shape)[1].T
    got = [
        linear("Q4G64_F16S", shape, x, cut=(0, 5, grid), how=(4, MMA), epilogue=epilogue)
        for grid in (1, 5)
    ]
    LINEAR_BF16.check(got[0], want + (epilogue == Epilogue.ADD_BF16))
    assert (got[0] == got[1]).all()


@pytest.mark.parametrize(
    ("N", "cut"), [(300, (0, 5, 1)), (301, (0, 5, 5)), (300, (2, 2)), (301, (3, 0))], ids=str
)
def test_slices_of_many_columns_are_finished_by_their_senders(N, cut):
    shape, x = (N, 584), tokens(17, 584)
    want = x.astype(np.float64) @ weights("Q4G64_F16S", *shape)[1].T
    got = linear("Q4G64_F16S", shape, x, cut=cut, how=(2, WGMMA), epilogue=Epilogue.ADD_BF16)
    LINEAR_BF16.check(got, want + 1)


def test_more_slices_than_tiles_of_columns():
    shape, x = (40, 1300), tokens(17, 1300)  # six slices, four tiles
    want = x.astype(np.float64) @ weights("Q4G64_F16S", *shape)[1].T
    LINEAR_BF16.check(linear("Q4G64_F16S", shape, x, cut=(0, 6, 3), how=(2, WGMMA)), want)


def test_a_collection_stands_between_whole_row_blocks():
    shape, x = (300, 584), tokens(3, 584)  # two whole row blocks, two runs through the third
    want = x.astype(np.float64) @ weights("Q4G64_F16S", *shape)[1].T
    LINEAR_BF16.check(linear("Q4G64_F16S", shape, x, cut=(2, 2), how=(4, MMA)), want)
