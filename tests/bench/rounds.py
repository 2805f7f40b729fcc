"""Decode rounds of a whole model on a GPU: tokens/s, fractions of the read ceiling, parts, start.

python -m tests.bench.rounds PACKAGE [--start] [--out FILE] [--commit SHA]     needs torch with CUDA

Contexts are histories of `ginfer.engine.bench`. Bytes of a round: every matrix once, K/V of all
rows, recurrent state read and written. The read ceiling is a float32 sum over 8 GB in the same run.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ginfer.batch import Phase
from ginfer.config import EngineConfig
from ginfer.cuda.round_clock import RoundClock
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.stream import Timer
from ginfer.cuda.slots import slot_nbytes
from ginfer.engine.bench import decoding, histories
from ginfer.engine.engine import Engine
from ginfer.engine.loader import open_package
from ginfer.sizes import MIB, human_bytes
from ginfer.spec import PAGE_TOKENS, KvCodec
from tests.bench.ops import read_ceiling
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.spec import ModelSpec

    Figures = dict[str, tuple[float, str]]

KIB_TOKENS = 1024
CONTEXTS = (1, 8, 64, 256)  # x 1024 tokens
ROWS = (1, 2, 4, 8)
TOKENS = 48  # of a row that are measured
PARTED = ((1, 1), (8, 1), (1, 64), (1, 256))  # rows and context whose parts are measured
PARTS = {
    "linear": "ginfer.cuda.linear.",
    "attention": "ginfer.cuda.attention.",
    "gdn": "ginfer.cuda.gdn.",
    "norm": "ginfer.cuda.norm",
}
REPLAYS = 7
READERS = 8
PIECE_NBYTES = 8 * MIB


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a round reads: bytes of all matrices, of a page, of a slot."""

    matrices_nbytes: int
    page_nbytes: int
    slot_nbytes: int

    def nbytes(self, rows: int, context: int) -> int:
        """Bytes of a round of `rows` rows after `context` tokens each."""
        kv = context * self.page_nbytes // PAGE_TOKENS
        return self.matrices_nbytes + rows * (kv + 2 * self.slot_nbytes)


def load_of(package: Path, codec: KvCodec) -> tuple[Load, ModelSpec]:
    """The bytes of a package's rounds, and its model."""
    bound = open_package(package, verify=False, progress=lambda *_: None)
    with bound.package as opened:
        spec = bound.contract.spec
        rows = ("text/token_embedding",)  # looked up, not read
        matrices = sum(r.bytes for r in opened.tensors if r.name.startswith("text/"))
        matrices -= sum(r.bytes for r in opened.tensors if r.name in rows)
    page = spec.page_nbytes(codec) + spec.scales_nbytes(codec)
    slot = slot_nbytes(spec)
    return Load(matrices_nbytes=matrices, page_nbytes=page, slot_nbytes=slot), spec


