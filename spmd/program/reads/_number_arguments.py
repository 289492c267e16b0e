"""Calls with a program number where torch's C++ takes a plain one.

C++ converts a float argument (the probability of a dropout, the margin of a loss), and the Scalar of some derivatives (the exponent of a
power), to a double. It would be a constant of the program, which is then valid for one value. So such a call is composed of
operations that take tensors or Scalars (`_composed_functions`, `_composed_draws`). They compute the same, up to rounding, and draw the
same random numbers. A composition raises NotImplementedError for a call that it does not compute: torch refuses it, the number is at
another place, or a mode or subclass of the user's sees torch's function. Then torch's own function is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

import torch
from torch.autograd import forward_ad

from spmd.base._errors import dropped
from spmd.base._torch import DeviceContext, are_functorch_transforms_active, function_mode_at, num_torch_function_modes
from spmd.device._numbers import is_program_number, sample

_METHODS = (BuiltinMethodType, MethodType)
_NOT_TAKEN = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)
_composed: dict[int, Callable[..., Any]] = {}  # by id of torch's function
_methods: dict[str, Callable[..., Any]] = {}  # by name of a tensor's method


def composes(*functions: Any, method: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, which has torch's signature, in the place of some functions and of a tensor's method."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def called(*given: Any, **options: Any) -> Any:
            if len(given) > len(parameters) or not parameters.keys() >= options.keys() or is_overridden((*given, *options.values())):
                raise NotImplementedError
            return function(*given, **options)

        for fn in (*functions, *([getattr(torch.Tensor, method)] if method else ())):
            _composed[id(fn)] = called
        if method:
            _methods[method] = called
        return called

    return register


def is_overridden(values: tuple[Any, ...]) -> bool:
    """Whether a mode, or a subclass among the arguments, would see the function that is called (`__torch_function__`)."""
    modes = (type(function_mode_at(i)) for i in range(num_torch_function_modes()))
    kinds = {type(value) for value in values if isinstance(value, torch.Tensor)} - {torch.Tensor, torch.nn.Parameter}
    return any(mode is not DeviceContext for mode in modes) or any(not _is_plain(kind) for kind in kinds)


def _is_plain(kind: Any) -> bool:
    function = kind.__torch_function__
    if str(kind.__module__).startswith("spmd."):  # sharded tensors
        return True
    return getattr(function, "__func__", function) in (torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)


def composition(fn: Any) -> Callable[..., Any] | None:
    """The function that computes what `fn` computes, with program numbers; it may raise NotImplementedError. None if there is none."""
    if isinstance(fn, _METHODS) and isinstance(fn.__self__, torch.Tensor):
        found = _methods.get(fn.__name__)
        return None if found is None else functools.partial(found, fn.__self__)
    return _composed.get(id(fn))


def by_composition(composed: Callable[..., Any], fn: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`, computed by a composition if it can."""
    try:
        return composed(*given, **options)
    except NotImplementedError:
        return fn(*given, **options)


def with_first_form(called: Callable[..., Any], forms: Sequence[Callable[[Any], Any]], given: Sequence[Any], options: Any) -> Any:
    """`called(*given, **options)`, with the arguments in the first of some forms that it takes.

    A number is a tensor or a Scalar for one function of torch, and a size, a dim or a count for another one, which takes only a Python
    number. A call that may run code of the user's has the first form only: that code would run twice.

    Args:
        called: a function of torch.
        forms: each gives the form of an argument.
    """
    call = lambda form: called(*map(form, given), **{name: form(value) for name, value in options.items()})  # noqa: E731
    if any(map(callable, (*given, *options.values(), getattr(called, "__self__", None)))):
        return call(forms[0])
    for form in forms[:-1]:
        with dropped(*_NOT_TAKEN):
            return call(form)
    return call(forms[-1])


def require(*conditions: Any) -> None:
    """Raise NotImplementedError unless all conditions hold. One that compares a program number is a branch of the program."""
    if not all(conditions):
        raise NotImplementedError


def require_number(*values: Any) -> None:
    """Raise NotImplementedError unless one of the values is a program number."""
    require(any(map(_is_number, values)))


def require_floats(*values: Any) -> None:
    """Raise NotImplementedError unless all values are floating-point tensors on the device, and not in forward-mode differentiation.

    There an exponent that is a tensor has a derivative of 0, and the logarithm of a negative base times 0 is NaN.
    """
    require(not are_functorch_transforms_active(), all(isinstance(v, torch.Tensor) for v in values))
    require(*(v.device.type == "jax" and v.is_floating_point() and forward_ad.unpack_dual(v).tangent is None for v in values))


def require_one_dtype(*values: Any) -> None:
    """Raise NotImplementedError unless all values are floats of one dtype, and autocast, which would compute in another one, is off."""
    require_floats(*values)
    require(not torch.is_autocast_enabled("jax"), *(v.dtype == values[0].dtype for v in values))


def as_tensor(number: Any, like: torch.Tensor) -> torch.Tensor:
    """The number as a 0-dim tensor beside which an operation of `like` has the dtype, and is computed, as with a number."""
    dtype = torch.result_type(like, sample(number) if _is_number(number) else number)
    return torch.full((), number, dtype=torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype, device=like.device)


def is_int(value: Any) -> bool:
    """Whether it is an int, Python's or the program's."""
    return type(sample(value) if _is_number(value) else value) is int


def _is_number(value: Any) -> bool:
    return type(value) is torch.SymFloat and is_program_number(value)


__all__ = [
    "as_tensor",
    "by_composition",
    "composes",
    "composition",
    "is_int",
    "is_overridden",
    "require",
    "require_floats",
    "require_number",
    "require_one_dtype",
    "with_first_form",
]
