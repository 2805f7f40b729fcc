"""Whole-model oracle: the Qwen forward pass of one sequence in float64, recurrent GDN, no cache.

It reads packed tensors through the exact decoder of `tests.oracles.formats` and rounds nothing but
K and V, which the model's cache stores in BF16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.spec import LayerKind
from tests.oracles.attention import attention, round_bf16
from tests.oracles.formats import decode
from tests.oracles.gdn import causal_conv, gated_deltanet, gates
from tests.oracles.norm import gated_rms_norm, rms_norm, sigmoid
from tests.oracles.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ginfer.backend import PackedTensor
    from ginfer.spec import ModelSpec


class Oracle:
    """A model with its decoded weights."""

    def __init__(self, spec: ModelSpec, tensors: Iterable[PackedTensor]) -> None:
        self.spec = spec
        self.w = {
            t.name: decode(t.format, t.layout, t.shape, t.data).astype(np.float64) for t in tensors
        }

    def logits(self, ids: Sequence[int], positions: np.ndarray | None = None) -> np.ndarray:
        """Logits of every position, [T, vocabulary rows]. positions: [3, T], default 0 .. T - 1."""
        if positions is None:
            positions = np.tile(np.arange(len(ids)), (3, 1))
        h = self.w["text/token_embedding"][np.asarray(ids)]
        for i, kind in enumerate(self.spec.layers):
            path = f"text/layers/{i}/"
            x = self._norm(h, path + "input_norm")
            gated = kind is LayerKind.GATED_DELTANET
            h = h + (self._gdn(x, path) if gated else self._attention(x, path, positions))
            h = h + self._mlp(self._norm(h, path + "post_attention_norm"), path)
        return self._norm(h, "text/final_norm") @ self.w["text/output_head"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, 1.0 + self.w[name], self.spec.norm_eps)

    def _heads(self, x: np.ndarray, num: int) -> np.ndarray:
        return x.reshape(x.shape[0], num, -1)

    def _attention(self, x: np.ndarray, path: str, positions: np.ndarray) -> np.ndarray:
        a, T = self.spec.attention, x.shape[0]
        y = x @ self.w[path + "attention/query_key_gate_value"].T
        edges = np.cumsum([a.q_width, a.kv_width, a.q_width])
        q, k, gate, v = np.split(y, edges, axis=1)
        turned = []
        for part, num, norm in ((q, a.num_q_heads, "query"), (k, a.num_kv_heads, "key")):
            heads = part.reshape(T * num, a.head_dim)
            normed = self._norm(heads, f"{path}attention/{norm}_norm").reshape(T, num, -1)
            turned.append(rotate(normed, positions, a.rope_theta, a.mrope_sections))
        out = attention(
            turned[0],
            round_bf16(turned[1]),
            round_bf16(self._heads(v, a.num_kv_heads)),
            0,
            a.head_dim**-0.5,
        )
        return (out.reshape(T, -1) * sigmoid(gate)) @ self.w[path + "attention/output"].T

    def _gdn(self, x: np.ndarray, path: str) -> np.ndarray:
        g, T = self.spec.gdn, x.shape[0]
        y = x @ self.w[path + "gdn/query_key_value_z"].T
        a, b = np.split(x @ self.w[path + "gdn/a_b_projection"].T, 2, axis=1)
        mix, z = y[:, : g.conv_channels], y[:, g.conv_channels :]
        history = np.zeros((g.conv_taps - 1, g.conv_channels))
        c = causal_conv(mix, self.w[path + "gdn/convolution"], history)
        q, k, v = np.split(c, [g.key_width, 2 * g.key_width], axis=1)
        decay, beta = gates(a, b, self.w[path + "gdn/a_log"], self.w[path + "gdn/dt_bias"])
        out, _ = gated_deltanet(
            self._heads(q, g.num_k_heads),
            self._heads(k, g.num_k_heads),
            self._heads(v, g.num_v_heads),
            decay,
            beta,
            np.zeros((g.num_v_heads, g.k_head_dim, g.v_head_dim)),
        )
        rows = out.reshape(T * g.num_v_heads, g.v_head_dim)
        gate = z.reshape(T * g.num_v_heads, g.v_head_dim)
        normed = gated_rms_norm(rows, self.w[path + "gdn/norm"], gate, self.spec.norm_eps)
        return normed.reshape(T, -1) @ self.w[path + "gdn/output"].T

    def _mlp(self, x: np.ndarray, path: str) -> np.ndarray:
        y = x @ self.w[path + "mlp/gate_up"].T
        pairs = y.reshape(x.shape[0], -1, 2, 16)  # 16-row tiles alternate gate and up
        gate, up = (pairs[:, :, i].reshape(x.shape[0], -1) for i in (0, 1))
        return (gate * sigmoid(gate) * up) @ self.w[path + "mlp/down"].T
