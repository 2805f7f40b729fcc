"""Small seeded checkpoints: input of the tests and of their golden data."""

from __future__ import annotations

import json
import struct
from math import prod, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scripts.pack.codecs import bf16_bits
from scripts.pack.sources import bf16_to_f32

if TYPE_CHECKING:
    from pathlib import Path

    from ginfer.models.contract import ModelContract, VisionSpec
    from ginfer.spec import DrafterSpec, ModelSpec

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, NDArray[np.float32]]


def checkpoint_shapes(contract: ModelContract) -> Shapes:
    """Names and shapes of a checkpoint of a (small) contract, without MTP."""
    return {**text_shapes(contract.spec), **_vision_shapes(contract.vision)}


def text_shapes(spec: ModelSpec) -> Shapes:
    """Names and shapes of the text model and its head."""
    a, g, C = spec.attention, spec.gdn, spec.hidden_size
    prefix = "model.language_model."
    shapes: Shapes = {
        prefix + "embed_tokens.weight": (spec.vocab_size, C),
        prefix + "norm.weight": (C,),
        "lm_head.weight": (spec.vocab_size, C),
    }
    attention: Shapes = {
        "self_attn.q_proj.weight": (2 * a.q_width, C),
        "self_attn.k_proj.weight": (a.kv_width, C),
        "self_attn.v_proj.weight": (a.kv_width, C),
        "self_attn.o_proj.weight": (C, a.q_width),
        "self_attn.q_norm.weight": (a.head_dim,),
        "self_attn.k_norm.weight": (a.head_dim,),
    }
    gdn: Shapes = {
        "linear_attn.in_proj_qkv.weight": (g.conv_channels, C),
        "linear_attn.in_proj_z.weight": (g.value_width, C),
        "linear_attn.in_proj_b.weight": (g.num_v_heads, C),
        "linear_attn.in_proj_a.weight": (g.num_v_heads, C),
        "linear_attn.conv1d.weight": (g.conv_channels, 1, g.conv_taps),
        "linear_attn.A_log": (g.num_v_heads,),
        "linear_attn.dt_bias": (g.num_v_heads,),
        "linear_attn.norm.weight": (g.v_head_dim,),
        "linear_attn.out_proj.weight": (C, g.value_width),
    }
    for i, kind in enumerate(spec.layers):
        layer: Shapes = {
            "input_layernorm.weight": (C,),
            "post_attention_layernorm.weight": (C,),
            "mlp.gate_proj.weight": (spec.mlp_width, C),
            "mlp.up_proj.weight": (spec.mlp_width, C),
            "mlp.down_proj.weight": (C, spec.mlp_width),
            **(attention if kind == "full_attention" else gdn),
        }
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def drafter_shapes(d: DrafterSpec) -> Shapes:
    """Names and shapes of a DFlash2 checkpoint."""
    C, D, codebook = d.hidden_size, d.head_dim, (d.vocab_size, d.selector_rank)
    layer: Shapes = {
        "input_layernorm.weight": (C,),
        "post_attention_layernorm.weight": (C,),
        "self_attn.q_proj.weight": (d.num_q_heads * D, C),
        "self_attn.k_proj.weight": (d.num_kv_heads * D, C),
        "self_attn.v_proj.weight": (d.num_kv_heads * D, C),
        "self_attn.o_proj.weight": (C, d.num_q_heads * D),
        "self_attn.q_norm.weight": (D,),
        "self_attn.k_norm.weight": (D,),
        "mlp.gate_proj.weight": (d.mlp_width, C),
        "mlp.up_proj.weight": (d.mlp_width, C),
        "mlp.down_proj.weight": (C, d.mlp_width),
    }
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, 2, C)
        layer[f"{conv}.kernel_projection.weight"] = (4 * (C // d.conv_group), C)
    shapes: Shapes = {
        "fc.weight": (C, len(d.tapped_layers) * C),
        "hidden_norm.weight": (C,),
        "norm.weight": (C,),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
        "candidate_selector.hidden_projection.weight": (d.selector_rank, C),
    }
    for i in range(d.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _vision_shapes(v: VisionSpec) -> Shapes:
    h, m = v.hidden_size, v.hidden_size * v.merge**2
    patch = (v.in_channels, v.temporal_patch, v.patch_size, v.patch_size)
    matrices: Shapes = {
        "patch_embed.proj": (h, *patch),
        "merger.linear_fc1": (m, m),
        "merger.linear_fc2": (v.out_size, m),
    }
    for i in range(v.depth):
        matrices |= {
            f"blocks.{i}.attn.qkv": (3 * h, h),
            f"blocks.{i}.attn.proj": (h, h),
            f"blocks.{i}.mlp.linear_fc1": (v.mlp_width, h),
            f"blocks.{i}.mlp.linear_fc2": (h, v.mlp_width),
        }
    norms = ["merger.norm", *(f"blocks.{i}.norm{n}" for i in range(v.depth) for n in (1, 2))]
    shapes: Shapes = {"pos_embed.weight": (v.num_positions, h)}
    shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes |= {f"{name}.{part}": (h,) for name in norms for part in ("weight", "bias")}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def random_arrays(shapes: Shapes, seed: int) -> Arrays:
    """Float32 arrays that BF16 holds exactly, the same on every platform and for every NumPy:
    uniform, from the raw stream of PCG64, which never changes, unlike distributions above it.

    Matrices keep the scale of their input, embeddings have deviation 1, decays span short and long
    memory, head and gates are wide enough to tell tokens apart.
    """
    arrays = {}
    for n, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        bits = np.random.PCG64([seed, n]).random_raw(prod(shape)) >> np.uint64(40)
        uniform = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        low, high = _value_range(name, shape)
        values = np.float32(low) + np.float32(high - low) * (uniform + 1) / 2
        arrays[name] = bf16_to_f32(bf16_bits(values.astype(np.float32))).reshape(shape)
    return arrays


def _value_range(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith("A_log"):
        return -3.0, 2.0
    if name.endswith("dt_bias"):
        return -4.0, 1.0
    if "linear_attn.norm" in name:
        return 0.5, 1.5
    if len(shape) == 1:
        return -0.2, 0.2
    if "embed_tokens" in name:
        return -1.7, 1.7
    gain = 4.0 if name == "lm_head.weight" or "in_proj_a" in name or "in_proj_b" in name else 1.7
    bound = gain / sqrt(prod(shape[1:]))
    return -bound, bound


def write_safetensors(path: Path, arrays: Arrays) -> None:
    """Write float32 arrays as BF16."""
    header, at = {}, 0
    for name, array in arrays.items():
        span = [at, at + 2 * array.size]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(bf16_bits(array).tobytes())


def write_checkpoint(folder: Path, contract: ModelContract, arrays: Arrays) -> None:
    """A folder as exported: two files, an index and the frontend resources."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(arrays)
    weight_map: dict[str, str] = {}
    for n, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{n:05d}-of-00002.safetensors"
        write_safetensors(folder / file, {name: arrays[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in contract.resources:
        (folder / name.rpartition("/")[2]).write_bytes(f"content of {name}\n".encode())
