"""Weights of a model on the device: payloads as they are, vectors in FP32, bound by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.attention.append import HeadNorms
from ginfer.cuda.embedding import FORMATS as EMBEDDINGS
from ginfer.cuda.linear.unpack import UNPACK
from ginfer.cuda.runtime.memory import Arena, Piece, Staging
from ginfer.errors import ArtifactError
from ginfer.formats import BF16, FP32, Layout, row_nbytes
from ginfer.sizes import MIB, align_up
from ginfer.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from ginfer.backend import PackedTensor
    from ginfer.cuda.runtime.stream import Stream

ALIGNMENT = 256
VECTORS_NBYTES = 32 * MIB  # norms, taps and gates in FP32
ROUNDING_NBYTES = 4 * MIB


def _fill(tensor: PackedTensor, at: int, buffer: memoryview) -> None:
    """Fill a buffer with payload from byte `at` on."""
    if tensor.read is not None:
        tensor.read(buffer, at)
    else:
        buffer[:] = tensor.data.data[at : at + len(buffer)]


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] in tiles; or of an embedding, whose rows are `stride` bytes apart."""

    address: int
    fmt: str
    N: int
    K: int
    stride: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Addresses of a layer. Norm factors are 1 + w. Attention: heads; GDN: a_b, taps, norm, and
    gates (-e^A_log, dt_bias)."""

    input_norm: int
    inner: Matrix
    output: Matrix
    post_norm: int
    gate_up: Matrix
    down: Matrix
    heads: HeadNorms | None = None
    a_b: Matrix | None = None
    taps: int = 0
    gates: int = 0
    norm: int = 0


def matrix_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(N, K) of every matrix that is multiplied."""
    a, g, C, wide = spec.attention, spec.gdn, spec.hidden_size, spec.mlp_width
    return (
        (2 * (a.q_width + a.kv_width), C),
        (C, a.q_width),
        (g.conv_channels + g.value_width, C),
        (2 * g.num_v_heads, C),
        (C, g.value_width),
        (2 * wide, C),
        (C, wide),
        (spec.vocab_size, C),
    )


def arena_nbytes(payload_nbytes: int) -> int:
    """Device memory that weights with so many bytes of payload take at most."""
    return payload_nbytes + ROUNDING_NBYTES + VECTORS_NBYTES


