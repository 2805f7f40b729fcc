"""Regular expressions of schemas, as terminals of a grammar take them.

A schema's pattern is searched for, its classes are ASCII (ECMA 262); a terminal matches in full.
"""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}
_TOKEN = re.compile(
    r"\\. | \[(?:\\.|[^\]\\])*\] | \(\?<?[=!] | [()|^$] | [^\\\[()|^$]+", re.DOTALL | re.VERBOSE
)
_IN_CLASS = re.compile(r"\\.|\[|&&|--|~~", re.DOTALL)
_ANYTHING = "(?s:.*)"


def full_match(pattern: str) -> str:
    """The expression that matches the texts in which `pattern` is found.

    Raises ValueError for what regular languages lack (look-around, references, word borders) and
    for anchors that are not at the start or end of an alternative.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for token in _tokens(pattern):
        depth += token.startswith("(") - (token == ")")
        if depth < 0:
            break
        if token == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(_translated(token))
    if depth:
        raise ValueError("the pattern has unbalanced parentheses")
    return "|".join(map(_anchored, alternatives))


def _tokens(pattern: str) -> list[str]:
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != pattern:
        raise ValueError("the pattern ends in a backslash or an open class")
    return tokens


def _translated(token: str) -> str:
    if token.startswith("(?") and token[-1] in "=!":
        raise ValueError("look-around in a pattern cannot be enforced")
    if token.startswith("["):
        if token in ("[]", "[^]"):
            raise ValueError(f"the class {token} in a pattern cannot be enforced")
        return _IN_CLASS.sub(_class_member, "\\" + token)[1:]
    return _escape(token) if token.startswith("\\") else token


def _class_member(found: re.Match[str]) -> str:
    token = found[0]
    if found.start() == 0:
        return token  # the bracket that opens the class
    if token == "[":
        return r"\["
    if not token.startswith("\\") or token in (r"\D", r"\W"):
        raise ValueError(f"{token} inside a class cannot be enforced; write the class out")
    return _CLASSES.get(token[1], token)


def _escape(token: str) -> str:
    name = token[1]
    if name in "bB":
        raise ValueError("word borders in a pattern cannot be enforced")
    if name in "123456789k":
        raise ValueError("references in a pattern cannot be enforced")
    members = _CLASSES.get(name.lower())
    return token if members is None else f"[{'^' * name.isupper()}{members}]"


def _anchored(tokens: list[str]) -> str:
    start = tokens[:1] == ["^"]
    end = tokens[start:][-1:] == ["$"]
    inner = tokens[start : len(tokens) - end]
    if "^" in inner or "$" in inner:
        raise ValueError("an anchor inside a pattern cannot be enforced")
    return ("" if start else _ANYTHING) + f"(?:{''.join(inner)})" + ("" if end else _ANYTHING)
