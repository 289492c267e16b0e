"""Import hooks: patches a module of another package when the program imports it. Importing this package does not import it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` once: now if module `name` is already imported, else right after its import."""
    if name in sys.modules:
        action()
        return
    sys.meta_path.insert(0, _Once(name, action))  # pyright: ignore[reportArgumentType]


class _Once:
    """A finder that is on `sys.meta_path` until the module is imported."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.action()

        loader.exec_module = exec_module
        return spec


__all__ = ["when_imported"]
