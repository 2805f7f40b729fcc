"""DFlash2: dimensions of the drafters of both models, and their forward programs."""

from __future__ import annotations

from ginfer.spec import DrafterSpec

QWEN_27B_DRAFTER = DrafterSpec(
    num_layers=5,
    hidden_size=5120,
    vocab_size=248320,
    mlp_width=17408,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e7,
    norm_eps=1e-6,
    window=2048,
    block_size=8,
    mask_id=248070,
    tapped_layers=(5, 19, 33, 47, 61),
    conv_group=16,
    selector_rank=256,
    num_candidates=16,
)

QWEN_DEMO_DRAFTER = DrafterSpec(
    num_layers=3,
    hidden_size=384,
    vocab_size=4224,
    mlp_width=768,
    num_q_heads=4,
    num_kv_heads=1,
    head_dim=128,
    rope_theta=1e7,
    norm_eps=1e-6,
    window=2048,
    block_size=8,
    mask_id=4110,
    tapped_layers=(1, 2, 4, 5, 6),
    conv_group=16,
    selector_rank=64,
    num_candidates=16,
)
