"""Prefill attention of the 27B shapes on a GPU: whole prompts and a turn, beside cuBLAS and SDPA.

python -m tests.bench.prefill_attention [--out FILE] [--commit SHA]        needs torch with CUDA

Scores and values are random; of a prompt, every chunk of 8,192 tokens over the chunks before it.
Fractions are of cuBLAS bf16 at 8192^3 in the same run. SDPA: torch's flash and cuDNN kernels on the
same tokens, contiguous and without a mask but for the first chunk; cuDNN where it has such heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ginfer.cuda.attention.append import Columns
from ginfer.cuda.attention.pages import TILE, PageShape
from ginfer.cuda.attention.prefill_launch import (
    TOTALS_NBYTES,
    PrefillAttention,
    attention_prefill,
    query_items,
)
from ginfer.cuda.runtime.queue import Queue
from ginfer.sizes import div_ceil
from tests.bench.ops import Bench, cublas, torch_us
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Callable

    Figures = dict[str, tuple[float, str]]

H, G, D = 24, 4, 256
LAYERS = 16  # of the model that attend
CHUNK = 8192
KIB_TOKENS = 1024
PROMPTS = (8, 32, 128)  # x 1024 tokens
PEERS = {  # name in figures to torch's backend
    "sdpa": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    "cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
}


def flops(start: int, T: int) -> float:
    """Of T columns behind `start` tokens."""
    return 4.0 * H * D * T * (start + (T + 1) / 2)


class Attention:
    """Pages of one sequence and the tables of its last columns."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        self.bench, self.P = bench, div_ceil(tokens, TILE)
        self.shape = PageShape(1, G, D)
        kv = torch.randn(self.P, self.shape.page_nbytes // 2, device="cuda")
        self.kv = kv.bfloat16()
        self.pages = torch.randperm(self.P, device="cuda").int()
        self.totals = torch.zeros(TOTALS_NBYTES, device="cuda", dtype=torch.uint8)

    def columns(self, start: int, T: int) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
        """A launch of columns start .. start + T, their q, k, gate and v, and where results go."""
        tokens = np.arange(start, start + T)
        capability = self.bench.image.capability
        found = query_items(capability, H // G, np.array([0, T], np.int32), tokens)
        items = torch.from_numpy(found).cuda()
        token = torch.arange(start, start + T, device="cuda", dtype=torch.int32)
        row = torch.zeros_like(token)
        qkgv = torch.randn(T, 2 * (H + G) * D, device="cuda").bfloat16()
        out = torch.empty(T, H * D, device="cuda", dtype=torch.bfloat16)
        columns = Columns(row.data_ptr(), token.data_ptr(), self.pages.data_ptr(), 0, self.P)
        shape = PrefillAttention(
            items=items.data_ptr(),
            num_items=len(items),
            H=H,
            scale=D**-0.5,
            totals=self.totals.data_ptr(),
            num_sms=self.bench.device.info.num_sms,
        )
        queue = Queue(self.bench.image, self.bench.stream)
        kv = (self.kv.data_ptr(), 0, self.shape)
        kept = (items, token, row, qkgv, out)

        def launch() -> None:
            addresses = (kept[4].data_ptr(), kept[3].data_ptr())
            attention_prefill(queue, *addresses, kv=kv, columns=columns, shape=shape)

        return launch, qkgv, out

    def us(self, start: int, T: int) -> float:
        """Time of one launch."""
        return self.bench.time([self.columns(start, T)[0]])


def sdpa_us(start: int, T: int, backend: torch.nn.attention.SDPBackend) -> float:
    """torch's attention. Raises RuntimeError where the backend has no kernel for these heads."""
    q = torch.randn(1, H, T, D, device="cuda").bfloat16()
    k, v = (torch.randn(1, H, start + T, D, device="cuda").bfloat16() for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(backend):
        return torch_us([lambda: attend(q, k, v, is_causal=start == 0)])


def measure(bench: Bench, figures: Figures) -> None:
    """Prompts by their chunks, and a turn of 2,000 tokens."""
    ceiling = 2 * 8192.0**3 / cublas(8192, 8192, 8192)
    for size in PROMPTS:
        tokens = size * KIB_TOKENS
        attention = Attention(bench, tokens)
        us = sum(attention.us(start, CHUNK) for start in range(0, tokens, CHUNK))
        fraction = flops(0, tokens) / us / ceiling
        figures[f"prefill.{size}k.attention_fraction"] = (fraction, "fraction of cuBLAS")
        figures[f"prefill.{size}k.attention_ms"] = (us * LAYERS / 1e3, "ms")
    start, T = 64 * KIB_TOKENS, 2000
    us = Attention(bench, start + T).us(start, T)
    figures["ttft.64k_plus_2000.attention_ms"] = (us * LAYERS / 1e3, "ms")
    figures["ttft.64k_plus_2000.attention_fraction"] = (flops(start, T) / us / ceiling, "fraction")
    first = figures["prefill.8k.attention_ms"][0] / LAYERS * 1e3
    for name, backend in PEERS.items():
        try:
            turn, prompt = us / sdpa_us(start, T, backend), first / sdpa_us(0, CHUNK, backend)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            continue
        figures[f"ttft.64k_plus_2000.attention_over_{name}"] = (turn, "ratio")
        figures[f"prefill.8k.attention_over_{name}"] = (prompt, "ratio")
    figures["cublas.bf16.8192.tflop_s"] = (ceiling / 1e6, "TFLOP/s")


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
