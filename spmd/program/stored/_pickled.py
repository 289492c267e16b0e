"""Writes the record of a trace as bytes, and reads it in another process, where the objects that it names are that process's own.

Note [Stored traces]
    The objects of this package are written by value, functions that it made included. The objects of the program are not: the function,
    its modules, tensors, dicts, classes and functions become references, which are paths (`_paths`) with a description (`_description`).
    A process that reads the record follows the paths, and compares the descriptions and which objects are one. After that, it evaluates
    the guards of the trace. Anything that is neither of this package nor found by a path, and anything that has no description, makes
    the trace not storable. So a trace is used only where this process would record the same one.

    Guards compare what recorded code read. What code of libraries reads is constant within a process, and has no guard. So descriptions
    contain what is in objects of libraries, and the record is looked up by the state of libraries before the trace (`_library_state`). A
    trace is not stored if it depends on what no other process has (`reads._process_only`): addresses, or that it has printed something.
"""

from __future__ import annotations

import collections
import functools
import io
import marshal
import operator
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from mesh import Mesh, ShardingSpec
from mesh._devices import devices
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, strided_alias
from spmd.program.find._static import is_a, is_named, is_python_class
from spmd.program.reads import ABSENT, PLAIN, content_of
from spmd.program.reuse._columns import Guards
from spmd.program.stored._description import Descriptions, NotStorable, is_ours
from spmd.program.stored._modules import Modules
from spmd.program.stored._paths import Node, Places, Search

_PLAIN = frozenset(PLAIN)
_BY_VALUE = frozenset(
    (
        *(dict, list, set, frozenset, bytearray, collections.OrderedDict, collections.defaultdict, collections.deque),
        *(functools.partial, operator.attrgetter, operator.itemgetter, operator.methodcaller, np.ndarray),
    )
)

_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.ClassMethodDescriptorType)


class NotHere(Exception):
    """The record does not fit this process: an object that it refers to is missing or another one."""


class _Writer(pickle.Pickler):
    """Pickles a record.

    Args:
        search: the objects that paths lead to. They are the program's, and not this package's.
        live: ids of other objects of the program.
        tensors: a tensor of each buffer, by id of the buffer.

    Attributes:
        referenced: the objects that the record refers to, in the order of the references.
    """

    def __init__(self, file: Any, search: Search, live: set[int], tensors: Mapping[int, torch.Tensor]) -> None:
        super().__init__(file, protocol=4)
        self._search, self._live, self._tensors = search, live, tensors
        self._numbers: dict[int, int] = {}
        self._singletons = _singletons()
        self.referenced: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN or kind is tuple:
            return None
        if id(obj) in self._singletons:
            return "ours", self._singletons[id(obj)]
        if kind is Buffer and id(obj) in self._tensors:
            return "buffer", self._reference(self._tensors[id(obj)])
        if kind is torch.UntypedStorage:
            return "storage", self._reference(self._tensors[id(obj.spmd_buffer)])
        if is_a(obj, jax.Device):
            return "device", (obj.platform, obj.id)
        if obj in self._search and (kind is Buffer or (kind is types.FunctionType and not is_named(obj))):
            return "at", self._reference(obj)
        if id(obj) in self._live or not self._is_by_value(obj, kind) or (obj in self._search and not is_ours(obj)):
            return "at", self._reference(obj)
        return None

    def _is_by_value(self, obj: Any, kind: type) -> bool:
        """Whether an object belongs to this package, or is plain data."""
        if issubclass(kind, type):
            return is_ours(obj) or obj in _PLAIN or obj in _BY_VALUE
        if kind is types.FunctionType:
            return is_ours(obj)
        if kind in _DESCRIPTORS:
            return not is_python_class(obj.__objclass__)
        if kind is types.CellType or issubclass(kind, (*_METHODS, np.generic, np.dtype, np.ufunc)):
            return True
        if issubclass(kind, torch.Tensor):  # otherwise a gradient that the trace made
            return obj not in self._search
        return is_ours(kind) or kind in _BY_VALUE or issubclass(kind, tuple)

    def _reference(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self.referenced))
        if number == len(self.referenced):
            self.referenced.append(value)
        return number

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        parts = _PARTS.get(kind)
        if parts is not None:
            return parts(obj)
        if kind is types.FunctionType:
            return NotImplemented if is_named(obj) else _function_parts(obj)
        if kind in _METHODS[1:] and not is_a(obj.__self__, types.ModuleType):
            return getattr, (obj.__self__, obj.__name__)
        if kind is ShardingSpec:
            return kind, (obj.mesh, obj.partition_spec, obj.minibatch)
        if is_a(obj, jax.Array):
            raise NotStorable("an array that is a constant of the program")
        return NotImplemented


def _singletons() -> dict[int, tuple[str, str]]:
    """The objects of this package that are variables of its modules, by id."""
    found: dict[int, tuple[str, str]] = {}
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(("spmd.", "mesh.")):
            for key, value in list(vars(module).items()):
                if type(value) not in _PLAIN and not is_a(value, (type, types.FunctionType, types.ModuleType, tuple)):
                    found.setdefault(id(value), (name, key))
    return found


def _function_parts(fn: types.FunctionType) -> Any:
    """A function that this package made inside of another one: its code, and what it has from outside."""
    given = marshal.dumps(fn.__code__), fn.__module__, fn.__name__, fn.__defaults__, fn.__kwdefaults__, fn.__closure__
    return _made_function, given


