"""Prefill attention of sm_90a on a `Cache`, for whatever runs it; see `device_cases`."""

import numpy as np

from ginfer.cuda.attention.prefill_launch import query_items
from ginfer.cuda.attention.prefill_wgmma import (
    GROUP_NBYTES,
    TOTAL_NBYTES,
    attention_prefill_wgmma_kernel,
)
from tests.device_cases import NAN

FLAG = slice(GROUP_NBYTES - 256, GROUP_NBYTES - 252)


def attention_prefill_wgmma(run, cache, *, block_tiles, grid=0, split=1):
    """Result bits [T, H D]. grid: thread blocks, by default `split` for each unit of work."""
    indptr = np.r_[0, np.flatnonzero(np.diff(cache.row, append=-1)) + 1]
    items = query_items("90a", cache.H // cache.G, indptr, cache.token)
    units, D = len(items) * cache.G, cache.shape.D
    grid = grid or units * split
    out = np.full((len(cache.row), cache.H * D), NAN, np.uint16)
    totals = np.full((2 * grid, GROUP_NBYTES), 0xFF, np.uint8)
    totals[:, FLAG] = 0
    assert totals.nbytes == grid * TOTAL_NBYTES
    run(
        attention_prefill_wgmma_kernel(D, block_tiles, 1),
        grid,
        *(out, cache.qkgv, cache.kv, items, cache.row, cache.token),
        *(cache.pages, totals, units, split, cache.H, cache.G, *cache.numbers, D**-0.5),
    )
    assert (totals[:, FLAG] == 0).all()  # ready for the next launch
    return out
