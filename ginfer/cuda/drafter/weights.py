"""Weights of a drafter on the device. Matrices that read the same columns lie behind each other and
are one: q, k and v of a layer, gate and up, and once more k and v of all layers for the context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ginfer.cuda.drafter.order import HEAD_DIM
from ginfer.cuda.drafter.path import Codebooks
from ginfer.cuda.weights import Matrix, Upload
from ginfer.errors import ArtifactError, ConfigError
from ginfer.formats import TILE_N

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ginfer.backend import PackedTensor
    from ginfer.cuda.runtime.memory import Arena
    from ginfer.cuda.runtime.stream import Stream
    from ginfer.spec import DrafterSpec

CONTEXT = "context/"  # before the names of the second copies of k and v


@dataclass(frozen=True)
class Sublayer:
    """Norm factors [C] FP32, base kernel [2][2][C] FP32, projection to the coefficients."""

    norm: int
    base: int
    projection: Matrix


@dataclass(frozen=True)
class DrafterLayer:
    """Head factors are addresses of [D] FP32."""

    attention: Sublayer
    qkv: Matrix
    q_norm: int
    k_norm: int
    output: Matrix
    mlp: Sublayer
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class DrafterWeights:
    """All of a drafter. k_norms: [layers][D] FP32."""

    fc: Matrix
    hidden_norm: int
    context: Matrix
    k_norms: int
    layers: tuple[DrafterLayer, ...]
    norm: int
    projection: Matrix
    books: Codebooks
    arena: Arena


def context_nbytes(d: DrafterSpec) -> int:
    """Bytes that the second copies of k and v take at most."""
    return d.num_layers * 2 * d.kv_width * d.hidden_size * 2  # as BF16


def matrix_shapes(d: DrafterSpec) -> tuple[tuple[int, int], ...]:
    """(N, K) of every matrix that is multiplied, but for the target's head."""
    C = d.hidden_size
    return (
        (C, d.tap_width),
        (d.num_layers * 2 * d.kv_width, C),
        (d.conv_coefficients, C),
        (d.q_width + 2 * d.kv_width, C),
        (C, d.q_width),
        (2 * d.mlp_width, C),
        (C, d.mlp_width),
        (d.selector_rank, C),
    )


def check_shapes(d: DrafterSpec) -> None:
    """Raise ConfigError for a drafter without kernels."""
    widths = (d.q_width, d.kv_width, d.mlp_width)
    if d.head_dim != HEAD_DIM or any(n % TILE_N for n in widths) or d.hidden_size % 64:
        raise ConfigError(
            "the CUDA image has kernels for drafters with heads of 128 dims and an MLP of a "
            f"multiple of {TILE_N} columns only; start with --spec none",
            param="spec",
        )


def _ordered(tensors: Iterable[PackedTensor], d: DrafterSpec) -> Iterator[PackedTensor]:
    """All tensors, in the order in which matrices are joined."""
    named = {t.name: t for t in tensors}
    for i in range(d.num_layers):
        path = f"dflash2/layers/{i}"
        for group in (("self_attn/q", "self_attn/k", "self_attn/v"), ("mlp/gate", "mlp/up")):
            for name in group:
                if f"{path}/{name}_proj" in named:
                    yield named[f"{path}/{name}_proj"]
    for i in range(d.num_layers):
        for part in ("k", "v"):
            name = f"dflash2/layers/{i}/self_attn/{part}_proj"
            if name in named:
                yield replace(named[name], name=CONTEXT + name)
    yield from named.values()


