"""Decode attention: which kernels an image holds, the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.attention.decode import attention_decode_kernel
from ginfer.cuda.attention.decode_bulk import attention_decode_bulk_kernel
from ginfer.cuda.attention.decode_wgmma import attention_decode_wgmma_kernel
from ginfer.cuda.attention.merge import attention_merge_kernel
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.attention.append import Columns
    from ginfer.cuda.attention.pages import PageShape
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

ON_WGMMA = ("90a",)  # whatever the size of units, and pages in BF16
WGMMA_TILES = 4
SMALL = 1  # tiles of 16 rows of a unit, when there are few columns
LARGE = {"90a": 3, "80": 2, "90": 2}  # where a block has more than 99 KiB
STAGES = {  # planes in the ring by tiles, of BF16 and of codes, with bulk copies
    "90a": {1: (0, 6), 3: (0, 5)},
    "120a": {1: (2, 0)},
}


def large_tiles(capability: str, packed: bool = False) -> int:
    """Tiles of 16 rows of the largest units."""
    return WGMMA_TILES if capability in ON_WGMMA and not packed else LARGE.get(capability, SMALL)


def decode_kernel(capability: str, tiles: int, packed: bool = False) -> Kernel:
    """The kernel for units of at most so many tiles and pages of one kind."""
    early = starts_early(capability)
    if capability in ON_WGMMA and not packed:
        return attention_decode_wgmma_kernel(early)
    stages = STAGES.get(capability, {}).get(tiles, (0, 0))[packed]
    if stages:
        return attention_decode_bulk_kernel(tiles, stages, packed, early)
    return attention_decode_kernel(tiles, packed, early)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Both sizes of units and kinds of pages; results in the orders that the next linear reads."""
    early = starts_early(capability)
    for packed in (False, True):
        for tiles in sorted({SMALL, large_tiles(capability, packed)}):
            yield decode_kernel(capability, tiles, packed)
    yield attention_merge_kernel(0, early)
    yield attention_merge_kernel(1, early)


@dataclass(frozen=True)
class DecodeScratch:
    """Addresses. partials: [slots][H][D] FP32, stats: [slots][H][2] FP32; units (from the header
    on), members and first of `batch.WorkUnits`."""

    partials: int
    stats: int
    units: int
    members: int
    first: int


@dataclass(frozen=True)
class DecodeAttention:
    """Shape of a launch: T columns, H query heads, blocks of the grid, tiles of 16 rows of a unit,
    scale of the scores, order of the results."""

    T: int
    H: int
    grid: int
    tiles: int
    scale: float
    fragments: bool


def attention_decode(
    queue: Queue,
    out: int,
    qkgv: int,
    *,
    kv: tuple[int, int, PageShape],
    tables: tuple[Columns, DecodeScratch],
    shape: DecodeAttention,
) -> None:
    """out = gated attention of columns whose q, k, v have been prepared by `append`. kv: address of
    page 0, attention layer, shape of the pages."""
    (address, layer_idx, pages), (columns, scratch) = kv, tables
    T, H, early = shape.T, shape.H, queue.early
    queue.launch(
        decode_kernel(queue.image.capability, shape.tiles, pages.packed),
        (shape.grid,),
        *(scratch.partials, scratch.stats, qkgv, address, pages.scales),
        *(scratch.units, scratch.members, scratch.first, columns.row, columns.token, columns.pages),
        *(H, pages.G, H // pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx)),
        shape.scale,
    )
    queue.launch(
        attention_merge_kernel(shape.fragments, early),
        (T * H,),
        *(out, scratch.partials, scratch.stats, qkgv, scratch.units, scratch.first, columns.token),
        *(H, pages.G, *tiles_of(T)),
    )