def drop_cache(path: Path) -> None:
    """Have the file's pages leave the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def raw_read_s(path: Path) -> float:
    """Seconds of reading a file past the page cache where the file system allows, by READERS."""
    size = path.stat().st_size
    offsets = iter(range(0, size // PIECE_NBYTES * PIECE_NBYTES, PIECE_NBYTES))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        drop_cache(path)
        fd = os.open(path, os.O_RDONLY)
    lock = threading.Lock()

    def read() -> None:
        buffer = mmap(-1, PIECE_NBYTES)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.preadv(fd, [buffer], offset)

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return time.perf_counter() - start


def timed_start(config: EngineConfig, *, cold: bool) -> tuple[Engine, Figures]:
    """An engine, and figures of its start. cold: from a file that is not in the page cache, with
    the time that reading it takes."""
    marks: dict[str, float] = {}

    def progress(stage: str, done: int, total: int) -> None:
        marks.setdefault(f"first {stage}", time.perf_counter())
        marks[f"last {stage}"] = time.perf_counter()

    raw = raw_read_s(config.package) if cold else 0.0
    if cold:
        drop_cache(config.package)
    start = time.perf_counter()
    engine = Engine.open(config, progress)
    ready = time.perf_counter()
    gc.collect()
    gc.freeze()  # as the engine's process does
    before = marks["first load"] - start
    load = marks["last load"] - marks["first load"]
    after = ready - marks["last load"]
    print(
        f"raw read {raw:.1f} s; start {ready - start:.1f} s: before the first payload "
        f"{before:.1f}, load {load:.1f}, then {after:.1f}",
        flush=True,
    )
    if not cold:
        return engine, {}
    return engine, {
        "start.load_over_read": (load / raw, "ratio"),
        "start.ready_after_load_s": (after, "s"),
        "start.ready_s": (ready - start, "s"),
    }


class Parts:
    """Device time of parts of a decode round, as graphs of their kernels alone, in the tables of
    the round that ran last."""

    def __init__(self, backend: Any, rows: int) -> None:
        self._backend, self._rows = backend, rows
        self._stream, self._image = backend._queue.stream, backend._queue.image
        self._timer = Timer(self._stream)

    def measure(self) -> dict[str, float]:
        """Microseconds of the whole forward, of each part, of what is left of it as `rest` (what
        stands idle, less what overlaps), and of the selection behind it."""
        whole = self._time(self._backend._graphs[self._rows, self._rows, False])
        found = {"forward": whole}
        for name, prefix in PARTS.items():
            graph = Graph(self._stream, partial(self._launch, prefix), name=name)
            found[name] = self._time(graph)
            graph.close()
        graph = Graph(self._stream, self._head, name="head")
        found["head"] = self._time(graph)
        graph.close()
        found["rest"] = whole - sum(us for name, us in found.items() if name != "forward")
        selections = self._backend._selector._graphs  # by rows, masked, greedy
        found["selection"] = self._time(selections[self._rows, False, True][0])
        return found

    def _time(self, graph: Graph) -> float:
        graph.replay()
        times = [self._timer.milliseconds(graph.replay) for _ in range(REPLAYS)]
        return 1e3 * statistics.median(times)

    def _head(self) -> None:
        staged = self._backend._frame.decode_round(self._rows)
        self._backend._blocks.head(staged, self._rows)

    def _launch(self, prefix: str) -> None:
        """Put the kernels of modules with this prefix on the stream, the head's apart."""
        backend, launch = self._backend, self._image.launch

        def only(item: Any, *args: Any, **how: Any) -> None:
            if item.module.startswith(prefix):
                launch(item, *args, **how)

        self._image.launch = only
        try:
            staged = backend._frame.decode_round(self._rows)
            for i in range(len(backend._spec.layers)):
                backend._mixer(i, staged, Phase.DECODE)
                backend._blocks.mlp(i, staged, Phase.DECODE)
        finally:
            self._image.launch = launch


