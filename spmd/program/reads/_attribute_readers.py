"""`operator.attrgetter` and `getattr` as values: called, as a key, or given to a function that calls them. The attributes are recorded.

sorted(layers, key=operator.attrgetter("depth"))
functools.reduce(getattr, "encoder.norm".split("."), model)
"""

from __future__ import annotations

import bisect
import builtins
import functools
import heapq
import itertools
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

# functions that call one of their arguments, and keep it no longer than the trace
_CALL_IT = frozenset(
    map(
        id,
        (
            *(functools.reduce, itertools.starmap, itertools.groupby, itertools.takewhile, itertools.dropwhile, itertools.filterfalse),
            *(heapq.nlargest, heapq.nsmallest, heapq.merge, bisect.bisect, bisect.bisect_left, bisect.insort, bisect.insort_left),
        ),
    )
)


def reader(recording: Recording, fn: Any) -> Callable[..., Any] | None:
    """A function that records the attributes that `fn` reads, and reads them; None for other functions."""
    if fn is builtins.getattr:

        def read(owner: Any, name: str, *default: Any) -> Any:
            recording.load_attr(owner, name)
            return getattr(owner, name, *default)

        return read
    if type(fn) is not operator.attrgetter:
        return None
    paths = [path.split(".") for path in fn.__reduce__()[1]]
    step: Any = reader(recording, builtins.getattr)

    def get(owner: Any) -> Any:
        found = tuple(functools.reduce(step, path, owner) for path in paths)
        return found[0] if len(paths) == 1 else found

    return get


def with_readers(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use where `fn` reads attributes, or calls an argument that does; None for other calls."""
    if fn is not builtins.getattr and (own := reader(recording, fn)) is not None:
        return own
    if not (id(fn) in _CALL_IT or _is_sort(fn)) or all(reader(recording, arg) is None for arg in args):
        return None

    def given(arg: Any) -> Any:
        return reader(recording, arg) or arg

    chosen: Any = recording.call(fn, *map(given, args))
    return lambda *items, **options: chosen(*map(given, items), **{name: given(option) for name, option in options.items()})


def _is_sort(fn: Any) -> bool:
    return type(fn) is types.BuiltinMethodType and isinstance(fn.__self__, list) and fn.__name__ == "sort"


__all__ = ["reader", "with_readers"]
