"""Numba's lowering for front_end: variables without reference counts and sizes for debuggers.

Numba asks LLVM for the size of each variable, by the text of a module, and walks a block anew for
each that is assigned in it. Values of kernels have no reference counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from llvmlite.ir import Constant
from numba.cuda.core import analysis, ir  # type: ignore[import-not-found]
from numba.cuda.core.errors import NumbaError  # type: ignore[import-not-found]


def collect_variables(value: Any, found: list[Any]) -> None:
    """Add the variables that a part of a statement mentions to `found`, in order."""
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is ir.Expr:
        for inner in value._kws.values():
            collect_variables(inner, found)
    elif kind is list or kind is tuple:
        for inner in value:
            collect_variables(inner, found)
    elif kind is dict:
        for inner in value.values():
            collect_variables(inner, found)
    elif isinstance(value, ir.Inst):
        found.extend(value.list_vars())


def variables_of_statement(self: Any) -> list[Any]:
    """In place of Stmt.list_vars."""
    found: list[Any] = []
    collect_variables(list(self.__dict__.values()), found)
    return found


def variables_of_expression(self: Any) -> list[Any]:
    """In place of Expr.list_vars."""
    found: list[Any] = []
    collect_variables(self._kws, found)
    return found


def compute_use_defs(blocks: Any) -> Any:
    """In place of compute_use_defs: what blocks define, and what they use that others have."""
    uses: dict[int, set[str]] = {}
    definitions: dict[int, set[str]] = {}
    for label, block in blocks.items():
        used, defined = uses.setdefault(label, set()), definitions.setdefault(label, set())
        for statement in block.body:
            found: list[Any] = []
            if type(statement) is ir.Assign:
                collect_variables(statement.value, found)
                names, target = {variable.name for variable in found}, statement.target.name
                if target not in names:
                    defined.add(target)
            else:
                collect_variables(list(statement.__dict__.values()), found)
                names = {variable.name for variable in found}
            used |= names - defined
    return analysis._use_defs_result(usemap=uses, defmap=definitions)


def find_singly_assigned(self: Any) -> None:
    """In place of Lower._find_singly_assigned_variable: one walk for all variables, and what was
    found where the ends of lives were written into the blocks. Those at the start of a block use
    what other blocks define."""
    lives = self.func_ir.variable_lifetime
    found, ended = lives.usedefs, lives.deadmaps.escaping
    elsewhere = set[str]().union(*found.usemap.values(), *ended.values())
    assigned = Counter(
        statement.target.name
        for block in self.func_ir.blocks.values()
        for statement in block.body
        if type(statement) is ir.Assign
    )
    defined = set[str]().union(*found.defmap.values())
    self._singly_assigned_vars = {n for n in defined - elsewhere if assigned[n] == 1}
    self._blk_local_varmap = {}


class ErrorContext:
    """In place of new_error_context: says where an error of ours arose, and costs nothing else."""

    def __init__(self, text: str, *args: Any, **kwargs: Any) -> None:
        self.parts = text, args, kwargs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, NumbaError):
            text, args, kwargs = self.parts
            error.add_context(text.format(*args, **kwargs))


def lower_block(self: Any, block: Any) -> None:
    """In place of Lower.lower_block: without notes for a debugger and their texts."""
    self.pre_block(block)
    for statement in block.body:
        self.loc, kind = statement.loc, type(statement)
        with ErrorContext('lowering "{0}" at {1}', statement, statement.loc):
            if kind is ir.Assign:
                name, value = statement.target.name, statement.value
                lowered = self.lower_assign(self.typeof(name), statement)
                index = value.index + 1 if type(value) is ir.Arg else None
                self.storevar(lowered, name, argidx=index)
            elif kind is ir.Del:
                self.delvar(statement.value)
            else:
                self.lower_inst(statement)
    self.post_block(block)


def delete_variable(self: Any, name: str) -> None:
    """In place of CUDALower.delvar."""
    if name in self._blk_local_varmap:
        return
    self._singly_assigned_vars.discard(name)
    self._alloca_var(name, self.typeof(name))
    pointer = self.getvar(name)
    self.builder.load(pointer)  # LLVM's choices depend on it, and on the zeros
    self.builder.store(Constant(pointer.type.pointee, None), pointer)


def store_variable(self: Any, value: Any, name: str, argidx: Any = None) -> None:
    """In place of CUDALower.storevar."""
    self._alloca_var(name, self.typeof(name))
    if name in self._singly_assigned_vars:
        self._blk_local_varmap[name] = value
    else:
        self.builder.store(value, self.getvar(name))


def allocate_variable(self: Any, name: str, lltype: Any, datamodel: Any = None) -> Any:
    """In place of CUDALower.alloca_lltype: nothing is read before it is stored."""
    with self.builder.goto_entry_block():
        return self.builder.alloca(lltype, name=name)
