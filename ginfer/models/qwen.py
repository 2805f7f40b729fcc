"""Qwen3.8: contract values of the 27B and the demo model, and the forward program they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.models.contract import ModelContract, TokenIds, VisionSpec
from ginfer.models.dflash2 import QWEN_27B_DRAFTER, QWEN_DEMO_DRAFTER
from ginfer.spec import AttentionSpec, GdnSpec, LayerKind, ModelSpec

if TYPE_CHECKING:
    from ginfer.backend import Backend, Hidden
    from ginfer.batch import ForwardBatch

RESOURCES = tuple(
    f"frontend/{name}"
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    )
)


def _layers(n: int) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind.FULL_ATTENTION if i % 4 == 3 else LayerKind.GATED_DELTANET for i in range(n)
    )


QWEN_27B = ModelContract(
    model_id="qwen3.8-27b",
    spec=ModelSpec(
        hidden_size=5120,
        mlp_width=17408,
        vocab_size=248320,
        num_token_ids=248077,
        max_context=262144,
        norm_eps=1e-6,
        layers=_layers(64),
        attention=AttentionSpec(
            num_q_heads=24,
            num_kv_heads=4,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            mrope_sections=(11, 11, 10),
        ),
        gdn=GdnSpec(num_k_heads=16, num_v_heads=48, k_head_dim=128, v_head_dim=128, conv_taps=4),
    ),
    vision=VisionSpec(
        depth=27,
        hidden_size=1152,
        num_heads=16,
        mlp_width=4304,
        patch_size=16,
        temporal_patch=2,
        merge=2,
        num_positions=2304,
        in_channels=3,
        out_size=5120,
    ),
    token_ids=TokenIds(
        stop=(248046, 248044),
        image_pad=248056,
        video_pad=248057,
        vision_start=248053,
        vision_end=248054,
        mask=248070,
    ),
    profiles=(
        "bf16",
        "groupwise-int",
        *(f"groupwise-int-dflash2-{drafter}" for drafter in ("q4", "q4w8", "w8")),
    ),
    resources=RESOURCES,
    drafter=QWEN_27B_DRAFTER,
)

QWEN_DEMO = ModelContract(
    model_id="qwen3.8-demo",
    spec=ModelSpec(
        hidden_size=384,
        mlp_width=1024,
        vocab_size=4224,
        num_token_ids=4111,
        max_context=16384,
        norm_eps=1e-6,
        layers=_layers(8),
        attention=AttentionSpec(
            num_q_heads=3,
            num_kv_heads=1,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            mrope_sections=(11, 11, 10),
        ),
        gdn=GdnSpec(num_k_heads=2, num_v_heads=6, k_head_dim=128, v_head_dim=128, conv_taps=4),
    ),
    vision=VisionSpec(
        depth=4,
        hidden_size=144,
        num_heads=2,
        mlp_width=576,
        patch_size=16,
        temporal_patch=2,
        merge=2,
        num_positions=2304,
        in_channels=3,
        out_size=384,
    ),
    token_ids=TokenIds(
        stop=(4098, 4096),
        image_pad=4102,
        video_pad=4103,
        vision_start=4099,
        vision_end=4100,
        mask=4110,
    ),
    profiles=("bf16", "groupwise-int", "groupwise-int-dflash2-q4"),
    resources=RESOURCES,
    drafter=QWEN_DEMO_DRAFTER,
)


def forward(spec: ModelSpec, backend: Backend, batch: ForwardBatch) -> Hidden:
    """Run the batch through the layers; what `backend.select` takes when logits are wanted."""
    hidden = backend.embed(batch)
    if backend.replayed:
        return hidden
    for layer_idx, kind in enumerate(spec.layers):
        if kind is LayerKind.GATED_DELTANET:
            backend.gdn_block(hidden, layer_idx, batch)
        else:
            backend.attention_block(hidden, layer_idx, batch)
        backend.mlp_block(hidden, layer_idx, batch)
    return hidden
