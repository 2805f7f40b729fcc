"""Linear operators on a GPU beside cuBLAS bf16 and tinygemm int4, in one process.

python -m tests.bench.ops [--out FILE] [--commit SHA]     needs torch with CUDA and kernel images

Each figure is the median of replays of a graph of launches over different weights beyond the L2
cache, all data random. Ours go through 4 GB, because what is to leave L2 first stays there longest
when it comes again; peers, which say nothing of it, through several times L2. The read ceiling is a
float32 sum over 8 GB, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ginfer.cuda.linear.decode_launch import (
    DecodeLinear,
    DecodeScratch,
    column_tiles,
    linear_decode,
    scratch_nbytes,
)
from ginfer.cuda.linear.decode_results import X_TILE
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.prefill_launch import (
    LinearPrefillPlan,
    PrefillLinear,
    PrefillTokens,
    linear_prefill,
    prefill_kernel,
    token_maps,
)
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.linear.variants import decode_kernel
from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.stream import Stream, Timer
from ginfer.cuda.runtime.tensor_map import place_tensor_maps
from ginfer.sizes import MIB
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.cuda.runtime.jit import Kernel

Figures = dict[str, tuple[float, str]]  # (value, unit) by name
FMT = "Q4G64_F16S"
LARGEST = (34816, 5120)
DECODE = {LARGEST: (1, 8, 32, 64), (16384, 5120): (1, 8), (5120, 17408): (1, 8)}
PREFILL = {
    LARGEST: (128, 2048),
    (5120, 17408): (2048,),
    (16384, 5120): (2048,),
    (5120, 6144): (2048,),
}
ROTATED_NBYTES = 4 << 30  # of weights that a graph goes through: L2 keeps next to nothing of them
REPLAYS = 7


class Bench:
    """A device, its image, a stream, random weights; every method returns microseconds."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.device = Device()
        capability = native_capability(self.device.info.capability)
        items = kernels_of(capability)
        self.image = Image.open(capability, items, device_capability=self.device.info.capability)
        self.stream, self.arena = Stream(), Arena(4 * MIB, "tensor maps")
        self.timer = Timer(self.stream)
        torch.manual_seed(1)

    def time(self, launches: list[Callable[[], None]]) -> float:
        """Median time of one launch in a graph of all."""
        torch.cuda.synchronize()
        graph = Graph(self.stream, lambda: [launch() for launch in launches] and None)
        graph.replay()
        self.stream.synchronize()
        times = [self.timer.milliseconds(graph.replay) for _ in range(REPLAYS)]
        graph.close()
        return statistics.median(times) * 1e3 / len(launches)

    def describe(self, item: Kernel) -> str:
        """Registers and occupancy of a kernel."""
        function = self.image[item]
        return f"{function.record.registers} registers, {function.occupancy()} a multiprocessor"

    def decode_text(self, N: int, K: int, T: int) -> str:
        """What runs linear_decode."""
        shape = (N, K, column_tiles(T), UNPACK[FMT].tile_nbytes)
        return self.describe(decode_kernel(self.image.plans, FMT, shape)[0])

    def prefill_plan(self, N: int, K: int, T: int) -> tuple[LinearPrefillPlan, str]:
        """The plan of linear_prefill, and what runs it."""
        shape = PrefillLinear(w=0, fmt=FMT, N=N, K=K).shape(T)
        plan = self.image.plans.find("linear_prefill", LinearPrefillPlan, shape)
        item = prefill_kernel(FMT, plan, Epilogue.STORE_BF16, self.image.capability)
        return plan, f"{plan}, {self.describe(item)}"

    def weights(self, N: int, K: int, count: int = 0) -> list[torch.Tensor]:
        """Random payloads, enough of them to leave the L2 cache behind, or so many."""
        tiles = N // 128 * K // 64
        payloads = []
        for _ in range(count or ROTATED_NBYTES // (tiles * 4352) + 1):
            payload = torch.randint(0, 256, (tiles, 4352), device="cuda", dtype=torch.uint8)
            scales = torch.rand(tiles, 128, device="cuda") * 0.01 + 0.005
            payload[:, 4096:] = scales.half().view(torch.uint8)
            payloads.append(payload)
        return payloads

    def decode(self, payloads: list[torch.Tensor], N: int, K: int, T: int) -> float:
        """linear_decode of T tokens."""
        x = torch.randn(K // 64 * column_tiles(T) * X_TILE // 2, device="cuda").bfloat16()
        y = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
        workspace, counters = (
            torch.zeros(n, device="cuda", dtype=torch.uint8) for n in scratch_nbytes(N, K)
        )
        scratch = DecodeScratch(workspace=workspace.data_ptr(), counters=counters.data_ptr())
        sms = self.device.info.num_sms

        def launch(payload: torch.Tensor) -> Callable[[], None]:
            matrix = DecodeLinear(w=payload.data_ptr(), fmt=FMT, N=N, K=K, num_sms=sms)
            return lambda: linear_decode(
                self.image, self.stream, y.data_ptr(), x.data_ptr(), T=T, linear=(matrix, scratch)
            )

        return self.time([launch(p) for p in payloads])

    def prefill(self, payloads: list[torch.Tensor], N: int, K: int, T: int) -> float:
        """linear_prefill of T tokens."""
        x = torch.randn(T, K, device="cuda").bfloat16()
        y = torch.empty(T, N, device="cuda", dtype=torch.bfloat16)
        views = token_maps(x.data_ptr(), rows=T, K=K)
        placed = place_tensor_maps(
            list(views.values()), self.arena.take(len(views) * 128, "maps", alignment=128)
        )
        tokens = PrefillTokens(x=x.data_ptr(), T=T, maps=dict(zip(views, placed, strict=True)))
        sms = self.device.info.num_sms
        plan, _ = self.prefill_plan(N, K, T)

        def launch(payload: torch.Tensor) -> Callable[[], None]:
            linear = PrefillLinear(w=payload.data_ptr(), fmt=FMT, N=N, K=K, num_sms=sms)
            return lambda: linear_prefill(
                self.image, self.stream, y.data_ptr(), tokens=tokens, linear=linear, plan=plan
            )

        return self.time([launch(p) for p in payloads])


def torch_us(thunks: list[Callable[[], Any]]) -> float:
    """Median time of one call in a torch graph of all."""
    for thunk in thunks[:2]:
        thunk()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for thunk in thunks:
            thunk()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3 / len(thunks)


def read_ceiling() -> float:
    """Bytes per microsecond of a float32 sum over 8 GB."""
    big = torch.randn(2 << 30, device="cuda")
    return big.numel() * 4 / torch_us([big.sum])


def cublas(N: int, K: int, T: int) -> float:
    """cuBLAS bf16 on the same shape."""
    x = torch.randn(T, K, device="cuda").bfloat16()
    weights = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(3)]
    return torch_us([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])


def tinygemm(N: int, K: int, T: int) -> float:
    """torch's int4 kernel, groups of 64."""
    x = torch.randn(T, K, device="cuda").bfloat16()
    packed = [
        torch._convert_weight_to_int4pack(
            torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8), 8
        )
        for _ in range(5)
    ]
    scales = torch.rand(K // 64, N, 2, device="cuda").bfloat16()
    return torch_us([lambda w=w: torch._weight_int4pack_mm(x, w, 64, scales) for w in packed])


def measure_decode(bench: Bench, figures: Figures) -> None:
    """linear_decode against the read ceiling; prints what it finds."""
    ceiling = read_ceiling()
    figures["read.ceiling_tb_s"] = (ceiling / 1e6, "TB/s")
    for (N, K), columns in DECODE.items():
        payloads = bench.weights(N, K)
        times = {T: bench.decode(payloads, N, K, T) for T in columns}
        for T, us in times.items():
            fraction = payloads[0].numel() / us / ceiling
            figures[f"linear.q4.{N}x{K}.t{T}.read_fraction"] = (fraction, "fraction")
            peers = f"cuBLAS {cublas(N, K, T):.1f}, tinygemm {tinygemm(N, K, T):.1f} us"
            print(f"decode  {N}x{K} T={T}: {us:.1f} us, {fraction:.3f} of the ceiling; {peers}")
            print(f"        {bench.decode_text(N, K, T)}")
        if (N, K) == LARGEST:
            for over, under in ((8, 1), (32, 1), (64, 1)):
                name = f"linear.q4.t{over}_over_t{under}"
                figures[name] = (times[over] / times[under], "ratio")


def measure_prefill(bench: Bench, figures: Figures) -> None:
    """linear_prefill against cuBLAS, at its best before and after; prints what it finds."""
    for (N, K), tokens in PREFILL.items():
        payloads = bench.weights(N, K, 4)
        before = cublas(N, K, 2048)
        times = {T: bench.prefill(payloads, N, K, T) for T in tokens}
        peer = min(before, cublas(N, K, 2048)) / 2048
        for T, us in times.items():
            fraction = peer * T / us
            what = "cublas_fraction" if T == 2048 else "cublas2048_fraction"
            figures[f"linear.q4.{N}x{K}.t{T}.{what}"] = (fraction, "fraction")
            rate = 2 * N * K * T / us / 1e6
            print(
                f"prefill {N}x{K} T={T}: {us:.0f} us, {rate:.0f} TFLOP/s, {fraction:.3f} of cuBLAS"
            )
            print(f"        {bench.prefill_plan(N, K, T)[1]}")


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    bench = Bench()
    info = bench.device.info
    print(info)
    figures: Figures = {}
    try:
        measure_decode(bench, figures)
        measure_prefill(bench, figures)
    finally:
        if options.out:
            record(figures, info.name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
