"""Limits on files, functions, parameters, nesting and docstrings; prints every breach and fails.

Kernel bodies (functions under a compiling decorator) may have 150 lines and any number of
parameters; so may tests, whose parameters are fixtures; launch plans and case tables may be long.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ginfer", "appliance", "scripts", "tests")
EXEMPT = ("ginfer/cuda/plans/", "tests/cases.py")
FILE_LINES, HOST_LINES, KERNEL_LINES, PARAMETERS, NESTING = 500, 60, 150, 6, 4
COMPILING = ("jit", "kernel", "intrinsic", "device", "emitted")
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: Function) -> bool:
    """Whether a decorator compiles the function to machine code."""
    names = (ast.unparse(d) for d in function.decorator_list)
    return any(word in name for name in names for word in COMPILING)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest nesting of blocks below `node`; `elif` does not nest, inner functions start anew."""
    deepest = depth
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, Function | ast.ClassDef):
                continue
            chained = isinstance(node, ast.If) and name == "orelse" and isinstance(child, ast.If)
            inner = depth + (isinstance(child, BLOCKS) and not chained)
            deepest = max(deepest, nesting(child, inner))
    return deepest


def own_lines(function: Function) -> int:
    """Lines of a function without its docstring and without functions defined inside it."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        lines -= (text.end_lineno or 0) - text.lineno + 1
    inner = [n for n in ast.walk(function) if isinstance(n, Function) and n is not function]
    return lines - sum((n.end_lineno or 0) - n.lineno + 1 for n in inner if is_kernel(n))


def check_function(function: Function, *, public: bool) -> Iterator[str]:
    """Yield the breaches of one function."""
    kernel = is_kernel(function)
    lines, limit = own_lines(function), KERNEL_LINES if kernel else HOST_LINES
    if lines > limit:
        yield f"{function.name} has {lines} lines, at most {limit}"
    if kernel or function.name.startswith("test_"):
        return
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    total = len([n for n in names if n not in ("self", "cls")])
    if total > PARAMETERS:
        yield f"{function.name} has {total} parameters, at most {PARAMETERS}"
    depth = nesting(function)
    if depth > NESTING:
        yield f"{function.name} nests {depth} deep, at most {NESTING}"
    if public and not function.name.startswith("_") and ast.get_docstring(function) is None:
        yield f"{function.name} is public and has no docstring"


def check_file(path: Path) -> Iterator[str]:
    """Yield the breaches of one file as 'path:line: text'."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    module = ast.parse(text)
    lines = text.count("\n")
    if lines > FILE_LINES and not name.startswith(EXEMPT):
        yield f"{name}:1: {lines} lines, at most {FILE_LINES}"
    in_tests = name.startswith("tests/")
    if text.strip() and not in_tests and ast.get_docstring(module) is None:
        yield f"{name}:1: no module docstring"
    nested = {
        id(n)
        for f in ast.walk(module)
        if isinstance(f, Function)
        for n in ast.walk(f)
        if n is not f
    }
    for node in ast.walk(module):
        if isinstance(node, Function):
            public = not in_tests and id(node) not in nested
            for breach in check_function(node, public=public):
                yield f"{name}:{node.lineno}: {breach}"
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node) is None:
            if in_tests or node.name.startswith("_"):
                continue
            yield f"{name}:{node.lineno}: class {node.name} has no docstring"


def main() -> int:
    """Check every file; return the exit status."""
    paths = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))
    breaches = [b for p in paths for b in check_file(p)]
    print("\n".join(breaches) if breaches else f"size: {len(paths)} files within their limits")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
