"""Drafter oracle: DFlash2 of one sequence in float64, context K and V kept whole, in BF16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.oracles.attention import round_bf16
from tests.oracles.formats import decode
from tests.oracles.norm import rms_norm, sigmoid
from tests.oracles.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.backend import PackedTensor
    from ginfer.spec import DrafterSpec


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    w = np.exp(x - x.max(axis=-1, keepdims=True))
    share: np.ndarray = w / w.sum(axis=-1, keepdims=True)
    return share


class DrafterOracle:
    """A drafter with its decoded weights, and the embedding and head of its target."""

    def __init__(
        self, spec: DrafterSpec, tensors: Iterable[PackedTensor], num_token_ids: int
    ) -> None:
        """tensors: those of the drafter, and the target's embedding and head."""
        self.d, self.legal = spec, num_token_ids
        self.w = {
            t.name.removeprefix("dflash2/"): decode(t.format, t.layout, t.shape, t.data)
            .astype(np.float64)
            .reshape(t.shape)
            for t in tensors
        }

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.w[name], self.d.norm_eps)

    def _heads(self, x: np.ndarray, norm: str, positions: np.ndarray) -> np.ndarray:
        """[T, heads, D] normed and turned."""
        D = self.d.head_dim
        heads = self._norm(x.reshape(-1, D), norm).reshape(len(x), -1, D)
        three = np.tile(positions, (3, 1))
        return rotate(heads, three, self.d.rope_theta, (D // 2, 0, 0))

    def context(self, taps: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(K, V) [P, G, D] per layer of the tapped streams [P, taps * C]."""
        x = self._norm(taps @ self.w["fc"].T, "hidden_norm")
        positions, out = np.arange(len(taps)), []
        for i in range(self.d.num_layers):
            path = f"layers/{i}/self_attn/"
            k = self._heads(x @ self.w[path + "k_proj"].T, path + "k_norm", positions)
            v = (x @ self.w[path + "v_proj"].T).reshape(k.shape)
            out.append((round_bf16(k), round_bf16(v)))
        return out

    def _conv(self, u: np.ndarray, coef: np.ndarray, base: np.ndarray, side: int) -> np.ndarray:
        """coef: [S, side, tap, groups]."""
        before = np.concatenate([np.zeros((1, u.shape[1])), u[:-1]])
        wide = np.repeat(coef, self.d.conv_group, axis=-1)
        kernel = base[side] + wide[:, side]
        out: np.ndarray = kernel[:, 0] * u + kernel[:, 1] * before
        return out

    def block(
        self, anchor: int, num_drafts: int, context: list[tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """Final hidden states of the masks, [num_drafts, C]."""
        ids = [anchor, *[self.d.mask_id] * num_drafts]
        P = len(context[0][0])
        positions = P + np.arange(len(ids))
        h = self.w["text/token_embedding"][ids]
        for i, kv in enumerate(context):
            for conv, norm, inner in (
                ("attention_conv", "input_layernorm", self._attention),
                ("mlp_conv", "post_attention_layernorm", self._mlp),
            ):
                path = f"layers/{i}/"
                x = self._norm(h, path + norm)
                coef = (x @ self.w[f"{path}{conv}/kernel_projection"].T).reshape(len(x), 2, 2, -1)
                base = self.w[f"{path}{conv}/base_kernel"]
                y = inner(self._conv(x, coef, base, 0), path, kv, positions)
                h = h + self._conv(y, coef, base, 1)
        return self._norm(h, "norm")[1:]

    def _attention(
        self, x: np.ndarray, path: str, kv: tuple[np.ndarray, np.ndarray], positions: np.ndarray
    ) -> np.ndarray:
        d, path = self.d, path + "self_attn/"
        q = self._heads(x @ self.w[path + "q_proj"].T, path + "q_norm", positions)
        kb = self._heads(x @ self.w[path + "k_proj"].T, path + "k_norm", positions)
        vb = (x @ self.w[path + "v_proj"].T).reshape(kb.shape)
        k, v = np.concatenate([kv[0], kb]), np.concatenate([kv[1], vb])
        out = np.zeros_like(q)
        near = positions[:, None] - np.arange(len(k)) < d.window  # block keys are always near
        for h in range(d.num_q_heads):
            g = h * d.num_kv_heads // d.num_q_heads
            scores = q[:, h] @ k[:, g].T / np.sqrt(d.head_dim)
            out[:, h] = softmax(np.where(near, scores, -np.inf)) @ v[:, g]
        return out.reshape(len(x), -1) @ self.w[path + "o_proj"].T

    def _mlp(self, x: np.ndarray, path: str, *_: object) -> np.ndarray:
        gate, up = (x @ self.w[f"{path}mlp/{name}_proj"].T for name in ("gate", "up"))
        return (gate * sigmoid(gate) * up) @ self.w[path + "mlp/down_proj"].T

    def path(self, anchor: int, hidden: np.ndarray) -> tuple[list[int], list[dict[int, float]]]:
        """The greedy path, and the score of each candidate on the way."""
        logits = (hidden @ self.w["text/output_head"].T)[:, : self.legal]
        rank = hidden @ self.w["candidate_selector/hidden_projection"].T
        before, after = (
            self.w[f"candidate_selector/{n}_codebook"] for n in ("predecessor", "successor")
        )
        path, scores = [anchor], []
        for row, hp in zip(logits, rank):
            best = sorted(range(len(row)), key=lambda c: (-row[c], c))[: self.d.num_candidates]
            pair = before[path[-1]] * hp
            scores.append({c: float(row[c] + pair @ after[c]) for c in best})
            path.append(max(best, key=lambda c: (scores[-1][c], -c)))
        return path[1:], scores
