"""Prefill of a whole model on a GPU: tokens/s of prompts, their parts, and decode beside a prompt.

python -m tests.bench.prefill PACKAGE [--prompts N ...] [--out FILE]         needs torch with CUDA

Prompts are random ids, 512 to 256K of them: about three minutes. Parts are graphs of a chunk's
kernels alone, in its tables and values; `rest` is what is left of the chunk's graph, `host` what
Python takes to order it, at the same time. Of a long prompt a few chunks are measured, behind
copies of the first one's K/V, and those between them are interpolated: attention grows linearly.
Fractions are of cuBLAS bf16 at 8192^3 in the same run, over multiply-adds of matrices or attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ginfer.batch import ForwardBatch, Phase
from ginfer.config import EngineConfig
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.stream import Timer
from ginfer.engine.bench import measure_prefill
from ginfer.engine.engine import Engine
from ginfer.engine.request import Delta, Failed, Finished, Request, SamplingParams
from ginfer.models import qwen
from ginfer.prompt import PreparedPrompt
from ginfer.sizes import div_ceil
from ginfer.spec import PAGE_TOKENS
from tests.bench.ops import cublas
from tests.bench.summary import SUMMARY, record

if TYPE_CHECKING:
    from ginfer.engine.request import Event

    Figures = dict[str, tuple[float, str]]

KIB_TOKENS = 1024
CHUNK = 8192
MAX_CONTEXT = 262_144
PROMPTS = (512, 2048, 8192, 32768, 131072, MAX_CONTEXT - 16)
SAMPLES = 5  # chunks of a prompt whose parts are measured
LONG_MS = 100.0  # what takes longer is measured once
PARTS = ("linear", "gdn", "attention")
ROWS, CONTEXT, BESIDE = 7, 1024, 65536
UNDISTURBED = 200  # rounds
LIMIT_S = 120.0  # of anything that is waited for


def matrix_flops(model: Any) -> float:
    """Of one token in all layers."""
    total = 0
    for w in model.layers:
        matrices = (w.inner, w.output, w.gate_up, w.down, w.a_b)
        total += sum(m.N * m.K for m in matrices if m is not None)
    return 2.0 * float(total)


def attention_flops(backend: Any, start: int, columns: int) -> float:
    """Of a chunk behind `start` tokens, in all layers that attend."""
    a, layers = backend._spec.attention, sum(w.heads is not None for w in backend._model.layers)
    return 4.0 * layers * a.q_width * columns * (start + (columns + 1) / 2)


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Milliseconds of a chunk: ordered by Python and computed, what the ordering took, the same as
    a graph, and graphs of parts."""

    eager: float
    host: float
    graph: float
    parts: dict[str, float]


