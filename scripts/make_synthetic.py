"""Write a package of full size with random weights, for measuring speed and memory.

    python -m scripts.make_synthetic qwen3.8-27b OUT.ginfer --resources DEMO.ginfer

A few thousand random tiles per matrix shape are encoded once and strewn over every matrix of that
shape, so that the disk is the limit. Scales are plausible: matrices keep the scale of their input,
embeddings have deviation 1. The tokenizer files come from another package, `--resources`, stretched
to the ids of the model; the text that it speaks means nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ginfer.artifact import Package, verify_digests
from ginfer.artifact.records import Identity, Producer
from ginfer.artifact.writer import PackageWriter, PlannedResource, PlannedTensor
from ginfer.errors import GInferError
from ginfer.formats import FP32, TILE_K, TILE_N, TILE_NBYTES, Layout, row_nbytes
from ginfer.models.contract import PROFILES, Role
from ginfer.models.registry import contract_for
from scripts.pack import codecs
from scripts.synthetic_tokenizer import stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

POOL_TILES = 1024
CHUNK_NBYTES = 64 << 20
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to be made up."""

    plan: PlannedTensor
    role: Role

    def deviation(self) -> float:
        """Standard deviation of its values."""
        embedded = self.role in (Role.EMBEDDING, Role.CODEBOOK)
        return 1.0 if embedded else float(self.plan.shape[-1]) ** -0.5


class Pools:
    """Encoded random units, tiles or rows, by format, layout and width."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int], Bytes] = {}
        self._rng = np.random.default_rng(SEED)

    def chunks(self, tensor: Tensor) -> Iterator[Bytes]:
        """Payload of a tensor, piece by piece."""
        plan = tensor.plan
        if plan.layout is Layout.CONTIGUOUS:
            yield self._vector(tensor)
        elif plan.layout is Layout.TILE and (plan.shape[0] % TILE_N or plan.shape[1] % TILE_K):
            yield from self._encoded(tensor)
        else:
            yield from self._strewn(tensor)

    def _vector(self, tensor: Tensor) -> Bytes:
        plan, name = tensor.plan, tensor.plan.name
        low, high = -0.2, 0.2
        if name.endswith("a_log"):
            low, high = -3.0, 2.0
        elif name.endswith("dt_bias"):
            low, high = -4.0, 1.0
        elif name.endswith("gdn/norm"):
            low, high = 0.5, 1.5
        values = self._rng.uniform(low, high, plan.shape).astype(np.float32)
        bits = values if plan.format is FP32 else codecs.bf16_bits(values)
        return np.ascontiguousarray(bits).reshape(-1).view(np.uint8)

    def _values(self, rows: int, K: int, deviation: float) -> NDArray[np.float32]:
        return self._rng.standard_normal((rows, K), np.float32) * np.float32(deviation)

    def _encoded(self, tensor: Tensor) -> Iterator[Bytes]:
        """Every block on its own: its padding is not random."""
        (N, K), plan = tensor.plan.shape, tensor.plan
        for n in range(0, N, TILE_N):
            block = self._values(min(TILE_N, N - n), K, tensor.deviation())
            yield codecs.encode(plan.format, plan.layout, block)

    def _pool(self, tensor: Tensor) -> Bytes:
        """[units, bytes of one]."""
        plan, K = tensor.plan, tensor.plan.shape[1]
        key = (plan.format.name, str(plan.layout), K)
        if key not in self._made:
            tiles = plan.layout is Layout.TILE
            width = TILE_K * POOL_TILES if tiles else K
            unit = TILE_NBYTES[plan.format.name] if tiles else row_nbytes(plan.format, K)
            values = self._values(TILE_N, width, tensor.deviation())
            self._made[key] = codecs.encode(plan.format, plan.layout, values).reshape(-1, unit)
        return self._made[key]

    def _strewn(self, tensor: Tensor) -> Iterator[Bytes]:
        pool = self._pool(tensor)
        left, most = tensor.plan.nbytes // pool.shape[1], CHUNK_NBYTES // pool.shape[1]
        while left:
            count = min(left, most)
            yield pool[self._rng.integers(0, len(pool), count)].reshape(-1)
            left -= count


def tensors_of(model_id: str, weights_id: str) -> list[Tensor]:
    """Every tensor of a package, in physical order. Raises ConfigError for an unknown model."""
    contract, profile = contract_for(model_id, weights_id), PROFILES[weights_id]
    found = []
    for t in contract.inventory(drafter=profile.has_drafter):
        fmt, layout = profile.storage(t.role)
        plan = PlannedTensor(name=t.name, shape=t.shape, format=fmt, layout=layout)
        found.append(Tensor(plan=plan, role=t.role))
    return found


def write(path: Path, model_id: str, weights_id: str, resources: dict[str, bytes]) -> None:
    """Write the package. Raises ConfigError for an unknown model."""
    tensors, pools = tensors_of(model_id, weights_id), Pools()
    digest = hashlib.sha256(f"random weights {SEED}".encode()).hexdigest()
    identity = Identity(
        model_id=model_id,
        weights_id=weights_id,
        tp=1,
        drafter_tp=int(PROFILES[weights_id].has_drafter),
        kv_calibration=None,
        qualified=(),
        producer=Producer(
            name="ginfer-synthetic", version="1", recipe_sha256=digest, source_sha256=digest
        ),
    )
    files = [PlannedResource(name=n, nbytes=len(data)) for n, data in resources.items()]
    with PackageWriter(path, identity, [*files, *(t.plan for t in tensors)]) as writer:
        for name, data in resources.items():
            writer.write(name, data)
        for tensor in tensors:
            writer.write(tensor.plan.name, pools.chunks(tensor))


def main() -> int:
    """Parse the command line, write, verify."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", help="qwen3.8-27b or qwen3.8-demo")
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", default="groupwise-int")
    parser.add_argument("--resources", type=Path, required=True, help="package with the tokenizer")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        source = Package.open(options.resources)
        resources = {name: bytes(source.resource(name)) for name in source.resources}
        source.close()
        contract = contract_for(options.model, options.weights)
        resources = stretch(resources, contract)
        write(options.out, options.model, options.weights, resources)
        written = time.monotonic()
        package = Package.open(options.out)
        found = verify_digests(package, lambda done, total: None)
        package.close()
    except GInferError as error:
        print(error, file=sys.stderr)
        return 1
    nbytes = options.out.stat().st_size
    print(f"{nbytes / 1e9:.1f} GB in {written - start:.0f} s, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
