"""Calls of `copy` and `pickle`: the registries of functions that they look into, and what a pickle names."""

from __future__ import annotations

import copy
import copyreg
import pickle
import pickletools
import sys
from typing import TYPE_CHECKING, Any, cast

from spmd.program.reads._library import is_library
from spmd.program.reads._parts import WITH_ITEMS

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__copy__", "__deepcopy__")
_REGISTRIES: dict[int, list[tuple[str, dict[Any, Any]]]] = {
    id(fn): [("copyreg.dispatch_table", copyreg.dispatch_table), *([(f"copy.{name}", cast(Any, copy).__dict__[name])] if name else [])]
    for fn, name in ((copy.copy, "_copy_dispatch"), (copy.deepcopy, "_deepcopy_dispatch"), (pickle.dumps, ""), (pickle.dump, ""))
}


def note_copy(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Record what a function of `copy` or `pickle` reads beside its arguments; nothing for other functions."""
    for title, registry in _REGISTRIES.get(id(fn), ()):
        recording._title_of(registry, title)
        recording.read_content(registry)
    if id(fn) in _REGISTRIES and args:
        _read_class(recording, type(args[0]))
    if fn is pickle.loads and args and isinstance(args[0], (bytes, bytearray)):
        _read_names(recording, bytes(args[0]))


def _read_class(recording: Recording, cls: type) -> None:
    """Record the containers of a class whose methods say how its objects are copied: they may give one to the copy."""
    for base in cls.__mro__:
        own = {} if is_library(base.__module__) else vars(base)
        if any(name in own for name in _METHODS):
            for value in [value for value in own.values() if isinstance(value, WITH_ITEMS)]:
                recording.read_deep(recording.owned(base, value))


def _read_names(recording: Recording, pickled: bytes) -> None:
    """Record the functions and classes that a pickle names: they are looked up in their modules."""
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name == "GLOBAL":
                _read_name(recording, *str(argument).split(" ", 1))
            elif operation.name == "STACK_GLOBAL" and len(texts) >= 2:
                _read_name(recording, *texts[-2:])
            if isinstance(argument, str):
                texts.append(argument)
    except ValueError:  # not a pickle, which `loads` says itself
        return


def _read_name(recording: Recording, module_name: str, name: str) -> None:
    recording.import_module(module_name, 0, None, None)
    if (module := sys.modules.get(module_name)) is not None:
        recording.load_attr(module, name.partition(".")[0])


__all__ = ["note_copy"]
