"""Golden data from Hugging Face Transformers (extra `oracle`), float32 on the CPU, eager attention.

python -m scripts.golden chat PACKAGE PROMPTS OUT    greedy continuations of a package's weights
python -m scripts.golden random OUT                  logits of the random small models
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch
import transformers
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ginfer.artifact.reader import Package
from ginfer.models.registry import contract_for
from ginfer.spec import LayerKind
from scripts.pack import qwen
from scripts.random_models import DENSE_LENGTHS, LENGTHS, MODELS, RandomModel
from tests.oracles.formats import decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.models.contract import ModelContract
    from ginfer.spec import ModelSpec

    Weights = dict[str, NDArray[np.float32]]  # by source name

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
DEMO_PACKAGE = ROOT / "appliance" / "demo" / "qwen3.8-demo-groupwise-int.ginfer"
MAX_NEW_TOKENS = 96
NUM_TOP = 20


def transformers_model(spec: ModelSpec, weights: Weights) -> Any:
    """The reference model with these weights, in evaluation mode."""
    a, g = spec.attention, spec.gdn
    config = Qwen3_5TextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=a.num_q_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": a.rope_theta,
            "partial_rotary_factor": a.rotary_dim / a.head_dim,
            "mrope_section": list(a.mrope_sections),
            "mrope_interleaved": True,
        },
        linear_conv_kernel_dim=g.conv_taps,
        linear_key_head_dim=g.k_head_dim,
        linear_value_head_dim=g.v_head_dim,
        linear_num_key_heads=g.num_k_heads,
        linear_num_value_heads=g.num_v_heads,
        layer_types=[
            "full_attention" if kind is LayerKind.FULL_ATTENTION else "linear_attention"
            for kind in spec.layers
        ],
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model: Any = Qwen3_5ForCausalLM(config)  # parameters are float32 by default
    model.eval()
    state = {
        "model." + name.removeprefix("text.")
        if name.startswith("text.")
        else name: torch.from_numpy(array)
        for name, array in weights.items()
    }
    model.load_state_dict(state, strict=True)
    return model


def package_weights(package: Package, contract: ModelContract) -> Weights:
    """The represented text weights of a package under their source names."""
    weights: Weights = {}
    for recipe in qwen.recipes(contract):
        if not recipe.target.name.startswith("text/"):
            continue
        tensor = package.tensor(recipe.target.name)
        values = decode(tensor.format, tensor.layout, tensor.shape, tensor.data)
        rows = values.T if recipe.transpose else values
        at = 0
        for piece in recipe.pieces:
            source, n = piece.source, piece.stop - piece.start
            array = weights.setdefault(source.name, np.empty(source.shape, np.float32))
            array[piece.start : piece.stop] = rows[at : at + n].reshape(n, *source.shape[1:])
            at += n
    return weights


def greedy(model: Any, ids: list[int], contract: ModelContract) -> dict[str, Any]:
    """Greedy continuation among legal ids, the smallest gap between the two best logits on the way
    and the numbers of the last prompt position."""
    legal = contract.spec.num_token_ids
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True, output_hidden_states=True)
        logits = out.logits[0, -1, :legal]
        top = torch.topk(logits, NUM_TOP)
        last = {
            "top20_ids": top.indices.tolist(),
            "top20_logits": [round(x, 5) for x in top.values.tolist()],
            "hidden_norms": [round(float(h[0, -1].norm()), 5) for h in out.hidden_states],
        }
        tokens: list[int] = []
        margin = float("inf")
        while True:
            best = torch.topk(logits, 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            if tokens[-1] in contract.token_ids.stop or len(tokens) == MAX_NEW_TOKENS:
                break
            out = model(torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)
            logits = out.logits[0, -1, :legal]
    return {
        "greedy_ids": tokens,
        "stopped": tokens[-1] in contract.token_ids.stop,
        "min_top2_margin": round(margin, 5),
        "last_position": last,
    }


def random_case(model: RandomModel) -> dict[str, Any]:
    """Last-position logits of every prompt length, and a few logits at every position."""
    reference = transformers_model(
        model.spec, {str(qwen.canonical_name(n)): a for n, a in model.arrays().items()}
    )
    case: dict[str, Any] = {"last": {}, "dense": {}}
    for length in LENGTHS:
        with torch.no_grad():
            ids = torch.from_numpy(model.prompt(length).astype(np.int64))[None]
            logits = reference(ids, use_cache=False).logits[0].numpy()
        case["last"][length] = _rounded(logits[-1, : model.num_token_ids])
        if length in DENSE_LENGTHS:
            case["dense"][length] = [_rounded(row) for row in logits[:, model.dense_ids()]]
    return case


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(float(x), 4) for x in values]


def _header(kind: str) -> dict[str, Any]:
    return {
        "format": f"{kind} golden data, version 1",
        "transformers": transformers.__version__,
        "dtype": "float32 on CPU",
    }


def _write(path: Path, header: dict[str, Any], key: str, rows: list[Any]) -> None:
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    lines = ",\n".join(dump(row) for row in rows)
    path.write_text(f'{dump(header)[:-1]},"{key}":[\n{lines}\n]}}\n')


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Record golden data; without a command, all of tests/golden that comes from here."""
    torch.set_num_threads(1)  # one order of sums
    if context.invoked_subcommand is None:
        record_chat(DEMO_PACKAGE, GOLDEN / "chat_groupwise_int.json")
        record_random(GOLDEN / "random_configs.json")


@main.command()
@click.argument("package", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def chat(package: Path, out: Path) -> None:
    """Greedy continuations of the golden prompts by the represented weights of PACKAGE."""
    record_chat(package, out)


@main.command(name="random")
@click.argument("out", type=click.Path(path_type=Path))
def random_models(out: Path) -> None:
    """Logits of the random small models."""
    record_random(out)


def record_chat(path: Path, out: Path) -> None:
    """Write the continuations of one package for the prompts of `chat_bf16.json`."""
    prompts = json.loads((GOLDEN / "chat_bf16.json").read_bytes())["cases"]
    with Package.open(path) as package:
        contract = contract_for(package.identity.model_id, package.identity.weights_id)
        model = transformers_model(contract.spec, package_weights(package, contract))
        header = _header("chat") | {
            "weights_id": package.identity.weights_id,
            "package_directory_sha256": package.digest,
            "eos_ids": contract.token_ids.stop,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
    cases = []
    for case in prompts:
        result = greedy(model, case["prompt_ids"], contract)
        if "last_position" not in case:
            del result["last_position"]
        cases.append({"name": case["name"], "prompt_ids": case["prompt_ids"], **result})
        length, margin = len(result["greedy_ids"]), result["min_top2_margin"]
        click.echo(f"{case['name']}: {length} tokens, margin {margin}")
    _write(out, header, "cases", cases)


def record_random(out: Path) -> None:
    """Write the logits of the random small models."""
    models = [{"name": model.name, **random_case(model)} for model in MODELS]
    _write(out, _header("random models"), "models", models)


if __name__ == "__main__":
    main()
