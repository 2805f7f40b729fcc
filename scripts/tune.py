"""Measure launch plans on the GPU of this machine and write ginfer/cuda/plans/sm_XX.py.

    python -m scripts.tune [--op linear_prefill] [--no-build] [--out FOLDER]

Every candidate must first give the rows of a float64 product within the bound, and all rows bit for
bit as the first candidate does: plans change speed, never numbers. A time is the median of replays
of a graph of launches over different copies of random weights, beyond the L2 cache. Of prefill,
plans that no image holds are shown, but not written; an image holds what the table of decode names,
and a table names what is at least 2 % faster than the default.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ginfer.cuda.lib.fragment import column_tiles, fragment_offset
from ginfer.cuda.linear.decode_launch import (
    DecodeLinear,
    DecodeScratch,
    linear_decode,
    scratch_nbytes,
)
from ginfer.cuda.linear.epilogue import Epilogue
from ginfer.cuda.linear.prefill_launch import (
    LinearPrefillPlan,
    PrefillLinear,
    PrefillTokens,
    linear_prefill,
    prefill_kernel,
)
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.linear.variants import OPS as DECODE
from ginfer.cuda.linear.variants import decode_op, plan_kernel
from ginfer.cuda.runtime.build import build_image
from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.manifest import image_folder, read_manifest
from ginfer.cuda.runtime.memory import Arena
from ginfer.cuda.runtime.plan import LaunchPlan, PlanTable, Shape
from ginfer.cuda.runtime.stream import Stream, Timer
from ginfer.cuda.runtime.tensor_map import NBYTES as MAP_NBYTES
from ginfer.cuda.runtime.tensor_map import TensorMap, place_tensor_maps
from ginfer.errors import InternalError
from ginfer.formats import FORMATS, Layout
from ginfer.models.contract import Role
from ginfer.models.registry import contract_for
from ginfer.sizes import MIB
from scripts.pack.codecs import absmax_codes, bf16_bits, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from ginfer.cuda.runtime.jit import Kernel

    Bits = NDArray[np.uint16]

FOLDER = Path(__file__).parents[1] / "ginfer/cuda/plans"
FMT = "Q4G64_F16S"
TILE_NBYTES = UNPACK[FMT].tile_nbytes
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
WIDTHS = (8, 16, 32, 64)  # tokens of decode launches
BOUND = 1 / 256  # of the relative L2 error of BF16 results
ROTATED_NBYTES = 400 * MIB  # of weights that a graph goes through
ARENA_NBYTES = 3 << 30
REPLAYS = 5
GAIN = 0.98  # of the default's time: what is less is noise
SLOWER = 1.3  # than the best so far: one replay tells enough


class Gpu:
    """A device, its image, a stream, an arena that is used again for every matrix."""

    def __init__(self, items: Iterable[Kernel], capability: str, device: Device) -> None:
        self.capability, self.num_sms = capability, device.info.num_sms
        self.image = Image.open(capability, items, device_capability=device.info.capability)
        self.stream = Stream()
        self.timer = Timer(self.stream)

    def time(self, launches: list[Callable[[], None]], best: float) -> float:
        """Microseconds of one launch in a graph of all; one replay of what is much slower than
        `best`."""

        def work() -> None:
            for launch in launches:
                launch()

        graph = Graph(self.stream, work)
        graph.replay()
        times = [self.timer.milliseconds(graph.replay)]
        if times[0] * 1e3 / len(launches) < best * SLOWER:
            times += [self.timer.milliseconds(graph.replay) for _ in range(REPLAYS - 1)]
        graph.close()
        return statistics.median(times) * 1e3 / len(launches)


class Payload:
    """Random weights [N, K]: 128 encoded rows at either end, whose values are known, random codes
    and scales between them."""

    def __init__(self, N: int, K: int, rng: np.random.Generator) -> None:
        blocks, per_block = -(-N // 128), -(-K // 64) * TILE_NBYTES
        known = (rng.standard_normal((256, K)) * K**-0.5).astype(np.float32)
        codes, scales = absmax_codes(known, 64, 7)
        self.rows = np.r_[:128, N - 128 : N]
        self.values = codes * np.repeat(scales.astype(np.float64), 64, axis=1)
        tiles = np.frombuffer(rng.bytes(blocks * per_block), np.uint8).copy()
        tiles = tiles.reshape(-1, TILE_NBYTES)
        random = (rng.random((len(tiles), 128)) * 0.01 + 0.005) * K**-0.5
        tiles[:, 4096:] = random.astype(np.float16).view(np.uint8)
        self.bytes = tiles.reshape(blocks, per_block)
        for place, first in ((0, 0), (blocks - 1, 128)):
            self.bytes[place] = encode(FORMATS[FMT], Layout.TILE, known[first : first + 128])


class Case(ABC):
    """An operator on a matrix: weights, tokens and results on the device."""

    name: ClassVar[str]
    family: ClassVar[type[LaunchPlan]]
    buckets: ClassVar[tuple[int, ...]]  # numbers of tokens
    in_image: ClassVar[bool] = False  # an image holds the plans of its table
    checks: ClassVar[tuple[int, ...]]  # numbers of tokens at which results are compared

    def __init__(self, gpu: Gpu, arena: Arena, shape: tuple[int, int]) -> None:
        self.gpu, (self.N, self.K) = gpu, shape
        rng = np.random.default_rng(self.N + self.K)
        self.payload = Payload(*shape, rng)
        nbytes, self.copies = self.payload.bytes.nbytes, list[int]()
        for _ in range(max(2, ROTATED_NBYTES // nbytes + 1)):
            part = arena.take(nbytes, "weights", alignment=1024)
            part.array(self.payload.bytes.shape, np.uint8).write(self.payload.bytes)
            self.copies.append(part.address)
        T = max(self.buckets)
        bits = bf16_bits(rng.standard_normal((min(T, 512), self.K)).astype(np.float32))
        self.tokens = np.resize(bits, (T, self.K))
        self.y = arena.take(T * self.N * 2, "results", alignment=1024)
        self.place_tokens(arena)

    @classmethod
    def bucket(cls, shape: tuple[int, int], T: int) -> Shape:
        """The shape that look-ups use."""
        return (*shape, T, TILE_NBYTES)

    @staticmethod
    @abstractmethod
    def kernel(capability: str, plan: Any, bucket: Shape) -> Kernel:
        """The kernel of a plan."""

    @abstractmethod
    def place_tokens(self, arena: Arena) -> None:
        """Bring the tokens to the device in the order that the kernels read."""

    @abstractmethod
    def launches(self, plan: Any, T: int) -> list[Callable[[], None]]:
        """A launch for each copy of the weights."""

    def check(self, plan: LaunchPlan, T: int, first: Bits | None) -> Bits:
        """The bits of the results. Raises InternalError when they are not the product, or not the
        bits of `first`."""
        results = self.y.array((T, self.N), np.uint16)
        results.write(np.full((T, self.N), 0x7FC0))
        self.launches(plan, T)[0]()
        self.gpu.stream.synchronize()
        bits = results.read()
        if first is not None and not np.array_equal(bits, first):
            raise InternalError(f"{self.name}: {plan} has other bits at {self.N}x{self.K}")
        got, x = (
            (b.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            for b in (bits[:, self.payload.rows], self.tokens[:T])
        )
        want = x @ self.payload.values.T
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error <= BOUND:
            raise InternalError(f"{self.name}: {plan} is off by {error:.3g} at {self.N}x{self.K}")
        return bits

    def measure(self, T: int, plans: list[LaunchPlan]) -> dict[LaunchPlan, float]:
        """Microseconds of each plan."""
        times: dict[LaunchPlan, float] = {}
        for plan in plans:
            best = min(times.values(), default=float("inf"))
            times[plan] = self.gpu.time(self.launches(plan, T), best)
        return times


class PrefillCase(Case):
    """linear_prefill."""

    name, family, buckets, checks = "linear_prefill", LinearPrefillPlan, TOKENS, (300,)

    @staticmethod
    def kernel(capability: str, plan: LinearPrefillPlan, bucket: Shape) -> Kernel:
        """The kernel of a plan."""
        return prefill_kernel(FMT, plan, Epilogue.STORE_BF16, capability)

    def place_tokens(self, arena: Arena) -> None:
        """Row-major, with a tensor map for each width of a tile."""
        x = arena.take(self.tokens.nbytes, "tokens", alignment=1024)
        x.array(self.tokens.shape, np.uint16).write(self.tokens)
        self.x = x.address
        bucket = self.bucket((self.N, self.K), 1)
        plans = LinearPrefillPlan.candidates(self.gpu.capability, bucket)
        widths = sorted({plan.tile_n for plan in plans})
        views = [TensorMap(address=self.x, shape=self.tokens.shape, box=(n, 64)) for n in widths]
        room = arena.take(len(views) * MAP_NBYTES, "maps", alignment=MAP_NBYTES)
        self.maps = dict(zip(widths, place_tensor_maps(views, room), strict=True))

    def launches(self, plan: LinearPrefillPlan, T: int) -> list[Callable[[], None]]:
        """A launch for each copy of the weights."""
        gpu, y = self.gpu, self.y.address
        tokens = PrefillTokens(x=self.x, T=T, maps=self.maps)

        def launch(w: int) -> Callable[[], None]:
            matrix = PrefillLinear(w=w, fmt=FMT, N=self.N, K=self.K, num_sms=gpu.num_sms)
            to = (gpu.image, gpu.stream, y)
            return partial(linear_prefill, *to, tokens=tokens, linear=matrix, plan=plan)

        return [launch(w) for w in self.copies]


class DecodeCase(Case):
    """linear_decode."""

    buckets, checks, in_image = WIDTHS, WIDTHS, True

    @classmethod
    def bucket(cls, shape: tuple[int, int], T: int) -> Shape:
        """Columns count in tiles of eight."""
        return (*shape, column_tiles(T), TILE_NBYTES)

    @staticmethod
    def kernel(capability: str, plan: LaunchPlan, bucket: Shape) -> Kernel:
        """The kernel of a plan."""
        return plan_kernel(plan, FMT, bucket[2])

    def place_tokens(self, arena: Arena) -> None:
        """In fragment order, once for each width."""
        self.x = {}
        for T in WIDTHS:
            at = fragment_offset(np.arange(T)[:, None], np.arange(self.K)[None], column_tiles(T))
            buffer = np.empty(T * self.K, np.uint16)
            buffer[at // 2] = self.tokens[:T]
            part = arena.take(buffer.nbytes, "tokens", alignment=1024)
            part.array(buffer.shape, np.uint16).write(buffer)
            self.x[T] = part.address
        sizes = scratch_nbytes(self.N, self.K)
        workspace, counters = (arena.take(n, "slices", alignment=1024) for n in sizes)
        for part in (workspace, counters):
            part.array((part.nbytes,), np.uint8).write(np.zeros(part.nbytes, np.uint8))
        self.scratch = DecodeScratch(workspace=workspace.address, counters=counters.address)

    def launches(self, plan: LaunchPlan, T: int) -> list[Callable[[], None]]:
        """A launch for each copy of the weights."""
        gpu, y = self.gpu, self.y.address
        bucket = self.bucket((self.N, self.K), T)
        image = replace(gpu.image, plans=PlanTable(gpu.capability, {(self.name, bucket): plan}))

        def launch(w: int) -> Callable[[], None]:
            matrix = DecodeLinear(w=w, fmt=FMT, N=self.N, K=self.K, num_sms=gpu.num_sms)
            to = (image, gpu.stream, y, self.x[T])
            return partial(linear_decode, *to, T=T, linear=(matrix, self.scratch))

        return [launch(w) for w in self.copies]


class DecodeBulkCase(DecodeCase):
    """With bulk copies."""

    name, family = "linear_decode", DECODE["linear_decode"]


class DecodeMmaCase(DecodeCase):
    """Without them."""

    name, family = "linear_decode_mma", DECODE["linear_decode_mma"]


CASES = (PrefillCase, DecodeBulkCase, DecodeMmaCase)
OPS: dict[str, type[Case]] = {case.name: case for case in CASES}


def ops(capability: str) -> list[str]:
    """The operators that a capability has."""
    return [name for name in OPS if name not in DECODE or name == decode_op(capability)]


def matrices() -> list[tuple[int, int]]:
    """(N, K) of the large model's 4-bit matrices, the largest first."""
    contract = contract_for("qwen3.8-27b", "groupwise-int")
    found = {t.shape for t in contract.inventory() if t.role is Role.MATRIX}
    return sorted(((N, K) for N, K in found), reverse=True)


