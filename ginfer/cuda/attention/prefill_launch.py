"""Prefill attention: the kernel of a capability, its units of work, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.cuda.attention.prefill import attention_prefill_kernel, form_of
from ginfer.cuda.attention.prefill_wgmma import (
    BLOCK_TILES,
    ROWS,
    TOTAL_NBYTES,
    attention_prefill_wgmma_kernel,
)

if TYPE_CHECKING:
    from ginfer.cuda.attention.append import Columns
    from ginfer.cuda.attention.pages import PageShape
    from ginfer.cuda.runtime.queue import Queue

MAX_BLOCKS = 144  # thread blocks of a launch, each with its totals
TOTALS_NBYTES = MAX_BLOCKS * TOTAL_NBYTES


def columns_of_item(capability: str, M: int) -> int:
    """Columns of a work item at most; M: query heads per K/V head."""
    return ROWS // M if capability == "90a" else 16 * form_of(capability)[0]


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
