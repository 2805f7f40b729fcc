"""Gated DeltaNet: causal convolution, the step of decode, the chunks of prefill, gated norm."""
