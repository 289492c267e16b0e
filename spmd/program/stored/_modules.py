"""The modules that a process has loaded, compared with those of another process by the size and the time of their files.

A module that only one of two processes has loaded may have changed functions of others, so no trace is used then. An exception are modules
that were first loaded during a trace: a process that uses the trace does not load them.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Collection
from typing import Any, NamedTuple

_ON_DEMAND = frozenset(("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "spmd", "mesh"))  # load modules of theirs when first used
_of_traces: set[str] = set()  # names of the modules that were first loaded during a trace


class Modules(NamedTuple):
    """Loaded modules.

    Attributes:
        files: name -> (file, size, time of its last change), without the modules that Python and jax load on demand.
        of_traces: the names of those that were first loaded during a trace.
    """

    files: dict[str, tuple[Any, ...]]
    of_traces: frozenset[str]

    @staticmethod
    def loaded() -> Modules:
        """The modules of this process."""
        names = [name for name in list(sys.modules) if not _is_on_demand(name)]
        return Modules({name: _seen(_file_of(sys.modules[name])) for name in names}, frozenset(_of_traces))

    def differing(self) -> str | None:
        """The name of a module that this process does not have like these; None if there is none."""
        now = Modules.loaded().files
        for name, seen in now.items():
            if self.files.get(name) != seen:
                return name
        missing = [name for name in self.files if name not in now]
        return next((name for name in missing if name not in self.of_traces or _seen(self.files[name][0]) != self.files[name]), None)


def note_trace(before: Collection[str]) -> None:
    """After a trace: note the modules that it has loaded. `before`: the names of those that were loaded before it."""
    _of_traces.update(sys.modules.keys() - before)


def _is_on_demand(name: str) -> bool:
    root = name.partition(".")[0]
    return root in sys.stdlib_module_names or root in _ON_DEMAND


def _file_of(module: Any) -> Any:
    """The file of a module. What else is in `sys.modules` may compute its attributes."""
    return vars(module).get("__file__") if issubclass(type(module), types.ModuleType) else None


def _seen(file: Any) -> tuple[Any, ...]:
    if not isinstance(file, str):
        return (None,)
    try:
        about = os.stat(file)
    except OSError:
        return (file,)
    return file, about.st_size, about.st_mtime_ns


__all__ = ["Modules", "note_trace"]
