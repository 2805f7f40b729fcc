"""Binds the tensors of a package to the blocks of a model, by name and shape, without copying
matrices.

Vectors (norms, convolution taps, gates) are turned to float32 once; they are a few kilobytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ginfer.backend import PackedTensor
from ginfer.cpu.gdn import Weights as GdnWeights
from ginfer.cpu.linear import LinearWeight, prepare
from ginfer.errors import ArtifactError
from ginfer.formats import BF16, FP32, Layout
from ginfer.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    F32 = NDArray[np.float32]


class Layer(NamedTuple):
    """One layer. Norm factors are 1 + w. Attention: q_norm, k_norm; GDN: gdn and a_b."""

    input_norm: F32
    inner: LinearWeight
    output: LinearWeight
    post_norm: F32
    gate_up: LinearWeight
    down: LinearWeight
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    a_b: LinearWeight | None = None
    gdn: GdnWeights | None = None


class Model(NamedTuple):
    """All weights of the text model."""

    embedding: LinearWeight
    layers: tuple[Layer, ...]
    final_norm: F32
    head: LinearWeight


class TensorTable:
    """Tensors by name; `faults` collects what is absent or misshapen, for `check` to raise."""

    def __init__(self, tensors: dict[str, PackedTensor]) -> None:
        """tensors: whatever the package has."""
        self._tensors = tensors
        self.faults: list[str] = []

    def _take(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """The tensor, or an empty one and a fault."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape == shape:
            return tensor
        found = f"has shape {tensor.shape}, not {shape}" if tensor else "is missing"
        self.faults.append(f"{name} {found}")
        nothing = np.zeros(0, np.uint8)
        return PackedTensor(name=name, shape=shape, format=BF16, layout=Layout.TILE, data=nothing)

    def matrix(self, name: str, N: int, K: int) -> LinearWeight:
        """The tensor [N, K], ready for the linear operators."""
        return prepare(self._take(name, (N, K)))

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> F32:
        """The tensor in float32, plus a constant."""
        tensor = self._take(name, shape)
        if not tensor.data.size:
            return np.zeros(shape, np.float32)
        if tensor.format is FP32:
            values = tensor.data.view("<f4")
        elif tensor.format is BF16:
            values = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            self.faults.append(f"{name} has format {tensor.format.name}, not BF16 or FP32")
            return np.zeros(shape, np.float32)
        return (values.reshape(shape) + np.float32(plus)).astype(np.float32)

    def bits(self, name: str, N: int, K: int) -> NDArray[np.uint16]:
        """The BF16 bits of a tensor of rows, [N, K]."""
        tensor = self._take(name, (N, K))
        if tensor.format is not BF16 or tensor.layout is not Layout.ROWS:
            self.faults.append(f"{name} is {tensor.format.name} in {tensor.layout}, not BF16 rows")
            return np.zeros((N, K), np.uint16)
        rows: NDArray[np.uint16] = tensor.data.view("<u2").reshape(N, -1)[:, :K]
        return rows

    def check(self) -> None:
        """Raise ArtifactError when anything was missing."""
        if self.faults:
            raise ArtifactError(
                f"the package does not fit the model: {self.faults[0]}"
                f" ({len(self.faults)} tensors in all)",
                findings=self.faults,
            )


def _gdn(table: TensorTable, path: str, spec: ModelSpec) -> dict[str, object]:
    g, C = spec.gdn, spec.hidden_size
    HV = g.num_v_heads
    a_log = table.vector(f"{path}/gdn/a_log", HV).astype(np.float64)
    return {
        "inner": table.matrix(f"{path}/gdn/query_key_value_z", g.conv_channels + g.value_width, C),
        "a_b": table.matrix(f"{path}/gdn/a_b_projection", 2 * HV, C),
        "gdn": GdnWeights(
            table.vector(f"{path}/gdn/convolution", g.conv_taps, g.conv_channels),
            (-np.exp(a_log)).astype(np.float32),
            table.vector(f"{path}/gdn/dt_bias", HV),
            table.vector(f"{path}/gdn/norm", g.v_head_dim),
        ),
        "output": table.matrix(f"{path}/gdn/output", C, g.value_width),
    }


def _attention(table: TensorTable, path: str, spec: ModelSpec) -> dict[str, object]:
    a, C = spec.attention, spec.hidden_size
    return {
        "inner": table.matrix(
            f"{path}/attention/query_key_gate_value", 2 * (a.q_width + a.kv_width), C
        ),
        "q_norm": table.vector(f"{path}/attention/query_norm", a.head_dim, plus=1.0),
        "k_norm": table.vector(f"{path}/attention/key_norm", a.head_dim, plus=1.0),
        "output": table.matrix(f"{path}/attention/output", C, a.q_width),
    }


def _layer(table: TensorTable, i: int, spec: ModelSpec) -> Layer:
    path, C, wide = f"text/layers/{i}", spec.hidden_size, spec.mlp_width
    mixer = _gdn if spec.layers[i] is LayerKind.GATED_DELTANET else _attention
    return Layer(
        input_norm=table.vector(f"{path}/input_norm", C, plus=1.0),
        post_norm=table.vector(f"{path}/post_attention_norm", C, plus=1.0),
        gate_up=table.matrix(f"{path}/mlp/gate_up", 2 * wide, C),
        down=table.matrix(f"{path}/mlp/down", C, wide),
        **mixer(table, path, spec),  # type: ignore[arg-type]
    )


def bind(
    spec: ModelSpec, tensors: Iterable[PackedTensor], progress: Callable[[int], None]
) -> Model:
    """Bind the text tensors; others are taken note of and left. Raises ArtifactError naming every
    tensor that is missing or has another shape."""
    named, taken = {}, 0
    for tensor in tensors:
        named[tensor.name] = tensor
        taken += tensor.data.nbytes
        progress(taken)
    table, C, V = TensorTable(named), spec.hidden_size, spec.vocab_size
    model = Model(
        embedding=table.matrix("text/token_embedding", V, C),
        layers=tuple(_layer(table, i, spec) for i in range(len(spec.layers))),
        final_norm=table.vector("text/final_norm", C, plus=1.0),
        head=table.matrix("text/output_head", V, C),
    )
    table.check()
    return model
