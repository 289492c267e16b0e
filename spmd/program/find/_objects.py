"""Flattens and unflattens the containers of a trace: torch's pytrees, and objects with device tensors, such as a key/value cache.

An object is a container of its attributes (and of its items, if its class derives from dict or list), so its tensors can be inputs and
outputs of a program. Every call repeats the function's writes to such an argument on the caller's object. An empty cache has no tensor yet,
and so is not a container. If a trace puts a tensor into such an argument, it is repeated with the object's class as a container class.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spmd.base._errors import SpmdError, TraceAgain, message
from spmd.base._torch import pytree
from spmd.device._generator import DeviceGenerator
from spmd.device._storage import is_device_tensor
from spmd.program.find._static import attributes_of, is_a
from spmd.program.reads import PLAIN, is_library

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

_DEPTH = 6
_NOT_HOLDERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
ITEMS = "items of the container itself"


class Compiled:
    """Base class of compiled functions. An object with a compiled method is not a container: the program finds it by name, as state."""


class NewContainerTypes(TraceAgain):
    """The function put tensors into arguments that had none. In the next trace objects of these `classes` are containers."""

    def __init__(self, classes: frozenset[type]) -> None:
        super().__init__()
        self.classes = classes

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, holders=settings.holders | self.classes)


class Part(NamedTuple):
    """The structure of a pytree in which some leaves are objects.

    Attributes:
        spec: the pytree's structure.
        objects: for each leaf, the number of the object, or None for other leaves.
    """

    spec: Any
    objects: tuple[int | None, ...]


class Tree(NamedTuple):
    """The structure of a value: its pytree, and by number the class and the structure of the contents of each object in it."""

    root: Part
    objects: tuple[tuple[type, Part], ...]


class Flat(NamedTuple):
    """A flattened value: its leaves, its structure, and the objects in it, by number."""

    leaves: list[Any]
    tree: Tree
    objects: list[Any]


def flatten(value: Any, known: Sequence[Any] = (), classes: Collection[type] = frozenset()) -> Flat:
    """Flatten a value into leaves: tensors, and all values that are not containers.

    Args:
        value: the value.
        known: objects that are flattened too and get the first numbers, whether or not they occur in `value`.
        classes: classes whose instances are containers even if they have no device tensor.

    Raises:
        SpmdError: a list, tuple or dict contains itself.
    """
    try:
        return _flattened(value, known, lambda leaf: type(leaf) in classes or is_holder(leaf))
    except RecursionError as error:
        raise SpmdError(
            message(
                "an argument or result of a compiled function is a list or dict that contains itself, or is nested too deep",
                fix="pass an object that has it as an attribute, or reach it as a variable of the function",
            )
        ) from error


def _flattened(value: Any, known: Sequence[Any], is_container: Callable[[Any], bool]) -> Flat:
    leaves: list[Any] = []
    objects = list(known)
    numbers = {id(o): i for i, o in enumerate(objects)}

    def part_of(container: Any) -> Part:
        flat, spec = pytree.tree_flatten(container, is_leaf=is_size)
        found: list[int | None] = []
        for leaf in flat:
            if id(leaf) not in numbers and not is_a(leaf, PLAIN) and is_container(leaf):
                numbers[id(leaf)] = len(objects)
                objects.append(leaf)
            found.append(None if is_a(leaf, PLAIN) else numbers.get(id(leaf)))
            if found[-1] is None:
                leaves.append(leaf)
        return Part(spec, tuple(found))

    root = part_of(value)
    parts: list[tuple[type, Part]] = []
    for instance in objects:  # the list grows during the loop: the contents of an object may contain others
        parts.append((type(instance), part_of(contents_of(instance))))
    return Flat(leaves, Tree(root, tuple(parts)), objects)


def is_size(value: Any) -> bool:
    """Whether a value is a torch.Size: a leaf, because torch would make a tuple of it again."""
    return type(value) is torch.Size


def unflatten(leaves: Sequence[Any], tree: Tree, objects: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """Build a value of the structure `tree` from `leaves`.

    Args:
        leaves: the leaves.
        tree: the structure.
        objects: existing objects, which get new contents in place of new objects with the first numbers.

    Returns:
        The value, and the objects in it, by number.
    """
    made = [objects[i] if i < len(objects) else _blank(cls) for i, (cls, _) in enumerate(tree.objects)]
    remaining = iter(leaves)

    def value_of(part: Part) -> Any:
        return pytree.tree_unflatten([next(remaining) if i is None else made[i] for i in part.objects], part.spec)

    value = value_of(tree.root)
    for instance, (_, part) in zip(made, tree.objects, strict=True):
        fill(instance, value_of(part))
    return value, made


class EmptyContainers:
    """A snapshot of the objects among the arguments that are not containers yet."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._objects = [leaf for leaf in leaves if _may_hold(leaf)]
        self._before = _flattened(None, self._objects, _may_hold)
        self._holders = {id(o) for o in self._before.objects if is_holder(o)}  # inside others, which hold a module

    def require_empty(self) -> None:
        """Check after a trace that they still have no tensors.

        Raises:
            NewContainerTypes: they have. Their contents are restored first.
        """
        now = _flattened(None, self._objects, _may_hold).objects if self._objects else []
        classes = frozenset(type(o) for o in now if id(o) not in self._holders and is_holder(o))
        if classes:
            unflatten(self._before.leaves, self._before.tree, self._before.objects)
            raise NewContainerTypes(classes)


