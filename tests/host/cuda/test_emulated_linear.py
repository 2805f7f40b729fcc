"""Linear on mma.sync with emulated threads, against the float64 oracle."""

import numpy as np
import pytest

from ginfer.cuda.linear.decode_mma import DecodeMmaPlan, linear_decode_mma_kernel
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.prefill_launch import MMA, prefill_kernel
from ginfer.formats import TILE_NBYTES
from ginfer.sizes import div_ceil
from scripts.pack.codecs import bf16_bits
from tests.cuda.test_linear_decode import buffer_size, column_tiles, offsets, tokens, weights
from tests.host.cuda.emulator import run
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import LINEAR_BF16, SILU_UP_BF16

NAN = 0x7FC0


def linear(fmt, shape, x, split, epilogue):
    """Result of tokens x as float32 [T, N or N / 2]; split: (whole row blocks, slices)."""
    payload, W = weights(fmt, *shape)
    (N, K), T, NT = W.shape, len(x), column_tiles(len(x))
    blocks, k_tiles = div_ceil(N, 128), div_ceil(K, 64)
    buffer = np.zeros(buffer_size(T, k_tiles * 64), np.uint16)
    buffer[offsets(T, K, k_tiles * 64)] = bf16_bits(x)
    y = np.full((T, N), NAN, np.uint16)
    if epilogue == Epilogue.STORE_F32:
        y = np.full((T, N), np.nan, np.float32)
    if epilogue == Epilogue.ADD_BF16:
        y[:] = 0x3F80
    if epilogue == Epilogue.SILU_UP:
        y = np.full(buffer_size(T, blocks * 64), NAN, np.uint16)
    whole, slices = split
    items = whole + (blocks - whole) * slices
    workspace = np.full(items * NT * 1024, np.nan, np.float32)
    counters = np.zeros(blocks, np.uint32)
    span = DecodeMmaPlan.default("80", (N, K, NT, TILE_NBYTES[fmt])).span
    item = linear_decode_mma_kernel(fmt, NT, span)
    scalars = (k_tiles, blocks, whole, slices, T, N, epilogue)
    run(item, items, payload, buffer, y, workspace, counters, *scalars)
    assert (counters == 0).all()
    if epilogue == Epilogue.STORE_F32:
        return y
    if epilogue != Epilogue.SILU_UP:
        return bf16_to_f32(y)
    at = offsets(T, N // 2, blocks * 64)
    assert (np.delete(y, at.reshape(-1)) & 0x7FFF == 0).all()
    return bf16_to_f32(y[at])


@pytest.mark.parametrize(
    ("fmt", "shape", "T", "split", "epilogue"),
    [
        ("Q4G64_F16S", (200, 584), 1, (1, 3), Epilogue.STORE_BF16),
        ("Q4G64_F16S", (200, 328), 9, (0, 2), Epilogue.ADD_BF16),
        ("Q4G64_BF16S", (128, 128), 33, (1, 1), Epilogue.STORE_BF16),
        ("W8G32_F16S", (130, 136), 17, (2, 1), Epilogue.STORE_F32),
        ("BF16", (96, 328), 5, (0, 2), Epilogue.STORE_F32),
        ("BF16", (160, 72), 12, (2, 1), Epilogue.STORE_BF16),
    ],
    ids=str,
)
def test_linear_decode_is_the_oracle(fmt, shape, T, split, epilogue):
    x = tokens(T, shape[1])
    want = x.astype(np.float64) @ weights(fmt, *shape)[1].T + (epilogue == Epilogue.ADD_BF16)
    LINEAR_BF16.check(linear(fmt, shape, x, split, epilogue), want)


@pytest.mark.parametrize("split", [(1, 1), (0, 2)])
def test_gated_rows_become_tokens_of_the_next_linear(split):
    x = tokens(9, 328)
    z = (x.astype(np.float64) @ weights("Q4G64_F16S", 96, 328)[1].T).reshape(9, -1, 2, 16)
    want = (z[:, :, 0] / (1 + np.exp(-z[:, :, 0])) * z[:, :, 1]).reshape(9, -1)
    SILU_UP_BF16.check(linear("Q4G64_F16S", (96, 328), x, split, Epilogue.SILU_UP), want)


def test_a_column_alone_is_itself_in_company_bit_for_bit():
    x = tokens(33, 328)
    how = ("Q4G64_F16S", (128, 328))
    together = linear(*how, x, (0, 2), Epilogue.STORE_F32)
    for t in (0, 8, 32):
        alone = linear(*how, x[t : t + 1], (0, 2), Epilogue.STORE_F32)
        assert (alone == together[t]).all()


@pytest.mark.parametrize("N", [40, 37])
def test_linear_prefill_adds(N):
    K, T = 72, 3
    payload, W = weights("Q4G64_F16S", N, K)
    x, y = tokens(T, K), np.full((T, N), 0x3F80, np.uint16)
    item = prefill_kernel("Q4G64_F16S", MMA, Epilogue.ADD_BF16, "80")
    run(item, 1, payload, bf16_bits(x), y, 2, 1, T, N, 1, K)
    LINEAR_BF16.check(bf16_to_f32(y), x.astype(np.float64) @ W.T + 1)