def kernels(case: type[Case], capability: str) -> set[Kernel]:
    """Every kernel that is measured."""
    return {
        case.kernel(capability, plan, bucket)
        for shape in matrices()
        for bucket in (case.bucket(shape, T) for T in case.buckets)
        for plan in case.family.candidates(capability, bucket)
    }


@dataclass(frozen=True)
class Row:
    """Times of a bucket by plan, in microseconds, and the plan that a look-up gives today."""

    case: type[Case]
    bucket: Shape
    today: LaunchPlan
    times: dict[LaunchPlan, float]

    def may_name(self, plan: LaunchPlan, capability: str, held: set[Kernel]) -> bool:
        """Whether a table may name a plan."""
        return self.case.in_image or self.case.kernel(capability, plan, self.bucket) in held

    def best(self, among: set[LaunchPlan]) -> LaunchPlan:
        """The fastest plan among some."""
        return min(among & set(self.times), key=self.times.__getitem__)

    def __str__(self) -> str:
        ordered = sorted(self.times, key=self.times.__getitem__)
        shown = " ".join(f"{astuple(p)}:{self.times[p]:.1f}" for p in ordered[:4])
        today = self.times.get(self.today, float("nan"))
        return f"{self.case.name} {self.bucket[:3]} today {astuple(self.today)}:{today:.1f} {shown}"


