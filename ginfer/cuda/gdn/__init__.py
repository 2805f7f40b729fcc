"""Gated DeltaNet: convolution, recurrent step (decode family), chunks (prefill family)."""
