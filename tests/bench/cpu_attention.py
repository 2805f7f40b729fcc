"""Decode over one shared prefix on the CPU image: attention, and rounds of the demo model.

python -m tests.bench.cpu_attention [--prefix 8192] [--tail 200] [--threads N] [--package P]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import numpy as np

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase
from ginfer.cpu import attention
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.loader import load_weights, open_package
from ginfer.engine.memory import page_nbytes
from ginfer.engine.work_items import work_items
from ginfer.models.qwen import QWEN_DEMO, forward
from tests.bench.cpu_engine import DEMO_PACKAGE
from tests.bench.cpu_ops import best_seconds
from tests.models.cpu.kernels import PAGE, Attention, batch_of
from tests.models.cpu.rows import greedy

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (1, 2, 4, 8)
REPEATS = 5  # of every measurement, in turns: others use the machine too
SPEC = QWEN_DEMO.spec


def decode_batch(rows: int, prefix: int, tail: int) -> ForwardBatch:
    """One column of each row after a common prefix and a tail of its own; with work items."""
    shared, own = prefix // PAGE, tail // PAGE + 1
    pages = np.empty((rows, shared + own), np.int32)
    pages[:, :shared] = np.arange(shared)
    pages[:, shared:] = shared + np.arange(rows * own).reshape(rows, own)
    batch = batch_of(Phase.DECODE, [1] * rows, [prefix + tail] * rows, pages)
    items = work_items(pages, batch.starts, batch.row_indptr)
    selection = greedy(range(rows), rows=np.arange(rows, dtype=np.int32))
    return replace(batch, items=items, selection=selection)


def filled(kv: np.ndarray) -> np.ndarray:
    """Random BF16 in all pages."""
    values = np.random.default_rng(1).standard_normal(kv.shape, np.float32)
    kv[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return kv


def attention_call(pages: int) -> Callable[[ForwardBatch], Callable[[], object]]:
    """Batch to a call of `attention_decode` on pages of the demo's shape."""
    a = SPEC.attention
    rig = Attention(a.num_q_heads, a.num_kv_heads, a.head_dim, pages, rotary=a.rotary_dim)
    filled(rig.kv)
    rooms = np.zeros((numba.get_num_threads(), 0), np.uint16)
    scratch = np.zeros((numba.get_num_threads(), attention.decode_scratch(rig.heads)), np.float32)

    def call(batch: ForwardBatch) -> Callable[[], object]:
        staged, T = rig.staged(batch), batch.num_columns
        r = np.random.default_rng(0)
        qkgv = r.standard_normal((T, 2 * (rig.H + rig.G) * rig.D)).astype(np.float32)
        out = np.zeros((T, rig.H * rig.D), np.float32)
        slots = int(staged.work.first[T]) * rig.H
        spaces = (np.zeros(slots * rig.D, np.float32), np.zeros((2, slots), np.float32))
        fixed = (out, qkgv, rig.planes, 1, rig.heads, staged.columns, staged.work)
        return lambda: attention.attention_decode(*fixed, (0, T), *spaces, scratch, rooms)

    return call


def round_call(pages: int, package: Path) -> Callable[[ForwardBatch], Callable[[], object]]:
    """Batch to a call of a whole forward of the demo model."""
    backend = CpuBackend(SPEC, threads=numba.get_num_threads())
    load_weights(open_package(package, verify=False, progress=_silent), backend, _silent)
    plan = MemoryPlan(
        num_rows=8,
        num_units=pages,
        unit_nbytes=page_nbytes(SPEC),
        num_slots=8,
        max_columns=64,
        max_pages_per_row=pages,
    )
    backend.allocate(plan)
    filled(backend._kv.bits)
    return lambda batch: lambda: forward(SPEC, backend, batch)


def _silent(stage: str, done: int, total: int) -> None:
    """Loading takes a moment; nobody waits for news."""


def measure(
    name: str, call: Callable[[ForwardBatch], Callable[[], object]], prefix: int, tail: int
) -> None:
    """Print microseconds for several rows, each for itself and by work items."""
    batches = {rows: decode_batch(rows, prefix, tail) for rows in ROWS}
    variants = {(rows, grouped): np.inf for rows in ROWS for grouped in (False, True)}
    for _ in range(REPEATS):
        for rows, grouped in variants:
            batch = batches[rows] if grouped else replace(batches[rows], items=None)
            seconds = best_seconds(call(batch))
            variants[rows, grouped] = min(variants[rows, grouped], seconds)
    alone = min(variants[1, False], variants[1, True])
    for rows in ROWS:
        apart, together = (1e6 * variants[rows, grouped] for grouped in (False, True))
        print(
            f"{name:9} {rows} rows: each for itself {apart:7.0f} us, by work items "
            f"{together:7.0f} us = {together / 1e6 / alone:.2f} of one row"
        )


def main() -> None:
    """Measure attention, then rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--tail", type=int, default=200)
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    parser.add_argument("--package", type=Path, default=DEMO_PACKAGE)
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    prefix, tail = arguments.prefix, arguments.tail
    pages = prefix // PAGE + max(ROWS) * (tail // PAGE + 1)
    measure("attention", attention_call(pages), prefix, tail)
    measure("round", round_call(pages, arguments.package), prefix, tail)


if __name__ == "__main__":
    main()
