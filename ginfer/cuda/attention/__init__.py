"""Gated attention over pages: append, decode and prefill kernels, merge of partials."""