class Chunks:
    """Chunks of one prompt on an idle backend, in the pages from 0 on and in slot 0."""

    def __init__(self, backend: Any, tokens: int) -> None:
        self._backend, self._rng = backend, np.random.default_rng(tokens)
        backend.clear_slot(0)  # the first of these calls in a thread makes the device current
        self._timer = Timer(backend._queue.stream)
        self._pages = np.arange(div_ceil(tokens, PAGE_TOKENS), dtype=np.int32)[None]

    def batch(self, start: int, columns: int) -> ForwardBatch:
        """The chunk of so many columns behind `start` tokens."""
        slot, tokens = np.zeros(1, np.int32), np.arange(start, start + columns, dtype=np.int32)
        return ForwardBatch(
            phase=Phase.PREFILL,
            token_ids=self._rng.integers(0, 4000, columns, dtype=np.int32),
            positions=np.tile(tokens, (3, 1)),
            row_indptr=np.array([0, columns], np.int32),
            starts=slot + start,
            page_table=self._pages[:, : div_ceil(start + columns, PAGE_TOKENS)],
            state_in=slot,
            state_out=slot,
        )

    def measure(self, start: int, columns: int, parts: tuple[str, ...] = PARTS) -> ChunkTimes:
        """Compute a chunk as serving does, then time it and its parts."""
        backend, batch, host_s = self._backend, self.batch(start, columns), 0.0
        backend._queue.stream.synchronize()
        staged: Any = None

        def order() -> None:
            nonlocal staged, host_s
            began = time.perf_counter()
            staged = qwen.forward(backend._spec, backend, batch)
            host_s = time.perf_counter() - began

        eager = self._timer.milliseconds(order)
        if eager < 10 * LONG_MS:  # the first time some tables are new
            eager = min(eager, self._timer.milliseconds(order))
        found = {name: self._graph_ms(f"ginfer.cuda.{name}.", staged) for name in parts}
        graph = self._graph_ms("ginfer.", staged) if parts == PARTS else 0.0
        return ChunkTimes(eager=eager, host=1e3 * host_s, graph=graph, parts=found)

    def _graph_ms(self, prefix: str, staged: Any) -> float:
        """Time of the kernels from modules with this prefix."""
        work = partial(self._launch, prefix, staged)
        graph = Graph(self._backend._queue.stream, work, name=prefix)
        ms = self._timer.milliseconds(graph.replay)
        for _ in range(2 if ms < LONG_MS else 0):
            ms = min(ms, self._timer.milliseconds(graph.replay))
        graph.close()
        return ms

    def copy_first(self, columns: int) -> None:
        """The K/V of the first columns behind themselves, over and over."""
        pages = columns // PAGE_TOKENS
        for page in range(pages, self._pages.size):
            self._backend.copy_page(page % pages, page)

    def _launch(self, prefix: str, staged: Any) -> None:
        backend, image = self._backend, self._backend._queue.image
        launch = image.launch

        def only(item: Any, *args: Any, **how: Any) -> None:
            if item.module.startswith(prefix):
                launch(item, *args, **how)

        image.launch = only
        try:
            backend._blocks.embed(staged, Phase.PREFILL)
            for i in range(len(backend._spec.layers)):
                backend._mixer(i, staged, Phase.PREFILL)
                backend._blocks.mlp(i, staged, Phase.PREFILL)
        finally:
            image.launch = launch


def name_of(tokens: int) -> str:
    """Of a prompt's figures."""
    return f"prefill.{tokens / KIB_TOKENS:.3g}k"


def measure_parts(engine: Engine, tokens: int, ceiling: float) -> Figures:
    """Where the time of a prompt goes. ceiling: FLOP/s of cuBLAS."""
    name, starts = name_of(tokens), np.arange(0, tokens, CHUNK)
    measured = starts[np.unique(np.linspace(0, len(starts) - 1, SAMPLES).round().astype(int))]

    def work(_: Any, backend: Any) -> tuple[list[ChunkTimes], float, float]:
        chunks, found = Chunks(backend, tokens), []
        for start in measured.tolist():
            parts = PARTS if start == 0 else ("attention",)
            found.append(chunks.measure(start, min(CHUNK, tokens - start), parts))
            if start == 0:
                chunks.copy_first(min(CHUNK, tokens))
        return found, matrix_flops(backend._model), attention_flops(backend, 0, tokens)

    chunks, flops, attention = engine.between_rounds(work)

    def total(values: list[float]) -> float:
        return float(np.interp(starts, measured, values).sum())

    first, eager = chunks[0], total([c.eager for c in chunks])
    host = total([c.host for c in chunks])
    ms = {part: first.parts[part] * len(starts) for part in PARTS}
    ms["attention"] = total([c.parts["attention"] for c in chunks])
    ms["rest"] = (first.graph - sum(first.parts.values())) * len(starts)
    print(f"{name}: {eager:.0f} ms,", ", ".join(f"{p} {v:.0f}" for p, v in ms.items()), end="; ")
    print(f"host {host:.0f} ms, the first chunk as a graph {first.graph:.1f} of {first.eager:.1f}")
    return {
        **{f"{name}.{part}_ms": (ms[part], "ms") for part in PARTS},
        f"{name}.host_share": (host / eager, "fraction"),
        f"{name}.gdn_share": (ms["gdn"] / eager, "fraction"),
        f"{name}.cublas_fraction": (flops * tokens / eager * 1e3 / ceiling, "fraction of cuBLAS"),
        f"{name}.attention_fraction": (
            attention / ms["attention"] * 1e3 / ceiling,
            "fraction of cuBLAS",
        ),
    }


