"""Gated DeltaNet of the 27B shapes on a GPU, and kernels bound by memory at many tokens.

python -m tests.bench.gdn [--out FILE] [--commit SHA]                 needs torch with CUDA

Random data, a graph of launches over several sets of buffers. A layer is convolution, both chunk
kernels and gated norm, without its linear operators. Fractions are of a read-only kernel in the
same run, over the bytes that a kernel has to read and write.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ginfer.cuda.attention.append import Columns, HeadNorms, append
from ginfer.cuda.attention.pages import TILE, PageShape
from ginfer.cuda.embedding import embedding
from ginfer.cuda.frame import chunks_of
from ginfer.cuda.gdn.chunk import Chunks, gdn_chunks
from ginfer.cuda.gdn.conv import Channels, Rows, conv
from ginfer.cuda.gdn.gate import gated_norm
from ginfer.cuda.gdn.prepare import WITHIN_NBYTES
from ginfer.cuda.gdn.recurrence import WIDTH
from ginfer.cuda.gdn.step import GdnInputs, GdnLayer
from ginfer.cuda.norm import RowNorm, rms_norm
from ginfer.cuda.runtime.queue import Queue
from tests.bench.ops import Bench, read_ceiling
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Callable

    Figures = dict[str, tuple[float, str]]

C, VOCABULARY = 5120, 248_320
HK, HV, LAYERS = 16, 48, 48
X, V = (2 * HK + HV) * WIDTH, HV * WIDTH
W = X + V
H, G, D = 24, 4, 256
EPS, SETS, REPEATS = 1e-6, 3, 4
MANY = 20  # repeats of kernels of ten microseconds: a graph takes some to begin


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, device="cuda").bfloat16()


@dataclass
class Prompt:
    """Buffers of one GDN layer for T tokens of one row."""

    queue: Queue
    T: int

    def __post_init__(self) -> None:
        T, f32 = self.T, lambda *shape: torch.randn(*shape, device="cuda")
        chunks, ends = chunks_of(np.array([0, T], np.int32), np.zeros(1, np.int32))
        within = torch.empty(len(chunks) * HV * WITHIN_NBYTES, device="cuda", dtype=torch.uint8)
        gates = torch.stack(
            [-torch.rand(HV, device="cuda") * 16, -torch.rand(HV, device="cuda") * 5]
        )
        tables = [torch.from_numpy(a).cuda() for a in (chunks, ends, np.array([0, T], np.int32))]
        self.mix, self.ab, self.convolved = bf16(T, W), f32(T, 2 * HV), bf16(T, X)
        self.out, self.results = bf16(T, V), f32(T, V)
        slot = torch.zeros(1, device="cuda", dtype=torch.int32)
        state, history, taps, w = f32(HV, WIDTH, WIDTH), bf16(3, X), f32(4, X), f32(WIDTH)
        self.kept = (*tables, within, gates, slot, state, history, taps, w)
        at = [t.data_ptr() for t in self.kept]
        self.chunks = Chunks(
            at[0], at[1], within=at[3], results=self.results.data_ptr(), num=T // 64
        )
        self.rows = Rows(at[2], at[5], at[5], 1, T)
        self.layer = GdnLayer(at[6], at[4], at[9], HK, HV, W, EPS)
        self.channels = Channels(X, W, at[8], at[7])

    def convolve(self) -> None:
        """The convolution alone."""
        addresses = (self.convolved.data_ptr(), self.mix.data_ptr())
        conv(self.queue, *addresses, rows=self.rows, channels=self.channels)

    def norm(self) -> None:
        """The gated norm alone."""
        addresses = [t.data_ptr() for t in (self.out, self.results, self.mix)]
        gated_norm(self.queue, *addresses, T=self.T, layer=self.layer)

    def whole(self) -> None:
        """All of the layer but its linear operators."""
        self.convolve()
        inputs = GdnInputs(self.convolved.data_ptr(), self.mix.data_ptr(), self.ab.data_ptr())
        tables = ((self.rows,), self.layer, self.chunks)
        gdn_chunks(self.queue, self.out.data_ptr(), inputs, T=self.T, tables=tables)


def measure_gdn(bench: Bench, queue: Queue, ceiling: float, figures: Figures) -> None:
    """A layer and its kernels that are bound by memory."""
    for T in (2048, 8192):
        sets = [Prompt(queue, T) for _ in range(SETS)]
        us = bench.time([one.whole for one in sets] * REPEATS)
        figures[f"gdn.t{T}.layer_us"] = (us, "us")
        figures[f"gdn.t{T}.tok_s"] = (T / us / LAYERS * 1e6, "tok/s")
        us = bench.time([one.convolve for one in sets] * MANY)
        figures[f"conv.t{T}.read_fraction"] = (4 * T * X / us / ceiling, "fraction")
        us = bench.time([one.norm for one in sets] * MANY)
        figures[f"gated_norm.t{T}.read_fraction"] = (8 * T * V / us / ceiling, "fraction")


def measure_rows(bench: Bench, queue: Queue, ceiling: float, figures: Figures) -> None:
    """Norm, embedding and append of 2,048 tokens."""
    T, stride = 2048, C + C // 16
    x, y = [bf16(T, C) for _ in range(SETS)], [bf16(T, C) for _ in range(SETS)]
    w = torch.randn(C, device="cuda")
    us = bench.time([_norm(queue, *pair, w) for pair in zip(y, x)] * MANY)
    figures["rms_norm.t2048.read_fraction"] = (4 * T * C / us / ceiling, "fraction")
    table = torch.randint(0, 100, (VOCABULARY, stride), device="cuda", dtype=torch.uint8)
    shape = (table.data_ptr(), "W8G32_F16S", stride)
    ids = [torch.randint(0, VOCABULARY, (T,), device="cuda").int() for _ in range(SETS)]
    us = bench.time([_embed(queue, *pair, shape) for pair in zip(y, ids)] * MANY)
    figures["embedding.t2048.read_fraction"] = (T * (2 * C + stride) / us / ceiling, "fraction")
    launches, _ = _appends(queue, T)
    us = bench.time(launches * MANY)
    nbytes = 4 * D * T * (H + 2 * G)
    figures["append.t2048.read_fraction"] = (nbytes / us / ceiling, "fraction")


def _norm(queue: Queue, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Callable[[], None]:
    at, shape = (y.data_ptr(), x.data_ptr(), w.data_ptr()), (len(x), C)
    return lambda: rms_norm(queue, *at, shape=shape, how=RowNorm(EPS))


def _embed(queue: Queue, y: torch.Tensor, ids: torch.Tensor, table: Any) -> Callable[[], None]:
    at, shape = (ids.data_ptr(), ids.data_ptr()), (len(ids), C)
    return lambda: embedding(queue, y.data_ptr(), at, table=table, shape=shape)


def _appends(queue: Queue, T: int) -> tuple[list[Callable[[], None]], Any]:
    """Launches on several buffers, and what they use."""
    P, layers = T // TILE, PageShape(SETS, G, D)
    kv = torch.empty(P * layers.page_nbytes, device="cuda", dtype=torch.uint8)
    token = torch.arange(T, device="cuda", dtype=torch.int32)
    kept = (torch.zeros_like(token), token, torch.randperm(P, device="cuda").int())
    floats = [torch.rand(T, 64, device="cuda"), *(torch.randn(D, device="cuda") for _ in "qk")]
    columns = Columns(*(t.data_ptr() for t in (*kept, floats[0])), P=P)
    norms = (HeadNorms(floats[1].data_ptr(), floats[2].data_ptr(), EPS), H)
    inner = [bf16(T, 2 * (H + G) * D) for _ in range(SETS)]

    def launch(i: int) -> Callable[[], None]:
        address, to = inner[i].data_ptr(), (kv.data_ptr(), i, layers)
        return lambda: append(queue, address, to, T=T, columns=columns, norms=norms)

    return [launch(i) for i in range(SETS)], (kept, floats, inner, kv)


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    bench, figures = Bench(), {}
    queue, ceiling = Queue(bench.image, bench.stream), read_ceiling()
    measure_gdn(bench, queue, ceiling, figures)
    measure_rows(bench, queue, ceiling, figures)
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.4g} {unit}")
    if options.out:
        record(figures, bench.device.info.name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
