"""Descriptions of Python objects as plain data: equal in two processes only if a trace could not tell their objects apart.

A stored trace names the objects that it used by where they are (`_paths`). What is there in another process must be the same: the same
function of the same code, an object of the same class, a tensor of the same shape. The contents of objects that the trace read are not
part of a description. They are guarded, and compared before the trace is used.
"""

from __future__ import annotations

import collections
import contextvars
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import operator
import pathlib
import re
import sys
import types
from typing import Any

import numpy as np
import torch

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.find._static import is_python_class
from spmd.program.reads import PLAIN, code_of

_DEEPEST = 24  # functions inside of functions: decorators, closures
_LONGEST = 64  # items of a container in a closure or among defaults
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
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
_BUILTIN = (types.BuiltinFunctionType, types.MethodWrapperType, types.ClassMethodDescriptorType)
_FIELD: Any = type(inspect.getattr_static(inspect.FullArgSpec, "args"))  # of a named tuple
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller, _FIELD)
_MEMO = type(functools.lru_cache(lambda: None))
_WITH_TEXT = (decimal.Decimal, fractions.Fraction, pathlib.PurePath, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
_OPAQUE = ("_abc_data",)  # objects in C that belong to their class, and whose changes are guarded otherwise


LAYOUTS = (Mesh, ShardingSpec, PartitionSpec)


class NotStorable(Exception):
    """A trace depends on a value that another process cannot compare with its own. The message names the value."""


def is_ours(value: Any) -> bool:
    """Whether a class or function belongs to this package."""
    return f"{getattr(value, '__module__', None)}.".startswith(("spmd.", "mesh."))


def importable(value: Any) -> bool:
    """Whether a class or function is what its module has under its qualified name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in getattr(value, "__qualname__", "<none>").split("."):
        found = inspect.getattr_static(found, name, None)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return found is value


def description(value: Any, depth: int = 0) -> Any:
    """The description of an object, as nested tuples of plain values.

    Raises:
        NotStorable: it is of a kind that has no description.
    """
    kind = type(value)
    if depth > _DEEPEST:
        raise NotStorable(f"a {kind.__qualname__} inside of very many functions")
    if isinstance(value, enum.Enum):
        return "enum", description(kind, depth + 1), value.name
    if kind in PLAIN:
        return kind.__qualname__, repr(value)
    if isinstance(value, np.generic):
        return kind.__qualname__, value.dtype.str, value.tobytes()
    for kinds, describe in _KINDS:
        if isinstance(value, kinds):
            return describe(value, depth + 1)
    return _of_object(value, depth + 1)


def _of_object(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind.__qualname__ in _OPAQUE:
        return (kind.__qualname__,)
    if kind in (set, frozenset):
        return kind.__qualname__, *sorted((description(v, depth) for v in value), key=repr)
    if kind in (dict, list, collections.OrderedDict, collections.deque):
        return kind.__qualname__, getattr(value, "maxlen", None)
    if not all(is_python_class(base) or base in _WITH_CONTENTS for base in kind.__mro__):
        raise NotStorable(f"a {kind.__qualname__}, which has state that is not in Python")
    more = description(value.default_factory, depth) if isinstance(value, collections.defaultdict) else None
    return "object", description(kind, depth), more


def _of_module(value: Any, depth: int) -> Any:
    if sys.modules.get(value.__name__) is not value:
        raise NotStorable(f"a module {value.__name__} that cannot be imported by its name")
    return "module", value.__name__


def _of_class(value: Any, depth: int) -> Any:
    if is_python_class(value) and not importable(value):
        raise NotStorable(f"the class {value.__qualname__}, which is not a variable of its module")
    return "class", value.__module__, value.__qualname__


def _of_function(value: Any, depth: int) -> Any:
    cells = tuple(_within(_contents(cell), depth) for cell in value.__closure__ or ())
    defaults = tuple(_within(v, depth) for v in value.__defaults__ or ())
    named = tuple((k, _within(v, depth)) for k, v in (value.__kwdefaults__ or {}).items())
    wrapped = value.__dict__.get("__wrapped__")
    code = code_digest(code_of(value))
    return "function", value.__module__, value.__qualname__, code, cells, defaults, named, wrapped and _within(wrapped, depth)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return NotStorable


def _within(value: Any, depth: int) -> Any:
    """The description of a value in a function, with that of the items of a small container."""
    if type(value) in (tuple, list) and len(value) <= _LONGEST:
        return type(value).__name__, *(_within(v, depth + 1) for v in value)
    if type(value) is dict and len(value) <= _LONGEST:
        return "dict", *((_within(k, depth + 1), _within(v, depth + 1)) for k, v in value.items())
    if isinstance(value, types.FunctionType) and depth > 8 and importable(value):
        return "function", value.__module__, value.__qualname__, code_digest(code_of(value))
    return description(value, depth)


def _of_tuple(value: Any, depth: int) -> Any:
    return type(value).__qualname__, *(description(v, depth) for v in value)


def _of_method(value: Any, depth: int) -> Any:
    return "method", description(value.__func__, depth), description(value.__self__, depth)


def _of_builtin(value: Any, depth: int) -> Any:
    owner = getattr(value, "__self__", None)
    return "builtin", value.__qualname__, getattr(value, "__module__", None), description(owner, depth)


def _of_property(value: Any, depth: int) -> Any:
    return "property", *(description(fn, depth) for fn in (value.fget, value.fset, value.fdel))


def _of_wrapper(value: Any, depth: int) -> Any:
    return type(value).__name__, description(value.__func__, depth)


def _of_descriptor(value: Any, depth: int) -> Any:
    return type(value).__name__, value.__objclass__.__module__, value.__objclass__.__qualname__, value.__name__


def _of_partial(value: Any, depth: int) -> Any:
    return "partial", *(_within(v, depth) for v in (value.func, value.args, value.keywords))


def _of_getter(value: Any, depth: int) -> Any:
    cls, args, *_ = value.__reduce__()
    return cls.__name__, *(_within(v, depth) for v in args)


def _of_memo(value: Any, depth: int) -> Any:
    return "memo", description(value.__wrapped__, depth), tuple(value.cache_parameters().items())


def _of_pattern(value: Any, depth: int) -> Any:
    return "pattern", repr(value.pattern), value.flags


def _of_text(value: Any, depth: int) -> Any:
    return type(value).__qualname__, str(value)


def _of_variable(value: Any, depth: int) -> Any:
    return "context variable", value.name


def _of_cell(value: Any, depth: int) -> Any:
    return ("cell",)


def _of_code(value: Any, depth: int) -> Any:
    return "code", code_digest(value)


def _of_tensor(value: torch.Tensor, depth: int) -> Any:
    place = str(value.device.type), tuple(value.shape), value.stride(), int(value.storage_offset())
    about = str(value.dtype), value.requires_grad, value.is_leaf, description(type(value), depth)
    return "tensor", *place, *about, _of_buffer(buffer_of(value), depth) if is_device_tensor(value) else None


def _of_buffer(value: Buffer, depth: int) -> Any:
    dtype = str(value.dtype) if value.value is not None or value.host is not None or value.queue is not None else None
    layouts = _of_layout(value.annotation), _of_layout(value.state_annotation)
    return "buffer", value.shape, value.stored, dtype, value.dropped, *layouts


def _of_layout(value: Any, depth: int = 0) -> Any:
    if isinstance(value, ShardingSpec):
        return type(value).__qualname__, _of_layout(value.mesh), _of_layout(value.partition_spec), value.minibatch
    if isinstance(value, Mesh):
        return type(value).__qualname__, tuple(value.device_ids.tolist()), value.mesh_shape, value.axis_names, value.topology
    return repr(value)


def _of_array(value: Any, depth: int) -> Any:
    if value.dtype.hasobject:
        raise NotStorable("a numpy array of objects")
    return "array", value.shape, value.strides, value.dtype.str  # its content is guarded


_KINDS: tuple[tuple[Any, Any], ...] = (
    (types.ModuleType, _of_module),
    (type, _of_class),
    (types.FunctionType, _of_function),
    (types.MethodType, _of_method),
    (_BUILTIN, _of_builtin),
    (property, _of_property),
    ((staticmethod, classmethod), _of_wrapper),
    (_DESCRIPTORS, _of_descriptor),
    (functools.partial, _of_partial),
    (_MEMO, _of_memo),
    (re.Pattern, _of_pattern),
    (_WITH_TEXT, _of_text),
    (contextvars.ContextVar, _of_variable),
    (_GETTERS, _of_getter),
    (types.CellType, _of_cell),
    (types.CodeType, _of_code),
    (torch.Tensor, _of_tensor),
    (Buffer, _of_buffer),
    (LAYOUTS, _of_layout),
    (np.ndarray, _of_array),
    (tuple, _of_tuple),
)


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    """A digest of everything in a code object that a call depends on."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_firstlineno
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_qualname, code.co_filename
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


__all__ = ["LAYOUTS", "NotStorable", "code_digest", "description", "importable", "is_ours"]
