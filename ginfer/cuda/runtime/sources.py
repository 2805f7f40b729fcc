"""The files behind a kernel: its module and everything of the project that it imports, by digest.

`ginfer.cuda.runtime` and `ginfer.cuda.plans` are left out, for they choose and launch kernels and
shape none (the compiler's own module is added by name), and so are imports for type checkers.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_ONLY = ("ginfer.cuda.runtime", "ginfer.cuda.plans", "ginfer.errors", "ginfer.env")


@cache
def sources_digest(module: str) -> str:
    """SHA-256 over the files of `module`, in order of their module names."""
    digest = hashlib.sha256()
    for name, path in sorted(source_files(module).items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def source_files(module: str) -> dict[str, Path]:
    """Module name to file: `module` and, transitively, what it imports of ginfer and of its own
    top-level package."""
    tops = {"ginfer", module.partition(".")[0]}
    found: dict[str, Path] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        path = None if name in found else _file(name)
        if path is None:
            continue
        found[name] = path
        for imported in _imports(ast.parse(path.read_bytes())):
            host_only = any(f"{imported}.".startswith(f"{name}.") for name in HOST_ONLY)
            if imported.partition(".")[0] in tops and not host_only:
                wanted.append(imported)
    return found


def _file(module: str) -> Path | None:
    """The file of a module; None for a name that is no module (a function that was imported)."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _imports(node: ast.AST) -> Iterator[str]:
    """Names that may be modules, of every import that runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child)
