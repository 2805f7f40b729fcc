"""Linears between two mixers in one kernel: for whom it is there, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.linear.decode_chain import SHARED_NBYTES, linear_decode_chain_kernel
from ginfer.cuda.linear.decode_chain_parts import FACTORS_NBYTES, MOST_TILES, PHASES, SLICE_NBYTES
from ginfer.cuda.linear.decode_few_launch import BESIDE
from ginfer.cuda.linear.decode_launch import DecodeLinear, k_slices
from ginfer.cuda.linear.decode_results import SLICE_TILES
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import align_up, div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

SPAN = 4  # k tiles in a stage
COUNTERS_NBYTES = 256
MOST_CHAINED = 8  # rows
FORMATS = ("Q4G64_F16S",)


def chain_kernel(fmt: str, span: int = SPAN) -> Kernel:
    """The kernel of a format, whose ring may take all of the shared memory."""
    return linear_decode_chain_kernel(fmt, span, SHARED_NBYTES // (span * UNPACK[fmt].tile_nbytes))


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel of each format, where there is a variant."""
    if starts_early(capability):
        yield from map(chain_kernel, FORMATS)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What the kernel works on. linears: output, gate and up, down, and perhaps inner, whose
    epilogues are their places'. factors: of the norms in front of gate and up, and of inner, [C]
    FP32. beside: a small BF16 matrix with the rows of inner, and the address of its results, FP32.
    Addresses: mixed and mlp in fragment order, hidden and inner in rows; scratch of `chain_nbytes`,
    for this kernel alone, zero at first."""

    linears: tuple[DecodeLinear, ...]
    factors: tuple[int, int]
    mixed: int
    hidden: int
    mlp: int
    scratch: int
    inner: int = 0
    beside: tuple[DecodeLinear, int] | None = None


def makes_chain(linears: Iterable[DecodeLinear]) -> bool:
    """Whether there is a kernel for these linears, four and four between mixers, where
    `takes_rows` says so of the rows."""
    return all(
        m.fmt in FORMATS and (p % 2 == 1 or _item_tiles(m) <= MOST_TILES)
        for p, m in enumerate(linears)
    )


def chain_nbytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes of the scratch memory of chains with matrices of such shapes."""
    splits = [(div_ceil(N, 128), *k_slices(N, K)) for N, K in shapes]
    sliced = max((blocks - whole) * slices for blocks, whole, slices in splits)
    return COUNTERS_NBYTES + sliced * SLICE_NBYTES


def _item_tiles(matrix: DecodeLinear) -> int:
    """K tiles of the longest item."""
    tiles = div_ceil(matrix.K, 64)
    whole, slices = k_slices(matrix.N, matrix.K)
    sliced = div_ceil(div_ceil(tiles, SLICE_TILES), slices) * SLICE_TILES
    return tiles if whole or slices == 1 else min(sliced, tiles)


def linear_decode_chain(queue: Queue, chain: Chain, *, T: int, eps: float, first: int = 0) -> None:
    """hidden, mlp and inner of T rows, from phase `first` on."""
    assert T <= MOST_CHAINED
    fmt, count = chain.linears[0].fmt, len(chain.linears)
    linears = (chain.linears + chain.linears[:1] * PHASES)[:PHASES]
    most = max(div_ceil(m.K, 64) if p % 2 else _item_tiles(m) for p, m in enumerate(chain.linears))
    tokens_nbytes = align_up(T * (128 * most + 16), 128)
    item = chain_kernel(fmt)
    depth = (SHARED_NBYTES - FACTORS_NBYTES - tokens_nbytes) // (SPAN * UNPACK[fmt].tile_nbytes)
    small, other_y = chain.beside or (None, 0)
    others = min(BESIDE, div_ceil(small.N, 16)) if small else 0
    other = (small.N, k_slices(small.N, small.K)[1], others) if small else (0, 0, 0)
    splits = [whole + (slices << 16) for whole, slices in (k_slices(m.N, m.K) for m in linears)]
    tiles = [div_ceil(m.K, 64) for m in linears[:3]]
    queue.launch(
        item,
        (linears[0].num_sms,),
        *(chain.mixed, chain.hidden, chain.mlp, chain.inner),
        *(chain.scratch + COUNTERS_NBYTES, chain.scratch, *(m.w for m in linears)),
        *(*chain.factors, small.w if small else 0, other_y),
        *(first, count, T, *tiles, linears[0].N, linears[1].N, linears[3].N, *splits),
        *(*other, depth, tokens_nbytes, eps),
    )
