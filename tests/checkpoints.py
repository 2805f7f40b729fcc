"""Names and shapes of the 27B checkpoint as literal numbers: what the contract is held against."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

FULL_ATTENTION = {  # layer tensors of the 27B model
    "self_attn.q_proj.weight": (12288, 5120),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.o_proj.weight": (5120, 6144),
    "self_attn.q_norm.weight": (256,),
    "self_attn.k_norm.weight": (256,),
}
GATED_DELTANET = {
    "linear_attn.in_proj_qkv.weight": (10240, 5120),
    "linear_attn.in_proj_z.weight": (6144, 5120),
    "linear_attn.in_proj_b.weight": (48, 5120),
    "linear_attn.in_proj_a.weight": (48, 5120),
    "linear_attn.conv1d.weight": (10240, 1, 4),
    "linear_attn.A_log": (48,),
    "linear_attn.dt_bias": (48,),
    "linear_attn.norm.weight": (128,),
    "linear_attn.out_proj.weight": (5120, 6144),
}
EVERY_LAYER = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120),
    "mlp.down_proj.weight": (5120, 17408),
}
VISION_BLOCK = {
    "norm1.weight": (1152,),
    "norm1.bias": (1152,),
    "norm2.weight": (1152,),
    "norm2.bias": (1152,),
    "attn.qkv.weight": (3456, 1152),
    "attn.qkv.bias": (3456,),
    "attn.proj.weight": (1152, 1152),
    "attn.proj.bias": (1152,),
    "mlp.linear_fc1.weight": (4304, 1152),
    "mlp.linear_fc1.bias": (4304,),
    "mlp.linear_fc2.weight": (1152, 4304),
    "mlp.linear_fc2.bias": (1152,),
}
DRAFTER_CONV = {"base_kernel": (2, 2, 5120), "kernel_projection.weight": (1280, 5120)}
DRAFTER_LAYER = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "self_attn.q_proj.weight": (4096, 5120),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.o_proj.weight": (5120, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120),
    "mlp.down_proj.weight": (5120, 17408),
    **{f"attention_conv.{name}": shape for name, shape in DRAFTER_CONV.items()},
    **{f"mlp_conv.{name}": shape for name, shape in DRAFTER_CONV.items()},
}


def drafter_27b_shapes() -> Shapes:
    """The 81 tensors of the DFlash2 checkpoint."""
    shapes: Shapes = {
        "fc.weight": (5120, 25600),
        "hidden_norm.weight": (5120,),
        "norm.weight": (5120,),
        "candidate_selector.predecessor_codebook": (248320, 256),
        "candidate_selector.successor_codebook": (248320, 256),
        "candidate_selector.hidden_projection.weight": (256, 5120),
    }
    for i in range(5):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in DRAFTER_LAYER.items()}
    return shapes


def full_27b_shapes() -> Shapes:
    """The 1,199 tensors of the checkpoint, MTP included."""
    shapes: Shapes = {
        "model.language_model.embed_tokens.weight": (248320, 5120),
        "model.language_model.norm.weight": (5120,),
        "lm_head.weight": (248320, 5120),
        "mtp.fc.weight": (5120, 10240),
    }
    for i in range(64):
        mixer = FULL_ATTENTION if i % 4 == 3 else GATED_DELTANET
        for name, shape in {**EVERY_LAYER, **mixer}.items():
            shapes[f"model.language_model.layers.{i}.{name}"] = shape
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = (5120,)
    for name, shape in {**EVERY_LAYER, **FULL_ATTENTION}.items():
        shapes[f"mtp.layers.0.{name}"] = shape
    for i in range(27):
        for name, shape in VISION_BLOCK.items():
            shapes[f"model.visual.blocks.{i}.{name}"] = shape
    for name, shape in {
        "patch_embed.proj.weight": (1152, 3, 2, 16, 16),
        "patch_embed.proj.bias": (1152,),
        "pos_embed.weight": (2304, 1152),
        "merger.norm.weight": (1152,),
        "merger.norm.bias": (1152,),
        "merger.linear_fc1.weight": (4608, 4608),
        "merger.linear_fc1.bias": (4608,),
        "merger.linear_fc2.weight": (5120, 4608),
        "merger.linear_fc2.bias": (5120,),
    }.items():
        shapes[f"model.visual.{name}"] = shape
    return shapes
