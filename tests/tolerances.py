"""Error bounds by operator profile, never by kernel or shape; loosening one is a reviewed step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bound:
    """Of a reduction: relative L2 norm, and max error <= absolute + relative * max |want|."""

    l2: float
    absolute: float
    relative: float

    def check(self, got: np.ndarray, want: np.ndarray, what: str = "") -> None:
        """Raise AssertionError when `got` is not finite or not within the bound of `want`."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (what, got.shape, want.shape)
        assert np.isfinite(got).all(), f"{what}: not finite"
        error = np.abs(got - want)
        l2, scale = np.linalg.norm(error), np.linalg.norm(want)
        assert l2 <= self.l2 * scale, f"{what}: relative L2 {l2 / scale:.3g}, bound {self.l2}"
        worst, bound = error.max(), self.absolute + self.relative * np.abs(want).max()
        assert worst <= bound, f"{what}: largest error {worst:.3g}, bound {bound:.3g}"


@dataclass(frozen=True)
class Pointwise:
    """|error| <= absolute + relative * |want| everywhere."""

    absolute: float
    relative: float

    def check(self, got: np.ndarray, want: np.ndarray, what: str = "") -> None:
        """Raise AssertionError when `got` is not finite or not within the bound of `want`."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (what, got.shape, want.shape)
        assert np.isfinite(got).all(), f"{what}: not finite"
        excess = np.abs(got - want) - self.absolute - self.relative * np.abs(want)
        assert excess.max() <= 0, f"{what}: {excess.max():.3g} beyond the bound"


LINEAR_BF16 = Bound(1 / 256, 1 / 256, 2 / 256)  # linear, BF16 activations
# silu(gate) * up, two results of that linear: their relative errors add in quadrature. Rounding
# weights and outputs to BF16, all else in float64, gives 4.14e-3 on one token of a 96-row matrix.
SILU_UP_BF16 = Bound(2**0.5 / 256, 2**0.5 / 256, 2**0.5 * 2 / 256)
ATTENTION_BF16 = Bound(2.8e-3, 1.0e-3, 2.7e-3)
POINTWISE_BF16 = Pointwise(1e-6, 1 / 250)  # FP32 throughout, one rounding to BF16 at the end
GDN_OUTPUT = Bound(4.1e-3, 5e-6, 5.5e-3)
GDN_STATE = Bound(2.7e-3, 1e-5, 3.9e-3)
# The CPU image computes in float32 from the same represented inputs: rounding of sums only.
NORM_F32 = Bound(1e-6, 1e-6, 1e-6)
ROPE_F32 = Bound(1e-6, 1e-6, 1e-6)
ATTENTION_F32 = Bound(2e-6, 1e-6, 2e-6)
GDN_F32 = Bound(2e-5, 1e-6, 2e-5)
MODEL_LOGPROBS = Bound(1e-3, 1e-3, 1e-3)  # whole model: K and V round to BF16 near their ties
