"""`sorted`, `min`, `max`, `filter` and `map` with a function of the user's, an `attrgetter` or the like: of each item they read
only what that function returns.

for callback in sorted(callbacks, key=lambda c: c.priority): ...   # other attributes of the callbacks are not guarded
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.program.reads._attribute_readers import is_reader, reader
from spmd.program.reads._library import is_recorded
from spmd.program.reads._places import PLAIN
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_BY_KEY = (builtins.sorted, builtins.min, builtins.max)
_OF_EACH = (builtins.filter, builtins.map)


def with_key_function(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use instead of one of these functions, with its reads recorded; None for other calls."""
    if len(args) < 2 or not (any(fn is f for f in _BY_KEY) or any(fn is f for f in _OF_EACH)):
        return None
    is_of_each = any(fn is f for f in _OF_EACH)
    key: Any = args[0] if is_of_each else next(filter(_is_recorded, args[1:]), None)
    if not _is_recorded(key) or any(type(arg) is Varying for arg in args):
        return None
    given: Any = reader(recording, key) or key
    recording.read_function(key)
    for items in args[1:] if is_of_each else args[:1]:
        recording.iterate(items)

    def seen(*item: Any) -> Any:
        found = given(*item)
        if fn is not builtins.map and not isinstance(found, (*PLAIN, Varying)):
            recording.read_deep(found)
        return found

    if is_of_each:
        return lambda _, *items: fn(seen, *items)
    return lambda *items, **options: fn(*items, **{**options, "key": seen})


def _is_recorded(value: Any) -> bool:
    if type(value) is types.FunctionType:
        return is_recorded(value.__module__)
    return is_reader(value)


__all__ = ["with_key_function"]
