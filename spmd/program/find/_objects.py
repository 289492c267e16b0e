"""Containers as a trace sees them: torch's pytrees, and objects that hold device tensors, such as a model's cache of keys and values.

An object counts as a container of its attributes (and of its items, if it is a dict or list of a class of its own), so that the
tensors in it can enter and leave a program. What the function does to such an argument, every call does to the caller's object.
An empty cache holds no tensor yet: a trace that puts one into an argument is started again, with that object's class known.

It knows nothing of programs: it takes values apart and puts them together.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spmd.base._errors import TraceAgain
from spmd.base._torch import pytree
from spmd.device._storage import is_device_tensor
from spmd.program.find._static import attributes_of
from spmd.program.reads import PLAIN, is_library

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

_DEPTH = 6
_NOT_HOLDERS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
ITEMS = "items of the container itself"


class Compiled:
    """Base of what `spmd.compile` returns. An object with a compiled method is the state of a program, which finds it by name."""


class NewContainerTypes(TraceAgain):
    """The function put tensors into arguments that held none: trace again, with their `classes` taken for containers."""

    def __init__(self, classes: frozenset[type]) -> None:
        super().__init__()
        self.classes = classes

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, holders=settings.holders | self.classes)


class Part(NamedTuple):
    """A pytree, some of whose leaves are objects.

    Attributes:
        spec: the pytree.
        objects: for each of its leaves the number of the object that it is, None for other leaves.
    """

    spec: Any
    objects: tuple[int | None, ...]


class Tree(NamedTuple):
    """How leaves make a value: a pytree, and the classes and contents of the objects in it, each once, by number."""

    root: Part
    objects: tuple[tuple[type, Part], ...]


class Flat(NamedTuple):
    """A value taken apart."""

    leaves: list[Any]
    tree: Tree
    objects: list[Any]


def flatten(value: Any, known: Sequence[Any] = (), classes: Collection[type] = frozenset()) -> Flat:
    """Take `value` apart, and the objects `known`, which get the first numbers whether or not they occur in it.

    Leaves are tensors and whatever is no container. An object that holds no device tensor is a leaf, unless it is of one of `classes`.
    """
    return _taken_apart(value, known, lambda leaf: type(leaf) in classes or is_holder(leaf))


def _taken_apart(value: Any, known: Sequence[Any], is_container: Callable[[Any], bool]) -> Flat:
    leaves: list[Any] = []
    objects = list(known)
    numbers = {id(o): i for i, o in enumerate(objects)}

    def part_of(container: Any) -> Part:
        flat, spec = pytree.tree_flatten(container)
        found: list[int | None] = []
        for leaf in flat:
            if id(leaf) not in numbers and not isinstance(leaf, PLAIN) and is_container(leaf):
                numbers[id(leaf)] = len(objects)
                objects.append(leaf)
            found.append(None if isinstance(leaf, PLAIN) else numbers.get(id(leaf)))
            if found[-1] is None:
                leaves.append(leaf)
        return Part(spec, tuple(found))

    root = part_of(value)
    parts: list[tuple[type, Part]] = []
    for instance in objects:  # grows while it is walked: an object's contents may hold others
        parts.append((type(instance), part_of(contents_of(instance))))
    return Flat(leaves, Tree(root, tuple(parts)), objects)


def unflatten(leaves: Sequence[Any], tree: Tree, objects: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """The value that `leaves` make, and the objects in it by number. `objects`: the first of them, to be given new contents."""
    made = [objects[i] if i < len(objects) else _blank(cls) for i, (cls, _) in enumerate(tree.objects)]
    remaining = iter(leaves)

    def value_of(part: Part) -> Any:
        return pytree.tree_unflatten([next(remaining) if i is None else made[i] for i in part.objects], part.spec)

    value = value_of(tree.root)
    for instance, (_, part) in zip(made, tree.objects, strict=True):
        fill(instance, value_of(part))
    return value, made


class EmptyContainers:
    """The arguments that hold no tensor, as they are before a trace."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._objects = [leaf for leaf in leaves if _may_hold(leaf)]
        self._before = _taken_apart(None, self._objects, _may_hold)

    def require_empty(self) -> None:
        """If they hold tensors now, make them what they were, and raise NewContainerTypes."""
        now = _taken_apart(None, self._objects, _may_hold).objects if self._objects else []
        classes = frozenset(type(o) for o in now if is_holder(o))
        if classes:
            unflatten(self._before.leaves, self._before.tree, self._before.objects)
            raise NewContainerTypes(classes)


def is_holder(value: Any) -> bool:
    """Whether `value` is an object that holds a device tensor, and no module or optimizer, whose state a program finds by itself."""
    if not _may_hold(value):
        return False
    held: list[bool] = []
    _look(value, _DEPTH, held, set())
    return bool(held) and all(held)


def _may_hold(value: Any) -> bool:
    return attributes_of(value) is not None and is_object(value)


def is_object(value: Any) -> bool:
    """Whether `value` is an object of a class that is no library's, and no module, optimizer or state of a program."""
    if isinstance(value, (*PLAIN, *_NOT_HOLDERS)) or is_library(type(value).__module__):
        return False
    return not any(isinstance(a, Compiled) for cls in type(value).__mro__ for a in vars(cls).values())


def _look(value: Any, depth: int, held: list[bool], seen: set[int]) -> None:
    """Add True to `held` for a device tensor and False for a module or optimizer within `value`."""
    if isinstance(value, PLAIN) or depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if is_device_tensor(value):
            held.append(True)
    elif isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        held.append(False)
    else:
        parts = [contents_of(value)] if _may_hold(value) else pytree.tree_leaves(value)
        for part in parts:
            inside = pytree.tree_leaves(part)
            for leaf in inside:
                if leaf is not value:
                    _look(leaf, depth - 1, held, seen)


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


def contents_of(instance: Any) -> dict[str, Any]:
    """The attributes of an object, and under `ITEMS` its items."""
    contents = dict(attributes_of(instance) or {})
    if isinstance(instance, dict):
        contents[ITEMS] = dict(instance)
    elif isinstance(instance, list):
        contents[ITEMS] = list(instance)
    return contents


def fill(instance: Any, contents: dict[str, Any]) -> None:
    """Give an object these contents."""
    items = contents.pop(ITEMS, None)
    attributes = attributes_of(instance)
    assert attributes is not None
    attributes.clear()
    attributes.update(contents)
    if isinstance(instance, dict):
        base: Any = OrderedDict if isinstance(instance, OrderedDict) else dict
        base.clear(instance)
        for key, value in items.items():  # past what the class does when an item is set: transformers' outputs forbid it
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
    "unflatten",
]
