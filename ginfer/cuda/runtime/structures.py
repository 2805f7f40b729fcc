"""Numba's structures for front_end: one that is given by value and only read stays a value.

Numba puts every structure into a stack slot, of which it fills two copies with zeros: for each
element that is read from a local array, and three times for each turn of a loop over a range.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.cuda import cgutils
from numba.cuda.np import arrayobj as arrays  # type: ignore[import-not-found]

Structure = cgutils._StructProxy
_make, _item, _value, _attribute = (
    Structure.__init__,
    Structure.__getitem__,
    Structure._getvalue,
    Structure.__getattr__,
)
_make_array = arrays.make_array


def held(structure: Any) -> Any:
    """The value that a structure was made of; None of one in memory."""
    return structure.__dict__.get("_held")


def make(self: Any, context: Any, builder: Any, value: Any = None, ref: Any = None) -> None:
    """In place of _StructProxy.__init__."""
    model = context.data_model_manager[self._fe_type]
    if value is None or ref is not None or value.type != self._get_be_type(model):
        _make(self, context, builder, value, ref)
        return
    self._context, self._builder, self._datamodel = context, builder, model
    self._be_type, self._held = value.type, value


def item(self: Any, index: int) -> Any:
    """In place of _StructProxy.__getitem__."""
    value = held(self)
    if value is None:
        return _item(self, index)
    return self._cast_member_to_value(index, self._builder.extract_value(value, index))


def whole(self: Any) -> Any:
    """In place of _StructProxy._getvalue."""
    value = held(self)
    return _value(self) if value is None else value


def attribute(self: Any, name: str) -> Any:
    """In place of _StructProxy.__getattr__."""
    if name in ("_value", "_outer_ref"):
        raise NotImplementedError(f"a {self._fe_type} that was given by value is written")
    return _attribute(self, name)


@cache
def make_array(array_type: Any) -> Any:
    """In place of make_array: the structure of an array type."""
    base = _make_array(array_type)

    class Array(base):  # type: ignore[misc, valid-type]
        """Its shape, which Numba reads from memory."""

        @property
        def shape(self) -> Any:
            """Value of the sizes."""
            return base.shape.fget(self) if held(self) is None else _attribute(self, "shape")

    return Array
