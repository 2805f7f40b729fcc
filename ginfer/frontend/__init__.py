"""Text in, token ids out, and back: tokenizers, chat templates, channels and tool calls."""

from ginfer.frontend.registry import open_frontend

__all__ = ["open_frontend"]
