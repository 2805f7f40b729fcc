"""Decode attention of the 27B shapes on a GPU: long, shared and short histories, both codecs.

python -m tests.bench.decode_attention [--out FILE] [--commit SHA]         needs torch with CUDA

Keys and values are random and lie in pages in random order; a graph goes through the layers, so
that short histories come from memory too. The read ceiling is a float32 sum over 8 GB of the run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase
from ginfer.cuda.attention.append import Columns
from ginfer.cuda.attention.decode_launch import (
    SMALL,
    DecodeAttention,
    DecodeScratch,
    attention_decode,
    decode_kernel,
    large_tiles,
)
from ginfer.cuda.attention.pages import PageShape
from ginfer.cuda.frame import work_units
from ginfer.cuda.runtime.queue import Queue
from ginfer.engine.work_items import work_items
from ginfer.models.qwen import QWEN_27B
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS, KvCodec
from tests.bench.ops import Bench, read_ceiling
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Callable

    Figures = dict[str, tuple[float, str]]

SPEC = QWEN_27B.spec
A = SPEC.attention
LAYERS = 16
NUM_PAGES = 4200
K = 1024


@dataclass(frozen=True)
class Rows:
    """Rows of `tokens` tokens each, the last `columns` of which are columns, that share whole pages
    of their first `shared` tokens."""

    num: int
    tokens: int
    shared: int = 0
    columns: int = 1


CASES = {
    "c1.256k": Rows(1, 256 * K),
    "c1.128k": Rows(1, 128 * K),
    "c1.32k": Rows(1, 32 * K),
    "c1.1k": Rows(1, K),
    "c8.8k": Rows(8, 8 * K),
    "c8.1k": Rows(8, K),
    "r8.128k": Rows(8, 128 * K + 1, shared=128 * K),
    "t16.64k": Rows(1, 64 * K, columns=16),
}


class Cache:
    """Random pages of one codec."""

    def __init__(self, codec: KvCodec) -> None:
        nbytes, scales = SPEC.page_nbytes(codec), SPEC.scales_nbytes(codec)
        self.packed = codec is KvCodec.INT8
        self.token_nbytes = (nbytes + scales) / PAGE_TOKENS / LAYERS
        if self.packed:
            self.kv = torch.randint(-127, 128, (NUM_PAGES, nbytes), device="cuda", dtype=torch.int8)
        else:
            self.kv = torch.empty(NUM_PAGES, nbytes // 2, device="cuda", dtype=torch.bfloat16)
            for part in self.kv.split(200):
                part.normal_()
        self.scales = (torch.rand(NUM_PAGES, scales // 2, device="cuda") * 0.01 + 0.005).half()
        self.shape = PageShape(
            LAYERS, A.num_kv_heads, A.head_dim, self.packed, self.scales.data_ptr()
        )


def batch_of(rows: Rows) -> ForwardBatch:
    """The tables of a decode batch."""
    P, shared = div_ceil(rows.tokens, PAGE_TOKENS), rows.shared // PAGE_TOKENS
    order = np.random.default_rng(1).permutation(NUM_PAGES).astype(np.int32)
    pages = order[shared : shared + rows.num * (P - shared)].reshape(rows.num, -1)
    pages = np.concatenate([np.tile(order[:shared], (rows.num, 1)), pages], 1)
    lanes = np.arange(rows.num, dtype=np.int32)
    indptr = np.arange(rows.num + 1, dtype=np.int32) * np.int32(rows.columns)
    starts = np.full(rows.num, rows.tokens - rows.columns, np.int32)
    T = rows.num * rows.columns
    return ForwardBatch(
        phase=Phase.DECODE,
        token_ids=np.zeros(T, np.int32),
        positions=np.zeros((3, T), np.int32),
        row_indptr=indptr,
        starts=starts,
        page_table=pages,
        state_in=lanes,
        state_out=lanes,
        items=work_items(pages, starts, indptr),
    )


def decode_us(bench: Bench, cache: Cache, rows: Rows) -> float:
    """Time of attention of one layer."""
    batch, T, H = batch_of(rows), rows.num * rows.columns, A.num_q_heads
    P, capability = batch.page_table.shape[1], bench.image.capability
    plan = MemoryPlan(
        num_rows=rows.num,
        num_units=0,
        unit_nbytes=0,
        num_slots=0,
        max_columns=T,
        max_pages_per_row=P,
        max_recorded=T,
    )
    large = large_tiles(capability, cache.packed)
    tiles = SMALL if 16 * SMALL * A.num_kv_heads >= T * H else large
    occupancy = bench.image[decode_kernel(capability, tiles, cache.packed)].occupancy()
    grid = bench.device.info.num_sms * occupancy
    units = work_units(SPEC, plan, large, num_blocks=grid)
    units.fill(batch)
    tokens = np.concatenate([start + np.arange(rows.columns) for start in batch.starts])
    lanes = np.repeat(np.arange(rows.num), rows.columns)
    row, token, pages, storage = (
        torch.from_numpy(table.astype(np.int32)).cuda()
        for table in (lanes, tokens, batch.page_table, units.storage[: units.used])
    )
    slots = int(units.first[T])
    partials = torch.empty(slots, H, A.head_dim, device="cuda")
    stats = torch.empty(slots, H, 2, device="cuda")
    qkgv = torch.randn(T, 2 * (A.q_width + A.kv_width), device="cuda").bfloat16()
    out = torch.empty(T, A.q_width, device="cuda", dtype=torch.bfloat16)
    first = storage.data_ptr()
    members = first + units.first.nbytes
    scratch = DecodeScratch(
        partials.data_ptr(), stats.data_ptr(), members + units.members.nbytes, members, first
    )
    columns = Columns(row.data_ptr(), token.data_ptr(), pages.data_ptr(), 0, P)
    shape = DecodeAttention(T, H, grid, tiles, A.scale, fragments=False)
    queue = Queue(bench.image, bench.stream)

    def launch(layer_idx: int) -> Callable[[], None]:
        return lambda: attention_decode(
            queue,
            out.data_ptr(),
            qkgv.data_ptr(),
            kv=(cache.kv.data_ptr(), layer_idx, cache.shape),
            tables=(columns, scratch),
            shape=shape,
        )

    return bench.time([launch(i) for i in range(LAYERS)])


def measure(bench: Bench, figures: Figures) -> None:
    """All cases with both codecs; prints what it finds."""
    ceiling = read_ceiling()
    for codec in KvCodec:
        cache, times = Cache(codec), {}
        suffix = "" if codec is KvCodec.BF16 else ".int8"
        for name, rows in CASES.items():
            times[name] = us = decode_us(bench, cache, rows)
            tokens = rows.shared + rows.num * (rows.tokens - rows.shared)
            fraction = tokens * cache.token_nbytes / us / ceiling
            figures[f"attention.{name}{suffix}.us"] = (us, "us per layer")
            figures[f"attention.{name}{suffix}.read_fraction"] = (fraction, "fraction")
        ratio = times["r8.128k"] / times["c1.128k"]
        figures[f"cascade.128k{suffix}.r8_over_r1"] = (ratio, "ratio")
        del cache
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    bench = Bench()
    figures: Figures = {}
    measure(bench, figures)
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.4g} {unit}")
    if options.out:
        record(figures, bench.device.info.name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
