"""The text behind a kernel: every definition of the project that its builder reaches, by digest.

A definition is a statement of a module that binds a name: a function, a class, a constant. It
reaches what its text names, through imports too, and whatever its module does beside binding names.
Docstrings and imports for type checkers are left out, and so are `ginfer.cuda.runtime` and
`ginfer.cuda.plans`, for they choose and launch kernels and shape none (the compiler's own module
is added by name).
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HOST_ONLY = ("ginfer.cuda.runtime", "ginfer.cuda.plans", "ginfer.errors", "ginfer.env")
ALL = "*"  # in place of a name: all of a module
EFFECTS = ""  # what a module does beside binding names
Name = tuple[str, str]  # of a module, and of a definition in it


@cache
def sources_digest(module: str, name: str = ALL) -> str:
    """SHA-256 over the text that a definition of `module` reaches, or that all of them do."""
    digest = hashlib.sha256()
    for (owner, defined), text in sorted(reached(module, name).items()):
        digest.update(f"{owner}.{defined} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return digest.hexdigest()


def reached(module: str, name: str = ALL) -> dict[Name, str]:
    """The text of each definition that sources_digest() covers, those in ginfer and in the module's
    own top-level package."""
    tops = {"ginfer", module.partition(".")[0]}
    texts: dict[Name, str] = {}
    wanted = {(module, name)}
    while wanted:
        owner, defined = wanted.pop()
        host_only = (owner, defined) != (module, name) and any(
            f"{owner}.".startswith(f"{other}.") for other in HOST_ONLY
        )
        path = _file(owner)
        if host_only or path is None or owner.partition(".")[0] not in tops:
            continue
        source = _parse(owner, path.read_text())
        texts[owner, defined] = "\n".join(source.texts.get(defined, ()))
        wanted |= source.targets(defined) - texts.keys()
    return texts


@dataclass(frozen=True)
class _Module:
    """Of each definition the text of its statements and what that names; where imported names come
    from."""

    name: str
    texts: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    imports: dict[str, set[Name]] = field(default_factory=dict)

    def targets(self, defined: str) -> set[Name]:
        """What a definition reaches in one step."""
        known = self.texts.keys() | self.imports.keys()
        if defined not in known:  # made in a way that is not seen here
            names = set(known)
        else:
            names = self.names.get(defined, set()) & known
            names |= {EFFECTS} & known
        imported = [self.imports[name] for name in names | {defined} if name in self.imports]
        return {(self.name, name) for name in names & self.texts.keys()}.union(*imported)

    def add(self, bound: set[str], text: str, nodes: list[ast.AST]) -> None:
        """A statement that binds names: what ast.walk() gives of it."""
        node = nodes[0]
        inner = {child.id for child in nodes if isinstance(child, ast.Name)}
        if isinstance(node, ast.FunctionDef):  # a kernel may be called as its launcher
            inner -= {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        for child in nodes:
            if isinstance(child, ast.Import | ast.ImportFrom):
                self.add_import(child)
                inner |= {_bound_by(alias) for alias in child.names}
        for name in bound:
            self.texts.setdefault(name, []).append(text)
            self.names.setdefault(name, set()).update(inner)

    def add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Names that an import binds, of a module or in one."""
        for alias in node.names:
            target = (alias.name, ALL)
            if isinstance(node, ast.ImportFrom):
                inside = f"{node.module}.{alias.name}"
                target = (inside, ALL) if _file(inside) else (node.module or "", alias.name)
            self.imports.setdefault(_bound_by(alias), set()).add(target)


@cache
def _parse(name: str, text: str) -> _Module:
    """The definitions in the text of a module."""
    module, lines = _Module(name), text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.add_import(node)
        elif not _docstring(node):
            nodes = list(ast.walk(node))
            module.add(_bound(nodes), _without_docstrings(nodes, lines), nodes)
    return module


def _bound(nodes: list[ast.AST]) -> set[str]:
    """Names that a statement of a module binds, and EFFECTS when it may do more."""
    node = nodes[0]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    stored = {
        child.id
        for child in nodes
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }
    plain = isinstance(node, ast.Assign | ast.AnnAssign)
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if plain and all(isinstance(target, ast.Name | ast.Tuple) for target in targets):
        return stored
    defined = {child.name for child in nodes if isinstance(child, ast.FunctionDef | ast.ClassDef)}
    return stored | defined | {EFFECTS}


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _docstring(node: ast.AST) -> range:
    """Line numbers of a statement that is a string; none of any other."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return range(0)
    held = isinstance(node.value.value, str)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1) if held else range(0)


def _without_docstrings(nodes: list[Any], lines: list[str]) -> str:
    """Lines of a statement."""
    node = nodes[0]
    decorators = getattr(node, "decorator_list", ())
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    left_out = {i for child in nodes if type(child) is ast.Expr for i in _docstring(child)}
    numbers = range(first, (node.end_lineno or first) + 1)
    return "\n".join(lines[i - 1] for i in numbers if i not in left_out)


def _file(module: str) -> Path | None:
    """The file of a module; None for a name that is no module (a function that was imported)."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