@dataclass(frozen=True)
class Model:
    """All weights of the text model."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: int
    head: Matrix
    arena: Arena


class Upload:
    """Uploads tensors as they come, and binds them. `faults` collects what is absent, misshapen or
    in a format without a kernel."""

    def __init__(self, tensors: list[PackedTensor], stream: Stream) -> None:
        self._tensors = {t.name: t for t in tensors}
        nbytes = sum(align_up(t.data.nbytes, ALIGNMENT) for t in self._tensors.values())
        self.arena = Arena(nbytes + VECTORS_NBYTES, "weights")
        self._stream, self._staging = stream, Staging()
        self._places: dict[str, int] = {}
        self.faults: list[str] = []

    def run(self, progress: Callable[[int], None]) -> None:
        """Copy every payload that is used as it is, in file order."""
        used = [t for t in self._tensors.values() if t.layout is not Layout.CONTIGUOUS]
        done = sum(t.data.nbytes for t in self._tensors.values()) - sum(t.data.nbytes for t in used)
        progress(done)
        pieces = chain.from_iterable(map(self._pieces, used))
        for nbytes in self._staging.upload(pieces, self._stream):
            done += nbytes
            progress(done)

    def _pieces(self, tensor: PackedTensor) -> Iterator[Piece]:
        """A payload in pieces, and its place."""
        place = self.arena.take(tensor.data.nbytes, "weights", alignment=ALIGNMENT)
        self._places[tensor.name] = place.address
        for at in range(0, tensor.data.nbytes, self._staging.nbytes):
            nbytes = min(self._staging.nbytes, tensor.data.nbytes - at)
            yield Piece(place.address + at, nbytes, partial(_fill, tensor, at))

    def _take(self, name: str, shape: tuple[int, ...]) -> PackedTensor | None:
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape == shape:
            return tensor
        found = f"has shape {tensor.shape}, not {shape}" if tensor else "is missing"
        self.faults.append(f"{name} {found}")
        return None

    def matrix(self, name: str, N: int, K: int) -> Matrix:
        """The tensor [N, K] in tiles."""
        tensor = self._take(name, (N, K))
        if tensor is None:
            return Matrix(0, "BF16", N, K)
        if tensor.layout is not Layout.TILE or tensor.format.name not in UNPACK:
            self.faults.append(f"{name}: no kernel for {tensor.format.name} in {tensor.layout}")
        return Matrix(self._places.get(name, 0), tensor.format.name, N, K)

    def embedding(self, name: str, N: int, K: int) -> Matrix:
        """The tensor [N, K] in rows."""
        tensor = self._take(name, (N, K))
        if tensor is None:
            return Matrix(0, "BF16", N, K)
        if tensor.layout is not Layout.ROWS or tensor.format.name not in EMBEDDINGS:
            self.faults.append(f"{name}: no kernel for {tensor.format.name} in {tensor.layout}")
        stride = row_nbytes(tensor.format, K)
        return Matrix(self._places.get(name, 0), tensor.format.name, N, K, stride)

    def values(self, name: str, *shape: int) -> NDArray[np.float32]:
        """The tensor in float32, on the host."""
        tensor = self._take(name, shape)
        if tensor is None:
            return np.zeros(shape, np.float32)
        if tensor.format is FP32:
            return tensor.data.view("<f4").reshape(shape)
        if tensor.format is BF16:
            bits = tensor.data.view("<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(shape)
        self.faults.append(f"{name} has format {tensor.format.name}, not BF16 or FP32")
        return np.zeros(shape, np.float32)

    def place(self, values: NDArray[np.float32]) -> int:
        """Address of FP32 values on the device."""
        part = self.arena.take(values.nbytes, "vectors", alignment=ALIGNMENT)
        part.array(values.shape, np.float32).write(values)
        return part.address

    def vector(self, name: str, N: int, plus: float = 0.0) -> int:
        """The tensor [N] in FP32, plus a constant."""
        return self.place(self.values(name, N) + np.float32(plus))

    def close(self) -> None:
        """Wait for the copies and free the staging memory."""
        self._stream.synchronize()
        self._staging.close()


def _gdn(table: Upload, path: str, spec: ModelSpec) -> dict[str, object]:
    g, C = spec.gdn, spec.hidden_size
    HV = g.num_v_heads
    decay = -np.exp(table.values(f"{path}/gdn/a_log", HV).astype(np.float64))
    bias = table.values(f"{path}/gdn/dt_bias", HV)
    inner = f"{path}/gdn/query_key_value_z"
    return {
        "inner": table.matrix(inner, g.conv_channels + g.value_width, C),
        "a_b": table.matrix(f"{path}/gdn/a_b_projection", 2 * HV, C),
        "taps": table.place(table.values(f"{path}/gdn/convolution", g.conv_taps, g.conv_channels)),
        "gates": table.place(np.stack([decay.astype(np.float32), bias])),
        "norm": table.vector(f"{path}/gdn/norm", g.v_head_dim),
        "output": table.matrix(f"{path}/gdn/output", C, g.value_width),
    }


def _attention(table: Upload, path: str, spec: ModelSpec) -> dict[str, object]:
    a, C = spec.attention, spec.hidden_size
    inner = f"{path}/attention/query_key_gate_value"
    return {
        "inner": table.matrix(inner, 2 * (a.q_width + a.kv_width), C),
        "heads": HeadNorms(
            table.vector(f"{path}/attention/query_norm", a.head_dim, 1.0),
            table.vector(f"{path}/attention/key_norm", a.head_dim, 1.0),
            spec.norm_eps,
        ),
        "output": table.matrix(f"{path}/attention/output", C, a.q_width),
    }


def _layer(table: Upload, i: int, spec: ModelSpec) -> Layer:
    path, C, wide = f"text/layers/{i}", spec.hidden_size, spec.mlp_width
    mixer = _gdn if spec.layers[i] is LayerKind.GATED_DELTANET else _attention
    return Layer(
        input_norm=table.vector(f"{path}/input_norm", C, 1.0),
        post_norm=table.vector(f"{path}/post_attention_norm", C, 1.0),
        gate_up=table.matrix(f"{path}/mlp/gate_up", 2 * wide, C),
        down=table.matrix(f"{path}/mlp/down", C, wide),
        **mixer(table, path, spec),  # type: ignore[arg-type]
    )


def upload(
    spec: ModelSpec,
    tensors: Iterable[PackedTensor],
    stream: Stream,
    progress: Callable[[int], None],
) -> Model:
    """Upload and bind the text tensors. Raises ArtifactError naming every tensor that is missing,
    has another shape or a format without a kernel; ConfigError when they do not fit."""
    table, C, V = Upload(list(tensors), stream), spec.hidden_size, spec.vocab_size
    try:
        table.run(progress)
        model = Model(
            embedding=table.embedding("text/token_embedding", V, C),
            layers=tuple(_layer(table, i, spec) for i in range(len(spec.layers))),
            final_norm=table.vector("text/final_norm", C, 1.0),
            head=table.matrix("text/output_head", V, C),
            arena=table.arena,
        )
    except BaseException:
        table.close()
        table.arena.close()
        raise
    table.close()
    if table.faults:
        table.arena.close()
        raise ArtifactError(
            f"the package does not fit the model: {table.faults[0]}"
            f" ({len(table.faults)} tensors in all)",
            findings=table.faults,
        )
    return model
