"""ModelContract: what a model is, as one frozen value. No dimension is written twice; derived
numbers are properties."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ginfer.formats import BF16, FP32, Q4G64_F16S, W8G32_F16S, Layout, StorageFormat
from ginfer.spec import LayerKind, ModelSpec


class Role(StrEnum):
    """What a tensor is for; a weight profile maps roles to formats."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"  # decoder linears: what gets quantised
    NARROW = "narrow"  # small matrices kept in BF16 (GDN a and b)
    VECTOR = "vector"  # norms, convolution, biases
    CONTROL = "control"  # FP32 vectors (A_log, dt_bias)
    VISION_MATRIX = "vision_matrix"


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Dimensions of the vision tower."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_width: int
    patch_size: int
    temporal_patch: int
    merge: int
    num_positions: int
    in_channels: int
    out_size: int

    @property
    def patch_width(self) -> int:
        """Numbers of one patch."""
        return self.in_channels * self.temporal_patch * self.patch_size * self.patch_size

    @property
    def merged_width(self) -> int:
        """Columns of a merged 2 x 2 block."""
        return self.hidden_size * self.merge * self.merge


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One object of the inventory: name, logical shape, role. The profile decides its format."""

    name: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True, kw_only=True)
class WeightProfile:
    """A named choice of formats: role to (format, layout)."""

    name: str
    embedding: StorageFormat
    matrix: StorageFormat
    head: StorageFormat

    def storage(self, role: Role) -> tuple[StorageFormat, Layout]:
        """Format and layout of a role."""
        return {
            Role.EMBEDDING: (self.embedding, Layout.ROWS),
            Role.HEAD: (self.head, Layout.TILE),
            Role.MATRIX: (self.matrix, Layout.TILE),
            Role.NARROW: (BF16, Layout.TILE),
            Role.VISION_MATRIX: (BF16, Layout.TILE),
            Role.VECTOR: (BF16, Layout.CONTIGUOUS),
            Role.CONTROL: (FP32, Layout.CONTIGUOUS),
        }[role]


PROFILES = {
    "bf16": WeightProfile(name="bf16", embedding=BF16, matrix=BF16, head=BF16),
    "groupwise-int": WeightProfile(
        name="groupwise-int", embedding=W8G32_F16S, matrix=Q4G64_F16S, head=W8G32_F16S
    ),
}


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Ids with a meaning. stop: end the response. mask: the drafter's placeholder."""

    stop: tuple[int, ...]
    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int
    mask: int


@dataclass(frozen=True, kw_only=True)
class ModelContract:
    """A registered model. `__post_init__` checks that its sums and divisions come out."""

    model_id: str
    spec: ModelSpec
    vision: VisionSpec
    token_ids: TokenIds
    profiles: tuple[str, ...]
    resources: tuple[str, ...]

    def __post_init__(self) -> None:
        a, g, s = self.spec.attention, self.spec.gdn, self.spec
        checks = {
            "query heads divide by K/V heads": a.num_q_heads % a.num_kv_heads == 0,
            "value heads divide by key heads": g.num_v_heads % g.num_k_heads == 0,
            "M-RoPE sections fill half the rotary width": 2 * sum(a.mrope_sections) == a.rotary_dim,
            "legal ids fit the vocabulary": 0 < s.num_token_ids <= s.vocab_size,
            "vision ends at the hidden size": self.vision.out_size == s.hidden_size,
            "profiles are known": all(p in PROFILES for p in self.profiles),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"contract {self.model_id}: {'; '.join(broken)}")

    def inventory(self) -> tuple[TensorSpec, ...]:
        """Every tensor of a package of this model, in physical order (architecture 3)."""
        s = self.spec
        tensors = [
            TensorSpec(
                name="text/token_embedding",
                shape=(s.vocab_size, s.hidden_size),
                role=Role.EMBEDDING,
            )
        ]
        for i, kind in enumerate(s.layers):
            tensors += self._layer(i, kind)
        tensors.append(TensorSpec(name="text/final_norm", shape=(s.hidden_size,), role=Role.VECTOR))
        tensors.append(
            TensorSpec(name="text/output_head", shape=(s.vocab_size, s.hidden_size), role=Role.HEAD)
        )
        return (*tensors, *self._vision())

    def _layer(self, i: int, kind: LayerKind) -> list[TensorSpec]:
        s, a, g = self.spec, self.spec.attention, self.spec.gdn
        c = s.hidden_size
        mixer: tuple[tuple[str, tuple[int, ...], Role], ...]
        if kind is LayerKind.GATED_DELTANET:
            mixer = (
                ("gdn/query_key_value_z", (g.conv_channels + g.value_width, c), Role.MATRIX),
                ("gdn/a_b_projection", (2 * g.num_v_heads, c), Role.NARROW),
                ("gdn/a_log", (g.num_v_heads,), Role.CONTROL),
                ("gdn/dt_bias", (g.num_v_heads,), Role.CONTROL),
                ("gdn/convolution", (g.conv_taps, g.conv_channels), Role.VECTOR),
                ("gdn/norm", (g.v_head_dim,), Role.VECTOR),
                ("gdn/output", (c, g.value_width), Role.MATRIX),
            )
        else:
            mixer = (
                ("attention/query_key_gate_value", (2 * (a.q_width + a.kv_width), c), Role.MATRIX),
                ("attention/query_norm", (a.head_dim,), Role.VECTOR),
                ("attention/key_norm", (a.head_dim,), Role.VECTOR),
                ("attention/output", (c, a.q_width), Role.MATRIX),
            )
        rows = (
            ("input_norm", (c,), Role.VECTOR),
            *mixer,
            ("post_attention_norm", (c,), Role.VECTOR),
            ("mlp/gate_up", (2 * s.mlp_width, c), Role.MATRIX),
            ("mlp/down", (c, s.mlp_width), Role.MATRIX),
        )
        return [
            TensorSpec(name=f"text/layers/{i}/{name}", shape=shape, role=role)
            for name, shape, role in rows
        ]

    def _vision(self) -> list[TensorSpec]:
        v = self.vision
        h = v.hidden_size
        rows: list[tuple[str, tuple[int, ...], Role]] = [
            ("patch_embedding/weight", (h, v.patch_width), Role.VISION_MATRIX),
            ("patch_embedding/bias", (h,), Role.VECTOR),
            ("position_embedding", (v.num_positions, h), Role.VECTOR),
        ]
        for b in range(v.depth):
            for name, shape in (("norm1", (h,)), ("norm2", (h,))):
                rows += [
                    (f"blocks/{b}/{name}/{part}", shape, Role.VECTOR) for part in ("weight", "bias")
                ]
            for name, n, k in (
                ("attention/qkv", 3 * h, h),
                ("attention/output", h, h),
                ("mlp/fc1", v.mlp_width, h),
                ("mlp/fc2", h, v.mlp_width),
            ):
                rows += [
                    (f"blocks/{b}/{name}/weight", (n, k), Role.VISION_MATRIX),
                    (f"blocks/{b}/{name}/bias", (n,), Role.VECTOR),
                ]
        m = v.merged_width
        rows += [(f"merger/norm/{part}", (h,), Role.VECTOR) for part in ("weight", "bias")]
        for name, n, k in (("merger/fc1", m, m), ("merger/fc2", v.out_size, m)):
            rows += [
                (f"{name}/weight", (n, k), Role.VISION_MATRIX),
                (f"{name}/bias", (n,), Role.VECTOR),
            ]
        return [
            TensorSpec(name=f"vision/{name}", shape=shape, role=role) for name, shape, role in rows
        ]
