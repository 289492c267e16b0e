"""Descriptions of Python objects as plain data: equal in two processes only if a trace could not tell their objects apart.

A stored trace names the objects that it used by where they are (`_paths`). What is there in another process must be the same: the same
function of the same code, an object of the same class, a tensor of the same shape. The contents of objects that the trace read are not
part of a description. They are guarded, and compared before the trace is used. No code of the program runs for a description.
"""

from __future__ import annotations

import collections
import contextvars
import decimal
import enum
import fractions
import functools
import gc
import hashlib
import inspect
import logging
import operator
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.find._static import attributes_of, class_dict, is_a, is_named, is_python_class, slots_of
from spmd.program.reads import PLAIN, code_of, content_of, is_recorded, items_of

_MOST = 10_000  # objects in one description
_LARGEST = 1 << 24  # bytes of an array
_WITH_CONTENTS = (
    object,
    dict,
    list,
    set,
    frozenset,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
    types.SimpleNamespace,
)
_FIELD: Any = type(inspect.getattr_static(inspect.FullArgSpec, "args"))  # of a named tuple
_FACTORY: Any = collections.defaultdict.default_factory.__get__  # type: ignore[attr-defined]
_MAXLEN: Any = collections.deque.maxlen.__get__  # type: ignore[attr-defined]
_OF_TORCH = [inspect.getattr_static(kind, "__torch_function__") for kind in (torch.Tensor, torch.nn.Parameter)]
_OPAQUE = ("_abc_data",)  # objects in C that belong to their class, and whose changes are guarded otherwise

LAYOUTS = (Mesh, ShardingSpec, PartitionSpec)


class NotStorable(Exception):
    """A trace depends on a value that another process cannot compare with its own. The message names the value."""


def is_ours(value: Any) -> bool:
    """Whether a value is a class or function of this package."""
    return is_a(value, (type, types.FunctionType)) and f"{value.__module__}.".startswith(("spmd.", "mesh."))


def has_own_attributes(tensor: torch.Tensor) -> bool:
    """Whether the attributes of a tensor are those that torch computes, and not the program's code."""
    found = inspect.getattr_static(type(tensor), "__torch_function__")
    return any(found is theirs for theirs in _OF_TORCH)


