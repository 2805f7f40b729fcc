"""Prefill attention: the kernel of a capability, its units of work, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.attention.prefill import attention_prefill_kernel, form_of
from ginfer.cuda.attention.prefill_wgmma import (
    BLOCK_TILES,
    ROWS,
    TOTAL_NBYTES,
    attention_prefill_wgmma_kernel,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.cuda.attention.append import Columns
    from ginfer.cuda.attention.pages import PageShape
    from ginfer.cuda.runtime.queue import Queue

MAX_BLOCKS = 144  # thread blocks of a launch, each with its totals
TOTALS_NBYTES = MAX_BLOCKS * TOTAL_NBYTES


def query_items(
    capability: str, M: int, indptr: NDArray[np.int32], token: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Work items of the columns of rows [B + 1], the longest histories first; M: query heads per
    K/V head. As the kernel of sm_90a takes them, tiles of rows that are full but for the last one
    of a row; for the others (first column, columns)."""
    most = 16 * form_of(capability)[0]
    items = []
    for start, end in pairwise(indptr.tolist()):
        if capability == "90a":
            num = (end - start) * M
            firsts = range(0, num, ROWS)
            items += [(start + r // M, min(ROWS, num - r) | r % M << 16) for r in firsts]
        else:
            items += [(t, min(most, end - t)) for t in range(start, end, most)]
    items.sort(key=lambda item: -int(token[item[0]]))
    return np.array(items, np.int32).reshape(-1, 2)


def spread(units: int, num_sms: int) -> tuple[int, int]:
    """(thread blocks, split) of so many units of work: all multiprocessors take units in turns, and
    when fewer than those are left, `split` of them share each."""
    most = min(num_sms, MAX_BLOCKS)
    rest = units % most
    split = most // rest if rest else 1
    return (most if units >= most else units * split), split


@dataclass(frozen=True, kw_only=True)
class PrefillAttention:
    """items: address of the work items and their number; H: query heads; scale of the scores;
    totals: address of TOTALS_NBYTES that were zero at first; num_sms: multiprocessors."""

    items: int
    num_items: int
    H: int
    scale: float
    totals: int
    num_sms: int


def attention_prefill(
    queue: Queue,
    out: int,
    qkgv: int,
    *,
    kv: tuple[int, int, PageShape],
    columns: Columns,
    shape: PrefillAttention,
) -> None:
    """out [T, H D] BF16 = gated attention of columns whose q, k, v have been prepared by `append`.
    kv: address of page 0, attention layer, shape of the pages."""
    address, layer_idx, pages = kv
    addresses = (out, qkgv, address, shape.items, columns.row, columns.token, columns.pages)
    numbers = (pages.G, columns.P, pages.page_nbytes, pages.layer_offset(layer_idx), shape.scale)
    if queue.image.capability == "90a":
        units = shape.num_items * pages.G
        grid, split = spread(units, shape.num_sms)
        item = attention_prefill_wgmma_kernel(pages.D, BLOCK_TILES, 1)
        scalars = (units, split, shape.H, *numbers)
        queue.launch(item, (grid,), *addresses, shape.totals, *scalars)
    else:
        item = attention_prefill_kernel(*form_of(queue.image.capability), queue.early)
        queue.launch(item, (shape.num_items * shape.H,), *addresses, shape.H, *numbers)
