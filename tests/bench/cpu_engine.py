"""Speed and size of the engine on the CPU image: prints the figures, `--write` records them.

python -m tests.bench.cpu_engine [--package P] [--threads N] [--write]
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

from ginfer.config import EngineConfig
from ginfer.engine.bench import measure_decode, measure_prefill
from ginfer.engine.engine import Engine
from tests.bench.summary import record

ROOT = Path(__file__).parents[2]
DEMO_PACKAGE = ROOT / "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
REPEATS = 3
READY = (
    "import sys, pathlib\n"
    "from ginfer import Engine, EngineConfig\n"
    "threads = int(sys.argv[2]) or None\n"
    "Engine.open(EngineConfig(package=pathlib.Path(sys.argv[1]), threads=threads)).close()\n"
)


def measure(package: Path, threads: int | None) -> dict[str, tuple[float, str]]:
    """All figures by name: (value, unit); the best of a few repeats, as the machine is shared."""
    ready = _best_seconds([sys.executable, "-c", READY, str(package), str(threads or 0)])
    with Engine.open(EngineConfig(package=package, backend="cpu", threads=threads)) as engine:
        c1 = max(measure_decode(engine, 1, 128, 256) for _ in range(REPEATS))
        c8 = max(measure_decode(engine, 8, 128, 128) for _ in range(REPEATS))
        prefill = max(measure_prefill(engine, 4096) for _ in range(REPEATS))
        overhead = _overhead_us(engine)
    return {
        "cpu.decode.c1.tok_s": (c1, "tokens/s"),
        "cpu.decode.c8.tok_s": (c8, "tokens/s"),
        "cpu.prefill.tok_s": (prefill, "tokens/s"),
        "cpu.engine.c8.overhead_us": (overhead, "us/round"),
        "cpu.rss_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, "MB"),
        "cpu.ready_s": (ready, "s"),
        "cli.help_ms": (
            1000 * _best_seconds([sys.executable, "-m", "appliance.cli", "--help"]),
            "ms",
        ),
    }


def _overhead_us(engine: Engine) -> float:
    """Microseconds per decode round of eight rows outside the backend: the least of a few runs."""
    found = []
    for _ in range(REPEATS):
        before = engine.stats()
        measure_decode(engine, 8, 1, 128)
        after = engine.stats()
        spent = {k: after[k] - before[k] for k in ("busy_s", "forward_s", "decode_rounds")}
        found.append(1e6 * (spent["busy_s"] - spent["forward_s"]) / spent["decode_rounds"])
    return min(found)


def _best_seconds(command: list[str]) -> float:
    """Wall time of a process, the least of a few runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def device() -> str:
    """The processor, for records."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=DEMO_PACKAGE)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = measure(options.package, options.threads)
    for name, (value, unit) in figures.items():
        print(f"{name:28} {value:10.1f} {unit}")
    if options.write:
        record(figures, device())


if __name__ == "__main__":
    main()
