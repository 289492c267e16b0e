"""Imports in a trace: which modules an import finds, and whether it finds one at all.

A module that the trace itself imports would count as created by the trace: its functions would not be instrumented, and nothing in it
guarded. So it is imported before, and the trace starts again.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spmd.base._errors import TraceAgain
from spmd.program.reads._library import is_recorded
from spmd.program.reads._process_settings import SETTINGS

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


class ImportNeeded(TraceAgain):
    """The function imports a module of the user's for the first time. The next trace finds it imported."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def other_settings(self, settings: Any) -> Any:
        with suppress(Exception):  # the function's own import raises it again
            importlib.import_module(self._module)
        return replace(settings, imported=settings.imported | {self._module})


def note_import(recording: Recording, module: str, level: int, names: Sequence[str] | None, package: str | None) -> None:
    """Before an import: record which modules `sys.modules` has under the names that it needs, and whether others can be found.

    Args:
        recording: the recording.
        module, level, names: as in the import: `from ..a import b` has the module "a", the level 2 and the names "b".
        package: the package of the code that imports.

    Raises:
        ImportNeeded: a module of the user's is imported for the first time.
    """
    recording.load_attr(builtins, "__import__")
    if level:
        outer = (package or "").rsplit(".", level - 1)[0]
        module = f"{outer}.{module}" if module else outer
    for name in _with_parents(module):
        if name not in sys.modules:
            return _note_missing(recording, name, module)
        recording._entry(sys.modules, name, "sys.modules", "[")
    found = sys.modules[module]
    if type(found) is types.ModuleType and hasattr(found, "__path__") and "__getattr__" not in vars(found):
        for name in (name for name in names or () if name != "*" and name not in vars(found)):
            _note_missing(recording, f"{module}.{name}", f"{module}.{name}")
    return None


def note_named_import(recording: Recording, name: str, package: str | None = None) -> None:
    """The same before `importlib.import_module(name, package)`."""
    module = name.lstrip(".")
    note_import(recording, module, len(name) - len(module), None, package)


def _with_parents(module: str) -> Iterator[str]:
    """The names of the packages that a module is in, the outermost first, and of the module."""
    for end in (index for index, letter in enumerate(f"{module}.") if letter == "."):
        yield module[:end]


def _note_missing(recording: Recording, name: str, module: str) -> None:
    """Record whether a module that is not imported can be found. `module`: what is imported, `name` or a module in it."""
    if is_recorded(name) and module not in recording.imported and _found(name):
        raise ImportNeeded(module)
    recording.ask(SETTINGS, (("import", name), f"the module {name!r}", partial(_found, name)))


def _found(name: str) -> Any:
    """What an import of this name gives if it was imported; else whether it can be found."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


__all__ = ["ImportNeeded", "note_import", "note_named_import"]
