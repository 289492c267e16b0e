"""Finds the modules, optimizers and tensors that a function can reach through its closure, globals, `self` and arguments.

Modules are found for their names, optimizers to prepare their numbers and state before the trace, and leaf tensors for their gradients. Of
an object, only those attributes are visited that a reachable function names. The trace reports a module or optimizer that is missed here
(`trace._module_calls`). The Python values that a trace depends on are not searched for: the trace records them (`reads`).
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from spmd.base._errors import TraceError, message
from spmd.base._torch import hooks_of_leaf
from spmd.device._storage import is_device_tensor
from spmd.program.find._objects import flatten
from spmd.program.find._static import attributes_of, is_a, static_attribute
from spmd.program.reads import PLAIN, is_library

_DEPTH = 4
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) - {"training"}


@dataclass
class Reachable:
    """The modules, optimizers and tensors that a function can reach.

    Attributes:
        modules: by id, each root module with the name it was found under.
        optimizers: the optimizers, except `as_objects`.
        prepared: for each optimizer that was prepared for the next trace, the parameters for which state was created.
        as_objects: optimizers that are visited as ordinary objects (see `TraceSettings`).
        tensors: by id, tensors outside of modules.
        holders: classes whose instances among the arguments count as containers even if they have no tensor attribute.
    """

    modules: dict[int, tuple[str, torch.nn.Module]] = field(default_factory=dict[int, tuple[str, torch.nn.Module]])
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    holders: frozenset[type] = frozenset()
    as_objects: tuple[torch.optim.Optimizer, ...] = ()
    prepared: list[tuple[torch.optim.Optimizer, list[torch.Tensor]]] = field(
        default_factory=list[tuple[torch.optim.Optimizer, list[torch.Tensor]]]
    )
    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    _seen: dict[int, Any] = field(default_factory=dict[int, Any])  # by id; keeps the objects alive, so that ids are not reused
    _names: set[str] = field(default_factory=lambda: {"forward", "__call__"})
    _owners: list[tuple[int, dict[str, Any]]] = field(default_factory=list[tuple[int, dict[str, Any]]])
    _classes: dict[type, None] = field(default_factory=dict[type, None])  # in the order in which they were found

    def visit(self, value: Any, name: str = "", depth: int = 0) -> None:
        """Visit `value` and everything in it: modules, optimizers, functions, containers, and objects, at most `_DEPTH` levels deep."""
        if depth > _DEPTH or id(value) in self._seen or is_a(value, (*PLAIN, types.ModuleType)):
            return
        self._seen[id(value)] = value
        if is_a(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif is_a(value, torch.nn.Module):
            self._visit_module(value, name, depth)
        elif is_a(value, torch.optim.Optimizer):
            if any(value is other for other in self.as_objects):
                self._visit_container([*(group["params"] for group in value.param_groups), value.state], name, depth)
            elif has_device_parameters(value):
                self.optimizers.append(value)
        elif is_a(value, (list, tuple, set, dict)):
            self._visit_container(value, name, depth)
        elif is_a(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(part, name, depth + 1)
        elif is_a(value, types.MethodType):
            self.visit(value.__self__, "self", depth + 1)
            self.visit(value.__func__, name, depth)
        elif is_a(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(wrapped := static_attribute(value, "__wrapped__"), types.FunctionType):  # another compiled function
            self.visit(wrapped, name, depth)
        elif is_a(value, type):
            self._note_class(value)
        elif not is_library(type(value).__module__):
            self._visit_object(value, name, depth)

    def add(self, value: Any) -> None:
        """Visit a value that a trace has found."""
        self.visit(value)
        self._visit_named()

    def add_hooks(self) -> None:
        """Visit the gradient hooks of the reachable tensors. They may reach optimizers that step during the backward pass."""
        for tensor in self.device_tensors():
            for hook in itertools.chain(*hooks_of_leaf(tensor)):
                self.visit(hook)
        self._visit_named()

    def leaves(self) -> list[torch.Tensor]:
        """Leaf tensors that may have a gradient. A frozen parameter may have one from before it was frozen."""
        return [
            t for t in self.device_tensors() if t.is_leaf and (t.requires_grad or t.grad is not None or isinstance(t, torch.nn.Parameter))
        ]

    def device_tensors(self) -> list[torch.Tensor]:
        """The reachable parameters, buffers and other tensors on device 'jax'."""
        return [t for _, t in self.named_tensors()]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """The state tensors of `optimizers` on device 'jax'."""
        states = (s for o in self.optimizers for s in o.state.values() if isinstance(s, dict))
        return [v for s in states for v in s.values() if is_device_tensor(v)]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each reachable tensor on device 'jax', once, with a name for messages."""
        yield from ((name, t) for name, t in self._named() if t.device.type == "jax")

    def cpu_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Each reachable tensor on the CPU, once, with a name for messages."""
        return [(name, t) for name, t in self._named() if t.device.type == "cpu"]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = [(f"{n}.{k}", t) for n, m in self.all_modules() for r in ("_parameters", "_buffers") for k, t in m.__dict__[r].items()]
        named.extend(("a parameter of an optimizer", p) for o in self.optimizers for group in o.param_groups for p in group["params"])
        named.extend(("a tensor that the function reads", t) for t in self.tensors.values())
        yield from {id(t): (name, t) for name, t in reversed(named) if t is not None and not is_lazy(t)}.values()

    def all_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module under the roots, once, with its qualified name. TorchScript modules are left out: their state is not in Python."""
        seen: set[int] = set()
        for root_name, root in self.modules.values():
            for name, module in root.named_modules():
                if id(module) not in seen and not isinstance(module, torch.jit.ScriptModule):
                    seen.add(id(module))
                    yield name or root_name, module

    def _visit_module(self, root: torch.nn.Module, name: str, depth: int) -> None:
        self.modules[id(root)] = (name, root)
        for module in root.modules():
            self._note_class(type(module))
            self._owners.append((depth + 1, {k: v for k, v in module.__dict__.items() if k not in _OF_EVERY_MODULE}))

    def _visit_container(self, value: Any, name: str, depth: int) -> None:
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, item in items:
            self.visit(item, str(key) if isinstance(key, str) else f"{name}[{key}]", depth + 1)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        attributes = attributes_of(value)
        if attributes is None:
            return
        self._note_class(type(value))
        self._owners.append((depth + 1, attributes))

    def _note_class(self, owner: type) -> None:
        for base in owner.__mro__:
            if not is_library(base.__module__):
                _require_hash(base)
                self._classes.setdefault(base)

    def _visit_named(self) -> None:
        """Visit those attributes of reachable objects and methods of reachable classes that a reachable function names.

        These name others, so this repeats until nothing new is found.
        """
        before = -1
        while before != len(self._seen):
            before = len(self._seen)
            for depth, attributes in list(self._owners):
                for name in self._names & attributes.keys():
                    self.visit(attributes[name], name, depth)
            for owner in list(self._classes):
                for name in self._names & vars(owner).keys():
                    method = vars(owner)[name]
                    is_bound = isinstance(method, (classmethod, staticmethod, types.MethodType))
                    method = method.fget if isinstance(method, property) else method.__func__ if is_bound else method
                    if isinstance(method, types.FunctionType) or static_attribute(method, "__wrapped__") is not None:
                        self.visit(method, name, 1)

    def _visit_function(self, fn: types.FunctionType, depth: int) -> None:
        if is_library(fn.__module__ or ""):
            return
        named = _names_in(fn.__code__)
        self._names.update(named)
        cells = fn.__closure__ or ()
        for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
            try:
                self.visit(cell.cell_contents, name, depth + 1)
            except ValueError:  # an empty cell: its variable is not assigned yet
                continue
        found = [name for name in dict.fromkeys(_globals_in(fn.__code__)) if name in fn.__globals__]
        for name in found:
            self.visit(fn.__globals__[name], name, depth + 1)
        self.visit(getattr(fn, "__wrapped__", None), "", depth + 1)
        for defaults in (fn.__defaults__, fn.__kwdefaults__):
            self.visit(defaults, "", depth + 1)


