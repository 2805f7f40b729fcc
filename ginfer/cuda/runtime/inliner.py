"""Numba's inliner for front_end: a device function is translated once, then copied into callers.

Numba translates a device function from its bytecode at every call of it, in every kernel, with all
that it calls in its place. Here its code is translated once, whatever constants it stands over;
what is left of it over its constants is kept too, without what it calls, for all functions of the
same code over the same constants; and a call copies that with its variables renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from numba.core import types
from numba.cuda.core import (  # type: ignore[import-not-found]
    analysis,
    bytecode,
    inline_closurecall,
    interpreter,
    ir,
    ir_utils,
    postproc,
    rewrites,
)

MAX_FUNCTIONS = 1000
PLAIN = int, bool, str, type(None)
SHARED = ir.Const, ir.Global, ir.FreeVar  # nothing changes them once they are made
COPIED = ir.SetItem, ir.StaticSetItem
CLOSURES = "make_function", "build_list"  # Numba's work

_inline_function = inline_closurecall.InlineWorker.inline_function


@dataclass(frozen=True)
class Inlinable:
    """What a call of a device function is replaced with; nothing here leads to the function."""

    parameters: int
    variables: dict[str, Any]  # name: what stands before and behind a number in a copy's; location
    blocks: dict[int, Any]  # by label, in topological order

    known: ClassVar[WeakKeyDictionary[Any, Inlinable | None]] = WeakKeyDictionary()
    alike: ClassVar[
        dict[Any, tuple[Any, Inlinable | None]]
    ] = {}  # with a function, for what it has

    @classmethod
    def of(cls, worker: Any, function: Any) -> Inlinable | None:
        """That of a function, None when it holds what is not copied here."""
        if function not in cls.known:
            key = meaning(function)
            if key not in cls.alike:
                _keep(cls.alike, key, (function, cls.translate(worker, function)))
            cls.known[function] = cls.alike[key][1]
        return cls.known[function]

    @classmethod
    def translate(cls, worker: Any, function: Any) -> Inlinable | None:
        """That of a function that is not known."""
        found = _own(function)
        worker.validator(found)
        blocks = inline_closurecall.simplify_CFG(found.blocks)
        for block in blocks.values():
            _return_plainly(block)
        statements = [statement for block in blocks.values() for statement in block.body]
        if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in _parameters(found)):
            return None
        if _assigns_free(found, function):
            return None
        if not all(map(_is_known, statements)):
            return None
        (scope,) = {id(block.scope): block.scope for block in blocks.values()}.values()
        names = {v.name: v.loc for v in scope.localvars._con.values()}
        names |= {v.name: v.loc for s in statements for v in s.list_vars()}  # star arguments
        return cls(
            len(_parameters(found)),
            {n: (*_renamed(found.func_id.func_qualname, n), loc) for n, loc in names.items()},
            {label: blocks[label] for label in inline_closurecall.find_topo_order(blocks)},
        )


def _renamed(function: str, name: str) -> list[str]:
    """The two parts of a copied variable's name, as Numba makes them, around a number."""
    rename = inline_closurecall._created_inlined_var_name
    parts: list[str] = rename(f"{function}$\0", name).split("\0")
    return parts


def meaning(function: Any) -> Any:
    """What functions have in common that are translated alike, as long as one of them lives."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = map(_meaning_of, (*cells, *(function.__defaults__ or ())))
    return id(function.__code__), id(function.__globals__), tuple(held)


def _meaning_of(value: Any) -> Any:
    if type(value) in PLAIN:
        return type(value), value
    inline = getattr(value, "targetoptions", {}).get("inline")
    return ("inline", meaning(value.py_func)) if inline == "always" else id(value)


def _parameters(function_ir: Any) -> list[Any]:
    return list(function_ir.func_id.pysig.parameters.values())


def _assigns_free(function_ir: Any, function: Any) -> bool:
    """Whether a variable has the name of a free one: those are not renamed."""
    (scope, *_) = [block.scope for block in function_ir.blocks.values()]
    return not set(function.__code__.co_freevars).isdisjoint(scope.localvars._con)


def _is_known(statement: Any) -> bool:
    kind = type(statement)
    if kind is ir.Assign:
        value = statement.value
        plain = type(value) in (ir.Var, ir.Arg, *SHARED)
        return plain or (type(value) is ir.Expr and value.op not in CLOSURES)
    return kind in (ir.Jump, ir.Branch, ir.Return, *COPIED)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Put a value into a dictionary that has at most MAX_FUNCTIONS."""
    kept[key] = value
    if len(kept) > MAX_FUNCTIONS:
        del kept[next(iter(kept))]


_of_code: dict[Any, tuple[Any, Any]] = {}  # by code and globals: a function that has them, its IR


def _own(function: Any) -> Any:
    """What Numba's passes make of a function before it is copied. Calls in it are replaced in the
    copy, in one kernel, not in every function on the way there."""
    key = id(function.__code__), id(function.__globals__)
    if key not in _of_code:
        identity = bytecode.FunctionIdentity.from_function(function)
        general = interpreter.Interpreter(identity).interpret(bytecode.ByteCode(identity))
        postproc.PostProcessor(general).run()
        _keep(_of_code, key, (function, general))
    found = _over(_of_code[key][1], function)
    arguments = found.arg_count * (types.pyobject,)
    analysis.rewrite_semantic_constants(found, arguments)
    analysis.dead_branch_prune(found, arguments)
    state = SimpleNamespace(func_ir=found, typemap=None, calltypes=None)
    rewrites.rewrite_registry.apply("before-inference", state)
    return found


