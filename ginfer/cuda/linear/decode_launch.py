"""Decode linear: how K is cut, scratch memory, and the launch for 1 to 128 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.linear.decode_results import MAX_SLICES, SLICE_TILES, X_TILE
from ginfer.cuda.linear.decode_small import MOST_ROWS, linear_decode_small_kernel
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.linear.variants import COLUMN_TILES, decode_kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from ginfer.cuda.runtime.image import Image
    from ginfer.cuda.runtime.stream import Stream

SMS = 132  # multiprocessors that slices are cut for: part of the numbers, whatever the device has
MAX_TOKENS = 128
LAUNCH_TOKENS = 8 * max(COLUMN_TILES)
COUNTERS_NBYTES = 16 << 10  # one u32 per row block
SLOT_NBYTES = 4096  # a slice's sums of one row block and 8 tokens


def k_slices(N: int, K: int) -> tuple[int, int]:
    """(whole, slices): the first `whole` row blocks of 128 take all of K, the others that many
    slices. A function of the shape alone; of all choices the least time by `_rounds`, where an
    exchange costs two steps, and four when no whole rows follow that hide it."""
    blocks, steps = div_ceil(N, 128), div_ceil(K, 64 * SLICE_TILES)
    best = (_rounds(blocks, steps), blocks, 1)
    for whole in {0, blocks // SMS * SMS} - {blocks}:
        for slices in range(2, min(steps, MAX_SLICES) + 1):
            exchange = 2 if whole else 4
            sliced = _rounds((blocks - whole) * slices, div_ceil(steps, slices))
            best = min(best, (whole // SMS * steps + sliced + exchange, whole, slices))
    return best[1:]


def k_runs(N: int, K: int) -> tuple[int, int]:
    """(whole, runs) for `decode_runs`: the slices of `k_slices`, each a run, or as many runs as
    multiprocessors, which cross row blocks, where that makes them two steps shorter."""
    whole, slices = k_slices(N, K)
    cut, steps = div_ceil(N, 128) - whole, div_ceil(K, 64 * SLICE_TILES)
    runs = cut * slices
    shorter = div_ceil(cut * steps, SMS) + 2 <= div_ceil(steps, slices)
    return (whole, SMS) if shorter and runs < SMS <= 2 * runs else (whole, runs)


def _rounds(items: int, steps: int) -> float:
    """Time of items of so many steps: a lone multiprocessor is at most 1.5 times as fast as its
    fair share of the bandwidth."""
    full, rest = divmod(items, SMS)
    return full * steps + (max(rest / SMS, 1 / 1.5) * steps if rest else 0)


@dataclass(frozen=True, kw_only=True)
class DecodeLinear:
    """A matrix [N, K] in `tile128x64-v1` at address w, what happens to its sums, and the number of
    multiprocessors of its device."""

    w: int
    fmt: str
    N: int
    K: int
    epilogue: Epilogue = Epilogue.STORE_BF16
    num_sms: int = SMS

    def __post_init__(self) -> None:
        assert self.epilogue in EPILOGUES[self.fmt], (self.fmt, self.epilogue)

    @property
    def is_small(self) -> bool:
        """Whether `decode_small` has a variant."""
        wanted = self.fmt == "BF16" and self.epilogue == Epilogue.STORE_F32
        return wanted and self.N <= MOST_ROWS


@dataclass(frozen=True, kw_only=True)
class DecodeScratch:
    """Addresses: slices of sums in flight, zeroed, and zero again after a launch; for kernels that
    do not start early counters, likewise, with their slices behind them. Launches that follow each
    other may share them."""

    workspace: int
    counters: int

    @property
    def counted(self) -> int:
        """Address of the slices that are counted."""
        return self.counters + COUNTERS_NBYTES


def scratch_nbytes(N: int, K: int) -> tuple[int, int]:
    """Bytes of the workspace and of the counters for a matrix [N, K] at any number of tokens."""
    blocks, (whole, runs) = div_ceil(N, 128), k_runs(N, K)
    room = (runs + blocks - whole) * max(COLUMN_TILES) * SLOT_NBYTES
    assert 4 * blocks <= COUNTERS_NBYTES
    return room, COUNTERS_NBYTES + room


def column_tiles(T: int) -> int:
    """Tiles of 8 columns of the launch that takes T <= 64 tokens: NT of its fragment order."""
    return next(n for n in COLUMN_TILES if n * 8 >= T)


def linear_decode(
    image: Image,
    stream: Stream,
    y: int,
    x: int,
    *,
    T: int,
    linear: tuple[DecodeLinear, DecodeScratch],
) -> None:
    """y = x W^T with the epilogue of `linear`, 1 <= T <= 128. May overlap the kernel before.

    x: tokens in fragment order (`fragment_offset`), the first 64 at NT = 8 and the others behind
    them at NT = `column_tiles` of their number; at most 64 at `column_tiles(T)`. y: address, a
    multiple of 4, of [T, N] BF16 or FP32, or of the next linear's tokens, N / 2 columns, in the
    same order.
    """
    assert 1 <= T <= MAX_TOKENS
    matrix, scratch = linear
    blocks, k_tiles = div_ceil(matrix.N, 128), div_ceil(matrix.K, 64)
    early = starts_early(image.capability)  # persistent, too: a block takes items in turns
    whole, parts = (k_runs if early else k_slices)(matrix.N, matrix.K)
    for first in range(0, T, LAUNCH_TOKENS):
        count = min(T - first, LAUNCH_TOKENS)
        NT = column_tiles(count)
        tokens_at, result_at = first * k_tiles * X_TILE // 8, first * _row_nbytes(matrix)
        if early and NT > 1 and matrix.is_small:
            to, sizes = (y + result_at, x + tokens_at), (max(parts, 1), NT, count)
            _small_linear(image, stream, *to, sizes=sizes, matrix=matrix)
            continue
        shape = (matrix.N, matrix.K, NT, UNPACK[matrix.fmt].tile_nbytes)
        item, ahead = decode_kernel(image.plans, matrix.fmt, shape)
        addresses = (matrix.w, x + tokens_at, y + result_at)
        scalars = (k_tiles, blocks, whole, parts, count, matrix.N, int(matrix.epilogue))
        if early:
            grid = min(max(parts + whole, blocks), matrix.num_sms)
            where = (*addresses, scratch.workspace)
            image.launch(item, (grid,), stream, *where, *scalars, ahead, dependent=True)
        else:
            items = (blocks - whole) * parts + whole
            counted = (*addresses, scratch.counted, scratch.counters)
            image.launch(item, (items,), stream, *counted, *scalars)


def _small_linear(
    image: Image,
    stream: Stream,
    y: int,
    x: int,
    *,
    sizes: tuple[int, int, int],
    matrix: DecodeLinear,
) -> None:
    """The launch of `decode_small`; sizes: slices, NT, T."""
    (slices, NT, T), k_tiles = sizes, div_ceil(matrix.K, 64)
    grid = (div_ceil(matrix.N, 16) * NT,)
    arguments = (matrix.w, x, y, k_tiles, slices, NT, T, matrix.N)
    image.launch(linear_decode_small_kernel(), grid, stream, *arguments, dependent=True)


def _row_nbytes(matrix: DecodeLinear) -> int:
    """Bytes of one token's results, padding of fragment order included."""
    if matrix.epilogue == Epilogue.SILU_UP:
        return div_ceil(matrix.N, 128) * X_TILE // 8
    return matrix.N * (4 if matrix.epilogue == Epilogue.STORE_F32 else 2)
