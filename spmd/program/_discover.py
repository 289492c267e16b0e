"""Finds the modules and optimizers that a function can reach: its closure, the globals it names, its `self`, its arguments.

Tensors need no finding, tracing sees them. Modules are found for their names and flags, optimizers because their numbers
and state must be prepared before the trace; one that is missed here is met when it steps (see `_capture`).
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch

_DEPTH = 4
_LIBRARIES = ("torch", "jax", "numpy", "builtins", "mesh", "spmd", "typing", "collections")


@dataclass
class Reachable:
    """What a function can reach: root modules with the name they were found under, and optimizers."""

    modules: dict[int, tuple[str, torch.nn.Module]] = field(default_factory=dict[int, tuple[str, torch.nn.Module]])
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    _seen: set[int] = field(default_factory=set[int])

    def visit(self, value: Any, name: str = "", depth: int = 0) -> None:
        """Walk `value`: modules, optimizers, functions, containers, and plain objects a few levels deep."""
        if depth > _DEPTH or id(value) in self._seen or isinstance(value, (str, int, float, torch.Tensor, type(None), types.ModuleType)):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self.modules[id(value)] = (name, value)
        elif isinstance(value, torch.optim.Optimizer):
            if all(value is not known for known in self.optimizers):
                self.optimizers.append(value)
        elif isinstance(value, (list, tuple, set)):
            for i, item in enumerate(value):
                self.visit(item, f"{name}[{i}]", depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.visit(item, str(key), depth + 1)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(part, name, depth + 1)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, "self", depth + 1)
            self.visit(value.__func__, name, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif not isinstance(value, type) and not type(value).__module__.startswith(_LIBRARIES):
            self.visit(getattr(value, "__dict__", None), name, depth + 1)

    def _visit_function(self, fn: types.FunctionType, depth: int) -> None:
        if (fn.__module__ or "").split(".")[0] in _LIBRARIES[:6]:
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self.visit(cell.cell_contents, name, depth + 1)
            except ValueError:  # an empty cell: the name is bound later
                continue
        for name in _global_names(fn.__code__):
            if name in fn.__globals__:
                self.visit(fn.__globals__[name], name, depth + 1)
        self.visit(getattr(fn, "__wrapped__", None), "", depth + 1)
        self.visit(fn.__defaults__, "", depth + 1)


def reachable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reachable:
    """Everything `fn(*args, **kwargs)` can name."""
    found = Reachable()
    found.visit(fn if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)) else fn.__call__, "fn")
    found.visit(args, "args")
    found.visit(kwargs, "kwargs")
    return found


def _global_names(code: types.CodeType) -> list[str]:
    """Names that the code, or a function defined inside it, may look up as globals."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return names
