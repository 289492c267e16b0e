"""What a trace leaves (its result, what it writes to Python) taken apart, so that every call makes it anew.

Containers, objects and functions that the trace made are made by every call, who is who included: one list under two names stays one
list. What existed before is put as it is, and what stands for an argument is the caller's. It knows nothing of tensors.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from spmd.base._torch import pytree
from spmd.program.find._objects import is_object
from spmd.program.find._static import attributes_of, slots_of
from spmd.program.reads import ABSENT, PLAIN, code_of, is_library

_LIBRARYS = (collections.Counter, collections.UserDict, collections.UserList, collections.ChainMap)  # whose objects are taken apart too


class Node(NamedTuple):
    """One container.

    Attributes:
        blank: makes it empty, or None if it is made at once from its parts.
        fill: (container or None, parts) -> the container.
        parts: what lies in it: a leaf's number, or ~number of a node.
    """

    blank: Callable[[], Any] | None
    fill: Callable[[Any, list[Any]], Any]
    parts: tuple[int, ...]


class Remade:
    """Takes values apart.

    Attributes:
        leaves: what is no container, or existed before.
        nodes: the containers, in the order in which they were met.
    """

    def __init__(self, is_before: Callable[[Any], bool]) -> None:
        self.leaves: list[Any] = []
        self.nodes: list[Node] = []
        self._is_before = is_before
        self._refs: dict[int, int] = {}
        self._kept: list[Any] = []
        self._whole: list[int] = []  # the nodes again, each after its parts

    def take(self, value: Any, is_new: bool = False) -> int:
        """The number of a value. `is_new`: it is a container that was made to hold its parts."""
        if isinstance(value, (*PLAIN, torch.Tensor)):
            return self._leaf(value)
        if id(value) in self._refs:
            return self._refs[id(value)]
        self._kept.append(value)
        found = None if not is_new and self._is_before(value) else _apart(value)
        if found is None:
            ref = self._refs[id(value)] = self._leaf(value)
            return ref
        blank, fill, parts = found
        number = len(self.nodes)
        self._refs[id(value)] = ~number
        self.nodes.append(Node(blank, fill, ()))
        self.nodes[number] = Node(blank, fill, tuple(map(self.take, parts)))
        self._whole.append(number)
        return ~number

    def ordered(self, refs: Sequence[int]) -> tuple[list[Node], list[int]]:
        """The nodes, each after its parts (a dict hashes its keys when it is filled), and the numbers that values have among these."""
        place = {number: i for i, number in enumerate(self._whole)}

        def moved(ref: int) -> int:
            return ref if ref >= 0 else ~place[~ref]

        nodes = (self.nodes[number] for number in self._whole)
        return [node._replace(parts=tuple(map(moved, node.parts))) for node in nodes], list(map(moved, refs))

    def _leaf(self, value: Any) -> int:
        self.leaves.append(value)
        return len(self.leaves) - 1


def remade(nodes: Sequence[Node], refs: Sequence[int], flat: list[Any]) -> list[Any]:
    """The values with these numbers. `nodes`: each after its parts; `flat`: this call's leaves."""
    if not nodes:
        return list(map(flat.__getitem__, refs))
    made: list[Any] = [ABSENT if node.blank is None else node.blank() for node in nodes]

    def value(ref: int) -> Any:
        if ref >= 0:
            return flat[ref]
        if made[~ref] is ABSENT:
            node = nodes[~ref]
            made[~ref] = node.fill(None, list(map(value, node.parts)))
        return made[~ref]

    for number, node in enumerate(nodes):
        if node.blank is not None:
            node.fill(made[number], list(map(value, node.parts)))
    return list(map(value, refs))


_Apart = tuple[Callable[[], Any] | None, Callable[[Any, list[Any]], Any], Sequence[Any]]


