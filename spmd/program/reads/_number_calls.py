"""Functions of torch that make a tensor of numbers, for those of a program: C++ takes each for a float and for a constant."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from spmd.device._numbers import NumberNode, sample

_MOST = 64  # numbers that are operations of their own


def is_lifted(value: Any) -> bool:
    """Whether it is a number of the program, or a list of some."""
    if type(value) in (list, tuple):
        return any(map(is_lifted, value))
    return isinstance(value, (torch.SymFloat, torch.SymBool)) and isinstance(value.node, NumberNode)


def of_numbers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What to call instead of `fn` with such numbers; `fn` itself where it takes them."""
    if fn is builtins.isinstance:
        return _is_instance
    if fn is builtins.type:
        return lambda value, *rest: type(value, *rest) if rest else type(sample(value))
    if fn is torch.where:
        return where
    if any(fn is f for f in (torch.tensor, torch.as_tensor)):
        return partial(tensor, fn)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.Tensor) and fn.__name__ == "new_tensor":
        return lambda data, *, dtype=None, device=None, **options: tensor(
            torch.tensor, data, dtype=dtype or owner.dtype, device=device or owner.device, **options
        )
    if isinstance(owner, torch.Tensor) and fn.__name__ == "where":
        return lambda condition, other: where(condition, owner, other)
    return fn


def where(condition: torch.Tensor, *choices: Any, **named: Any) -> torch.Tensor:
    """`torch.where(condition, input, other)`; a number promotes as Python's own."""
    left, right = choices if len(choices) == 2 else (*choices, *(named[name] for name in ("input", "self", "other") if name in named))
    if not (is_lifted(left) or is_lifted(right)):
        return torch.where(condition, left, right)
    dtype = torch.result_type(*(sample(c) if is_lifted(c) else c for c in (left, right)))
    return torch.where(condition, *(torch.full((), c, dtype=dtype, device=condition.device) if is_lifted(c) else c for c in (left, right)))


def tensor(fn: Callable[..., torch.Tensor], data: Any, *, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """`torch.tensor(data)` on the device, the numbers in it inputs or values of the program."""
    device = options.pop("device", None)
    device = torch.get_default_device() if device is None else torch.device(device)
    values = list(_flat(data))
    is_plain = all(is_lifted(v) or type(v) in (int, float, bool) for v in values)
    shape = _shape(data)
    if device.type != "jax" or not is_plain or shape is None or not 0 < len(values) <= _MOST or options.get("pin_memory"):
        more = {"requires_grad": True} if requires_grad else {}
        return fn(_known(data), device=device, **options, **more)
    dtype = options.get("dtype") or torch.tensor([sample(v) if is_lifted(v) else v for v in values]).dtype
    numbers = [torch.full((), v, dtype=dtype, device=device) for v in values]
    made = torch.stack(numbers).reshape(shape) if shape else numbers[0]
    return made.requires_grad_() if requires_grad else made


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) or isinstance(sample(value), kinds)


def _known(data: Any) -> Any:
    """The same with Python's own numbers."""
    if isinstance(data, (list, tuple)):
        return [_known(item) for item in data]
    return data.node.known("number") if is_lifted(data) else data


def _flat(data: Any) -> Iterator[Any]:
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _flat(item)
    else:
        yield data


def _shape(data: Any) -> tuple[int, ...] | None:
    """The sizes of nested lists; None where they are ragged."""
    if not isinstance(data, Sequence):
        return ()
    shapes = {_shape(item) for item in data}
    return None if len(shapes) != 1 or (inner := shapes.pop()) is None else (len(data), *inner)


__all__ = ["is_lifted", "of_numbers", "where"]
