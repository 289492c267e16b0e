"""Gradients without a value, of parameters that a conversion of their module moves or changes.

A compiled step leaves a tensor without a value in `.grad` (unless `keep_grads=True`), and a read of it raises. After `module.cpu()` or
`module.half()` a read still raises: it would be wrong to leave None, to which a later `backward()` would add nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from spmd.base._errors import DroppedValueError
from spmd.base._torch import disabled_torch_function, make_wrapper_subclass, pytree
from spmd.device._storage import buffer_of, is_device_tensor, recording


class MissingGradient(torch.Tensor):
    """A gradient on the host that has no value. Its shape, dtype and device are known; a read or write raises DroppedValueError.

    Attributes:
        why: the text of the error.
    """

    __torch_function__ = disabled_torch_function
    why: str

    @staticmethod
    def __new__(cls: type[MissingGradient], like: torch.Tensor, why: str) -> MissingGradient:
        made = make_wrapper_subclass(cls, tuple(like.shape), strides=like.stride(), dtype=like.dtype, device=like.device)
        made.why = why if "zero_grad" in why else f"{why}, or call optimizer.zero_grad() before the next backward()"
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise DroppedValueError(next(t.why for t in pytree.tree_leaves((args, kwargs)) if type(t) is MissingGradient))

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise DroppedValueError(self.why)

    numpy = tolist = item = __array__ = __repr__ = __reduce_ex__ = __deepcopy__ = _refuse  # pyright: ignore[reportAssignmentType]


class MovedGradients:
    """Context that takes the gradients without a value from the parameters of a module, and gives them to the converted parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._taken: list[tuple[str, torch.Tensor, torch.Tensor, str]] = []

    def __enter__(self) -> None:
        if recording.get() is not None:  # the gradients of a trace are its own
            return
        for name, parameter in self._module.__dict__["_parameters"].items():
            if parameter is None or (grad := parameter.grad) is None:
                continue
            why = _why_missing(grad)
            if why is not None:
                self._taken.append((name, parameter, grad, why))
                parameter.grad = None

    def __exit__(self, *error: object) -> None:
        for name, before, grad, why in self._taken:
            for parameter in (before, self._module.__dict__["_parameters"][name]):  # two objects if torch could not swap them
                is_same = (grad.dtype, grad.device) == (parameter.dtype, parameter.device)
                parameter.grad = grad if is_same else _without_value(parameter, why)


def _why_missing(grad: torch.Tensor) -> str | None:
    if type(grad) is MissingGradient:
        return grad.why
    return buffer_of(grad).dropped if is_device_tensor(grad) else None


def _without_value(parameter: torch.Tensor, why: str) -> torch.Tensor:
    """A gradient for `parameter` that raises `why` when it is read."""
    if parameter.device.type not in ("jax", "meta"):
        return MissingGradient(parameter, why)
    grad = torch.empty_like(parameter, requires_grad=False).as_subclass(torch.Tensor)
    if parameter.device.type == "jax":
        buffer_of(grad).drop(why)
    return grad


__all__ = ["MissingGradient", "MovedGradients"]
