"""Linears between two mixers in one kernel: for which models, and what a launch carries."""

from types import SimpleNamespace

import pytest

from ginfer.cuda.linear.decode_chain_launch import Chain, linear_decode_chain, makes_chain
from ginfer.cuda.linear.decode_chain_parts import FACTORS_NBYTES
from ginfer.cuda.linear.decode_launch import DecodeLinear, k_slices
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.runtime.compiler import MAX_SHARED_NBYTES

WIDTHS = {"27B": (5120, 6144, 17408, 16384), "demo": (384, 768, 1024, 2304)}


def linears(C, mixed, mlp, inner, fmt="Q4G64_F16S"):
    """Output, gate and up, down, inner."""
    shapes = ((C, mixed), (2 * mlp, C), (C, mlp), (inner, C))
    return tuple(DecodeLinear(w=i, fmt=fmt, N=N, K=K) for i, (N, K) in enumerate(shapes, 1))


def launched(widths, T, *, last=4):
    """The kernel, grid and arguments of a launch."""
    calls = []
    queue = SimpleNamespace(launch=lambda *call: calls.append(call))
    small = DecodeLinear(w=9, fmt="BF16", N=96, K=widths[0], epilogue=Epilogue.STORE_F32)
    chain = Chain(
        linears=linears(*widths)[:last],
        factors=(5, 6),
        mixed=10,
        hidden=11,
        mlp=12,
        inner=13,
        scratch=14,
        beside=(small, 17) if last == 4 else None,
    )
    linear_decode_chain(queue, chain, T=T, eps=1e-6)
    ((item, grid, *arguments),) = calls
    return item, grid, arguments


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_both_sizes_of_the_model_have_a_chain(widths):
    assert makes_chain(linears(*widths))
    assert not makes_chain(linears(*widths, fmt="BF16"))


def test_slices_too_long_for_the_tokens_have_none():
    assert k_slices(34816, 17408)[1] > 1
    assert not makes_chain(linears(34816, 17408, 5120, 16384))


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("T", [1, 4, 8])
@pytest.mark.parametrize("last", [3, 4])
def test_a_launch_fits_its_kernel(widths, T, last):
    item, (grid,), arguments = launched(widths, T, last=last)
    assert len(arguments) == len(item.signature)
    assert grid == 132
    build, (depth, tokens_nbytes, *_) = item.build(), arguments[-3:]
    _, span, stages = item.arguments
    assert 3 <= depth <= stages
    assert tokens_nbytes % 128 == 0
    assert FACTORS_NBYTES + tokens_nbytes + depth * span * 4352 + 128 <= build.shared_nbytes
    assert build.shared_nbytes + 4096 <= MAX_SHARED_NBYTES["90a"]
