"""The line that Claude Code puts first into its system prompt: different for every request."""

from __future__ import annotations

import re

NAME = "x-anthropic-billing-header"
# `x-anthropic-billing-header: cc_version=2.1.197.7d5; cc_entrypoint=sdk-cli; cch=fa690;`
LINE = re.compile(rf"\A{NAME}:(?: [a-z_]{{1,32}}=[^;\s]{{0,64}};){{1,8}}[ \t]*(?:\n|\Z)")


def without_header(texts: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The system prompt's texts without that line, and whether it was there. Only the very first
    line counts; a text that consisted of it goes too.

    It tells the provider who is billed, and nothing to the model; with it, no prefix would ever be
    found again."""
    if not texts or not (match := LINE.match(texts[0])):
        return texts, False
    rest = texts[0][match.end() :]
    return (rest, *texts[1:]) if rest else texts[1:], True
