"""Where the objects are that a trace used: by the variables, attributes, items and closures that lead to them.

The objects of one process have the same paths in another process that runs the same program. A path starts at the compiled function, at
an argument of the call, or at a name in a module, and is followed without running user code.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from spmd.base._torch import hooks_of_leaf
from spmd.device._storage import is_device_tensor
from spmd.program.find._static import attributes_of, class_dict, is_a, is_named, is_python_class, named, slots_of
from spmd.program.reads import PLAIN, SPECIAL, code_of, content_of, items_of
from spmd.program.stored._description import NotStorable, description, has_own_attributes, is_ours

Node = tuple[int | None, str, Any]  # the parent's position in the table, or None for a root; the kind of the step; its key
_LARGEST = 100_000  # items of a container that is searched
_MOST = 1_000_000  # objects that are searched
_WORDS: dict[type, tuple[str, ...]] = {  # attributes in C of objects of a class
    types.FunctionType: ("__globals__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}
_SEQUENCES = (list, tuple, collections.deque)
_OF_CLASSES = ("__dataclass_fields__", "_backward_cls", "_forward_cls")  # attributes that libraries read


def _dict_of(owner: Any) -> Any:
    """The dict of an object, module or class."""
    return class_dict(owner) if is_a(owner, type) else attributes_of(owner)


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "global": lambda _, key: named(*key),
    "dict": lambda owner, _: _dict_of(owner),
    "item": lambda owner, key: dict.__getitem__(owner, key),
    "at": lambda owner, index: items_of(owner)[index][1],
    "index": lambda owner, index: _sequence(owner).__getitem__(owner, index),
    "cell": lambda owner, index: owner.__closure__[index],
    "contents": lambda owner, _: owner.cell_contents,
    "word": getattr,
    "code": lambda owner, _: code_of(owner),
    "type": lambda owner, _: type(owner),
    "base": lambda owner, index: owner.__mro__[index],
    "grad": lambda owner, _: owner.grad,
    "hook": lambda owner, key: hooks_of_leaf(owner)[key[0]][key[1]],
    "referent": lambda owner, _: owner(),
    "slot": lambda owner, key: next(v for d, v in slots_of(owner).items() if (d.__objclass__.__qualname__, d.__name__) == key),
}


def _sequence(owner: Any) -> Any:
    return next(base for base in _SEQUENCES if is_a(owner, base))


class Search:
    """All objects that paths lead to, nearest first.

    Args:
        roots: objects by name: the function, the arguments.
        read: by id of a dict, the keys in it that the trace read; by id of a function, the attributes. No other variables of modules and
            attributes of classes are searched.
    """

    def __init__(self, roots: Mapping[str, Any], read: Mapping[int, list[Any]]) -> None:
        self._read = read
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        self._module_dicts = {id(vars(m)): name for name, m in modules if is_a(m, types.ModuleType)}
        self._namespaces = {id(sys.modules), *self._module_dicts}
        self._found: dict[int, int] = {}
        self._nodes: list[Node] = []
        self._objects: list[Any] = []
        self._next = 0
        for name, root in roots.items():
            self._visit(root, (None, "root", name))
        self._visit(sys.modules, (None, "global", ("sys", "modules")))
        self._run()

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._found

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors on device 'jax' that were found, and whose attributes are not computed by the program."""
        yield from (t for t in self._objects if is_a(t, torch.Tensor) and is_device_tensor(t) and has_own_attributes(t))

    def _run(self) -> None:
        while self._next < len(self._objects):
            for step, key, part in _parts(self._objects[self._next], self._read, self._namespaces):
                self._visit(part, (self._next, step, key))
            self._next += 1
            if len(self._objects) > _MOST:
                raise NotStorable("a function that reaches a million objects")

    def _visit(self, value: Any, node: Node) -> None:
        if type(value) not in PLAIN and id(value) not in self._found:
            self._found[id(value)] = len(self._nodes)
            self._nodes.append(node)
            self._objects.append(value)

    def add(self, value: Any) -> None:
        """Find an object that is a module, or a variable of one, and what it leads to."""
        if id(value) in self._module_dicts:
            value = sys.modules[self._module_dicts[id(value)]]
        elif is_a(value, dict):
            value = _class_of(value)
        if is_a(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            self._visit(value, (None, "global", (value.__name__, "")))
        elif is_a(value, (type, types.FunctionType, types.BuiltinFunctionType)) and is_named(value):
            self._visit(value, (None, "global", (value.__module__, value.__qualname__)))
        elif is_a(value, type) and (function := class_dict(value).get("_forward_cls")) is not None:  # an `autograd.Function` has it
            self.add(function)
        elif name := next((name for name, kind in vars(types).items() if kind is value), None):  # a type that `builtins` does not have
            self._visit(value, (None, "global", ("types", name)))
        elif is_a(value, types.BuiltinFunctionType) and named(value.__module__ or "", value.__name__) is value:
            self._visit(value, (None, "global", (value.__module__, value.__name__)))
        elif is_a(value, types.FunctionType) and "<" not in value.__qualname__ and value.__module__ in sys.modules:
            key = value.__module__, value.__qualname__  # a decorator has replaced it there, and may hold it
            self._visit(named(*key), (None, "global", key))
        self._run()

    def table(self, wanted: list[Any]) -> tuple[list[Node], list[int]]:
        """The nodes that lead to the wanted objects, and the position of the node of each of these.

        Raises:
            NotStorable: an object was not found.
        """
        table: list[Node] = []
        places: dict[int, int] = {}
        for value in wanted:
            if value not in self:
                self.add(value)
        for value in wanted:
            if value not in self:
                raise NotStorable(f"a {type(value).__qualname__} that no variable, attribute or item leads to: {description(value)!r:.200}")
        return table, [self._place(self._found[id(value)], table, places) for value in wanted]

    def _place(self, number: int, table: list[Node], places: dict[int, int]) -> int:
        """The position of a node in `table`, to which it and its parents are added. `places`: the positions, by number of the node."""
        if number not in places:
            parent, step, key = self._nodes[number]
            parent = None if parent is None else self._place(parent, table, places)
            places[number] = len(table)
            table.append((parent, step, key))
        return places[number]


def _class_of(namespace: dict[Any, Any]) -> Any:
    """The class whose dict this is, if it is a variable of its module; else None."""
    module = sys.modules.get(str(dict.get(namespace, "__module__")))
    classes = (c for c in list(vars(module).values()) if is_a(c, type)) if is_a(module, types.ModuleType) else ()
    return next((c for c in classes if class_dict(c) is namespace), None)


def _parts(value: Any, read: Mapping[int, list[Any]], namespaces: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """What is in an object: (step, key, part).

    Args:
        read: see `Search`.
        namespaces: ids of the dicts of modules and classes. That of a class is added.
    """
    kind = type(value)
    is_tensor, is_space = issubclass(kind, torch.Tensor), issubclass(kind, (types.ModuleType, type))
    if is_ours(kind) and not is_tensor and not issubclass(kind, torch.nn.Module):
        yield from (("dict", None, found) for found in (attributes_of(value),) if id(found) in read)
        return
    if issubclass(kind, dict):
        if id(value) in namespaces or (id(value) in read and dict.__len__(value) > _LARGEST):
            keys = (*read.get(id(value), ()), *SPECIAL, *_OF_CLASSES)
            yield from (("item", key, dict.get(value, key)) for key in keys if dict.__contains__(value, key))
        elif dict.__len__(value) <= _LARGEST:
            yield from (("item", k, v) if type(k) in (str, int) else ("at", i, v) for i, (k, v) in enumerate(items_of(value)))
    elif issubclass(kind, _SEQUENCES):
        base = _sequence(value)
        yield from (("index", i, part) for i, part in enumerate(base.__iter__(value)) if base.__len__(value) <= _LARGEST)
    elif kind is types.CellType:
        yield "contents", None, content_of(value)
    elif kind is weakref.ReferenceType:
        yield "referent", None, value()
    elif issubclass(kind, type):
        namespaces.add(id(class_dict(value)))
        yield from (("base", i, base) for i, base in enumerate(value.__mro__) if is_python_class(base))
    if is_space:
        yield "dict", None, _dict_of(value)
    if is_python_class(kind):
        yield "type", None, kind
    if is_space:
        return
    if kind is types.FunctionType:
        yield "code", None, code_of(value)
        yield from (("cell", i, cell) for i, cell in enumerate(value.__closure__ or ()))
    for word in _WORDS.get(kind, ()):
        yield "word", word, getattr(value, word)
    if kind is types.FunctionType and "__annotations__" in read.get(id(value), ()):
        yield "word", "__annotations__", value.__annotations__
    if kind is types.FunctionType and "__wrapped__" in value.__dict__:
        yield "word", "__wrapped__", value.__dict__["__wrapped__"]
    if is_tensor and has_own_attributes(value) and value.is_leaf:
        yield "grad", None, value.grad
        yield from (("hook", (kind, i), hook) for kind, hooks in enumerate(hooks_of_leaf(value)) for i, hook in enumerate(hooks))
    attributes = attributes_of(value)
    if attributes is not None and (id(attributes) in read or kind is not types.FunctionType):  # torch caches in functions' dicts
        yield "dict", None, attributes
    if not is_tensor and kind not in _WORDS:
        yield from (("slot", (d.__objclass__.__qualname__, d.__name__), v) for d, v in slots_of(value).items())


class Places:
    """The objects at the paths of a table in this process.

    Args:
        table: the nodes.
        roots: objects by name, as in `Search`.
    """

    def __init__(self, table: list[Node], roots: Mapping[str, Any]) -> None:
        self._table, self._roots = table, roots
        self._objects: dict[int, Any] = {}

    def __getitem__(self, place: int) -> Any:
        if place not in self._objects:
            parent, step, key = self._table[place]
            if step == "root":
                self._objects[place] = self._roots[key]
            else:
                self._objects[place] = _STEPS[step](None if parent is None else self[parent], key)
        return self._objects[place]


__all__ = ["Node", "Places", "Search"]
