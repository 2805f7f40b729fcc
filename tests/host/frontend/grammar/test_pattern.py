"""Patterns as terminals: they match in full exactly what the pattern finds."""

import re

import pytest

from ginfer.frontend.grammar.pattern import full_match

TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "abc",
    "xaby",
    "a-b",
    "a/b",
    "1",
    "a1",
    "[",
    "^",
    "$",
    "a\nb",
    " ",
]


@pytest.mark.parametrize(
    "pattern",
    ["a", "^a", "a$", "^a$", "", "^$", "^a|b$", "(a|b)", "^(a|b)$", "[ab]+$", "[^ab]", "^[^a-c]*$",
     r"\d", r"^\d$", r"^[\d\w]+$", r"\D", r"\W", r"\s", r"a\/b", r"\^", r"\$", "[$^|()]", r"[\[]",
     "^a?b{1,2}$", "a.b", r"^(?:ab)*$", "^[a-]+$", "a|", "^(a(b|c)?)+$"],
)  # fmt: skip
def test_matches_in_full_what_is_found(pattern):
    full = re.compile(full_match(pattern), re.ASCII)
    found = re.compile(pattern, re.ASCII)
    for text in TEXTS:
        assert bool(full.fullmatch(text)) == bool(found.search(text)), text


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", r"\ba", r"(a)\1", "a^b", "(^a)", "(a$)|b", "(a", "a)",
     "[a", "a\\", "[]", "[^]", r"[\D]", "[a&&b]"],
)  # fmt: skip
def test_refuses_what_no_terminal_can_say(pattern):
    with pytest.raises(ValueError, match=r"pattern|class"):
        full_match(pattern)
