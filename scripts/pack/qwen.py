"""Name map of Qwen3.8: every object of a contract's inventory from the tensors of a checkpoint.

Source names are those of the Transformers class without their prefix: `text.…` stands for
`model.language_model.…`, `visual.…` for `model.visual.…`; `lm_head.…` and `mtp.…` are as they are,
`dflash2.…` are those of the drafter's own checkpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ginfer.formats import ROW_TILE
from scripts.pack.recipe import Piece, Recipe, Source, interleave

if TYPE_CHECKING:
    from ginfer.models.contract import ModelContract, TensorSpec

PREFIXES = (  # the first that fits
    ("model.language_model.", "text."),
    ("language_model.model.", "text."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
    ("dflash2.", "dflash2."),
    ("model.", "text."),
)
DROPPED = "mtp."  # accepted and left out: we draft with DFlash2

SAME_ROWS = {
    "text/token_embedding": "text.embed_tokens.weight",
    "text/final_norm": "text.norm.weight",
    "text/output_head": "lm_head.weight",
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "attention/query_norm": "self_attn.q_norm.weight",
    "attention/key_norm": "self_attn.k_norm.weight",
    "attention/output": "self_attn.o_proj.weight",
    "gdn/a_log": "linear_attn.A_log",
    "gdn/dt_bias": "linear_attn.dt_bias",
    "gdn/norm": "linear_attn.norm.weight",
    "gdn/output": "linear_attn.out_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
}
VISION_NAMES = (
    ("vision/", "visual."),
    ("patch_embedding", "patch_embed.proj"),
    ("position_embedding", "pos_embed.weight"),
    ("attention/output", "attn.proj"),
    ("attention/", "attn."),
    ("fc", "linear_fc"),
    ("/", "."),
)


def canonical_name(name: str) -> str | None:
    """The name without its export's prefix, or None when no prefix fits."""
    for prefix, replacement in PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return None


def exported_name(source: str) -> str:
    """The name that a full export gives a source; for messages."""
    return next(p + source.removeprefix(s) for p, s in PREFIXES if source.startswith(s))


def recipes(contract: ModelContract, *, drafter: bool = False) -> tuple[Recipe, ...]:
    """One recipe per object of the inventory, in its order."""
    return tuple(_recipe(contract, target) for target in contract.inventory(drafter=drafter))


def _recipe(contract: ModelContract, target: TensorSpec) -> Recipe:
    if target.name.startswith("dflash2/"):
        return Recipe(target, (Source(_draft_name(target.name), target.shape).rows(),))
    layer = re.fullmatch(r"text/layers/(\d+)/(.+)", target.name)
    if layer is None:
        name = SAME_ROWS.get(target.name)
        source = Source(name, target.shape) if name else _vision_source(contract, target)
        return Recipe(target, (source.rows(),))
    prefix, part = f"text.layers.{layer[1]}.", layer[2]
    if part in SAME_ROWS:
        return Recipe(target, (Source(prefix + SAME_ROWS[part], target.shape).rows(),))
    if part == "gdn/convolution":  # [channels, 1, taps] to tap-major
        taps, channels = target.shape
        source = Source(prefix + "linear_attn.conv1d.weight", (channels, 1, taps))
        return Recipe(target, (source.rows(),), transpose=True)
    return Recipe(target, _FUSED[part](contract, prefix))


def _draft_name(name: str) -> str:
    """Same names, but that kernels and codebooks are no weights of modules."""
    parameter = name.endswith(("base_kernel", "codebook"))
    return name.replace("/", ".") + ("" if parameter else ".weight")


def _vision_source(contract: ModelContract, target: TensorSpec) -> Source:
    name = target.name
    for ours, theirs in VISION_NAMES:
        name = name.replace(ours, theirs)
    v = contract.vision
    if target.name == "vision/patch_embedding/weight":
        patch = (v.in_channels, v.temporal_patch, v.patch_size, v.patch_size)
        return Source(name, (v.hidden_size, *patch))
    return Source(name, target.shape)


def _query_key_gate_value(contract: ModelContract, prefix: str) -> tuple[Piece, ...]:
    """q_proj holds, per head, the query's rows and then the gate's; ours are apart."""
    a, c = contract.spec.attention, contract.spec.hidden_size
    q = Source(prefix + "self_attn.q_proj.weight", (2 * a.q_width, c))
    k = Source(prefix + "self_attn.k_proj.weight", (a.kv_width, c))
    v = Source(prefix + "self_attn.v_proj.weight", (a.kv_width, c))
    D = a.head_dim
    heads = range(0, 2 * a.q_width, 2 * D)
    query = (q.rows(row, row + D) for row in heads)
    gate = (q.rows(row + D, row + 2 * D) for row in heads)
    return (*query, k.rows(), *gate, v.rows())


def _query_key_value_z(contract: ModelContract, prefix: str) -> tuple[Piece, ...]:
    g, c = contract.spec.gdn, contract.spec.hidden_size
    return (
        Source(prefix + "linear_attn.in_proj_qkv.weight", (g.conv_channels, c)).rows(),
        Source(prefix + "linear_attn.in_proj_z.weight", (g.value_width, c)).rows(),
    )


def _a_b_projection(contract: ModelContract, prefix: str) -> tuple[Piece, ...]:
    shape = (contract.spec.gdn.num_v_heads, contract.spec.hidden_size)
    return tuple(Source(f"{prefix}linear_attn.in_proj_{x}.weight", shape).rows() for x in "ab")


def _gate_up(contract: ModelContract, prefix: str) -> tuple[Piece, ...]:
    """Row tiles alternate, so that one pass of a kernel holds a gate and its up."""
    shape = (contract.spec.mlp_width, contract.spec.hidden_size)
    parts = [Source(f"{prefix}mlp.{x}_proj.weight", shape) for x in ("gate", "up")]
    return interleave(parts, ROW_TILE)


_FUSED = {
    "attention/query_key_gate_value": _query_key_gate_value,
    "gdn/query_key_value_z": _query_key_value_z,
    "gdn/a_b_projection": _a_b_projection,
    "mlp/gate_up": _gate_up,
}
