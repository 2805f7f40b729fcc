"""Random small models of the Qwen3.8 class: specs, weights and prompts, all from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ginfer.backend import PackedTensor
from ginfer.formats import TILE_N
from ginfer.models.contract import PROFILES, ModelContract
from ginfer.models.qwen import QWEN_DEMO
from scripts.make_fixture import random_arrays, text_shapes
from scripts.pack import codecs, qwen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ginfer.spec import ModelSpec
    from scripts.make_fixture import Arrays
    from scripts.pack.recipe import Recipe

LENGTHS = (1, 2, 63, 64, 65, 127, 130, 300)  # around the borders of GDN chunks and K/V pages
DENSE_LENGTHS = (130, 300)  # prompts whose logits are kept at every position
NUM_DENSE_IDS = 6


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """One configuration. heads: query, K/V, GDN key, GDN value."""

    name: str
    seed: int
    heads: tuple[int, int, int, int]
    hidden_size: int
    mlp_width: int
    vocab_size: int
    num_token_ids: int
    num_layers: int

    @property
    def contract(self) -> ModelContract:
        """A contract with these dimensions; its head widths are those of the family."""
        demo = QWEN_DEMO.spec
        q, kv, gdn_k, gdn_v = self.heads
        spec = replace(
            demo,
            hidden_size=self.hidden_size,
            mlp_width=self.mlp_width,
            vocab_size=self.vocab_size,
            num_token_ids=self.num_token_ids,
            max_context=1024,
            layers=(demo.layers * 2)[: self.num_layers],
            attention=replace(demo.attention, num_q_heads=q, num_kv_heads=kv),
            gdn=replace(demo.gdn, num_k_heads=gdn_k, num_v_heads=gdn_v),
        )
        vision = replace(QWEN_DEMO.vision, out_size=self.hidden_size)
        return replace(QWEN_DEMO, model_id=self.name, spec=spec, vision=vision, drafter=None)

    @property
    def spec(self) -> ModelSpec:
        """Dimensions of the text model."""
        return self.contract.spec

    def arrays(self) -> Arrays:
        """Weights under the names of a checkpoint."""
        return random_arrays(text_shapes(self.spec), self.seed)

    def prompt(self, length: int) -> NDArray[np.int32]:
        """Token ids of a prompt, [length]."""
        raw = np.random.PCG64([self.seed, 1 << 20, length]).random_raw(length)
        return (raw % np.uint64(self.num_token_ids)).astype(np.int32)

    def dense_ids(self) -> NDArray[np.int32]:
        """The token ids whose logits are kept at every position, [NUM_DENSE_IDS], ascending."""
        steps = np.linspace(0, self.num_token_ids - 1, NUM_DENSE_IDS)
        return steps.astype(np.int32)

    def packed(self) -> list[PackedTensor]:
        """The text tensors as a `bf16` package has them."""
        arrays = {str(qwen.canonical_name(name)): a for name, a in self.arrays().items()}
        text = [r for r in qwen.recipes(self.contract) if r.target.name.startswith("text/")]
        return [_packed(recipe, arrays, "bf16") for recipe in text]


def packed_drafter(contract: ModelContract, arrays: Arrays, profile: str) -> list[PackedTensor]:
    """The drafter's tensors as a package has them. arrays: under the names of its checkpoint."""
    named = {f"dflash2.{name}": a for name, a in arrays.items()}
    recipes = qwen.recipes(contract, drafter=True)
    drafter = [r for r in recipes if r.target.name.startswith("dflash2/")]
    return [_packed(recipe, named, profile) for recipe in drafter]


def _packed(recipe: Recipe, arrays: Arrays, profile: str) -> PackedTensor:
    fmt, layout = PROFILES[profile].storage(recipe.target.role)
    pieces = [arrays[p.source.name][p.start : p.stop] for p in recipe.pieces]
    rows = np.concatenate([piece.reshape(len(piece), -1) for piece in pieces])
    rows = np.ascontiguousarray(rows.T) if recipe.transpose else rows
    blocks = [rows[i : i + TILE_N] for i in range(0, len(rows), TILE_N)]
    data = np.concatenate([codecs.encode(fmt, layout, block) for block in blocks])
    return PackedTensor(
        name=recipe.target.name, shape=recipe.target.shape, format=fmt, layout=layout, data=data
    )


def _model(
    seed: int,
    heads: tuple[int, int, int, int],
    sizes: tuple[int, int],
    ids: tuple[int, int],
    num_layers: int,
) -> RandomModel:
    q, kv, gdn_k, gdn_v = heads
    return RandomModel(
        name=f"random-{q}q{kv}kv-{gdn_k}k{gdn_v}v",
        seed=seed,
        heads=heads,
        hidden_size=sizes[0],
        mlp_width=sizes[1],
        vocab_size=ids[0],
        num_token_ids=ids[1],
        num_layers=num_layers,
    )


MODELS = (  # heads (q, kv, gdn k, gdn v), (hidden, mlp), (vocabulary, legal ids), layers
    _model(1, (1, 1, 1, 1), (128, 192), (256, 251), 4),
    _model(2, (2, 1, 1, 3), (160, 208), (387, 379), 4),
    _model(3, (2, 2, 2, 2), (192, 256), (320, 313), 5),
    _model(4, (4, 2, 2, 4), (256, 304), (401, 401), 8),
    _model(5, (6, 1, 3, 6), (224, 320), (512, 509), 4),
    _model(6, (3, 3, 1, 4), (320, 448), (300, 293), 7),
)