def is_holder(value: Any) -> bool:
    """Whether `value` is an object with a device tensor in it, and without a module or optimizer, whose state the program finds itself."""
    if not _may_hold(value):
        return False
    held: list[bool] = []
    _find_tensors(value, _DEPTH, held, set())
    return bool(held) and all(held)


def _may_hold(value: Any) -> bool:
    return is_a(value, DeviceGenerator) or (attributes_of(value) is not None and is_object(value))


def is_object(value: Any) -> bool:
    """Whether `value` is an object of a user's class, and not a module, an optimizer or an object with a compiled method."""
    if is_a(value, (*PLAIN, *_NOT_HOLDERS)) or is_library(type(value).__module__):
        return False
    return not any(isinstance(a, Compiled) for cls in type(value).__mro__ for a in vars(cls).values())


def _find_tensors(value: Any, depth: int, held: list[bool], seen: set[int]) -> None:
    """Add True to `held` for a device tensor and False for a module or optimizer within `value`."""
    if is_a(value, PLAIN) or depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    if is_a(value, torch.Tensor):
        if is_device_tensor(value):
            held.append(True)
    elif is_a(value, (torch.nn.Module, torch.optim.Optimizer)):
        held.append(False)
    else:
        parts = [contents_of(value)] if _may_hold(value) else pytree.tree_leaves(value)
        for part in parts:
            inside = pytree.tree_leaves(part)
            for leaf in inside:
                if leaf is not value:
                    _find_tensors(leaf, depth - 1, held, seen)


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


def contents_of(instance: Any) -> dict[str, Any]:
    """The attributes of an object, and its items under the key `ITEMS` if it is a dict or list."""
    contents = dict(attributes_of(instance) or {})
    if is_a(instance, dict):
        contents[ITEMS] = dict(instance)
    elif is_a(instance, list):
        contents[ITEMS] = list(instance)
    return contents


def fill(instance: Any, contents: dict[str, Any]) -> None:
    """Replace the contents of an object. `contents`: see `contents_of`."""
    items = contents.pop(ITEMS, None)
    attributes = attributes_of(instance)
    assert attributes is not None
    attributes.clear()
    attributes.update(contents)
    if isinstance(instance, dict):
        base: Any = OrderedDict if isinstance(instance, OrderedDict) else dict
        base.clear(instance)
        for key, value in items.items():  # without the class's own `__setitem__`, which transformers' outputs forbid
            base.__setitem__(instance, key, value)
    elif isinstance(instance, list):
        list.__setitem__(instance, slice(None), items)


__all__ = [
    "ITEMS",
    "Compiled",
    "Flat",
    "NewContainerTypes",
    "Part",
    "Tree",
    "EmptyContainers",
    "contents_of",
    "fill",
    "flatten",
    "is_holder",
    "is_object",
    "is_size",
    "unflatten",
]
