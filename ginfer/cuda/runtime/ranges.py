"""Numba's loops over ranges for front_end: little for LLVM to throw away.

Numba keeps a range, its iterator and what the iterator gave in stack slots that it fills with
zeros, and tests the sign of each step: more than a hundred instructions a loop, of which LLVM
leaves five. Here structures are values and a step is a positive constant; LLVM's choices depend on
the blocks, which are Numba's. Ranges of other steps are left to Numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite.ir import Constant, Undefined
from numba.cuda import types
from numba.cuda.lowering import CUDALower  # type: ignore[import-not-found]

_lower_expression = CUDALower.lower_expr


def lower_expression(self: Any, result: Any, expression: Any) -> Any:
    """In place of CUDALower.lower_expr."""
    own = OWN.get(expression.op)
    found = own(self, result, expression) if own else None
    return _lower_expression(self, result, expression) if found is None else found


def lower_range(self: Any, result: Any, call: Any) -> Any:
    """The value of a range(); None of another call."""
    if not isinstance(result, types.RangeType) or call.kws or call.vararg:
        return None
    wanted = self.fndesc.calltypes[call].args
    given = [self._cast_var(v, t) for v, t in zip(call.args, wanted, strict=True)]
    zero, one = (self.context.get_constant(result.dtype, n) for n in (0, 1))
    start, stop, step = (zero, *given, one) if len(given) == 1 else (*given, one)[:3]
    return _pack(self, result, start, stop, step)


def lower_iterator(self: Any, result: Any, expression: Any) -> Any:
    """The value of an iterator over a range: where its next number is, the range's stop and step,
    and where its count is."""
    if not isinstance(result, types.RangeIteratorType):
        return None
    build, zero = self.builder, self.context.get_constant(result.yield_type, 0)
    start, stop, step = _members(build, self.loadvar(expression.value.name), 3)
    if not isinstance(step, Constant) or step.constant <= 0:
        return None
    with build.goto_entry_block():
        number, count = build.alloca(start.type), build.alloca(start.type)
    build.store(start, number)
    difference = build.sub(stop, start)
    some = build.icmp_signed(">", difference, zero)
    with build.if_else(some) as (then, otherwise):
        with then:
            build.store(_quotient(build, difference, step), count)
        with otherwise:
            build.store(zero, count)
    return _pack(self, result, number, stop, step, count)


def _quotient(build: Any, number: Any, step: Any) -> Any:
    """Of positive numbers, rounded up."""
    if step.constant == 1:
        return number
    more = build.icmp_signed(">", build.srem(number, step), Constant(step.type, 0))
    return build.add(build.sdiv(number, step), build.zext(more, step.type))


def lower_next(self: Any, result: Any, expression: Any) -> Any:
    """A number of a range and whether there is one."""
    kind = self.typeof(expression.value.name)
    if not isinstance(kind, types.RangeIteratorType):
        return None
    zero, one = (self.context.get_constant(kind.yield_type, n) for n in (0, 1))
    build = self.builder
    number, _, step, left = _members(build, self.loadvar(expression.value.name), 4)
    count, before = build.load(left), build.basic_block
    valid = build.icmp_signed(">", count, zero)
    with build.if_then(valid):
        found = build.load(number)
        build.store(build.sub(count, one, flags=["nsw"]), left)
        build.store(build.add(found, step), number)
        within = build.basic_block
    value = build.phi(found.type)  # LLVM unrolls by what it sees here
    value.add_incoming(zero, before)
    value.add_incoming(found, within)
    return _pack(self, result, value, valid)


OWN = {"call": lower_range, "getiter": lower_iterator, "iternext": lower_next}


def _pack(self: Any, kind: Any, *members: Any) -> Any:
    """A structure of a type, as a value that knows its members."""
    whole = Constant(self.context.get_value_type(kind), Undefined)
    for i, member in enumerate(members):
        whole = self.builder.insert_value(whole, member, i)
    whole.members = members
    return whole


def _members(build: Any, whole: Any, count: int) -> Any:
    """Those of a structure, as they are known or by what reads them."""
    known = getattr(whole, "members", None)
    return known or [build.extract_value(whole, i) for i in range(count)]
