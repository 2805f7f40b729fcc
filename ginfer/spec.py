"""Dimensions of a model as the backends need them: shapes of blocks, no files, no requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

PAGE_TOKENS = 64  # tokens of one K/V page; GDN chunks have the same length
BLOCK_TOKENS = 256  # keys of one partial of decode attention; blocks lie at absolute positions
KV_GROUP = 64  # dims of a head that share a scale
RING_SLACK = 64  # tokens of a drafter ring beyond its window; two rounds append at most 32
SPAN_BLOCKS = 4  # that are folded into one partial, left to right, before the spans are


class KvCodec(StrEnum):
    """How K/V pages hold numbers: as they are, or INT8 codes with an F16 scale per token and 64
    dims of a head. Scales lie apart from the pages."""

    BF16 = "bf16"
    INT8 = "int8"


class LayerKind(StrEnum):
    """The mixer of a layer."""

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    GATED_DELTANET = "gated_deltanet"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Gated full attention with per-head q/k norms and partial interleaved M-RoPE (models of the
    Qwen3.8 family)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_sections: tuple[
        int, int, int
    ]  # frequencies per axis (T, H, W); they sum to rotary_dim / 2

    @property
    def q_width(self) -> int:
        """Columns of all query heads (and of the output gate)."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return math.sqrt(1.0 / self.head_dim)


@dataclass(frozen=True, kw_only=True)
class GdnSpec:
    """Gated DeltaNet: value head j reads key head j // (num_v_heads / num_k_heads)."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_taps: int

    @property
    def key_width(self) -> int:
        """Columns of all key (or query) heads."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_width(self) -> int:
        """Columns of all value heads (and of the gate z)."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k, v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A DFlash2 block drafter of a target. `hidden_size` and `vocab_size` are the target's; norms
    are used as they are stored; all of a head turns by the token's index."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    mlp_width: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    window: int  # a query at p sees context keys at p - window + 1 and later
    block_size: int  # the anchor and its masks
    mask_id: int
    tapped_layers: tuple[int, ...]  # target layers whose output stream is the context, ascending
    conv_group: int  # channels that share a dynamic coefficient
    selector_rank: int
    num_candidates: int  # ids of a position that the selector scores

    @property
    def max_drafts(self) -> int:
        """Most tokens that one block proposes."""
        return self.block_size - 1

    @property
    def ring_tokens(self) -> int:
        """Tokens of context that a ring holds: the window, and what a round may have appended to it
        before the host takes fewer tokens."""
        return self.window + RING_SLACK

    @property
    def ring_nbytes(self) -> int:
        """Bytes of one ring, BF16: [layer][K, V][ring_tokens][kv_width]."""
        return self.num_layers * 2 * self.ring_tokens * self.kv_width * 2

    @property
    def q_width(self) -> int:
        """Columns of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def tap_width(self) -> int:
        """Columns of the tapped streams, side by side."""
        return len(self.tapped_layers) * self.hidden_size

    @property
    def conv_coefficients(self) -> int:
        """Dynamic coefficients of a column: [side 2][tap 2][groups]."""
        return 4 * (self.hidden_size // self.conv_group)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One text model. `layers` gives the mixer of each layer; weights of norms are stored as (w),
    used as (1 + w)."""

    hidden_size: int
    mlp_width: int
    vocab_size: int  # rows of embedding and head
    num_token_ids: (
        int  # legal ids are 0 .. num_token_ids - 1; the rest is padding and never selected
    )
    max_context: int
    norm_eps: float
    layers: tuple[LayerKind, ...]
    attention: AttentionSpec
    gdn: GdnSpec

    def page_nbytes(self, codec: KvCodec) -> int:
        """Bytes of one K/V page, 64 tokens of all attention layers, without scales."""
        layers = len(self.layers_of(LayerKind.FULL_ATTENTION))
        return layers * self.attention.kv_width * PAGE_TOKENS * (4 if codec is KvCodec.BF16 else 2)

    def scales_nbytes(self, codec: KvCodec) -> int:
        """Bytes of the scales of one page."""
        a, layers = self.attention, len(self.layers_of(LayerKind.FULL_ATTENTION))
        groups = layers * a.num_kv_heads * -(-a.head_dim // KV_GROUP)
        return 0 if codec is KvCodec.BF16 else groups * PAGE_TOKENS * 4

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of one kind, ascending."""
        return tuple(i for i, k in enumerate(self.layers) if k is kind)
