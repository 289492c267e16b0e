"""Replacements for functions that are called with program numbers.

A program number is a `torch.SymFloat` or `torch.SymBool` whose value the program computes (`device/_numbers`). Torch's C++ code treats it
as a float constant where it makes a tensor from numbers (`torch.tensor`, `torch.where`). Other libraries, above all numpy, do not know
such a number: they make an array of objects, or raise an error that the caller may catch. So they get the Python number if the host
knows it.
"""

from __future__ import annotations

import bisect
import builtins
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd.device._host_copies import held_of
from spmd.device._number_arithmetic import chosen, converted, of_math
from spmd.device._numbers import OF_MATH, is_of_host, is_program_number, needs_value, sample
from spmd.device._storage import is_device_tensor
from spmd.program.reads import _composed_draws, _composed_functions  # noqa: F401  # pyright: ignore[reportUnusedImport] - register
from spmd.program.reads._library import is_recorded
from spmd.program.reads._nested import inside
from spmd.program.reads._number_arguments import by_composition, composition
from spmd.program.reads._number_operands import (
    TensorOperand,
    is_in_torch,
    loses_numbers,
    number_beside,
    runs_on_host,
    takes_tensors,
    with_operands,
)
from spmd.program.reads._numpy_numbers import is_number

_MOST = 64  # largest number of elements that `tensor` makes by one operation each
CONVERSIONS = (builtins.float, builtins.int)
MAKE_TENSORS = (torch.tensor, torch.as_tensor, torch.asarray)
CHOICES = (builtins.min, builtins.max)
SEARCHES = (bisect.bisect_left, bisect.bisect_right)  # `bisect.bisect` is `bisect_right`
_COMPARED: dict[int, Callable[[Any], Any]] = {  # comparisons that tell special numbers apart
    id(math.isnan): lambda number: number != number,
    id(math.isinf): lambda number: abs(number) == math.inf,
    id(math.isfinite): lambda number: abs(number) < math.inf,
}
_OF_NUMPY = (np.ndarray, np.generic)
_OF_INTS = frozenset((range, slice, bytes, bytearray, itertools.islice))
_OF_BOOLS = (torch.sym_ite, torch.sym_not)  # take only bools of torch's own tracers
_OF_SIZES = frozenset(  # functions of sizes, for which C++ accepts no program number
    ("view", "reshape", "expand", "repeat", "tile", "ones", "zeros", "empty", "rand", "randn", "new_ones", "new_zeros", "new_empty")
)
# libraries that pass program numbers on, compute with them as Python does, or ask them for a value, which the number refuses
_ARRAY_LIBRARIES = ("torch", "functorch", "jax", "spmd", "mesh")
_PYTHONS = ("builtins", "math", "functools", "_functools", "itertools", "copy", "logging", "warnings", "collections", "_collections")
_PYTHONS_TYPES = ("dataclasses", "contextlib", "typing", "types", "abc", "_abc", "numbers")
_TAKE_NUMBERS = frozenset((*_ARRAY_LIBRARIES, *_PYTHONS, *_PYTHONS_TYPES))


def is_lifted(value: Any) -> bool:
    """Whether it is a program number, or a list or tuple with one."""
    if type(value) in (list, tuple):
        return any(map(is_program_number, inside(value, _in_lists)))
    return is_program_number(value)


def _in_lists(value: Any) -> Any:
    return value if type(value) in (list, tuple) else None


def _in_containers(value: Any) -> Any:
    return value.values() if type(value) is dict else value if type(value) in (list, tuple, deque) else None


def for_numbers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable to use instead of `fn` with program numbers; `fn` itself if it takes them."""
    if (composed := composition(fn)) is not None:
        return partial(by_composition, composed, partial(_with_known_lists, fn))
    if fn is builtins.isinstance or fn is builtins.hasattr or fn is builtins.dir:  # answered for a Python number of the same type
        return lambda value, *rest: fn(sample(value) if is_program_number(value) else value, *rest)
    if fn is builtins.type:
        return lambda value, *rest: type(value, *rest) if rest or not is_program_number(value) else type(sample(value))
    if fn is torch.where:
        return where
    if fn is torch.cond:
        return lambda condition, *rest, **options: fn(_as_tensor_if_bool(condition), *rest, **options)
    if fn in CONVERSIONS:
        return partial(_converted, fn)
    if fn in CHOICES:
        return partial(_chosen, fn)
    if fn is builtins.divmod:
        return lambda left, right: (left // right, left % right)
    if getattr(fn, "__module__", None) == "math" and fn.__name__ in OF_MATH:
        return partial(of_math, fn)
    if id(fn) in _COMPARED:
        return _COMPARED[id(fn)]
    if fn is torch.result_type:
        return lambda *given: torch.result_type(*(sample(v) if is_program_number(v) else v for v in given))
    if any(fn is make for make in MAKE_TENSORS):
        return partial(tensor, fn)
    if fn is torch.full:
        return _full
    if takes_tensors(fn):
        return partial(with_operands, fn)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.Tensor) and fn.__name__ == "new_tensor":
        return lambda data, *, dtype=None, device=None, **options: tensor(
            torch.tensor, data, dtype=dtype or owner.dtype, device=device or owner.device, **options
        )
    if isinstance(owner, torch.Tensor) and fn.__name__ == "where":
        return lambda condition, other: where(condition, owner, other)
    if needs_known(fn) or getattr(fn, "__name__", "") in _OF_SIZES:
        return with_known(fn)
    return partial(_by_torch, fn) if is_in_torch(fn) else fn


def _by_torch(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)` of a function of torch, with Python numbers if the CPU computes it."""
    return (with_known(fn) if runs_on_host(fn, given, options) else fn)(*given, **options)


