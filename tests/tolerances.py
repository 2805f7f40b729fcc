"""Criteria of numeric tests: they belong to an operator and its precision, never to a kernel.

Loosening one is a reviewed change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reduction:
    """Bounds for sums: relative L2 error, and largest error <= absolute + relative * max |ref|."""

    l2: float
    absolute: float
    relative: float

    def check(self, actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
        """Fail when a bound is broken or a value is not finite."""
        assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
        assert np.isfinite(actual).all(), f"{what}: not finite"
        error = np.abs(actual.astype(np.float64) - expected)
        scale = np.linalg.norm(expected)
        l2 = np.linalg.norm(error) / scale if scale else np.linalg.norm(error)
        bound = self.absolute + self.relative * np.abs(expected).max(initial=0.0)
        assert l2 <= self.l2, f"{what}: relative L2 {l2:.3g} > {self.l2}"
        worst = error.max(initial=0.0)
        assert worst <= bound, f"{what}: largest error {worst:.3g} > {bound:.3g}"


# float32 throughout: rounding only
NORM_F32 = Reduction(l2=1e-6, absolute=1e-6, relative=1e-6)
ROPE_F32 = Reduction(l2=1e-6, absolute=1e-6, relative=1e-6)
CONV_F32 = Reduction(l2=1e-6, absolute=1e-6, relative=1e-6)
# K and V in BF16, the oracle reads the same BF16 values
ATTENTION_BF16 = Reduction(l2=2.8e-3, absolute=1.0e-3, relative=2.7e-3)
ATTENTION_F32 = Reduction(l2=2e-6, absolute=1e-6, relative=2e-6)
GDN_OUTPUT = Reduction(l2=4.1e-3, absolute=5e-6, relative=5.5e-3)
GDN_STATE = Reduction(l2=2.7e-3, absolute=1e-5, relative=3.9e-3)
GDN_F32 = Reduction(l2=2e-5, absolute=1e-6, relative=2e-5)
MODEL_LOGITS = Reduction(l2=2e-3, absolute=2e-3, relative=4e-3)
