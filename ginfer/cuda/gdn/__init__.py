"""Gated DeltaNet: causal convolution, and the recurrent step that both families use as yet."""
