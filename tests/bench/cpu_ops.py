"""Speed of the CPU image's linear operators at the shapes of the demo model, alone and in a round.

python -m tests.bench.cpu_ops [--threads N] [--formats Q4G64_F16S,BF16] [--columns 1,8,256]
"""

from __future__ import annotations

import argparse
import time

import numba
import numpy as np

from ginfer.cpu.linear import linear, linear_add, linear_silu_up, prepare
from ginfer.formats import FORMATS, Layout, StorageFormat
from tests.host.cpu.test_linear import random_payload

SHAPES = (  # name, N, K, operator, times in a forward
    ("inner projection", 2048, 384, linear, 8),
    ("output", 384, 768, linear_add, 8),
    ("gate_up", 2048, 384, linear_silu_up, 8),
    ("down", 384, 1024, linear_add, 8),
    ("head", 4224, 384, linear, 0),
)
SECONDS = 0.2  # of one measurement


def best_seconds(call) -> float:
    """The least time of a call in SECONDS: others use the machine too."""
    call()
    best, end = np.inf, time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(fmt: StorageFormat, T: int) -> None:
    """Print microseconds and GMAC/s of every shape, and what a forward of all layers would take."""
    forward = 0.0
    for name, N, K, operator, times in SHAPES:
        weight = prepare(random_payload(fmt, Layout.TILE, (N, K)))
        x = np.random.default_rng(0).standard_normal((T, K)).astype(np.float32)
        y = np.zeros((T, N // 2 if operator is linear_silu_up else N), np.float32)
        seconds = best_seconds(lambda: operator(y, x, weight))  # noqa: B023
        forward += times * seconds
        rate = N * K * T / seconds / 1e9
        print(f"{fmt.name:11} T={T:<4} {name:17} {1e6 * seconds:9.1f} us {rate:7.1f} GMAC/s")
    print(f"{fmt.name:11} T={T:<4} 8 layers {1e3 * forward:8.2f} ms, {T / forward:.0f} tokens/s")


def main() -> None:
    """Measure every format and number of columns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    parser.add_argument("--formats", default="Q4G64_F16S,W8G32_F16S,BF16")
    parser.add_argument("--columns", default="1,8,256")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    for name in arguments.formats.split(","):
        for T in arguments.columns.split(","):
            measure(FORMATS[name], int(T))


if __name__ == "__main__":
    main()
