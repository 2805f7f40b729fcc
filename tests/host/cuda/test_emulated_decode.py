"""Decode linear of sm_90a with emulated threads, on mma and on wgmma, against float64."""

import numpy as np
import pytest

from ginfer.cuda.linear.decode import linear_decode_kernel
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.sizes import div_ceil
from scripts.pack.codecs import bf16_bits
from tests.cuda.test_linear_decode import buffer_size, column_tiles, offsets, tokens, weights
from tests.host.cuda.emulator import run
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import LINEAR_BF16, SILU_UP_BF16

MMA, WGMMA = 0, 1


def linear(fmt, shape, x, *, split, how, epilogue=Epilogue.STORE_F32):
    """Result of tokens x as float32 [T, N or N / 2]. split: (whole row blocks, slices); how: warps,
    row tiles of a warp, k tiles of a stage, mma or wgmma."""
    payload, W = weights(fmt, *shape)
    (N, K), T, NT = W.shape, len(x), column_tiles(len(x))
    blocks, k_tiles = div_ceil(N, 128), div_ceil(K, 64)
    buffer = np.zeros(buffer_size(T, k_tiles * 64), np.uint16)
    buffer[offsets(T, K, k_tiles * 64)] = bf16_bits(x)
    y = np.full((T, N), np.nan, np.float32)
    if epilogue == Epilogue.SILU_UP:
        y = np.full(buffer_size(T, blocks * 64), 0x7FC0, np.uint16)
    (whole, slices), (warps, M, span, wgmma) = split, how
    RB = warps * M // 8
    sliced = div_ceil(blocks - whole, RB)
    workspace = np.full(sliced * slices * RB * NT * 1024 + 1, np.nan, np.float32)
    counters = np.zeros(blocks, np.uint32)
    item = linear_decode_kernel(fmt, warps, M, NT, span, 2, 1, wgmma)
    items = sliced * slices + div_ceil(whole, RB)
    scalars = (k_tiles, blocks, whole, slices, T, N, epilogue)
    run(item, min(items, 3), payload, buffer, y, workspace, counters, *scalars)
    assert (counters == 0).all()
    if epilogue == Epilogue.STORE_F32:
        return y
    at = offsets(T, N // 2, blocks * 64)
    assert (np.delete(y, at.reshape(-1)) & 0x7FFF == 0).all()
    return bf16_to_f32(y[at])


@pytest.mark.parametrize(
    ("fmt", "T", "split", "how"),
    [
        ("Q4G64_F16S", 5, (1, 2), (8, 1, 4, MMA)),
        ("Q4G64_F16S", 3, (2, 1), (8, 1, 8, MMA)),
        ("Q4G64_F16S", 5, (1, 2), (8, 1, 4, WGMMA)),
        ("Q4G64_BF16S", 9, (2, 1), (4, 2, 2, MMA)),
        ("Q4G64_BF16S", 33, (0, 2), (8, 2, 1, WGMMA)),
        ("W8G32_F16S", 3, (0, 2), (8, 1, 2, MMA)),
        ("W8G32_F16S", 17, (2, 1), (8, 1, 2, WGMMA)),
        ("BF16", 9, (0, 2), (8, 1, 2, WGMMA)),
    ],
    ids=str,
)
def test_linear_is_the_oracle(fmt, T, split, how):
    shape = (136, 328)
    W = weights(fmt, *shape)[1]
    x = tokens(T, W.shape[1])
    want = x.astype(np.float64) @ W.T
    LINEAR_BF16.check(linear(fmt, shape, x, split=split, how=how), want)


@pytest.mark.parametrize("how", [(8, 1, 4, MMA), (4, 2, 4, MMA), (8, 1, 4, WGMMA)], ids=str)
def test_gated_rows_become_tokens_of_the_next_linear(how):
    x, fmt, shape = tokens(9, 328), "Q4G64_F16S", (96, 328)
    z = (x.astype(np.float64) @ weights(fmt, *shape)[1].T).reshape(9, -1, 2, 16)
    want = (z[:, :, 0] / (1 + np.exp(-z[:, :, 0])) * z[:, :, 1]).reshape(9, -1)
    got = linear(fmt, shape, x, split=(0, 2), how=how, epilogue=Epilogue.SILU_UP)
    SILU_UP_BF16.check(got, want)


def test_stages_of_every_length():
    x = tokens(2, 1288)  # 21 k tiles: 2, 2, 4, 8, 2, 2, 1
    want = x.astype(np.float64) @ weights("Q4G64_F16S", 32, 1288)[1].T
    how = (8, 1, 8, MMA)
    LINEAR_BF16.check(linear("Q4G64_F16S", (32, 1288), x, split=(1, 1), how=how), want)
