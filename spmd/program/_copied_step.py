"""`copy` and `pickle` of a compiled function: the same result as for the function that was compiled.

A copy of a function is the function itself. A copy of a bound method is bound to the copy of its object. A pickle refers to a function
by its qualified name, so a function that its module does not have under that name is refused.
"""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

from spmd.base._errors import SpmdError, message
from spmd.program.find._objects import Compiled


class NotPickled(SpmdError, pickle.PicklingError):
    """A compiled function cannot be pickled, because another process could not find it by name."""


class CopiedStep(Compiled):
    """The `copy` and `pickle` methods of a compiled function."""

    _fn: Any
    _name: str
    _options: Any

    def __copy__(self) -> Any:
        return self._of(self._fn if isinstance(self._fn, types.MethodType) else copy.copy(self._fn))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._of(copy.deepcopy(self._fn, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = getattr(self, "__qualname__", "")
        if _named(self, name) is self:
            return name
        if isinstance(self._fn, types.FunctionType) and _named(self._fn, name) is not self._fn:
            what = f"the compiled function {self._name} cannot be pickled: module {self._fn.__module__} has it under no name of its own"
            raise NotPickled(message(what, fix="define it at the top of a module, or compile it again after loading"))
        return type(self), (self._fn, self._options)

    def _of(self, fn: Any) -> Any:
        """`self` if `fn` is its own function; else a new compiled function, with a program cache of its own."""
        is_same = fn is self._fn or (isinstance(fn, types.MethodType) and fn.__self__ is self._fn.__self__)
        return self if is_same else type(self)(fn, self._options)  # type: ignore[call-arg]


def _named(fn: Any, name: str) -> Any:
    """The object with the qualified name `name` in the module of `fn`, or None."""
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


__all__ = ["CopiedStep", "NotPickled"]
