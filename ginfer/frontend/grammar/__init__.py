"""Grammars of constrained content, as text for `Request.grammar`: JSON by a schema, tool calls."""

from ginfer.frontend.grammar.calls import ToolChoice, tool_grammar
from ginfer.frontend.grammar.content import ANY_OBJECT, json_grammar

__all__ = ["ANY_OBJECT", "ToolChoice", "json_grammar", "tool_grammar"]