def measure_prompts(engine: Engine, prompts: tuple[int, ...], ceiling: float) -> Figures:
    """Tokens/s of prompts alone in the engine, and their parts."""
    figures: Figures = {}
    measure_prefill(engine, PROMPTS[0])
    for tokens in prompts:
        speed = max(measure_prefill(engine, tokens) for _ in range(3 if tokens < CHUNK else 1))
        figures[f"{name_of(tokens)}.tok_s"] = (speed, "tokens/s")
        print(f"{name_of(tokens)}.tok_s {speed:.0f}", flush=True)
        figures |= measure_parts(engine, tokens, ceiling)
    return figures


class Rows:
    """Sink of requests that decode: when each of their tokens came."""

    def __init__(self, rows: int) -> None:
        self.times: dict[str, list[float]] = {}
        self._rows, self._ends = rows, SimpleQueue[Any]()

    def __call__(self, event: Event) -> None:
        """Take an event, in the loop thread."""
        if isinstance(event, Delta) and event.token_ids:
            self.times.setdefault(event.request_id, []).append(time.perf_counter())
        elif isinstance(event, Failed | Finished):
            self._ends.put(event)

    def wait(self, tokens: int) -> None:
        """Until every row has so many tokens."""
        deadline = time.perf_counter() + LIMIT_S
        while len(self.times) < self._rows or min(map(len, self.times.values())) < tokens:
            assert time.perf_counter() < deadline, "the rows do not go on"
            time.sleep(0.01)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Sorted seconds between the tokens of a row in a span of time."""
        found: list[float] = []
        for times in list(self.times.values()):
            inside = [t for t in list(times) if begin <= t <= end]
            found += np.diff(inside).tolist()
        return sorted(found)

    def wait_ends(self) -> None:
        """Until all have ended."""
        for _ in range(self._rows):
            self._ends.get(timeout=LIMIT_S)


def _request(request_id: str, tokens: int, max_tokens: int) -> Request:
    ids = np.random.default_rng(time.perf_counter_ns()).integers(0, 4000, tokens, dtype=np.int32)
    return Request(
        request_id=request_id,
        prompt=PreparedPrompt(token_ids=ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        raw=True,
        ignore_eos=True,
    )


def measure_interleaving(engine: Engine) -> Figures:
    """A long prompt while rows decode: 99th percentile of the gaps between tokens of a row over
    their median without it, and the prompt's time over its time alone."""
    alone = BESIDE / measure_prefill(engine, BESIDE)
    rows = Rows(ROWS)
    names = [f"row-{i}" for i in range(ROWS)]
    for name in names:
        engine.submit(_request(name, CONTEXT, 32 * KIB_TOKENS), rows)
    rows.wait(32)
    begin = time.perf_counter()
    rows.wait(min(map(len, rows.times.values())) + UNDISTURBED)
    quiet = rows.gaps(begin, begin := time.perf_counter())
    beside = BESIDE / measure_prefill(engine, BESIDE)
    gaps = rows.gaps(begin, time.perf_counter())
    for name in names:
        engine.cancel(name)
    rows.wait_ends()
    typical, late = statistics.median(quiet), gaps[int(0.99 * len(gaps))]
    print(
        f"interleave: gap {1e3 * typical:.2f} ms alone; beside a prompt of {BESIDE} median "
        f"{1e3 * statistics.median(gaps):.1f}, p99 {1e3 * late:.1f}, most {1e3 * gaps[-1]:.1f} ms "
        f"({len(gaps)}); prompt {alone:.2f} s alone, {beside:.2f} s",
        flush=True,
    )
    return {
        "interleave.gap_ratio": (late / typical, "ratio"),
        "interleave.prompt_ratio": (beside / alone, "ratio"),
    }


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, help="tokens")
    parser.add_argument("--decode-gap-ms", type=int, default=30, help="of the engine")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    figures: Figures = {}
    ceiling = 2 * 8192.0**3 / cublas(8192, 8192, 8192) * 1e6
    torch.cuda.empty_cache()
    print(f"cuBLAS {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    config = EngineConfig(
        package=options.package,
        backend="cuda",
        max_context=MAX_CONTEXT,
        prefill_chunk=CHUNK,
        decode_gap_ms=options.decode_gap_ms,
        prefix_reuse=False,
    )
    with Engine.open(config) as engine:
        figures |= measure_prompts(engine, tuple(options.prompts), ceiling)
        figures |= measure_interleaving(engine)
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.4g} {unit}")
    if options.out:
        record(figures, Device().info.name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