def _made_function(code: bytes, module: str, name: str, defaults: Any, named: Any, closure: Any) -> Any:
    fn = types.FunctionType(marshal.loads(code), vars(sys.modules[module]), name, defaults, closure)
    fn.__kwdefaults__ = named
    return fn


def _method(function: Any, instance: Any) -> Any:
    return types.MethodType(function, instance)


def _empty_cell() -> types.CellType:
    return types.CellType()


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    found = content_of(cell)
    return () if found is ABSENT else (found,)


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _buffer_parts(buffer: Buffer) -> Any:
    if buffer.value is not None or buffer.host is not None or buffer.queue is not None:
        raise NotStorable(f"a value of shape {list(buffer.shape)} that no tensor has")
    return _empty_buffer, (buffer.shape, buffer.annotation, buffer.state_annotation, buffer.dropped, buffer.dropped_dtype)


def _empty_buffer(shape: Any, annotation: Any, of_state: Any, dropped: Any, dtype: Any) -> Buffer:
    buffer = Buffer(None, shape, annotation=annotation)
    buffer.state_annotation, buffer.dropped, buffer.dropped_dtype = of_state, dropped, dtype
    return buffer


def _tensor_parts(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad:
        raise NotStorable("a tensor that the trace made, and that requires a gradient")
    return _empty_tensor, (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, buffer_of(tensor))


def _empty_tensor(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, buffer: Buffer) -> torch.Tensor:
    tensor = torch.empty(buffer.shape, dtype=dtype, device="jax")
    storage: Any = tensor.untyped_storage()
    storage.spmd_buffer = buffer
    is_root = (shape, stride, offset) == (tuple(tensor.shape), tensor.stride(), 0)
    return tensor if is_root else strided_alias(tensor, shape, stride, offset)


def _guards(added: list[tuple[Any, dict[str, Any]]]) -> Guards:
    guards = Guards()
    for guard, what in added:
        guards.add(guard, **what)
    return guards


_PARTS: dict[Any, Callable[[Any], Any]] = {
    types.CellType: lambda cell: (_empty_cell, (), _contents(cell), None, None, _fill_cell),
    types.MethodType: lambda method: (_method, (method.__func__, method.__self__)),
    Buffer: _buffer_parts,
    torch.Tensor: _tensor_parts,
    Mesh: lambda mesh: (partial(Mesh, topology=mesh.topology), (mesh.device_ids.tolist(), mesh.mesh_shape, mesh.axis_names)),
    Guards: lambda guards: (_guards, (guards.added,)),
}


def _memory(objects: list[Any]) -> list[tuple[int, int]]:
    """Which tensors have the same memory: for each the first one with it, both by position."""
    first: dict[int, int] = {}
    buffers = ((i, _buffer_of(value)) for i, value in enumerate(objects))
    return [(i, first.setdefault(id(buffer), i)) for i, buffer in buffers if buffer is not None]


def _buffer_of(value: Any) -> Buffer | None:
    """The memory of a tensor, or the value if it is memory; else None."""
    if type(value) is Buffer:
        return value
    return buffer_of(value) if is_a(value, torch.Tensor) and is_device_tensor(value) else None


class _Reader(pickle.Unpickler):
    """Unpickles a record. `objects`: what it refers to, in this process."""

    def __init__(self, file: Any, objects: list[Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        if kind == "ours":
            return getattr(sys.modules[key[0]], key[1])
        if kind == "device":
            return next(d for d in devices() if (d.platform, d.id) == key)
        found = self._objects[key]
        return found if kind == "at" else buffer_of(found) if kind == "buffer" else found.untyped_storage()


def written(record: Any, search: Search, live: set[int], tensors: Mapping[int, torch.Tensor]) -> bytes:
    """A record as bytes.

    Args:
        search, live, tensors: see `_Writer`.

    Raises:
        NotStorable: it contains something that another process cannot find or compare.
    """
    body = io.BytesIO()
    writer = _Writer(body, search, live, tensors)
    try:
        writer.dump(record)
    except NotStorable:
        raise
    except Exception as error:  # pickle and the objects that it visits raise many types
        raise NotStorable(f"what cannot be written: {type(error).__name__}: {error}") from error
    table, places = search.table(writer.referenced)
    about = list(map(Descriptions(writer.referenced), writer.referenced)), _memory(writer.referenced)
    head: tuple[Modules, list[Node], list[int], Any] = Modules.loaded(), table, places, about
    return pickle.dumps((head, body.getvalue()), protocol=4)


def read(content: bytes, roots: Mapping[str, Any]) -> Any:
    """The record that `written` wrote, with the objects of this process. `roots`: as there.

    Raises:
        NotHere: an object is missing or another one.
    """
    try:
        (modules, table, places, (descriptions, memory)), body = pickle.loads(content)
        if (name := modules.differing()) is not None:
            raise NotHere(f"the module {name} is not loaded in both, or its file has changed")
        here = Places(table, roots)
        objects = [here[place] for place in places]
        if len(set(map(id, objects))) != len(objects) or _memory(objects) != memory:
            raise NotHere("two objects of the trace are one object here, or the reverse")
        describe = Descriptions(objects)
        for found, expected in zip(objects, descriptions, strict=True):
            if describe(found) != expected:
                raise NotHere(f"a {type(found).__qualname__} is not the one of the trace")
        return _Reader(io.BytesIO(body), objects).load()
    except NotHere:
        raise
    except Exception as error:  # whatever following a path into other objects raises
        raise NotHere(f"{type(error).__name__}: {error}") from error


__all__ = ["NotHere", "is_ours", "read", "written"]
