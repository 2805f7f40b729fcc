"""Linears between two mixers in one kernel with emulated threads: the bits of one after another."""

from types import SimpleNamespace

import numpy as np
import pytest

from ginfer.cuda.linear.decode import linear_decode_kernel
from ginfer.cuda.linear.decode_chain import linear_decode_chain_kernel
from ginfer.cuda.linear.decode_few import linear_decode_few_kernel
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.sizes import align_up, div_ceil
from tests.cuda.test_linear_decode import buffer_size, offsets, weights
from tests.device_cases import EPS, normal
from tests.host.cuda.emulator import run

FMT, C, MIXED, MLP, INNER, OTHER = "Q4G64_F16S", 192, 576, 128, 160, 24
SHAPES = ((C, MIXED), (2 * MLP, C), (C, MLP), (INNER, C))
SPLITS = ((0, 3), (1, 1), (1, 1), (1, 1))
NAN = 0x7FC0


def case(T, splits=SPLITS):
    """Inputs of all phases."""
    rng = np.random.default_rng(T)
    mixed = np.full(buffer_size(T, MIXED), NAN, np.uint16)
    mixed[offsets(T, MIXED, MIXED)] = normal(rng, T, MIXED)[0]
    return SimpleNamespace(
        T=T,
        splits=splits,
        matrices=[weights(FMT, *shape)[0] for shape in SHAPES],
        other=weights("BF16", OTHER, C)[0],
        factors=[(1 + 0.2 * rng.standard_normal(C)).astype(np.float32) for _ in range(2)],
        mixed=mixed,
        hidden=normal(rng, T, C)[0],
        mlp=np.full(buffer_size(T, MLP), NAN, np.uint16),
        inner=np.full((T, INNER), NAN, np.uint16),
        ab=np.full((T, OTHER), np.nan, np.float32),
        workspace=np.full(8 * 1024, np.nan, np.float32),
        counters=np.zeros(8, np.uint32),
        exchange=np.zeros(8 * 2048, np.uint32),
        arrivals=np.zeros(2, np.uint32),
    )


def results(it):
    """The bits of everything that phases write."""
    mlp = it.mlp[offsets(it.T, MLP, MLP)]
    return [np.array(v) for v in (it.hidden, mlp, it.inner, it.ab.view(np.uint32))]


def apart(it, first=0, last=4):
    """The phases as kernels of their own."""
    plain = linear_decode_kernel(FMT, 8, 1, 1, 2, 2, 1, 0)
    normed = linear_decode_few_kernel(FMT, 1, 8, 1, 2, 2, 1)
    places = (
        (it.mixed, it.hidden, Epilogue.ADD_BF16),
        (it.hidden, it.mlp, Epilogue.SILU_UP),
        (it.mlp, it.hidden, Epilogue.ADD_BF16),
        (it.hidden, it.inner, Epilogue.STORE_BF16),
    )
    for p in range(first, last):
        (x, y, epilogue), (N, K) = places[p], SHAPES[p]
        addresses = (it.matrices[p], x, y, it.workspace, it.counters)
        scalars = (div_ceil(K, 64), div_ceil(N, 128), *it.splits[p], it.T, N, epilogue)
        if p % 2 == 0:
            run(plain, 1, *addresses, *scalars)
            continue
        small = (it.other, it.ab) if p == 3 else (0, 0)
        sizes = (1, OTHER if p == 3 else 0, 1, EPS)
        run(normed, 2, *addresses, it.factors[p // 2], 0, *small, *scalars, *sizes)
    return results(it)


def together(it, grid, first=0, last=4, *, span=2, depth=2):
    """The phases as one kernel; the last block takes the small matrix alone."""
    tokens_nbytes = align_up(it.T * (2 * MIXED + 16), 128)
    rows = (C, *(shape[0] for shape in SHAPES[1::2]))
    tiles = [K // 64 for _, K in SHAPES[:3]]
    splits = [whole + (slices << 16) for whole, slices in it.splits]
    run(
        linear_decode_chain_kernel(FMT, span, depth + 1),
        grid,
        *(it.mixed, it.hidden, it.mlp, it.inner, it.exchange, it.arrivals),
        *(*it.matrices, *it.factors, it.other, it.ab),
        *(first, last, it.T, *tiles, *rows, *splits, OTHER, 1, 1),
        *(depth, tokens_nbytes, EPS),
        together=True,
    )
    return results(it)


def same(a, b):
    """Whether all results have equal bits."""
    return all((x == y).all() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("T", "grid"), [(1, 3), (5, 2)])
def test_one_kernel_has_the_bits_of_four(T, grid):
    want, it = apart(case(T)), case(T)
    assert same(together(it, grid), want)
    assert it.arrivals.tolist() == [3 * grid % (2 * grid), grid]


def test_phases_may_begin_late_and_end_early_and_follow_each_other():
    one, other = case(3), case(3)
    want = apart(one, 1, 3), apart(one, 0, 2)
    assert same(together(other, 2, 1, 3, span=4), want[0])
    assert other.arrivals.tolist() == [2, 2]
    assert same(together(other, 2, 0, 2, span=4), want[1])