class Descriptions:
    """Describes objects of the program.

    Some objects contain others, and no place guards which: functions, bound methods, tuples, objects of libraries. Their description has
    that of what they contain. There, an object that the record refers to is described by its number. So a method of one of these objects
    and that of another have different descriptions.

    Args:
        referenced: the objects that the record refers to.
    """

    def __init__(self, referenced: Sequence[Any] = ()) -> None:
        self._numbers = {id(value): i for i, value in enumerate(referenced)}
        self._met: dict[int, tuple[int, Any]] = {}  # the objects in the current description, which stay alive
        self.is_deep = False  # whether code that is not recorded may read all attributes and items

    def __call__(self, value: Any) -> Any:
        """The description of an object, as nested tuples of plain values.

        Raises:
            NotStorable: it is of a kind that has no description, or contains one.
        """
        self._met = {id(value): (0, value)}
        return self._whole(value)

    def part(self, value: Any) -> Any:
        """The description of an object inside another one."""
        if type(value) in PLAIN:
            return self._whole(value)
        number = self.number(value)
        if number is not None and not self.is_deep:
            return "referenced", number
        if id(value) in self._met:
            return "met", self._met[id(value)][0]
        if len(self._met) == _MOST:
            raise NotStorable(f"a function or object that contains more than {_MOST} objects")
        self._met[id(value)] = len(self._met), value
        return number, self._whole(value)

    def parts(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """The descriptions of several objects."""
        return tuple(map(self.part, values))

    def number(self, value: Any) -> int | None:
        """The number of an object that the record refers to."""
        return self._numbers.get(id(value))

    def inside(self, values: Iterable[Any], *, is_deep: bool) -> tuple[Any, ...]:
        """The descriptions of several objects: with all attributes and items (`is_deep`), or without those whose reads are recorded."""
        before, self.is_deep = self.is_deep, is_deep
        try:
            return self.parts(values)
        finally:
            self.is_deep = before

    def _whole(self, value: Any) -> Any:
        kind = type(value)
        if kind is slice:
            return "slice", *self.parts((value.start, value.stop, value.step))
        if kind in PLAIN:
            return kind.__qualname__, repr(value)
        describe = _KINDS.get(kind) or next((describe for base, describe in _BASES if issubclass(kind, base)), None)
        return self._of_object(value) if describe is None else describe(self, value)

    def _of_object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__qualname__ in _OPAQUE:
            return (kind.__qualname__,)
        if not all((is_python_class(base) and not _has_code_in_c(base)) or base in _WITH_CONTENTS for base in kind.__mro__):
            raise NotStorable(f"a {kind.__qualname__}, which has state that is not in Python")
        attributes, within = attributes_of(value), None
        if not is_recorded(kind.__module__) or (self.is_deep and not issubclass(kind, torch.nn.Module)):
            within = self.inside((attributes, *slots_of(value).values()), is_deep=True)
        return "object", self.part(kind), self.number(attributes), self.contents(value), within

    def contents(self, value: Any) -> Any:
        """What no place guards of a container: its settings, and the items if code may read them that is not recorded."""
        about = self.part(_FACTORY(value)) if is_a(value, collections.defaultdict) else None
        about = _MAXLEN(value) if is_a(value, collections.deque) else about
        if self.is_deep and is_a(value, dict):
            return about, tuple((self.part(k), self.part(v)) for k, v in items_of(value))
        if self.is_deep and is_a(value, (list, collections.deque)):
            return about, self.parts((collections.deque if is_a(value, collections.deque) else list).__iter__(value))
        return about


def description(value: Any) -> Any:
    """The description of one object. See `Descriptions`."""
    return Descriptions()(value)


def _of_container(describe: Descriptions, value: Any) -> Any:
    return type(value).__qualname__, describe.contents(value)


def _of_set(describe: Descriptions, value: Any) -> Any:
    return type(value).__qualname__, *sorted(describe.parts(value), key=repr)


def _of_module(describe: Descriptions, value: Any) -> Any:
    if sys.modules.get(value.__name__) is not value:
        raise NotStorable(f"a module {value.__name__} that cannot be imported by its name")
    return "module", value.__name__


def _of_class(describe: Descriptions, value: Any) -> Any:
    if not is_python_class(value):
        return "class", value.__module__, value.__qualname__
    members = value._member_map_ if is_a(value, enum.EnumType) else {}  # Python's library reads these, which is not recorded
    described = *members, *describe.inside((member._value_ for member in members.values()), is_deep=True)
    about = value.__module__, value.__qualname__, described
    if is_named(value):
        return "class", *about, tuple((base.__module__, base.__qualname__) for base in value.__mro__)
    contents = tuple((name, describe.part(held)) for name, held in items_of(class_dict(value)))  # a function may make several classes
    return "made class", *about, *describe.parts((type(value), *value.__bases__)), contents


def _of_enum(describe: Descriptions, value: Any) -> Any:
    return "enum", describe.part(type(value)), value._name_, *describe.inside((value._value_,), is_deep=True)


def _of_function(describe: Descriptions, value: Any) -> Any:
    cells, named, attributes = value.__closure__ or (), value.__kwdefaults__ or {}, value.__dict__
    held = *map(content_of, cells), *(value.__defaults__ or ()), *named.values(), attributes.get("__wrapped__")
    about = value.__module__, value.__qualname__, code_digest(code_of(value)), repr(value.__globals__.get("__name__")), len(cells), *named
    places = *map(describe.number, cells), describe.number(value.__globals__), describe.number(attributes)
    return "function", about, places, describe.inside(held, is_deep=not is_recorded(value.__module__))


def _of_tuple(describe: Descriptions, value: Any) -> Any:
    return describe.part(type(value)), *describe.parts(tuple.__iter__(value))


def _of_method(describe: Descriptions, value: Any) -> Any:
    return "method", *describe.parts((value.__func__, value.__self__))


def _of_builtin(describe: Descriptions, value: Any) -> Any:
    return "builtin", value.__qualname__, getattr(value, "__module__", None), describe.part(getattr(value, "__self__", None))


def _of_property(describe: Descriptions, value: Any) -> Any:
    return "property", *describe.parts((value.fget, value.fset, value.fdel))


def _of_wrapper(describe: Descriptions, value: Any) -> Any:
    return type(value).__name__, describe.part(value.__func__)


def _of_descriptor(describe: Descriptions, value: Any) -> Any:
    return type(value).__name__, value.__objclass__.__module__, value.__objclass__.__qualname__, value.__name__


def _of_cached_property(describe: Descriptions, value: Any) -> Any:
    return "cached property", value.attrname, describe.part(value.func)


def _of_partial(describe: Descriptions, value: Any) -> Any:
    return "partial", *describe.inside((value.func, value.args, value.keywords), is_deep=True)


def _of_getter(describe: Descriptions, value: Any) -> Any:
    return type(value).__name__, *describe.inside(value.__reduce__(), is_deep=True)


def _of_memo(describe: Descriptions, value: Any) -> Any:
    return "memo", describe.part(value.__wrapped__), tuple(value.cache_parameters().items())


def _of_alias(describe: Descriptions, value: Any) -> Any:
    return type(value).__name__, *describe.parts((getattr(value, "__origin__", None), *value.__args__))


def _of_handler(describe: Descriptions, value: logging.Handler) -> Any:
    return "handler", describe.part(type(value)), value.level


def _of_logger(describe: Descriptions, value: logging.Logger) -> Any:
    return "logger", value.name, describe.part(type(value))  # its level is in `library_state`, and its handlers get the records again


def _of_pattern(describe: Descriptions, value: Any) -> Any:
    return "pattern", repr(value.pattern), value.flags


def _of_text(describe: Descriptions, value: Any) -> Any:
    return type(value).__qualname__, repr(value)


def _of_variable(describe: Descriptions, value: Any) -> Any:
    return "context variable", value.name


def _of_cell(describe: Descriptions, value: Any) -> Any:
    return ("cell",)


def _of_proxy(describe: Descriptions, value: Any) -> Any:
    return "proxy", describe.part(gc.get_referents(value)[0])


def _of_code(describe: Descriptions, value: Any) -> Any:
    return "code", code_digest(value)


def _of_tensor(describe: Descriptions, value: torch.Tensor) -> Any:
    if not has_own_attributes(value):
        raise NotStorable(f"a {type(value).__qualname__}, a tensor that computes its own attributes")
    place = str(value.device.type), tuple(value.shape), value.stride(), int(value.storage_offset())
    about = str(value.dtype), value.requires_grad, value.is_leaf, describe.part(type(value)), describe.number(attributes_of(value))
    return "tensor", *place, *about, _of_buffer(describe, buffer_of(value)) if is_device_tensor(value) else None


def _of_buffer(describe: Descriptions, value: Buffer) -> Any:
    dtype = str(value.dtype) if value.value is not None or value.host is not None or value.queue is not None else None
    layouts = _of_layout(describe, value.annotation), _of_layout(describe, value.state_annotation)
    return "buffer", value.shape, value.stored, dtype, value.dropped, *layouts


def _of_layout(describe: Descriptions, value: Any) -> Any:
    if isinstance(value, ShardingSpec):
        mesh, spec = _of_layout(describe, value.mesh), _of_layout(describe, value.partition_spec)
        return type(value).__qualname__, mesh, spec, value.minibatch
    if isinstance(value, Mesh):
        return type(value).__qualname__, tuple(value.device_ids.tolist()), value.mesh_shape, value.axis_names, value.topology
    return repr(value)


def _of_reference(describe: Descriptions, value: weakref.ReferenceType[Any]) -> Any:
    """A weak reference is to the same object as in the trace. What one to a CPU tensor has is guarded by the tensor's version."""
    referent = value()
    if value.__callback__ is not None or (is_a(referent, (torch.Tensor, np.ndarray)) and not is_device_tensor(referent)):
        raise NotStorable("a weak reference with a callback, or to a tensor of the CPU or an array")
    return "reference", describe.part(value())


def _of_dtype(_: Descriptions, value: np.dtype[Any]) -> Any:
    if value.metadata is not None:
        raise NotStorable("a dtype of numpy with metadata")
    return "dtype", value.name, repr(value.descr), value.alignment, value.itemsize


def _of_number(describe: Descriptions, value: np.generic) -> Any:
    return type(value).__qualname__, value.dtype.str, value.tobytes()


def _of_array(describe: Descriptions, value: Any) -> Any:
    if value.dtype.hasobject:
        raise NotStorable("a numpy array of objects")
    if describe.is_deep and value.nbytes > _LARGEST:
        raise NotStorable(f"a numpy array of {value.nbytes} bytes")
    content = hashlib.sha256(value.tobytes()).hexdigest() if describe.is_deep else None  # otherwise it is guarded
    return "array", value.shape, value.strides, value.dtype.str, content


def _of_jax_array(describe: Descriptions, value: jax.Array) -> Any:
    """Its values cannot change, so no place guards them."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended) or not value.is_fully_addressable or value.nbytes > _LARGEST:
        raise NotStorable(
            f"an array of jax, {value.dtype}{list(value.shape)}, of random keys, of other processes or too large to be compared"
        )
    content = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    return "jax array", value.shape, str(value.dtype), value.weak_type, repr(value.sharding), content


@functools.lru_cache(maxsize=4096)
def _has_code_in_c(kind: type) -> bool:
    """Whether a C extension made the class, so that its objects have state that Python does not see."""
    own = (v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__") and not is_a(v, types.MemberDescriptorType))
    return type(kind).__module__ == "nanobind" or any(getattr(v, "__objclass__", None) is kind for v in own)


_Describe = Callable[[Descriptions, Any], Any]
_KINDS: dict[Any, _Describe] = {
    **dict.fromkeys((dict, list, collections.OrderedDict, collections.defaultdict, collections.deque), _of_container),
    **dict.fromkeys((set, frozenset), _of_set),
    types.FunctionType: _of_function,
    types.MethodType: _of_method,
    **dict.fromkeys((types.BuiltinFunctionType, types.MethodWrapperType, types.ClassMethodDescriptorType), _of_builtin),
    property: _of_property,
    **dict.fromkeys((staticmethod, classmethod), _of_wrapper),
    functools.cached_property: _of_cached_property,
    **dict.fromkeys((types.GetSetDescriptorType, types.MemberDescriptorType), _of_descriptor),
    **dict.fromkeys((types.MethodDescriptorType, types.WrapperDescriptorType), _of_descriptor),
    functools.partial: _of_partial,
    **dict.fromkeys((operator.attrgetter, operator.itemgetter, operator.methodcaller, _FIELD), _of_getter),
    type(functools.lru_cache(lambda: None)): _of_memo,
    **dict.fromkeys((types.GenericAlias, types.UnionType), _of_alias),
    re.Pattern: _of_pattern,
    **dict.fromkeys((decimal.Decimal, fractions.Fraction, pathlib.PosixPath, pathlib.PurePosixPath), _of_text),
    **dict.fromkeys((torch.layout, torch.memory_format, torch.finfo, torch.iinfo), _of_text),
    contextvars.ContextVar: _of_variable,
    types.CellType: _of_cell,
    types.MappingProxyType: _of_proxy,
    types.CodeType: _of_code,
    weakref.ReferenceType: _of_reference,
    Buffer: _of_buffer,
    np.ndarray: _of_array,
}
_BASES: tuple[tuple[type, _Describe], ...] = (
    (types.ModuleType, _of_module),
    (type, _of_class),
    (enum.Enum, _of_enum),
    (logging.Logger, _of_logger),
    (logging.Handler, _of_handler),
    (logging.Manager, lambda describe, value: ("manager of loggers", value is logging.root.manager)),
    (torch.Tensor, _of_tensor),
    (jax.Array, _of_jax_array),
    *((kind, _of_layout) for kind in LAYOUTS),
    (np.generic, _of_number),
    (np.dtype, _of_dtype),
    (tuple, _of_tuple),
)


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    """A digest of everything in a code object that a call depends on.

    Without its file and its qualified name: equal code objects, of which the cache has one, may have others.
    """
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    tables = code.co_code.hex(), code.co_exceptiontable.hex(), tuple(code.co_lines())
    text = repr((counts, names, tables, tuple(map(_constant_text, code.co_consts))))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant_text, value)))}}}"
    return f"{type(value).__name__} {value!r}"


__all__ = ["LAYOUTS", "Descriptions", "NotStorable", "code_digest", "description", "has_own_attributes", "is_ours"]