class Rounds:
    """Measurements of one engine; collects figures by name."""

    def __init__(self, engine: Engine, load: Load, ceiling: float) -> None:
        self.engine, self.load, self.ceiling = engine, load, ceiling
        self.backend: Any = engine.between_rounds(lambda cache, backend: backend)
        self.figures: Figures = {}

    def fits(self, rows: int, context: int) -> bool:
        """Whether so many rows can be promised such a context."""
        pages = rows * (context // PAGE_TOKENS + 8)
        return pages * PAGE_TOKENS <= self.engine.info.kv_capacity

    def decode(self, rows: int, context: int) -> float:
        """Measure one place of the table; returns tokens/s."""
        kib = context // KIB_TOKENS
        name = f"decode.c{rows}.{kib}k"
        context = min(context, self.engine.info.max_context - 512)
        prompts = histories(self.engine, rows, context, TOKENS)
        clock = RoundClock(self.backend._queue.stream)
        self.backend.clock = clock
        parts: dict[str, float] = {}
        with decoding(self.engine, prompts, TOKENS) as steady:
            self.backend.clock = None
            if (rows, kib) in PARTED:
                parts = self.engine.between_rounds(lambda _, b: Parts(b, rows).measure())
        gaps, rounds = clock.intervals_us()
        clock.close()
        tail = rounds[len(rounds) // 2 :]
        round_us, gap_us = statistics.median(tail), statistics.median(gaps[len(gaps) // 2 :])
        nbytes = self.load.nbytes(rows, context + TOKENS // 2)
        fraction = nbytes / (steady.round_s * 1e6) / self.ceiling
        host_us = steady.host_s * 1e6
        self.figures |= {
            f"{name}.tokens_per_s": (steady.tokens_per_s, "tokens/s"),
            f"{name}.read_fraction": (fraction, "fraction"),
        }
        if kib == 1:
            self.figures[f"decode.c{rows}.gap_us"] = (gap_us, "us")
            self.figures[f"decode.c{rows}.host_us"] = (host_us, "us")
        print(
            f"{name}: {steady.tokens_per_s:.1f} tok/s, round {steady.round_s * 1e6:.0f} us wall "
            f"{round_us:.0f} device, gap {gap_us:.1f}, host {host_us:.0f} us; "
            f"{nbytes / 1e9:.2f} GB, {fraction:.3f} of the ceiling",
            flush=True,
        )
        if parts:
            idle = round_us - parts["forward"] - parts["selection"]
            self._parts(rows, (kib, context), parts | {"between": idle})
        return steady.tokens_per_s

    def _parts(self, rows: int, context: tuple[int, int], parts: dict[str, float]) -> None:
        kib, tokens = context
        print("   ", ", ".join(f"{part} {us:.0f}" for part, us in parts.items()), "us", flush=True)
        for part in (p for p in parts if p not in ("rest", "between")):  # differences, near zero
            us = parts[part]
            self.figures[f"decode.c{rows}.{kib}k.{part}_us"] = (us, "us")
        kv = rows * tokens * self.load.page_nbytes / PAGE_TOKENS
        short = f"attention.c{rows}.{kib}k.read_fraction"
        self.figures[short] = (kv / parts["attention"] / self.ceiling, "fraction")
        print(f"    {short} {self.figures[short][0]:.3f}", flush=True)


def ledger_over_device(engine: Engine, before: int, device: Device) -> float:
    """What the ledger counts over the device memory that is gone."""
    ledger = engine.stats()["memory"]
    counted = sum(n for name, n in ledger.items() if name != "parking")
    gone = before - device.free_nbytes()
    print("ledger:", ", ".join(f"{use} {human_bytes(n)}" for use, n in ledger.items()))
    print(f"counted {human_bytes(counted)}, gone {human_bytes(gone)}", flush=True)
    return counted / gone


def measure(options: argparse.Namespace, ceiling: float) -> Iterator[Figures]:
    """Figures of everything, as they come."""
    device = Device()
    before = device.free_nbytes()
    load, spec = load_of(options.package, KvCodec(options.kv_dtype))
    config = EngineConfig(package=options.package, backend="cuda", kv_dtype=options.kv_dtype)
    engine, start = timed_start(config, cold=options.start)
    yield start
    with engine:
        yield {"memory.ledger_over_device": (ledger_over_device(engine, before, device), "ratio")}
        rounds = Rounds(engine, load, ceiling)
        for context in options.contexts:
            speeds = {}
            for rows in options.rows:
                tokens = context * KIB_TOKENS
                if tokens <= spec.max_context and rounds.fits(rows, tokens):
                    speeds[rows] = rounds.decode(rows, tokens)
                    yield rounds.figures
            if context == 1 and {1, 8} <= speeds.keys():
                yield {"decode.c8_over_c1": (speeds[8] / speeds[1], "ratio")}


def torch_ceiling() -> float:
    """Bytes per microsecond of reading, measured by torch, which then gives its memory back."""
    ceiling = read_ceiling()
    torch.cuda.empty_cache()
    return ceiling


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS, help="x 1024 tokens")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="requests together")
    parser.add_argument("--kv-dtype", default="bf16", help="storage of K/V")
    parser.add_argument("--start", action="store_true", help="from a cold file, with figures of it")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    ceiling = torch_ceiling()
    print(f"read ceiling {ceiling / 1e6:.2f} TB/s", flush=True)
    figures: Figures = {"read.ceiling_tb_s": (ceiling / 1e6, "TB/s")}
    name = Device().info.name
    for found in measure(options, ceiling):
        figures |= found
        if options.out:
            record(figures, name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
