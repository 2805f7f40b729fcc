"""ModelContract: what a model is, as one frozen value. No dimension is written twice; derived
numbers are properties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ginfer.formats import BF16, FP32, Q4G64_F16S, W8G32_F16S, Layout, StorageFormat
from ginfer.spec import DrafterSpec, LayerKind, ModelSpec


class Role(StrEnum):
    """What a tensor is for; a weight profile maps roles to formats."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"  # decoder linears: what gets quantised
    NARROW = "narrow"  # small matrices kept in BF16 (GDN a and b, coefficients, selector)
    VECTOR = "vector"  # norms, convolution, biases
    CONTROL = "control"  # FP32 vectors (A_log, dt_bias)
    VISION_MATRIX = "vision_matrix"
    DRAFT_MATRIX = "draft_matrix"  # the drafter's context projection and attention
    DRAFT_MLP = "draft_mlp"
    CODEBOOK = "codebook"  # rows of the drafter's selector, by token id


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
    """A named choice of formats: role to (format, layout). draft_matrix, draft_mlp: None in
    packages without a drafter."""

    name: str
    embedding: StorageFormat
    matrix: StorageFormat
    head: StorageFormat
    draft_matrix: StorageFormat | None = None
    draft_mlp: StorageFormat | None = None

    @property
    def has_drafter(self) -> bool:
        """Whether the drafter's tensors belong to the package."""
        return self.draft_matrix is not None

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
            Role.DRAFT_MATRIX: (self.draft_matrix or BF16, Layout.TILE),
            Role.DRAFT_MLP: (self.draft_mlp or BF16, Layout.TILE),
            Role.CODEBOOK: (BF16, Layout.ROWS),
        }[role]


_GROUPWISE = WeightProfile(
    name="groupwise-int", embedding=W8G32_F16S, matrix=Q4G64_F16S, head=W8G32_F16S
)
# The mixed drafter keeps what reads the target's streams in 8 bits, and its bulk in 4.
_DRAFTERS = {
    "q4": (Q4G64_F16S, Q4G64_F16S),
    "q4w8": (W8G32_F16S, Q4G64_F16S),
    "w8": (W8G32_F16S, W8G32_F16S),
}
PROFILES = {
    p.name: p
    for p in (
        WeightProfile(name="bf16", embedding=BF16, matrix=BF16, head=BF16),
        _GROUPWISE,
        *(
            replace(_GROUPWISE, name=f"groupwise-int-dflash2-{name}", draft_matrix=a, draft_mlp=b)
            for name, (a, b) in _DRAFTERS.items()
        ),
    )
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
    drafter: DrafterSpec | None = None

    def __post_init__(self) -> None:
        a, g, s = self.spec.attention, self.spec.gdn, self.spec
        checks = {
            "query heads divide by K/V heads": a.num_q_heads % a.num_kv_heads == 0,
            "value heads divide by key heads": g.num_v_heads % g.num_k_heads == 0,
            "M-RoPE sections fill half the rotary width": 2 * sum(a.mrope_sections) == a.rotary_dim,
            "legal ids fit the vocabulary": 0 < s.num_token_ids <= s.vocab_size,
            "vision ends at the hidden size": self.vision.out_size == s.hidden_size,
            "profiles are known": all(p in PROFILES for p in self.profiles),
            **(_drafter_checks(self.drafter, s) if self.drafter else {}),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"contract {self.model_id}: {'; '.join(broken)}")

    def inventory(self, *, drafter: bool = False) -> tuple[TensorSpec, ...]:
        """Every tensor of a package of this model, in physical order: text, vision, and the drafter
        when the package has one."""
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
        return (*tensors, *self._vision(), *(self._drafter() if drafter else ()))

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

    def _drafter(self) -> list[TensorSpec]:
        d = self.drafter
        assert d is not None, f"{self.model_id} has no drafter"
        c, codebook = d.hidden_size, (d.vocab_size, d.selector_rank)
        conv: tuple[tuple[str, tuple[int, ...], Role], ...] = (
            ("base_kernel", (2, 2, c), Role.VECTOR),
            ("kernel_projection", (d.conv_coefficients, c), Role.NARROW),
        )
        layer = (
            ("input_layernorm", (c,), Role.VECTOR),
            ("self_attn/q_proj", (d.q_width, c), Role.DRAFT_MATRIX),
            ("self_attn/k_proj", (d.kv_width, c), Role.DRAFT_MATRIX),
            ("self_attn/v_proj", (d.kv_width, c), Role.DRAFT_MATRIX),
            ("self_attn/o_proj", (c, d.q_width), Role.DRAFT_MATRIX),
            ("self_attn/q_norm", (d.head_dim,), Role.VECTOR),
            ("self_attn/k_norm", (d.head_dim,), Role.VECTOR),
            *((f"attention_conv/{name}", shape, role) for name, shape, role in conv),
            ("post_attention_layernorm", (c,), Role.VECTOR),
            ("mlp/gate_proj", (d.mlp_width, c), Role.DRAFT_MLP),
            ("mlp/up_proj", (d.mlp_width, c), Role.DRAFT_MLP),
            ("mlp/down_proj", (c, d.mlp_width), Role.DRAFT_MLP),
            *((f"mlp_conv/{name}", shape, role) for name, shape, role in conv),
        )
        rows = (
            ("fc", (c, d.tap_width), Role.DRAFT_MATRIX),
            ("hidden_norm", (c,), Role.VECTOR),
            *(
                (f"layers/{i}/{name}", shape, role)
                for i in range(d.num_layers)
                for name, shape, role in layer
            ),
            ("norm", (c,), Role.VECTOR),
            ("candidate_selector/hidden_projection", (d.selector_rank, c), Role.NARROW),
            ("candidate_selector/predecessor_codebook", codebook, Role.CODEBOOK),
            ("candidate_selector/successor_codebook", codebook, Role.CODEBOOK),
        )
        return [
            TensorSpec(name=f"dflash2/{name}", shape=shape, role=role) for name, shape, role in rows
        ]


def _drafter_checks(d: DrafterSpec, target: ModelSpec) -> dict[str, bool]:
    taps, layers = d.tapped_layers, range(len(target.layers))
    return {
        "drafter and target are equally wide": d.hidden_size == target.hidden_size,
        "drafter and target share a vocabulary": d.vocab_size == target.vocab_size,
        "drafter's query heads divide by its K/V heads": d.num_q_heads % d.num_kv_heads == 0,
        "groups of the drafter's convolution fill its width": d.hidden_size % d.conv_group == 0,
        "tapped layers ascend inside the target": taps == tuple(sorted({*taps} & {*layers})),
        "the mask is a legal id": 0 <= d.mask_id < target.num_token_ids,
    }