def _apart(value: Any) -> _Apart | None:
    """How a container is made from its parts; None if it is none."""
    cls: Any = type(value)
    if cls is list:
        return list, list.extend, list(value)
    if cls is dict or cls is collections.OrderedDict or cls is collections.defaultdict:
        blank = functools.partial(cls, value.default_factory) if cls is collections.defaultdict else cls
        return blank, _fill_dict, _pairs(value)
    if cls is collections.deque:
        return functools.partial(cls, maxlen=value.maxlen), cls.extend, list(value)
    if cls is tuple or (isinstance(value, tuple) and hasattr(cls, "_fields")):
        return None, lambda _, parts: tuple.__new__(cls, parts), list(value)
    if cls is set:
        return set, set.update, list(value)
    if cls is frozenset:
        return None, lambda _, parts: frozenset(parts), list(value)
    if cls is bytearray or cls is np.ndarray:
        return (lambda: copy.copy(value)), (lambda made, parts: made), ()
    if cls in (types.FunctionType, types.CellType, types.MethodType, functools.partial):
        return _code_apart(value, cls)
    if not pytree.tree_is_leaf(value):
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        return None, lambda _, parts: pytree.tree_unflatten(parts, spec), parts
    return _object_apart(value, cls) if is_object(value) or isinstance(value, _LIBRARYS) else None


def _fill_dict(made: dict[Any, Any], parts: list[Any]) -> None:
    made.update(zip(parts[::2], parts[1::2], strict=True))


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _code_apart(value: Any, cls: type) -> _Apart | None:
    """Functions, what they close over, and what is bound to them."""
    if cls is types.MethodType:
        return None, lambda _, parts: types.MethodType(*parts), [value.__func__, value.__self__]
    if cls is functools.partial:
        return None, lambda _, parts: functools.partial(parts[0], *parts[1], **parts[2]), [value.func, value.args, value.keywords]
    if cls is types.CellType:
        try:
            return types.CellType, lambda made, parts: setattr(made, "cell_contents", parts[0]), [value.cell_contents]
        except ValueError:  # empty
            return types.CellType, lambda made, parts: made, []
    if is_library(value.__module__):
        return None
    code, cells, names = code_of(value), list(value.__closure__ or ()), list(vars(value))

    def function(_: Any, parts: list[Any]) -> Any:
        defaults, keywords, *rest = parts
        closure = rest[len(names) :]
        made = types.FunctionType(code, value.__globals__, value.__name__, defaults, tuple(closure) or None)
        made.__kwdefaults__, made.__qualname__, made.__doc__ = keywords, value.__qualname__, value.__doc__
        made.__module__, made.__annotations__ = value.__module__, value.__annotations__
        made.__dict__.update(zip(names, rest, strict=False))
        return made

    return None, function, [value.__defaults__, value.__kwdefaults__, *vars(value).values(), *cells]


def _object_apart(value: Any, cls: Any) -> _Apart | None:
    """An object: its attributes and slots, and its items if it is a dict or list."""
    own = next((c for c in cls.__mro__ if not c.__flags__ & _HEAP), object)
    if own not in (object, dict, list, collections.OrderedDict):
        return None
    attributes, slots = attributes_of(value) or {}, slots_of(value)
    items: list[Any] = [] if own is object else list(list.__iter__(value)) if own is list else _pairs_of(own, value)
    names, num_slots, base = list(attributes), len(slots), cast(Any, own)

    def fill(made: Any, parts: list[Any]) -> Any:
        held = attributes_of(made)
        if held is not None:
            held.update(zip(names, parts, strict=False))
        for descriptor, part in zip(slots, parts[len(names) :], strict=False):
            descriptor.__set__(made, part)
        rest = parts[len(names) + num_slots :]
        if own is list:
            list.extend(made, rest)
        elif own is not object:
            for key, part in zip(rest[::2], rest[1::2], strict=True):
                base.__setitem__(made, key, part)  # past what its class does when an item is set
        return made

    return (lambda: own.__new__(cls)), fill, [*attributes.values(), *slots.values(), *items]


def _pairs_of(own: Any, value: Any) -> list[Any]:
    return [part for pair in own.items(value) for part in pair]


_HEAP = 1 << 9  # a class made by Python code

__all__ = ["Node", "Remade", "remade"]