def _with_known_lists(fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)` with Python numbers in lists and tuples, which are sizes and positions, and where the CPU computes it."""
    if is_in_torch(fn) and runs_on_host(fn, given, options):
        return with_known(fn)(*given, **options)
    lists = [known(v) if type(v) in (list, tuple) else v for v in (*given, *options.values())]
    return fn(*lists[: len(given)], **dict(zip(options, lists[len(given) :], strict=True)))


def is_converted(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is `float(x)` or `int(x)` of a device tensor, or of its copy to the host."""
    return any(fn is kind for kind in CONVERSIONS) and len(args) == 1 and is_device_tensor(held_of(args[0])) and args[0].numel() == 1


def _converted(fn: Any, value: Any, *base: Any, **options: Any) -> Any:
    number: Any = value.item() if isinstance(value, torch.Tensor) and not base else value
    return converted(fn, number) if not base and _is_unknown(number) and not number.node.boolean else fn(value, *base, **options)


def _chosen(fn: Any, *given: Any, **options: Any) -> Any:
    numbers = given[0] if len(given) == 1 and type(given[0]) in (list, tuple) else given
    found = None if options or not any(map(_is_unknown, numbers)) else chosen(fn, numbers)
    return fn(*given, **options) if found is None else found


def _is_unknown(value: Any) -> bool:
    """Whether it is a program number that only the device knows."""
    return is_program_number(value) and not is_of_host(value, asks=True)


def needs_known(fn: Any) -> bool:
    """Whether `fn` takes only Python numbers, but may not raise for a program number."""
    if (isinstance(fn, type) and fn in _OF_INTS) or any(fn is f for f in _OF_BOOLS):
        return True
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, str):
        return fn.__name__ in ("format", "format_map")
    if isinstance(owner, memoryview):
        return True
    name = (getattr(type(owner), "__module__", None) if isinstance(owner, _OF_NUMPY) else getattr(fn, "__module__", None)) or ""
    if name == "_operator":
        return fn in (operator.is_, operator.is_not, operator.index)
    if isinstance(fn, np.ufunc):
        return True
    return bool(name) and not is_recorded(name) and name.partition(".")[0] not in _TAKE_NUMBERS


def with_known(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, called with the Python numbers that the program numbers stand for. The program is then valid for these only."""
    return lambda *given, **options: fn(*map(known, given), **{name: known(value) for name, value in options.items()})


def holds_lifted(value: Any) -> bool:
    """Whether it contains program numbers, in dicts, lists, tuples or deques, as passed to `json` or a logger."""
    return any(map(is_program_number, inside(value, _in_containers)))


def known(value: Any) -> Any:
    """The value with Python numbers in the place of program numbers.

    Raises:
        TraceError: only the device knows one of them.
    """
    return _known(value, {})


def _known(value: Any, made: dict[int, Any]) -> Any:
    """The same. `made`: the copies of containers, by id of the original: one may be in itself."""
    kind: Any = type(value)
    if kind is slice:
        return slice(known(value.start), known(value.stop), known(value.step))
    if kind not in (dict, list, tuple, deque):
        return value.node.known("number") if is_program_number(value) else value
    if not holds_lifted(value):
        return value
    if kind is tuple:
        return tuple(_known(item, made) for item in value)
    if id(value) not in made:
        copied: Any = kind()
        made[id(value)] = copied
        if kind is dict:
            copied.update((key, _known(item, made)) for key, item in value.items())
        else:
            copied.extend(_known(item, made) for item in value)
    return made[id(value)]


def numpy_operand(left: Any, right: Any) -> Any:
    """The left operand to use where one operand is numpy's and the other a program number: numpy would make an array of objects.

    An `np.float64` becomes a Python float.
    """
    if isinstance(left, _OF_NUMPY) and is_lifted(right):
        if type(left) is not np.float64:
            raise needs_value("number (an operand beside numpy's)")
        return float(left)
    return known(left) if isinstance(right, _OF_NUMPY) and type(right) is not np.float64 and is_lifted(left) else left


def tensor_operand(left: Any, right: Any) -> Any:
    """The left operand to use where one operand is a program number and the other a tensor that loses it."""
    if is_program_number(right) and loses_numbers(left):
        return TensorOperand(left)
    return number_beside(left, right) if loses_numbers(right) and is_program_number(left) else left


def require_known_name(value: Any, name: str) -> None:
    """Refuse an attribute of a program number that is missing, or different from that of the Python number.

    Raises:
        TraceError: the attribute is one of these.
    """
    if is_program_number(value) and (
        name in ("__class__", "__doc__", "node") or (hasattr(value.node.kind, name) != hasattr(type(value), name) and name[0] != "_")
    ):
        raise needs_value(f"number (for its attribute {name})")


def matched_value(value: Any, by_parts: bool) -> Any:
    """The value to use for a class pattern, `case cls(...)`; `by_parts`: the pattern also reads attributes."""
    if not is_program_number(value):
        return value
    return known(value) if by_parts else sample(value)


def _as_tensor_if_bool(value: Any) -> Any:
    number: Any = value
    return torch.full((), number, dtype=torch.bool, device="jax") if _is_truth(value) else value


def _is_truth(value: Any) -> bool:
    return is_program_number(value) and value.node.kind is bool


def identity_operand(left: Any, right: Any) -> Any:
    """The left operand to use for `is`: a program bool is neither the object True nor False."""
    if isinstance(right, bool) and _is_truth(left):
        return known(left)
    if isinstance(left, bool) and _is_truth(right):
        return right if known(right) is left else None
    return left


def is_searchable(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of a bisection are plain numbers and plain bounds."""
    numbers, _, *bounds = args
    return type(numbers) in (list, tuple) and {int, float}.issuperset(map(type, numbers)) and all(type(b) is int for b in bounds)


def position_in(fn: Any, numbers: tuple[float, ...], bounds: tuple[int, ...], options: dict[str, int], number: float) -> int:
    return fn(numbers, number, *bounds, **options)


def where(condition: torch.Tensor, *choices: Any, **named: Any) -> torch.Tensor:
    """`torch.where(condition, input, other)`; a program number promotes like a Python number."""
    left, right = choices if len(choices) == 2 else (*choices, *(named[name] for name in ("input", "self", "other") if name in named))
    given: list[tuple[Any, bool]] = [(choice, is_program_number(choice)) for choice in (left, right)]
    if not any(is_one for _, is_one in given):
        return torch.where(condition, left, right)
    dtype = torch.result_type(*(sample(c) if is_one else c for c, is_one in given))
    return torch.where(condition, *(torch.full((), c, dtype=dtype, device=condition.device) if is_one else c for c, is_one in given))


def tensor(
    fn: Callable[..., torch.Tensor], data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **options: Any
) -> torch.Tensor:
    """`torch.tensor(data)`; its program numbers stay values of the program. On the CPU it is a copy to the host."""
    device = torch.get_default_device() if device is None else torch.device(device)
    values = list(_flat(data))
    if device.type == "cpu" and not requires_grad and any(map(_is_unknown, values)):
        return tensor(fn, data, dtype=dtype, device=torch.device("jax"), **options).cpu()
    is_plain = all(is_lifted(v) or (is_number(v) and _fits(v)) or type(v) is bool for v in values)
    shape = _shape(data)
    if device.type != "jax" or not is_plain or shape is None or not 0 < len(values) <= _MOST or options.get("pin_memory"):
        more = {"requires_grad": True} if requires_grad else {}
        return fn(known(data), dtype=dtype, device=device, **options, **more)
    dtype = dtype or torch.tensor([sample(v) if is_lifted(v) else v for v in values]).dtype
    numbers = [_element(v, dtype, device) for v in values]
    made = torch.stack(numbers).reshape(shape) if shape else numbers[0]
    return made.requires_grad_() if requires_grad else made


def _full(*given: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.full` with program numbers. On the CPU it is a copy to the host if only the device knows the number."""
    is_of_host = (torch.get_default_device() if device is None else torch.device(device)).type == "cpu"
    unknown = any(map(_is_unknown, (*given, *options.values())))
    if is_of_host and unknown and not options.get("requires_grad") and options.get("out") is None:
        return torch.full(*given, device="jax", **options).cpu()
    return _by_torch(torch.full, *given, device=device, **options)


def _fits(number: Any) -> bool:
    """Whether it is no int that `torch.tensor` takes only for some dtypes, or refuses with an error of its own."""
    return type(number) is not int or -(2**63) <= number < 2**63


def _element(number: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:  # `torch.tensor` gives infinity where `torch.full` refuses a number
        return torch.full((), number, dtype=torch.float64, device=device).to(dtype)
    return torch.full((), number, dtype=dtype, device=device)


def _flat(data: Any) -> Iterator[Any]:
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _flat(item)
    else:
        yield data


def _shape(data: Any) -> tuple[int, ...] | None:
    """The shape of nested lists; None if they are ragged."""
    if not isinstance(data, Sequence):
        return ()
    shapes = {_shape(item) for item in data}
    return None if len(shapes) != 1 or (inner := shapes.pop()) is None else (len(data), *inner)


__all__ = [
    "CHOICES",
    "MAKE_TENSORS",
    "SEARCHES",
    "for_numbers",
    "position_in",
    "holds_lifted",
    "identity_operand",
    "is_converted",
    "is_lifted",
    "is_searchable",
    "known",
    "tensor_operand",
    "matched_value",
    "needs_known",
    "numpy_operand",
    "require_known_name",
    "where",
    "with_known",
]
