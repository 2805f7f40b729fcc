"""Numba's front end at twice its speed, for processes that compile many kernels: same PTX.

Numba resolves the type of every call anew in each of its passes, walks the whole function for each
variable that is assigned twice, and computes lifetimes of variables where nothing reads them. What
stands here in place of that gives the same results for what kernels are made of.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from numba.core import types
from numba.cuda.core import (  # type: ignore[import-not-found]
    analysis,
    base,
    compiler_machinery,
    inline_closurecall,
    ir,
    ir_utils,
    ssa,
    typed_passes,
    typeinfer,
    untyped_passes,
)
from numba.cuda.core.compiler import CompilerBase  # type: ignore[import-not-found]
from numba.cuda.core.errors import (  # type: ignore[import-not-found]
    ForceLiteralArg,
    TypingError,
)
from numba.cuda.cudadrv.nvvm import CompilationUnit
from numba.cuda.lowering import CUDALower  # type: ignore[import-not-found]
from numba.cuda.np import arrayobj as arrays  # type: ignore[import-not-found]
from numba.cuda.typing.context import (  # type: ignore[import-not-found]
    BaseContext as TypingContext,
)

from ginfer.cuda.runtime import lowering, ranges, structures
from ginfer.cuda.runtime.inliner import CLOSURES, inline_function

_run_ssa = ssa._run_ssa
_resolve_call = typeinfer.TypeInferer.resolve_call
_get_call_type = types.BaseFunction.get_call_type
_inline_closures = inline_closurecall.InlineClosureCallPass.run
_resolve_value_type = TypingContext.resolve_value_type
_refresh = base.BaseContext.refresh
_has_loc = base._has_loc
_compile_core = CompilerBase._compile_core


class _Names:
    """Names of the variables that a function's statements and blocks mention, while it goes to SSA
    form. What replaces a statement has a variable renamed that is done with."""

    blocks: ClassVar[dict[int, set[str]]] = {}
    statements: ClassVar[dict[int, tuple[Any, frozenset[str]]]] = {}  # by identity; keeps them

    @classmethod
    def of(cls, statement: Any) -> frozenset[str]:
        """Those of a statement."""
        known = cls.statements.get(id(statement))
        if known is None:
            known = statement, frozenset(v.name for v in statement.list_vars())
            cls.statements[id(statement)] = known
        return known[1]


def run_ssa(blocks: Any) -> Any:
    """In place of _run_ssa: knows where a variable is mentioned."""
    _Names.statements = {}
    _Names.blocks = {
        label: set[str]().union(*map(_Names.of, block.body)) for label, block in blocks.items()
    }
    return _run_ssa(blocks)


def run_block_rewrite(blocks: Any, states: Any, handler: Any) -> Any:
    """In place of _run_block_rewrite: visits the statements that mention the variable."""
    name, found = states["varname"], dict(blocks)
    for label, block in blocks.items():
        if name not in _Names.blocks[label]:
            continue
        states["label"], states["block"] = label, block
        body = []
        for statement in block.body:
            if name in _Names.of(statement):
                visit = handler.on_other
                if isinstance(statement, ir.assign_types):
                    visit = handler.on_assign
                body.append(visit(states, statement))
            else:
                body.append(statement)
        found[label] = ir.Block(scope=block.scope, loc=block.loc)
        found[label].body = body
    return found


class _Kernel:
    """What has been found for the function that is being compiled; None where there is none."""

    found: ClassVar[dict[Any, Any] | None] = None

    @classmethod
    def once(cls, key: Any, find: Any) -> Any:
        """What find() returned for an equal key, or returns now."""
        if cls.found is None:
            return find()
        known = cls.found.get(key)
        if known is None:
            known = cls.found[key] = find()
        return known


def compile_core(self: Any) -> Any:
    """In place of CompilerBase._compile_core: one may be compiled amid another."""
    outer, _Kernel.found = _Kernel.found, {}
    try:
        return _compile_core(self)
    finally:
        _Kernel.found = outer


def hash_of_type(self: Any) -> int:
    """In place of Type.__hash__: the key of a type does not change."""
    known: int | None = self.__dict__.get("_hash")
    if known is None:
        known = self._hash = hash(self.key)
    return known


def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """In place of BaseFunction.get_call_type: resolves equal calls of a kernel once."""
    key = self, tuple(args), tuple(kws.items())
    return _Kernel.once(key, lambda: _get_call_type(self, context, args, kws))


def resolve_call(self: Any, fnty: Any, pos_args: Any, kw_args: Any) -> Any:
    """In place of TypeInferer.resolve_call, as get_call_type."""
    key = fnty, tuple(pos_args), tuple(kw_args.items())
    return _Kernel.once(key, lambda: _resolve_call(self, fnty, pos_args, kw_args))


def resolve_value_type(self: Any, value: Any) -> Any:
    """In place of BaseContext.resolve_value_type: the type of an object once per kernel."""
    key = "value", id(value)
    return _Kernel.once(key, lambda: (_resolve_value_type(self, value), value))[0]


def refresh(self: Any) -> None:
    """In place of BaseContext.refresh: what has been declared is looked through once per kernel."""
    _Kernel.once(("refresh", id(self)), lambda: (_refresh(self),))


def propagate(self: Any, inferer: Any) -> list[Exception]:
    """In place of ConstraintNetwork.propagate: no warnings are gathered, for there are none."""
    faults: list[Exception] = []
    for constraint in self.constraints:
        try:
            constraint(inferer)
        except ForceLiteralArg as error:
            faults.append(error)
        except TypingError as error:
            fault = TypingError(str(error), loc=constraint.loc, highlighting=False)
            fault.__cause__ = error
            faults.append(fault)
    return faults


def compute_live_map(cfg: Any, blocks: Any, uses: Any, defs: Any) -> dict[int, set[str]]:
    """In place of compute_live_map: sets of variables are bits of integers while they change."""
    names = sorted(set[str]().union(*uses.values(), *defs.values()))
    bit = {name: 1 << i for i, name in enumerate(names)}
    used, defined = ({k: sum(map(bit.__getitem__, v)) for k, v in m.items()} for m in (uses, defs))
    successors = {k: [to for to, _ in cfg.successors(k)] for k in blocks}
    reaching = {k: used[k] | defined[k] for k in blocks}
    live, moved = dict(used), True
    while moved:
        moved = False
        for k in blocks:
            for to in successors[k]:
                more = reaching[to] | reaching[k]
                moved, reaching[to] = moved or more != reaching[to], more
    moved = True
    while moved:
        moved = False
        for k in reversed(blocks):
            more = live[k]
            for to in successors[k]:
                more |= live[to] & reaching[k] & ~defined[k]
            moved, live[k] = moved or more != live[k], more
    return {k: _members(names, live[k]) for k in blocks}


def _members(names: list[str], bits: int) -> set[str]:
    found = set()
    while bits:
        last = bits.bit_length() - 1
        found.add(names[last])
        bits ^= 1 << last
    return found


_with_loc: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def has_loc(function: Any) -> bool:
    """In place of _has_loc: reads the signature of an implementation once."""
    known = _with_loc.get(function)
    if known is None:
        known = _with_loc[function] = _has_loc(function)
    return known


def inline_closures(self: Any) -> None:
    """In place of InlineClosureCallPass.run: nothing where there is no closure and no list."""
    for block in self.func_ir.blocks.values():
        for expression in block.find_exprs():
            if expression.op in CLOSURES:
                _inline_closures(self)
                return


def nothing(*_: Any, **__: Any) -> bool:
    """In place of passes that look for what no kernel holds (literally(), literal_unroll(), lists
    of constants, items by name), and of checks of what Numba itself has just done."""
    return False


REPLACED = (
    (ssa, "_run_ssa", run_ssa),
    (ssa, "_run_block_rewrite", run_block_rewrite),
    (CompilerBase, "_compile_core", compile_core),
    (types.Type, "__hash__", hash_of_type),
    (typeinfer.TypeInferer, "resolve_call", resolve_call),
    (typeinfer.ConstraintNetwork, "propagate", propagate),
    (types.BaseFunction, "get_call_type", get_call_type),
    (TypingContext, "resolve_value_type", resolve_value_type),
    (typeinfer, "new_error_context", lowering.ErrorContext),
    (base.BaseContext, "refresh", refresh),
    (base, "_has_loc", has_loc),
    (analysis, "compute_live_map", compute_live_map),
    (analysis, "compute_use_defs", lowering.compute_use_defs),
    (inline_closurecall.InlineClosureCallPass, "run", inline_closures),
    (inline_closurecall.InlineWorker, "inline_function", inline_function),
    (typed_passes.NopythonRewrites, "run_pass", nothing),
    (untyped_passes.FindLiterallyCalls, "run_pass", nothing),
    (untyped_passes.LiteralUnroll, "run_pass", nothing),
    (untyped_passes.LiteralPropagationSubPipelinePass, "run_pass", nothing),
    (ir_utils, "enforce_no_dels", nothing),
    (compiler_machinery, "enforce_no_dels", nothing),
    (CompilationUnit, "verify", nothing),
    (ir.Stmt, "list_vars", lowering.variables_of_statement),
    (ir.Expr, "list_vars", lowering.variables_of_expression),
    (CUDALower, "_find_singly_assigned_variable", lowering.find_singly_assigned),
    (CUDALower, "lower_block", lowering.lower_block),
    (CUDALower, "lower_expr", ranges.lower_expression),
    (CUDALower, "storevar", lowering.store_variable),
    (CUDALower, "delvar", lowering.delete_variable),
    (CUDALower, "alloca_lltype", lowering.allocate_variable),
    (structures.Structure, "__init__", structures.make),
    (structures.Structure, "__getitem__", structures.item),
    (structures.Structure, "_getvalue", structures.whole),
    (structures.Structure, "__getattr__", structures.attribute),
    (arrays, "make_array", structures.make_array),
)


def speed_up() -> None:
    """Put these in place, for this process."""
    for owner, name, ours in REPLACED:
        setattr(owner, name, ours)
