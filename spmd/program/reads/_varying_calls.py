"""Functions that are called with numbers that vary: what is called instead, and the form in which torch and others take the numbers."""

from __future__ import annotations

import builtins
import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spmd.program.reads._library import is_recorded
from spmd.program.reads._nested import any_inside, holds_itself
from spmd.program.reads._number_arguments import with_first_form
from spmd.program.reads._number_calls import CHOICES, MAKE_TENSORS, SEARCHES, for_numbers, is_lifted, is_searchable, position_in
from spmd.program.reads._number_objects import identical_number
from spmd.program.reads._numpy_numbers import is_of_numbers
from spmd.program.reads._varying import PURE, NumbersNeeded, Varying, applied, evaluation, is_sequence

_Form = Callable[[Varying], Any]


def _kind_of(number: Any) -> type:
    """The type that a number has in Python."""
    return type(number.evaluate()) if type(number) is Varying else number.node.kind if is_lifted(number) else type(number)


def conversion(fn: Any, args: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    """The callable to use for `float(x)` and `int(x)` of an object that instrumented code converts; None for other calls."""
    if (fn is not float and fn is not int) or len(args) != 1:
        return None
    name = f"__{fn.__name__}__"
    method = getattr(type(args[0]), name, None)
    if type(method) is not types.FunctionType or not is_recorded(method.__module__):
        return None

    def convert(value: Any) -> Any:
        found: Any = method(value)
        kind = _kind_of(found)
        if not issubclass(kind, fn):
            raise TypeError(f"{type(value).__name__}.{name} returned non-{fn.__name__} (type {kind.__name__})")
        return found if kind is fn else fn(found)

    return convert


def substitute(fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use instead of `fn` when some of its arguments vary; None if `fn` takes them as they are."""
    name = getattr(fn, "__name__", "")
    if (id(fn) == id(type) and len(args) == 1) or name in ("isinstance", "__instancecheck__"):
        return lambda value, *kinds: fn(value.evaluate() if isinstance(value, Varying) else value, *kinds)
    if fn is operator.is_ or fn is operator.is_not:
        return lambda left, right: fn(identical_number(Varying, left, right), right)
    if fn is builtins.vars or fn is builtins.hash:  # a `Varying` has no `__dict__`; see `Recording.as_hash`
        raise NumbersNeeded
    if _is_pure(fn) and (first := _first_varying(args)) is not None and all(map(partial(_is_taken, fn, first), args)):
        return partial(applied, first, fn)
    if fn in SEARCHES and len(args) > 1 and type(args[1]) is Varying and is_searchable(args):
        return lambda numbers, number, *bounds, **options: number.apply(partial(position_in, fn, tuple(numbers), bounds, options), number)
    is_torch, is_numpy = _is_of("torch", fn), _is_of("numpy", fn)
    if not (is_torch or is_numpy) and not any(isinstance(a, Varying) for a in args):
        return None  # other functions treat a list of varying numbers like a list of any objects
    if any(holds_itself(a, lambda part: part if is_sequence(part) else None) for a in args):
        raise NumbersNeeded  # it cannot be copied with the numbers of a call
    is_on_tensor = _is_operator(fn) and any(isinstance(a, torch.Tensor) for a in args)
    is_of_program = is_torch or is_on_tensor or (fn in CHOICES and any(map(is_lifted, args)))
    called = for_numbers(fn)
    take: _Form = Varying.traced if is_of_program else Varying.concrete
    take_item: _Form = Varying.concrete if is_numpy or called is fn else Varying.traced
    form = partial(_in_form, take, take_item, is_torch or is_numpy)
    forms = [form, partial(_in_form, _plain_if_int, _plain_if_int, True), partial(_in_form, Varying.concrete, Varying.concrete, True)]
    if any(fn is make for make in MAKE_TENSORS) and any(map(_holds_numpys, args)):
        called = partial(_with_numpys_dtype, called, *args[:1])
    return lambda *given, **options: with_first_form(called, forms if is_torch else forms[:1], given, options)


def _in_form(take: _Form, take_item: _Form, copies_lists: bool, value: Any) -> Any:
    """An argument with each varying number, and each one in a tuple, or in a list that is copied, in the form that torch takes."""
    if isinstance(value, Varying):
        return take(value)
    if type(value) is tuple or (is_sequence(value) and copies_lists):  # no copy of a list that a function may write to
        kind = tuple if isinstance(value, tuple) else list
        return kind(take_item(v) if isinstance(v, Varying) else _in_form(take, take_item, copies_lists, v) for v in value)
    return value


def _plain_if_int(number: Varying) -> Any:
    return number.concrete() if type(number.evaluate()) is int else number.traced()


def _holds_numpys(data: Any) -> bool:
    return any_inside(data, lambda part: isinstance(part, (list, tuple)), lambda part: isinstance(part, Varying) and part.is_numpy)


def _with_numpys_dtype(called: Any, data: Any, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """`torch.tensor` of numbers of numpy, whose dtype the tensor has."""
    values = torch.tensor([evaluation(v)() for v in data] if isinstance(data, (list, tuple)) else data.evaluate())
    return called(*given, dtype=dtype or values.dtype, **options)


def _is_operator(fn: Any) -> bool:
    return fn is builtins.pow or getattr(fn, "__module__", None) == operator.add.__module__


def _is_pure(fn: Any) -> bool:
    """Whether `fn` computes from numbers only, without other effects."""
    return id(fn) in PURE or type(getattr(fn, "__self__", None)) in (int, float) or is_of_numbers(fn)


def _first_varying(args: tuple[Any, ...]) -> Varying | None:
    return next((a for a in (*args, *(i for a in args if is_sequence(a) for i in a)) if isinstance(a, Varying)), None)


def only_reads(fn: Any) -> bool:
    """Whether `fn` only computes from the numbers in a list or tuple, as `sum` does. Operators change or join lists."""
    return _is_pure(fn) and not _is_operator(fn) and not is_of_numbers(fn)


def _is_taken(fn: Any, first: Varying, number: Any) -> bool:
    """Whether the host computes `fn` of a number, or of a list or tuple of some."""
    return only_reads(fn) and all(map(first.takes, number)) if type(number) in (list, tuple) else first.takes(number)


def _is_of(library: str, fn: Any) -> bool:
    owner = getattr(fn, "__objclass__", None) or getattr(fn, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return library == "torch"
    names = (getattr(fn, "__module__", None), getattr(owner, "__module__", None), getattr(owner, "__name__", None))
    return any(isinstance(name, str) and name.partition(".")[0] == library for name in names)


__all__ = ["conversion", "only_reads", "substitute"]
