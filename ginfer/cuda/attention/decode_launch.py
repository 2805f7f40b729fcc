"""Decode attention: work items of a batch, which kernels an image holds, the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.attention.decode import BLOCK_KEYS, BLOCK_TILES, attention_decode_kernel
from ginfer.cuda.attention.merge import attention_merge_kernel
from ginfer.cuda.lib.fragment import tiles_of
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ginfer.cuda.attention.append import Columns
    from ginfer.cuda.attention.pages import PageShape
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

SMALL, LARGE = 1, 3  # tiles of 16 rows


def large_tiles(capability: str) -> int:
    """Tiles of 16 rows of the kernel for groups: one where a block has 99 KiB."""
    return SMALL if capability in ("86", "89", "120a") else LARGE


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Both sizes of groups; results in the orders that the next linear reads."""
    early = starts_early(capability)
    for tiles in sorted({SMALL, large_tiles(capability)}):
        yield attention_decode_kernel(tiles, early)
    yield attention_merge_kernel(0, early)
    yield attention_merge_kernel(1, early)


@dataclass(frozen=True)
class WorkItems:
    """items: [I, 3] int32, (place in lists, columns, block). lists: int32, columns of the groups.
    first: [T + 1] int32, slots of partials before a column."""

    items: NDArray[np.int32]
    lists: NDArray[np.int32]
    first: NDArray[np.int32]


def work_items(
    rows: NDArray[np.int32], tokens: NDArray[np.int32], pages: NDArray[np.int32], *, group: int
) -> WorkItems:
    """Cut a batch into items of at most `group` columns. Columns share an item of a block when the
    pages of that block are the same for them. rows, tokens: [T], row and token index of each
    column; pages: [B, P]."""
    blocks = tokens // BLOCK_KEYS + 1
    first = np.zeros(len(tokens) + 1, np.int32)
    np.cumsum(blocks, out=first[1:])
    lists: list[int] = []
    items: list[tuple[int, int, int]] = []
    places: dict[tuple[int, ...], int] = {}
    for block in range(int(blocks.max(initial=0))):
        for columns in _sharing(block, rows, tokens, pages):
            for i in range(0, len(columns), group):
                part = tuple(columns[i : i + group])
                if part not in places:
                    places[part] = len(lists)
                    lists.extend(part)
                items.append((places[part], len(part), block))
    return WorkItems(np.array(items, np.int32).reshape(-1, 3), np.array(lists, np.int32), first)


def _sharing(
    block: int, rows: NDArray[np.int32], tokens: NDArray[np.int32], pages: NDArray[np.int32]
) -> Sequence[list[int]]:
    """Columns that reach a block, by the pages that they read there."""
    found: dict[tuple[int, ...], list[int]] = {}
    for t in range(len(tokens)):
        if tokens[t] >= block * BLOCK_KEYS:
            last = min(int(tokens[t]) // 64, block * BLOCK_TILES + BLOCK_TILES - 1)
            table = pages[rows[t], block * BLOCK_TILES : last + 1]
            found.setdefault(tuple(table.tolist()), []).append(t)
    return list(found.values())


@dataclass(frozen=True)
class DecodeScratch:
    """Addresses. partials: [slots][H][D] FP32, stats: [slots][H][2] FP32, items: count, then
    `WorkItems.items`, lists and first as there."""

    partials: int
    stats: int
    items: int
    lists: int
    first: int


@dataclass(frozen=True)
class DecodeAttention:
    """Shape of a launch: T columns, H query heads, blocks of the grid, tiles of 16 rows of an
    item, scale of the scores, order of the results."""

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
        attention_decode_kernel(shape.tiles, early),
        (shape.grid,),
        *(scratch.partials, scratch.stats, qkgv, address, scratch.items, scratch.lists),
        *(scratch.first, columns.row, columns.token, columns.pages),
        *(H, pages.G, H // pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx)),
        shape.scale,
    )
    queue.launch(
        attention_merge_kernel(shape.fragments, early),
        (T * H,),
        *(out, scratch.partials, scratch.stats, qkgv, scratch.first, columns.token),
        *(H, pages.G, *tiles_of(T)),
    )