def _require_hash(cls: type) -> None:
    """Check that a class can be a key, as Python's own tables of classes require.

    Raises:
        TraceError: its metaclass defines `__eq__` without `__hash__`, or a `__hash__` that fails.
    """
    try:
        hash(cls)
    except Exception as error:
        raise TraceError(
            message(
                f"class {type.__getattribute__(cls, '__qualname__')}, which a compiled function reaches, cannot be hashed",
                f"its metaclass {type(cls).__qualname__} defines __eq__ without __hash__, or a __hash__ that fails",
                fix="in the metaclass: __hash__ = type.__hash__",
            )
        ) from error


def has_device_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has any parameter on device 'jax': one without has nothing to prepare."""
    return any(p.device.type == "jax" for group in optimizer.param_groups for p in group["params"])


def reachable(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    holders: frozenset[type] = frozenset(),
    as_objects: tuple[torch.optim.Optimizer, ...] = (),
) -> Reachable:
    """The modules, optimizers and tensors that `fn(*args, **kwargs)` can reach. See `Reachable` for `holders` and `as_objects`."""
    found = Reachable(holders=holders, as_objects=as_objects)
    found.visit(fn if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)) else fn.__call__, "fn")
    names = fn.__code__.co_varnames if isinstance(fn, types.FunctionType) else ()
    for i, value in enumerate((*args, *kwargs.values())):
        for leaf in flatten(value, classes=holders).leaves:  # containers and tensors are part of the signature
            if not isinstance(leaf, torch.Tensor):
                found.visit(leaf, names[i] if i < len(args) and i < len(names) else "args")
    found._visit_named()
    return found


_GLOBAL_LOADS = {dis.opmap["LOAD_NAME"]: 0, dis.opmap["LOAD_GLOBAL"]: 1}  # by opcode: flag bits of the argument below the name's index


def _globals_in(code: types.CodeType) -> list[str]:
    """Names that the code, or a function defined inside it, looks up as globals.

    Attribute names are left out: for `optimizer.step()`, a loop variable `step` of the script would count as state of its function.
    """
    names, higher = list[str](), 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):  # ten times faster than `dis`, which also finds jumps and lines
        arg = higher | low
        higher = arg << 8 if op == dis.EXTENDED_ARG else 0
        if op in _GLOBAL_LOADS:
            names.append(code.co_names[arg >> _GLOBAL_LOADS[op]])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_globals_in(constant))
    return names


def _names_in(code: types.CodeType) -> Sequence[str]:
    """Names that the code, or a function defined inside it, may look up as globals or attributes."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_names_in(constant))
    return names