def _over(general: Any, function: Any) -> Any:
    """The IR of a function's code over what the function holds. Expressions are not copied: passes
    put others in their place."""
    cells = function.__closure__ or ()
    held = {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, cells, strict=True)}
    found, (old, *_) = general.copy(), [block.scope for block in general.blocks.values()]
    scope = ir.Scope(old.parent, old.loc)
    scope.localvars._con |= old.localvars._con
    for block in found.blocks.values():
        block.scope, block.body = scope, [_statement_over(s, held) for s in block.body]
    found._definitions = ir_utils.build_definitions(found.blocks)
    return found


def _statement_over(old: Any, held: dict[str, Any]) -> Any:
    new = object.__new__(type(old))
    new.__dict__ = dict(old.__dict__)
    value = new.__dict__.get("value")
    if type(value) is ir.FreeVar:
        new.value = ir.FreeVar(value.index, value.name, held[value.name], value.loc)
    return new


def _return_plainly(block: Any) -> None:
    """Take the cast off the value that a block returns."""
    last = block.body[-1]
    if type(last) is not ir.Return:
        return
    for statement in block.body:
        value: Any = getattr(statement, "value", None)
        cast = type(value) is ir.Expr and value.op == "cast"
        if cast and statement.target.name == last.value.name:
            statement.value = value.value


def inline_function(
    self: Any, caller: Any, block: Any, i: int, function: Any, arg_typs: Any = None
) -> Any:
    """In place of InlineWorker.inline_function, for plain calls."""
    call = block.body[i].value
    found = Inlinable.of(self, function) if arg_typs is None else None
    plain = call.op == "call" and not (call.kws or call.vararg)
    if found is None or not plain or len(call.args) != found.parameters:
        return _inline_function(self, caller, block, i, function, arg_typs)
    return _insert(found, caller, block, i)


def _insert(found: Inlinable, caller: Any, block: Any, i: int) -> Any:
    """Put a function in place of statement i of a block of its caller."""
    labels, scope, instruction = ir_utils._the_max_label, block.scope, block.body[i]
    offset = max(labels.next(), max(caller.blocks)) + 1
    labels.update(max(found.blocks) + offset)
    call = next(bytecode.FunctionIdentity._unique_ids)  # makes the names of this copy new
    variables = {
        name: scope.define(f"{first}{call}{last}", loc)
        for name, (first, last, loc) in found.variables.items()
    }
    rest = ir.Block(scope, block.loc)
    rest.body, block.body = block.body[i + 1 :], block.body[:i]
    block.body.append(ir.Jump(min(found.blocks) + offset, instruction.loc))
    after = ir_utils.next_label()
    caller.blocks[after] = rest
    definitions = caller._definitions
    old = definitions.get(instruction.target.name, [])
    definitions[instruction.target.name] = [v for v in old if v is not instruction.value]
    copy = _Copy(variables, instruction.value.args, instruction.target, offset, after)
    inserted = {label + offset: copy.block(b, scope) for label, b in found.blocks.items()}
    for new in inserted.values():
        for statement in new.body:
            if type(statement) is ir.Assign:
                definitions[statement.target.name].append(statement.value)
    caller.blocks.update(inserted)
    return None, inserted, variables, [(after, rest), *inserted.items()]


@dataclass(frozen=True)
class _Copy:
    """What becomes of a function's names at a call."""

    variables: dict[str, Any]
    arguments: Any
    target: Any
    offset: int
    after: int  # label of what follows the call

    def block(self, old: Any, scope: Any) -> Any:
        """Of a block."""
        new = ir.Block(scope, old.loc)
        for statement in old.body:
            new.body.extend(self.statements(statement))
        return new

    def statements(self, old: Any) -> Any:
        """Of a statement."""
        kind = type(old)
        if kind is ir.Assign:
            return (ir.Assign(self.value(old.value), self.value(old.target), old.loc),)
        if kind is ir.Return:
            leave = ir.Jump(self.after, old.loc)
            return ir.Assign(self.value(old.value), self.target, old.loc), leave
        if kind is ir.Jump:
            return (ir.Jump(old.target + self.offset, old.loc),)
        if kind is ir.Branch:
            ways = old.truebr + self.offset, old.falsebr + self.offset
            return (ir.Branch(self.value(old.cond), *ways, old.loc),)
        new = object.__new__(kind)
        new.__dict__ = {name: self.value(value) for name, value in old.__dict__.items()}
        return (new,)

    def value(self, old: Any) -> Any:
        """Of what statements are made of."""
        kind = type(old)
        if kind is ir.Var:
            return self.variables[old.name]
        if kind is ir.Expr:
            names = {name: self.value(value) for name, value in old._kws.items()}
            return ir.Expr(old.op, old.loc, **names)
        if kind is ir.Arg:
            return self.arguments[old.index]
        if kind is tuple or kind is list:
            return kind(map(self.value, old))
        return old