def tune(gpu: Gpu, case: type[Case], held: set[Kernel]) -> Iterator[Row]:
    """Check and measure every bucket of every matrix, with the kernels that are `held`."""

    def plans(bucket: Shape) -> list[LaunchPlan]:
        """Candidates that can run, today's first."""
        today = gpu.image.plans.find(case.name, case.family, bucket)
        legal = case.family.candidates(gpu.capability, bucket)
        runs = [p for p in legal if case.kernel(gpu.capability, p, bucket) in held]
        return sorted(runs, key=lambda p: p != today)

    for shape in matrices():
        arena = Arena(ARENA_NBYTES, "tuning")
        it = case(gpu, arena, shape)
        for T in case.checks:
            first = None
            for plan in plans(case.bucket(shape, T)):
                first = it.check(plan, T, first)
        for T in case.buckets:
            bucket = case.bucket(shape, T)
            today = gpu.image.plans.find(case.name, case.family, bucket)
            yield Row(case, bucket, today, it.measure(T, plans(bucket)))
        arena.close()


def table(rows: list[Row], capability: str, device: str) -> str:
    """The module of a capability's plans; of those that an image holds only."""
    held = set(kernels_of(capability))
    families = sorted({row.case.family for row in rows}, key=lambda family: family.__module__)
    lines = [
        f'"""Plans measured on {device} by scripts/tune.py, {datetime.date.today()}."""',
        "",
        *(f"from {family.__module__} import {family.__name__}" for family in families),
        "",
        "PLANS = {",
    ]
    for row in rows:
        best = row.best({p for p in row.times if row.may_name(p, capability, held)})
        default = row.case.family.default(capability, row.bucket)
        if row.times[best] > GAIN * row.times.get(default, float("inf")):
            best = default
        fields = ", ".join(map(str, astuple(best)))
        lines.append(f'    ("{row.case.name}", {row.bucket}): {type(best).__name__}({fields}),')
    return "\n".join([*lines, "}", ""])


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--op", action="append", choices=OPS, help="only this operator")
    parser.add_argument("--sm", help="the image; default: the device's own")
    parser.add_argument("--no-build", action="store_true", help="measure what the image has")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the table")
    options = parser.parse_args()
    device = Device()
    device.use()
    capability = options.sm or native_capability(device.info.capability)
    cases = [OPS[name] for name in options.op or ops(capability)]
    items = {item for case in cases for item in kernels(case, capability)}
    if not options.no_build:
        build_image(items, capability)
    have = read_manifest(image_folder(capability))
    held = {item for item in items if item.source(capability) in have}
    gpu, rows = Gpu(held, capability, device), list[Row]()
    for case in cases:
        for row in tune(gpu, case, held):
            print(row, flush=True)
            rows.append(row)
    path = options.out / f"sm_{capability}.py"
    path.write_text(table([r for r in rows if len(r.times) > 1], capability, device.info.name))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
