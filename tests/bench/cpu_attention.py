"""Decode attention of the CPU image at the demo's shape: rows over one shared prefix, and one row.

python -m tests.bench.cpu_attention [--prefix 8192] [--tail 200] [--threads N]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numba
import numpy as np

from ginfer.batch import ForwardBatch, Phase
from ginfer.cpu import attention
from ginfer.engine.work_items import work_items
from ginfer.models.qwen import QWEN_DEMO
from tests.bench.cpu_ops import best_seconds
from tests.models.cpu.kernels import PAGE, Attention, batch_of


def tables(rows: int, prefix: int, tail: int) -> ForwardBatch:
    """A decode batch of rows with one prefix and tails of their own, and its work items."""
    shared, own = prefix // PAGE, tail // PAGE + 1
    pages = np.empty((rows, shared + own), np.int32)
    pages[:, :shared] = np.arange(shared)
    pages[:, shared:] = shared + np.arange(rows * own).reshape(rows, own)
    batch = batch_of(Phase.DECODE, [1] * rows, [prefix + tail] * rows, pages)
    return replace(batch, items=work_items(pages, batch.starts, batch.row_indptr))


def seconds(rig: Attention, batch: ForwardBatch) -> float:
    """The least time of `attention_decode`."""
    staged, T = rig.staged(batch), batch.num_columns
    r = np.random.default_rng(0)
    qkgv = r.standard_normal((T, 2 * (rig.H + rig.G) * rig.D)).astype(np.float32)
    out = np.zeros((T, rig.H * rig.D), np.float32)
    slots = int(staged.work.first[T]) * rig.H
    part, stats = np.zeros(slots * rig.D, np.float32), np.zeros((2, slots), np.float32)
    threads = numba.get_num_threads()
    scratch = np.zeros((threads, attention.decode_scratch(rig.heads)), np.float32)
    tables = (staged.columns, staged.work)
    return best_seconds(
        lambda: attention.attention_decode(
            out, qkgv, rig.kv, 1, rig.heads, *tables, (0, T), part, stats, scratch
        )
    )


def main() -> None:
    """Print microseconds of one row, and of several, each for itself and by work items."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--tail", type=int, default=200)
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    a = QWEN_DEMO.spec.attention
    pages = arguments.prefix // PAGE + 8 * (arguments.tail // PAGE + 1)
    rig = Attention(a.num_q_heads, a.num_kv_heads, a.head_dim, pages, rotary=a.rotary_dim)
    r = np.random.default_rng(1)
    values = r.standard_normal(rig.kv.shape, np.float32)
    rig.kv[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
    alone = seconds(rig, tables(1, arguments.prefix, arguments.tail))
    print(f"1 row            {1e6 * alone:8.0f} us")
    for rows in (2, 4, 8):
        batch = tables(rows, arguments.prefix, arguments.tail)
        for name, items in (("each for itself", None), ("by work items", batch.items)):
            time = seconds(rig, replace(batch, items=items))
            print(f"{rows} rows {name:16} {1e6 * time:6.0f} us, {time / alone:.2f} of one row")


if __name__ == "__main__":
    main()