class _Table:
    """Binds tensors of an upload by name."""

    def __init__(self, table: Upload, d: DrafterSpec) -> None:
        self._table, self._d = table, d

    def joined(self, names: list[str], heights: list[int], K: int) -> Matrix:
        """Matrices [N, K] that lie behind each other, as one."""
        parts = [self._table.matrix(n, h, K) for n, h in zip(names, heights, strict=True)]
        if len({p.fmt for p in parts}) > 1:
            self._table.faults.append(f"{names[0]} and {names[-1]} have different formats")
        return replace(parts[0], N=sum(heights))

    def sublayer(self, norm: str, conv: str) -> Sublayer:
        """A norm and the convolution around what follows it."""
        table, C = self._table, self._d.hidden_size
        base = table.place(table.values(f"{conv}/base_kernel", 2, 2, C))
        coefficients = self._d.conv_coefficients
        projection = table.matrix(f"{conv}/kernel_projection", coefficients, C)
        return Sublayer(table.vector(norm, C), base, projection)

    def layer(self, i: int, k_norms: int) -> DrafterLayer:
        """Layer i; k_norms: of all layers."""
        table, d, path = self._table, self._d, f"dflash2/layers/{i}"
        C, qkv = d.hidden_size, [f"{path}/self_attn/{part}_proj" for part in "qkv"]
        gate_up = [f"{path}/mlp/{part}_proj" for part in ("gate", "up")]
        return DrafterLayer(
            attention=self.sublayer(f"{path}/input_layernorm", f"{path}/attention_conv"),
            qkv=self.joined(qkv, [d.q_width, d.kv_width, d.kv_width], C),
            q_norm=table.vector(f"{path}/self_attn/q_norm", d.head_dim),
            k_norm=k_norms + i * d.head_dim * 4,
            output=table.matrix(f"{path}/self_attn/o_proj", C, d.q_width),
            mlp=self.sublayer(f"{path}/post_attention_layernorm", f"{path}/mlp_conv"),
            gate_up=self.joined(gate_up, [d.mlp_width] * 2, C),
            down=table.matrix(f"{path}/mlp/down_proj", C, d.mlp_width),
        )

    def weights(self) -> DrafterWeights:
        """Everything."""
        table, d, C = self._table, self._d, self._d.hidden_size
        layers = range(d.num_layers)
        k_norms = table.place(
            np.stack(
                [table.values(f"dflash2/layers/{i}/self_attn/k_norm", d.head_dim) for i in layers]
            )
        )
        names = [
            f"{CONTEXT}dflash2/layers/{i}/self_attn/{part}_proj" for i in layers for part in "kv"
        ]
        selector = "dflash2/candidate_selector"
        before, after = (
            table.embedding(f"{selector}/{name}_codebook", d.vocab_size, d.selector_rank)
            for name in ("predecessor", "successor")
        )
        return DrafterWeights(
            fc=table.matrix("dflash2/fc", C, d.tap_width),
            hidden_norm=table.vector("dflash2/hidden_norm", C),
            context=self.joined(names, [d.kv_width] * len(names), C),
            k_norms=k_norms,
            layers=tuple(self.layer(i, k_norms) for i in layers),
            norm=table.vector("dflash2/norm", C),
            projection=table.matrix(f"{selector}/hidden_projection", d.selector_rank, C),
            books=Codebooks(before.address, after.address, d.selector_rank, before.stride),
            arena=table.arena,
        )


def upload_drafter(
    d: DrafterSpec,
    tensors: Iterable[PackedTensor],
    stream: Stream,
    progress: Callable[[int], None],
) -> DrafterWeights:
    """Upload and bind the drafter's tensors. Raises ArtifactError naming every tensor that is
    missing, misshapen or in a format without a kernel; ConfigError when they do not fit."""
    check_shapes(d)
    table = Upload(list(_ordered(tensors, d)), stream)
    try:
        table.run(progress)
        weights = _Table(table, d).weights()
    except BaseException:
        table.close()
        table.arena.close()
        raise
    table.close()
    if table.faults:
        table.arena.close()
        raise ArtifactError(
            f"the package does not fit the drafter: {table.faults[0]}"
            f" ({len(table.faults)} tensors in all)",
            findings=table.faults,
        )
    return weights
